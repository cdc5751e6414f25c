r"""Split the output of ranks into lines, and shorten errors that repeat.

Progress bars redraw a row with ``\r``, or several rows (nested tqdm bars, live displays of rich) by
moving the cursor up. Rows become lines when the program continues below them. Where nothing can be
redrawn, such as in a file or notebook, a row is printed every few seconds.

One mistake often ends all ranks with the same traceback. A later rank's is held back while its
lines equal those of an earlier rank, apart from values that differ by rank. If the rank's stderr
ends there, the launcher names the rank instead. If only the message differs, only the message is
printed. If the rank continues or lines differ earlier, all are printed.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

# Longer lines are split, so that they do not fill the launcher's memory.
_MAX_LINE_NBYTES = 64 * 1024
_MAX_ROWS = 50
PROGRESS_EVERY = 5.0  # seconds between two lines for one progress bar
# Line ends, carriage return, cursor up, erase, and show or hide the cursor.
_CONTROL = re.compile(rb"\r?\n|\r|\x1b\[(\d{0,3})A|\x1b\[[012]?K|\x1b\[\?25[hl]")
# A possible start of one of these at the end of the data.
_UNFINISHED = re.compile(rb"(\r|\x1b(\[(\?2?5?|\d{0,3}))?)\Z")
_LONGEST_CONTROL = 6
_SHOWS_NOTHING = re.compile(rb"(\s|\x1b\[[0-9;]*m)*\Z")
# The first line of an error as Python and ``observe.tracebacks`` print it.
_BEGIN = re.compile(
    r"(  \+ Exception Group )?Traceback \(most recent call last\):|failed because of rank \d+: "
)
_DIFFERS_BY_RANK = re.compile(
    r" \[(op|rank|peer|tag|waited) [^\[\]]*\]| \(rank \d+ says\)"
    r"|(?<=^traceback on rank )\d+(?=:$)|(?<=^  \[)\d+(?= frames? of rankwire)"
)
_MOST_ERRORS = 16  # remembered, of all ranks
_MOST_LINES = 200  # of one error
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<name>.+)')
_MOST_INTERRUPT_LINES = 500  # held back until the end of a traceback
_MOST_OPEN = 4  # errors of one rank that may continue, such as a chain of exceptions


class LineSplitter:
    r"""Splits chunks of bytes into lines; text after a lone ``\r`` replaces the row."""

    def __init__(self, max_line_nbytes: int = _MAX_LINE_NBYTES) -> None:
        self._limit = max_line_nbytes
        self._held = b""  # an incomplete control sequence
        self._rows = [bytearray()]
        self._cursor = 0  # index of the current row
        self._is_redrawn = False
        self._is_at_start = False  # the next text replaces the row
        self._has_moved = False  # since the last new row

    @property
    def progress(self) -> list[bytes]:
        """The current rows of progress bars, without blank ones."""
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
        else:  # 0.9 instead of 3.7 ms for 64 KiB of lines
            *ended, rest = data.split(b"\n")
            for text in ended:
                self._write(text, lines)
                self._begin_row(lines)
            self._write(rest, lines)
        return lines

    def finish(self) -> list[bytes]:
        """Return the last lines if they are incomplete."""
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


class StreamLines:
    """Splits one output stream of a rank into lines, or redrawn ``rows``. For one thread."""

    def __init__(self, *, redraws: bool = False) -> None:
        self.rows: list[bytes] = []
        self._splitter = LineSplitter()
        self._redraws = redraws
        self._next_at = -math.inf
        self._printed: list[bytes] = []  # rows that were printed as lines

    def feed(self, data: bytes) -> list[bytes]:
        """Return the new lines that ``data`` completes, or the last ones if it is empty."""
        lines = self._splitter.feed(data) if data else self._splitter.finish()
        if not lines or not self._printed:
            return lines
        printed, self._printed = self._printed, []
        count = len(printed)
        return [line for line in lines[:count] if line not in printed] + lines[count:]

    def due(self, now: float) -> list[bytes]:
        """Return the progress rows to print as lines now, or update ``rows``."""
        rows = self._splitter.progress
        if self._redraws:
            self.rows = rows
            return []
        new = [row for row in rows if row not in self._printed] if now >= self._next_at else []
        if new:
            self._printed = rows
            self._next_at = now + PROGRESS_EVERY
        return new


@dataclass
class _Printed:
    rank: int
    lines: list[str] = field(default_factory=list)

    def agrees(self, lines: list[str]) -> bool:
        return all(_alike(line) == own for line, own in zip(lines, self.lines, strict=False))


class PrintedErrors(deque[_Printed]):
    """The last errors that the ranks of a job printed."""

    def __init__(self) -> None:
        super().__init__(maxlen=_MOST_ERRORS)


class RepeatFilter:
    """Drops an error at the end of a rank's stderr that another rank has printed.

    The owner releases the lines at ``held_until``. After ``finish``, ``same_as`` is the other rank.
    """

    def __init__(self, rank: int, printed: PrintedErrors) -> None:
        self._rank = rank
        self._printed = printed
        self._own: deque[_Printed] = deque(maxlen=_MOST_OPEN)
        self._held: list[str] = []
        self._same: list[_Printed] = []  # errors that equal the held lines so far
        self._message_at = 0  # index of the held line that differs, if it is the message
        self.same_as: int | None = None
        self.held_until = -math.inf

    @property
    def is_holding(self) -> bool:
        """Whether lines are held back."""
        return bool(self._held)

    def feed(self, lines: Iterable[str]) -> list[str]:
        """Return the lines to print now, including lines held back so far."""
        found: list[str] = []
        for line in lines:
            if self._held:
                if self._goes_on(line):
                    self._held.append(line)
                    continue
                found += self.release()
            if _BEGIN.match(line):
                begin = _alike(line)
                others = (known for known in self._printed if known.rank != self._rank)
                self._same = [known for known in others if known.lines[0] == begin]
                if self._same:
                    self._held = [line]
                    continue
            found.append(self._pass(line))
        return found

    def release(self) -> list[str]:
        """Return the lines held back, because the rank continues."""
        held, self._held, self._message_at = self._held, [], 0
        return [self._pass(line) for line in held]

    def finish(self, *, waits: bool = False) -> list[str]:
        """Return the lines to print after the end of the rank's stderr.

        With ``waits``, keep the error while the other rank's is incomplete; call this again later.
        """
        held, count = self._held, self._message_at or len(self._held)
        same = [known for known in self._same if held and known.agrees(held[:count])]
        whole = [known for known in same if len(known.lines) >= count]
        if not whole:
            return [] if same and waits else self.release()
        other, self._held = whole[0].rank, []
        if count == len(held):
            self.same_as = other
            return []
        message, *rest = held[count:]
        return [f"same traceback as rank {other}, but: {message}", *rest]

    def _goes_on(self, line: str) -> bool:
        count = len(self._held)
        if self._message_at or count >= _MOST_LINES:
            return count < _MOST_LINES
        same = [known for known in self._same if known.agrees([*self._held, line])]
        if same:
            self._same = same
        elif count > 1 and not line.startswith(" "):
            self._message_at = count
        return bool(same or self._message_at)

    def _pass(self, line: str) -> str:
        if _BEGIN.match(line):
            self._own.append(_Printed(self._rank))
            self._printed.append(self._own[-1])
        for error in self._own:
            if len(error.lines) < _MOST_LINES:
                error.lines.append(_alike(line))
        return line


def _alike(line: str) -> str:
    return _DIFFERS_BY_RANK.sub("", line)


class InterruptFilter:
    """Shortens the traceback of an interrupt to one line, as connected ranks do themselves."""

    def __init__(self) -> None:
        self._held: list[str] = []  # an incomplete traceback

    def feed(self, lines: Iterable[str]) -> list[str]:
        """Return the lines to print now, including lines held back so far."""
        found: list[str] = []
        for line in lines:
            if line == _TRACEBACK:
                found += self.finish()
                self._held = [line]
            elif not self._held:
                found.append(line)
            elif line.startswith(" ") and len(self._held) < _MOST_INTERRUPT_LINES:
                self._held.append(line)
            elif line == "KeyboardInterrupt":
                frames = [frame for held in self.finish() if (frame := _FRAME.match(held))]
                own = [frame for frame in frames if not frame["path"].startswith("<frozen ")]
                places = [f" ({each['path']}:{each['line']} in {each['name']})" for each in own]
                found.append("".join([line, *places[-1:]]))
            else:
                found += [*self.finish(), line]
        return found

    def finish(self) -> list[str]:
        """Return the lines held back."""
        held, self._held = self._held, []
        return held
