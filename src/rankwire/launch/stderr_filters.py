"""Shorten what ranks print to stderr: an error that all end with, and interrupts. Pure.

One mistake often ends all ranks with the same traceback. The first rank's is printed. A later
rank's is held back while its lines equal those of an earlier rank, apart from what differs by rank.
If the rank's stderr ends there, the launcher names the rank instead. If only the message differs,
only the message is printed. If the rank continues or the lines differ earlier, all are printed.

Connected ranks shorten the traceback of a Ctrl-C themselves (``observe.tracebacks``);
``InterruptFilter`` does so for the others.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

# The first line of an error as Python and ``observe.tracebacks`` print it.
_BEGIN = re.compile(
    r"(  \+ Exception Group )?Traceback \(most recent call last\):|failed because of rank \d+: "
)
_DIFFERS_BY_RANK = re.compile(
    r" \[(op|rank|peer|tag|waited) [^\[\]]*\]| \(rank \d+ says\)"
    r"|(?<=^traceback on rank )\d+(?=:$)|(?<=^  \[)\d+(?= frames? of rankwire)"
)
_MOST_ERRORS = 16  # remembered, of all ranks
_MOST_LINES = 200  # of one error that are remembered and held back
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<name>.+)')
_MOST_INTERRUPT_LINES = 500  # held back until the end of a traceback
_MOST_OPEN = 4  # errors of one rank that may continue, such as a chain of exceptions


@dataclass
class _Printed:
    rank: int
    lines: list[str] = field(default_factory=list)

    def agrees(self, lines: list[str]) -> bool:
        return all(_alike(line) == own for line, own in zip(lines, self.lines, strict=False))


class PrintedErrors:
    """Remember the last errors that the ranks of a job printed."""

    def __init__(self) -> None:
        self._known: deque[_Printed] = deque(maxlen=_MOST_ERRORS)

    def begin(self, rank: int) -> _Printed:
        """Add an error that a rank starts to print."""
        self._known.append(_Printed(rank))
        return self._known[-1]

    def beginning_with(self, line: str, rank: int) -> list[_Printed]:
        """Return the errors of other ranks that begin with a line."""
        return [known for known in self._known if known.rank != rank and known.lines[0] == line]

    def clear(self) -> None:
        """Forget all errors, because a rank was restarted."""
        self._known.clear()


class RepeatFilter:
    """Drop an error at the end of a rank's stderr that another rank has printed.

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
        """Return the lines to print now, of these and of those held back."""
        found: list[str] = []
        for line in lines:
            if self._held:
                if self._goes_on(line):
                    self._held.append(line)
                    continue
                found += self.release()
            if _BEGIN.match(line):
                self._same = self._printed.beginning_with(_alike(line), self._rank)
                if self._same:
                    self._held = [line]
                    continue
            found.append(self._pass(line))
        return found

    def release(self) -> list[str]:
        """Return the lines that are held back, because the rank continues."""
        held, self._held, self._message_at = self._held, [], 0
        return [self._pass(line) for line in held]

    def finish(self, *, waits: bool = False) -> list[str]:
        """Return the lines to print when the stderr of the rank has ended.

        With ``waits``, keep the error while the other rank has printed only a part of it; the
        caller then calls this again.
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
            self._own.append(self._printed.begin(self._rank))
        for error in self._own:
            if len(error.lines) < _MOST_LINES:
                error.lines.append(_alike(line))
        return line


def _alike(line: str) -> str:
    return _DIFFERS_BY_RANK.sub("", line)


class InterruptFilter:
    """Filter one stream: shorten the traceback of an interrupt to one line."""

    def __init__(self) -> None:
        self._held: list[str] = []  # a traceback that has not ended

    def feed(self, lines: Iterable[str]) -> list[str]:
        """Return the lines to print now, of these and of those held back."""
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
                found.append(f"{line}{self._place()}")
                self._held = []
            else:
                found += [*self.finish(), line]
        return found

    def finish(self) -> list[str]:
        """Return the lines that are held back."""
        held, self._held = self._held, []
        return held

    def _place(self) -> str:
        frames = [frame for line in self._held if (frame := _FRAME.match(line))]
        own = [frame for frame in frames if not frame["path"].startswith("<frozen ")]
        if not own:
            return ""
        return f" ({own[-1]['path']}:{own[-1]['line']} in {own[-1]['name']})"
