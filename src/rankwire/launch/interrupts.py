"""What Python prints of an interrupt, as one line. Pure.

All ranks of a job are interrupted at once, and each would print where it was, at length. A rank
that has connected prints one line already (``backends.tracebacks``); this is for the others, which
have not come to that. Anything else that looks like a traceback is passed on as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_BEGIN = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<name>.+)')
_MOST_LINES = 500


class InterruptFold:
    """Passes lines of one stream on, those of an interrupt as one. One thread."""

    def __init__(self) -> None:
        self._held: list[str] = []  # a traceback whose end has not come

    def feed(self, lines: Iterable[str]) -> list[str]:
        """Return what to print of these lines, and of those before them, by now."""
        found: list[str] = []
        for line in lines:
            if line == _BEGIN:
                found += self.finish()
                self._held = [line]
            elif not self._held:
                found.append(line)
            elif line.startswith(" ") and len(self._held) < _MOST_LINES:
                self._held.append(line)
            elif line == "KeyboardInterrupt":
                found.append(f"{line}{self._place()}")
                self._held = []
            else:
                found += [*self.finish(), line]
        return found

    def finish(self) -> list[str]:
        """Return what is held back."""
        held, self._held = self._held, []
        return held

    def _place(self) -> str:
        frames = [frame for line in self._held if (frame := _FRAME.match(line))]
        own = [frame for frame in frames if not frame["path"].startswith("<frozen ")]
        if not own:
            return ""
        return f" ({own[-1]['path']}:{own[-1]['line']} in {own[-1]['name']})"
