"""Frames: any cut of a message gives its two parts; a violation names the first thing wrong."""

import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire.errors import MessageTooLargeError
from rankwire.wire.frames import (
    LOAN,
    Channel,
    broken_seal,
    describe_violation,
    first_bytes,
    skip_bytes,
)

PIECES = st.lists(
    st.one_of(
        st.binary(max_size=20),
        st.binary(max_size=20).map(bytearray),
        st.lists(st.integers(0, 2**60), max_size=3).map(lambda n: memoryview(array.array("q", n))),
    ),
    max_size=6,
)


@given(PIECES, st.data())
def test_the_beginning_and_the_rest_are_the_whole(pieces, data):
    whole = b"".join(pieces)
    cut = data.draw(st.integers(0, len(whole)))
    assert b"".join(first_bytes(pieces, cut)) == whole[:cut]
    assert b"".join(skip_bytes(pieces, cut)) == whole[cut:]


def test_what_has_left_whole_is_not_sent_again_as_an_empty_piece():
    assert skip_bytes([b"gone", b"here"], 4) == [b"here"]
    assert skip_bytes([b"gone"], 4) == []


@pytest.mark.parametrize(
    ("word", "sequence", "nbytes", "text"),
    [
        (99, 7, 0, "unknown channel 99"),
        (Channel.CANCEL | LOAN, 7, 0, "channel 6 cannot lend"),
        (Channel.MESSAGE | 0x200, 7, 0, "unknown flags 0x2"),
        (Channel.MESSAGE | 0x10000, 7, 0, "reserved bits 0x1"),
        (Channel.MESSAGE, 8, 0, "sequence number 8, expected 7"),
        (Channel.MESSAGE, 7, 101, "announced 101 bytes, the limit is 100"),
    ],
)
def test_the_first_thing_that_is_wrong_is_said(word, sequence, nbytes, text):
    assert text in describe_violation(int(word), sequence, 7, nbytes, 100).message


def test_a_size_that_is_too_large_says_so_in_its_cause_too():
    error = describe_violation(int(Channel.MESSAGE), 7, 7, 101, 100)
    assert isinstance(error.__cause__, MessageTooLargeError)


def test_a_seal_that_does_not_fit_says_what_may_have_happened():
    assert "altered, repeated or left out" in broken_seal().message
