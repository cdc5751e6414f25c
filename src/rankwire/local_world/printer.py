"""Printer what ranks print, where the user looks.

In a notebook, what is printed appears below the cell whose thread prints it. So while a thread
waits for ranks, that thread prints; at other times the one that reads the ranks' output does.

Lock: ``_changed``'s own, for moments. Nothing is printed, and nothing called, under it.
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
    """Prints. Every method is safe from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._texts: deque[_Text] = deque()
        self._waiting = 0  # threads that wait, and print

    def put(self, stream: StreamName, text: str) -> None:
        """Have a text printed: by a thread that waits, or by this one."""
        with self._changed:
            self._texts.append(_Text(stream, text))
            if self._waiting:
                self._changed.notify_all()
                return
        self._print()

    def wake(self) -> None:
        """Have the threads that wait look whether it is over."""
        with self._changed:
            self._changed.notify_all()

    def print_until(self, is_over: Callable[[], bool], seconds: float | None = None) -> bool:
        """Print what comes, until something holds or the time has passed; return whether it does.

        What had come by then is printed.
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
            except IndexError:  # another thread has printed it
                return
            target = sys.stdout if stream == "stdout" else sys.stderr
            try:
                if target is not None:  # as in a program without a terminal
                    target.write(text)
                    target.flush()
            except (OSError, ValueError) as error:  # closed: nobody looks any more
                _log.debug("what a rank printed was not shown: %s", error)
