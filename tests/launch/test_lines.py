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
        (b"\r10%\r20%\r30%\n", [b"30%"]),
        (b"10%\r20%\r30%\r", [b"30%"]),
        (b"\r99%\r   \rhello\n", [b"hello"]),
        (b"\r99%\r   \r", []),
        (b"\x1b[?25l\r\x1b[2K1%\r\x1b[2K2%\n\x1b[?25h", [b"2%"]),
        (b"a\x1b[Kb\x1b[A\n", [b"a\x1b[Kb\x1b[A"]),
        (b"done\r", [b"done"]),
        (b"\x85\x0b\x0c\x1c", [b"\x85\x0b\x0c\x1c"]),  # ends of lines for str, not for us
    ],
)
def test_output_is_split_into_lines_at_these_characters(data, lines):
    assert split(data) == lines
    assert split(*(data[i : i + 1] for i in range(len(data)))) == lines


def test_a_line_is_passed_on_when_it_ends():
    splitter = LineSplitter()
    assert splitter.feed(b"ab") == []
    assert splitter.feed(b"c\nde") == [b"abc"]
    assert splitter.feed(b"\rf") == []
    assert splitter.finish() == [b"f"]
    assert splitter.finish() == []


def test_a_row_that_is_redrawn_is_known_before_it_is_a_line():
    splitter = LineSplitter()
    splitter.feed(b"unfinished")
    assert splitter.progress == []
    splitter.feed(b" line\n\r 10%")
    assert splitter.progress == [b" 10%"]
    splitter.feed(b"|#")
    assert splitter.progress == [b" 10%|#"]
    splitter.feed(b"\r 20%\r")
    assert splitter.progress == [b" 20%"]
    assert splitter.feed(b"\n") == [b" 20%"]
    assert splitter.progress == []


def test_the_nested_bars_of_tqdm_are_two_rows():
    splitter = LineSplitter()
    assert splitter.feed(b"\router 0/2") == []
    assert splitter.feed(b"\n\rinner 0/3\x1b[A") == [b"outer 0/2"]
    for number in range(1, 4):
        assert splitter.feed(b"\n\rinner %d/3\x1b[A" % number) == []
        assert splitter.progress == [b"inner %d/3" % number]
    assert splitter.feed(b"\n\r         \x1b[A\router 1/2") == []
    assert splitter.progress == [b"outer 1/2"]
    assert splitter.feed(b"\n\rinner 0/3\x1b[A") == []
    assert splitter.progress == [b"outer 1/2", b"inner 0/3"]
    assert splitter.feed(b"\n\r         \x1b[A\router 2/2\router 2/2\n") == []
    assert splitter.feed(b"done\n") == [b"outer 2/2"]
    assert splitter.feed(b"really\n") == [b"done", b"really"]
    assert splitter.progress == []


def test_what_rich_prints_above_a_display_of_two_rows_is_a_line():
    splitter = LineSplitter()
    splitter.feed(b"\r\x1b[2Kone 0%\ntwo 0%")
    frame = b"\r\x1b[2K\x1b[1A\x1b[2K"
    assert splitter.feed(frame + b"one 1%\ntwo 2%") == []
    assert splitter.progress == [b"one 1%", b"two 2%"]
    assert splitter.feed(frame + b"step 1\none 1%\ntwo 2%") == [b"step 1"]
    assert splitter.progress == [b"one 1%", b"two 2%"]
    assert splitter.feed(frame + b"one 100%\ntwo 100%\n\x1b[?25h") == [b"one 100%"]
    assert splitter.finish() == [b"two 100%"]


def test_rows_without_end_are_not_kept():
    splitter = LineSplitter()
    for _ in range(1000):
        splitter.feed(b"\rrow\x1b[999A")
    assert len(splitter._rows) <= 50


def test_a_long_line_is_cut_between_characters():
    lines = split("é".encode() * 10 + b"\n", limit=9)
    assert lines == ["éééé".encode(), "éééé".encode(), "éé".encode()]


def test_an_endless_line_is_not_kept():
    splitter = LineSplitter(100)
    passed_on = sum(len(line) for _ in range(1000) for line in splitter.feed(b"x" * 37))
    assert 37_000 - 100 <= passed_on <= 37_000


PIECES = [b"\r", b"\n", b"x", b"yyyyyyyy", "é€😀".encode(), b"\x80"]
PIECES += [
    b"\x1b[A",
    b"\x1b[2A",
    b"\x1b[K",
    b"\x1b[2K",
    b"\x1b[?25h",
    b"\x1b[",
    b"\x1b",
    b"\x1b[1m",
]


@given(
    st.lists(st.sampled_from(PIECES)).map(b"".join),
    st.data(),
)
def test_how_the_bytes_are_cut_makes_no_difference(data, draw):
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=20)))
    pieces = [data[i:j] for i, j in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert split(*pieces, limit=8) == split(data, limit=8)
