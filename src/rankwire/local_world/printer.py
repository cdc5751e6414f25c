"""Print the output of ranks where the user looks.

In a notebook, printed text appears below the cell whose thread prints it. So a thread that waits
for ranks prints their output; while no thread waits, the thread that reads the output does.

Lock: that of ``_changed``, held briefly. Nothing is printed or called under it.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

from rankwire.clock import REAL_TIME

_log = logging.getLogger("rankwire")

StreamName = Literal["stdout", "stderr"]


class _Text(NamedTuple):
    stream: StreamName
    text: str


class Printer:
    """Print texts in order. Every method is thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._texts: deque[_Text] = deque()
        self._waiting = 0  # threads inside print_until

    def put(self, stream: StreamName, text: str) -> None:
        """Print a text in a thread that waits, or in this one if none does."""
        with self._changed:
            self._texts.append(_Text(stream, text))
            if self._waiting:
                self._changed.notify_all()
                return
        self._print()

    def wake(self) -> None:
        """Have the waiting threads check their conditions again."""
        with self._changed:
            self._changed.notify_all()

    def print_until(self, is_over: Callable[[], bool], seconds: float | None = None) -> bool:
        """Print until ``is_over()`` or until the time has passed; return ``is_over()``.

        Texts that arrived by then are printed.
        """
        end = None if seconds is None else REAL_TIME.now() + seconds
        with self._changed:
            self._waiting += 1
        try:
            while not is_over():
                left = None if end is None else end - REAL_TIME.now()
                if left is not None and left <= 0.0:
                    break
                with self._changed:
                    REAL_TIME.wait_for(self._changed, lambda: bool(self._texts) or is_over(), left)
                self._print()
        finally:
            with self._changed:
                self._waiting -= 1
            self._print()
        return is_over()

    def _print(self) -> None:
        while self._texts:
            try:
                stream, text = self._texts.popleft()
            except IndexError:  # another thread took it
                return
            target = sys.stdout if stream == "stdout" else sys.stderr
            try:
                if target is not None:  # None in a program without a console
                    target.write(text)
                    target.flush()
            except (OSError, ValueError) as error:  # stdout or stderr was closed
                _log.debug("output of a rank was not shown: %s", error)
