"""Lines out of bytes, however these are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire.launch.lines import LineSplitter


def split(*pieces: bytes, limit: int = 64 * 1024) -> list[bytes]:
    splitter = LineSplitter(limit)
    lines = [line for piece in pieces for line in splitter.feed(piece)]
    return lines + splitter.finish()


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a", [b"a"]),
        (b"a\n", [b"a"]),
        (b"a\n\nb\n", [b"a", b"", b"b"]),
        (b"a\r\nb\r\n", [b"a", b"b"]),
        (b"\r\n", [b""]),
        (b"\r10%\r20%\r30%\n", [b"10%", b"20%", b"30%"]),
        (b"done\r", [b"done"]),
        (b"\x85\x0b\x0c\x1c", [b"\x85\x0b\x0c\x1c"]),  # ends of lines for str, not for us
    ],
)
def test_what_a_line_is(data, lines):
    assert split(data) == lines
    assert split(*(data[i : i + 1] for i in range(len(data)))) == lines


def test_a_line_is_passed_on_when_it_ends():
    splitter = LineSplitter()
    assert splitter.feed(b"ab") == []
    assert splitter.feed(b"c\nde") == [b"abc"]
    assert splitter.feed(b"\rf") == [b"de"]
    assert splitter.finish() == [b"f"]
    assert splitter.finish() == []


def test_a_long_line_is_cut_between_characters():
    lines = split("é".encode() * 10 + b"\n", limit=9)
    assert lines == ["éééé".encode(), "éééé".encode(), "éé".encode()]


def test_an_endless_line_is_not_kept():
    splitter = LineSplitter(100)
    passed_on = sum(len(line) for _ in range(1000) for line in splitter.feed(b"x" * 37))
    assert 37_000 - 100 <= passed_on <= 37_000


@given(
    st.lists(st.sampled_from([b"\r", b"\n", b"x", b"yyyyyyyy", "é€😀".encode(), b"\x80"])).map(
        b"".join
    ),
    st.data(),
)
def test_how_the_bytes_are_cut_makes_no_difference(data, draw):
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=20)))
    pieces = [data[i:j] for i, j in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert split(*pieces, limit=8) == split(data, limit=8)
