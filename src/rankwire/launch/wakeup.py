"""A way into the launcher's thread for what other threads have to tell it."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections import deque
from collections.abc import Callable

__all__ = ["Wakeup"]


class Wakeup:
    """Actions posted by any thread, run by the thread that serves the selector."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._actions: deque[Callable[[], None]] = deque()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        selector.register(self._reader, selectors.EVENT_READ, self._run)

    def post(self, action: Callable[[], None]) -> None:
        """Have ``action`` run soon. Safe from any thread; ignored once closed."""
        self._actions.append(action)
        with contextlib.suppress(OSError):  # full of wake-ups, or closed
            self._writer.send(b"\0")

    def _run(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)
        while self._actions:
            self._actions.popleft()()

    def close(self) -> None:
        """Take no more; what was posted and not run is dropped."""
        self._selector.unregister(self._reader)
        self._reader.close()
        self._writer.close()
