"""Credit: what a reader grants, and what a producer may send with it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire.errors import InvalidMessageError
from rankwire.wire.credit import CREDIT_NBYTES, Credit, Window, unpack_credit

totals = st.builds(Credit, st.integers(0, 2**63), st.integers(0, 2**63))


@given(totals)
def test_a_grant_has_two_totals_on_the_wire(credit):
    assert len(credit.pack()) == CREDIT_NBYTES
    assert unpack_credit(bytearray(credit.pack())) == credit


@given(st.binary(max_size=40))
def test_a_grant_of_another_length_is_refused(payload):
    if len(payload) != CREDIT_NBYTES:
        with pytest.raises(InvalidMessageError, match="16 bytes"):
            unpack_credit(payload)


@given(st.lists(totals, min_size=1), st.randoms())
def test_grants_may_arrive_late_twice_or_in_any_order(grants, random):
    expected = Credit(max(g.items for g in grants), max(g.nbytes for g in grants))
    arrived = grants * 2
    random.shuffle(arrived)
    credit = Credit()
    for grant in arrived:
        credit = credit.later(grant)
    assert credit == expected


@given(st.integers(1, 50), st.integers(1, 500), st.lists(st.integers(0, 200), max_size=200))
def test_a_reader_that_grants_when_half_is_taken_never_lets_the_producer_starve(
    most, most_nbytes, sizes
):
    """Items and bytes on their way or unread stay within the window, and one item."""
    window = Window(most, most_nbytes)
    window.granted = window.next_grant
    sent = sent_nbytes = 0
    unread = []
    for nbytes in sizes:
        while not (sent < window.granted.items and sent_nbytes < window.granted.nbytes):
            assert unread, "the producer waits for credit, and nothing is left to take"
            window.items, window.nbytes = window.items + 1, window.nbytes + unread.pop(0)
            if window.is_half_taken:
                window.granted = window.next_grant
        unread.append(nbytes)
        sent, sent_nbytes = sent + 1, sent_nbytes + nbytes
        assert len(unread) <= most
        assert sum(unread[:-1]) < most_nbytes
