"""Callbacks: a thread of a group that tells users of work that is done.

Not the thread that runs the operations, which a callback may begin and wait for. It comes with the
first work that has callbacks and ends when there has been none for a while.

Lock: ``_lock`` guards the queue and which thread serves it; callbacks run without it.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from rankwire.clock import Clock
from rankwire.collectives.work import Work
from rankwire.deadline import Deadline

_IDLE = 0.5  # seconds until a thread without callbacks ends


class CallbackThread:
    """Calls callbacks in one thread, in the order in which work was done. Safe from any thread."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._queue: deque[Work[Any]] = deque()
        self._server: object | None = None  # the name of the thread that serves it

    def submit(self, work: Work[Any]) -> None:
        """Have the callbacks of a work called. Safe to repeat, after an interrupt."""
        with self._lock:
            self._queue.append(work)
            if self._server is not None:
                self._has_work.notify()
                return
            server = self._server = object()
            try:
                threading.Thread(
                    target=self._run, args=(server,), name=self._name, daemon=True
                ).start()
            except BaseException:
                self._server = None  # if it has come to be, it finds that it is not wanted
                raise

    def _run(self, server: object) -> None:
        while (work := self._next(server)) is not None:
            work.call_back()
            del work  # or the result would live as long as the thread is idle

    def _next(self, server: object) -> Work[Any] | None:
        idle = Deadline(_IDLE, self._clock)
        with self._lock:
            while self._server is server and not self._queue:
                was_notified = self._clock.wait(self._has_work, idle.sleep_limit())
                if not was_notified and not self._queue and self._server is server:
                    self._server = None
            return self._queue.popleft() if self._server is server else None
