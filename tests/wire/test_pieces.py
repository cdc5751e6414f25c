"""Pieces: any cut of a message gives its two parts, whatever it lies in."""

import array

from hypothesis import given
from hypothesis import strategies as st

from rankwire.wire.pieces import after, until

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
    assert b"".join(until(pieces, cut)) == whole[:cut]
    assert b"".join(after(pieces, cut)) == whole[cut:]


def test_what_has_left_whole_is_not_sent_again_as_an_empty_piece():
    assert after([b"gone", b"here"], 4) == [b"here"]
    assert after([b"gone"], 4) == []
