r"""Split a stream of bytes into lines and rows that are still being redrawn. Pure.

Progress bars redraw a row with ``\r`` and several rows (nested tqdm bars, live displays of rich) by
moving the cursor up. Rows become lines when the program continues below them. Where nothing can be
redrawn, such as in a file or notebook, ``ProgressLines`` prints a row every few seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

# A longer line is split, so that it does not fill the launcher's memory.
_MAX_LINE_NBYTES = 64 * 1024
_MAX_ROWS = 50
PROGRESS_EVERY = 5.0  # seconds between two lines for one progress bar
# Line ends, carriage return, cursor up, erase, and show or hide the cursor.
_CONTROL = re.compile(rb"\r?\n|\r|\x1b\[(\d{0,3})A|\x1b\[[012]?K|\x1b\[\?25[hl]")
# A possible beginning of one of these at the end of the data.
_UNFINISHED = re.compile(rb"(\r|\x1b(\[(\?2?5?|\d{0,3}))?)\Z")
_LONGEST_CONTROL = 6
_SHOWS_NOTHING = re.compile(rb"(\s|\x1b\[[0-9;]*m)*\Z")


class LineSplitter:
    r"""Split chunks of bytes into lines; text after a lone ``\r`` replaces the row."""

    def __init__(self, max_line_nbytes: int = _MAX_LINE_NBYTES) -> None:
        self._limit = max_line_nbytes
        self._held = b""  # an incomplete control sequence
        self._rows = [bytearray()]
        self._cursor = 0  # index of the current row
        self._is_redrawn = False
        self._is_at_start = False  # the next text replaces the row's
        self._has_moved = False  # since the last new row

    @property
    def progress(self) -> list[bytes]:
        """The current rows that are being redrawn, without blank ones."""
        return self._visible() if self._is_redrawn else []

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that ``data`` completes."""
        data = self._held + data
        unfinished = _UNFINISHED.search(data[-_LONGEST_CONTROL:])
        self._held = unfinished[0] if unfinished else b""
        data = data[: len(data) - len(self._held)]
        lines: list[bytes] = []
        if self._is_redrawn or b"\r" in data or b"\x1b[?25" in data:
            self._draw(data, lines)
        else:
            *ended, rest = data.split(b"\n")
            for text in ended:
                self._write(text, lines)
                self._begin_row(lines)
            self._write(rest, lines)
        return lines

    def finish(self) -> list[bytes]:
        """Return the last lines if they have no end."""
        lines: list[bytes] = []
        if not self._held.startswith(b"\r"):
            self._write(self._held, lines)
        self._held = b""
        if self._is_redrawn or self._rows[0]:
            self._end_rows(lines)
        return lines

    def _draw(self, data: bytes, lines: list[bytes]) -> None:
        begin = 0
        for control in _CONTROL.finditer(data):
            self._write(data[begin : control.start()], lines)
            begin = control.end()
            what = control[0]
            if what.endswith(b"\n"):
                self._begin_row(lines)
            elif what == b"\r":
                self._is_redrawn = self._is_at_start = self._has_moved = True
            elif what.endswith((b"h", b"l")):
                pass  # other ranks share the terminal: do not hide its cursor
            elif not self._is_redrawn:
                self._write(what, lines)  # part of a colored line
            elif what.endswith(b"A"):
                self._move_up(int(control[1] or b"1"))
            elif self._is_at_start or b"2" in what:
                self._rows[self._cursor].clear()
        self._write(data[begin:], lines)

    def _write(self, text: bytes, lines: list[bytes]) -> None:
        if not text:
            return
        row = self._rows[self._cursor]
        if self._is_at_start:
            self._is_at_start = False
            row.clear()
        row += text
        while len(row) > self._limit:
            end = self._limit
            while end > self._limit - 4 and row[end] & 0xC0 == 0x80:
                end -= 1  # not inside a UTF-8 character
            lines.append(bytes(row[:end]))
            del row[:end]

    def _begin_row(self, lines: list[bytes]) -> None:
        if self._cursor < len(self._rows) - 1:
            self._cursor += 1
            self._is_at_start = True
        elif len(self._rows) == 1 or not self._has_moved:
            self._end_rows(lines)
        else:  # the rows scroll: a line is printed above a display
            lines.append(bytes(self._rows.pop(0)))
            self._rows.append(bytearray())
            self._is_at_start = self._has_moved = False

    def _end_rows(self, lines: list[bytes]) -> None:
        lines += self._visible() if self._is_redrawn else map(bytes, self._rows)
        self._rows = [bytearray()]
        self._cursor = 0
        self._is_redrawn = self._is_at_start = self._has_moved = False

    def _move_up(self, count: int) -> None:
        self._is_at_start = self._has_moved = True
        for _ in range(min(count, _MAX_ROWS)):
            if self._cursor:
                self._cursor -= 1
            elif len(self._rows) < _MAX_ROWS:
                self._rows.insert(0, bytearray())

    def _visible(self) -> list[bytes]:
        return [bytes(row) for row in self._rows if not _SHOWS_NOTHING.match(row)]


class ProgressLines:
    """Choose the rows of one stream to print as lines now and then. For one thread."""

    def __init__(self) -> None:
        self._next_at = -math.inf
        self._printed: list[bytes] = []

    def due(self, rows: Sequence[bytes], now: float) -> list[bytes]:
        """Return the rows that changed, if it is time to print them."""
        if not rows or now < self._next_at:
            return []
        new = [row for row in rows if row not in self._printed]
        if new:
            self._printed = list(rows)
            self._next_at = now + PROGRESS_EVERY
        return new

    def unprinted(self, lines: list[bytes]) -> list[bytes]:
        """Return the lines without those that were printed as rows and did not change since."""
        if not lines or not self._printed:
            return lines
        printed, self._printed = self._printed, []
        count = len(printed)
        return [line for line in lines[:count] if line not in printed] + lines[count:]


class StreamLines:
    """Split one output stream of a rank into the lines to print. For one thread.

    With ``redraws``, the caller redraws ``rows``; else they become a line every few seconds.
    """

    def __init__(self, *, redraws: bool = False) -> None:
        self.rows: list[bytes] = []
        self._splitter = LineSplitter()
        self._progress = None if redraws else ProgressLines()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that ``data`` completes; the last ones if it is empty."""
        lines = self._splitter.feed(data) if data else self._splitter.finish()
        return lines if self._progress is None else self._progress.unprinted(lines)

    def due(self, now: float) -> list[bytes]:
        """Return progress rows that are printed as lines now, or renew ``rows``."""
        if self._progress is not None:
            return self._progress.due(self._splitter.progress, now)
        self.rows = self._splitter.progress
        return []
