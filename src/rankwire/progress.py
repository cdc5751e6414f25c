"""Show how many tasks are done: as a bar on a terminal, else as a line now and then."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sized
from typing import Any, TypeAlias

from rankwire.clock import Clock
from rankwire.deadline import Deadline

# Called with the number of tasks that are done, and of all tasks if that is known.
OnProgress: TypeAlias = Callable[[int, int | None], object]

_REDRAW_EVERY = 0.1  # seconds, on a terminal
_PRINT_EVERY = 5.0  # seconds, elsewhere
_WIDTH = 30


class Progress:
    """Counts done tasks and shows the number. For one thread at a time.

    Attributes:
        is_shown: Whether anything is shown.

    Args:
        show: True for a bar on stderr, False for nothing, or a function to call.
        tasks: The tasks; if they have a length, the bar shows how many are left.
        name: What is done.
        clock: Tells when to draw again.
    """

    def __init__(
        self, show: bool | OnProgress, tasks: Iterable[Any], name: str, clock: Clock
    ) -> None:
        self._total = len(tasks) if isinstance(tasks, Sized) else None
        self._name = name
        self._clock = clock
        self._tell = self._draw if show is True else show or None
        self.is_shown = self._tell is not None
        self._done = self._failed = 0
        self._is_row = sys.stderr is not None and sys.stderr.isatty()
        self._begin = clock.now()
        self._next = Deadline(0.0 if self._is_row else _PRINT_EVERY, clock)
        self._shown = -1

    def note(self, *, failed: bool) -> None:
        """Count a task that is done."""
        self._done += 1
        self._failed += failed
        if self._tell is not None:
            self._tell(self._done, self._total)

    def end(self) -> None:
        """Show the last number and end the row. Idempotent."""
        if self._tell == self._draw and self._shown != self._done:
            self._print("\n")

    def _draw(self, done: int, total: int | None) -> None:
        if self._next.expired:
            self._next = Deadline(_REDRAW_EVERY if self._is_row else _PRINT_EVERY, self._clock)
            self._print("" if self._is_row else "\n")
            self._shown = -1 if self._is_row else done

    def _print(self, end: str) -> None:
        done, total = self._done, self._total
        text = f"{self._name}: {done}"
        if total:
            filled = _WIDTH * done // total
            bar = "━" * filled + "╌" * (_WIDTH - filled)
            text = f"{self._name} {bar} {done} of {total}"
        seconds = self._clock.now() - self._begin
        text += f", {self._failed} failed" if self._failed else ""
        text += f", {done / seconds:.3g}/s" if seconds > 0.0 else ""
        self._shown = done
        start = "\r\x1b[K" if self._is_row else ""
        try:
            sys.stderr.write(start + text + end)
            sys.stderr.flush()
        except (AttributeError, OSError, ValueError):  # there is no stderr, or it was closed
            self._tell = None
