"""Work: operations in the background, one after the other.

A group has one worker thread, which runs its operations in the order in which they were begun. All
ranks begin them in the same order, so the oldest one is running everywhere, and none waits for one
that cannot start; groups do not wait for each other. The thread comes with the first operation and
ends when there has been none for a while.

Lock: the worker's ``_lock`` guards its queue and whether its thread runs; nothing else is taken
under it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError
from rankwire.fork import disown, guard

_log = logging.getLogger("rankwire")

T = TypeVar("T")

_IDLE = 0.5  # seconds until a thread without work ends


class Work(Future[T]):
    """An operation that goes on in the background. Safe from any thread.

    A ``concurrent.futures.Future``, so ``done``, ``result``, ``exception`` and callbacks are as
    there; ``await`` works too. It cannot be cancelled: the other ranks count on it. If it is
    dropped, the operation still completes.
    """

    def __init__(self, description: str, clock: Clock) -> None:
        super().__init__()
        self.description = description
        self._clock = clock
        self.set_running_or_notify_cancel()
        guard(self)

    def wait(self, timeout: float | None = None) -> T:
        """Return the operation's result, or raise its error.

        Args:
            timeout: Seconds to wait here; None waits as long as the operation's own limit lets it.

        Raises:
            DeadlineExceededError: It is not done in time; it goes on.
        """
        try:
            return self.result(timeout)
        except FutureTimeoutError:
            if self.done():
                return self.result(0)  # it ended at this moment, or with such an error of its own
            assert timeout is not None
            error = DeadlineExceededError(timeout, detail=f"{self.description} goes on")
            raise error.during(op="wait", waited=timeout) from None

    def result(self, timeout: float | None = None) -> T:
        """Return the operation's result, or raise its error.

        After ``timeout`` seconds this raises ``TimeoutError``, and the operation goes on.
        """
        self._await(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the operation's error or None; waits as ``result`` does."""
        self._await(timeout)
        return super().exception(0)

    def _await(self, timeout: float | None) -> None:
        """Wait by the world's clock, and not by that of ``Future``."""
        if not self.done():
            with self._condition:
                self._clock.wait_for(self._condition, self.done, timeout)

    def forsake(self) -> None:
        """Make every use of it in a forked child an error: no thread will end it there."""
        disown(self)

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio  # here, because it takes as long to load as all of this package

        return asyncio.wrap_future(self).__await__()

    def __repr__(self) -> str:
        state = "running"
        if self.done():
            state = "done" if self.exception() is None else f"failed: {self.exception()}"
        return f"<Work {self.description}, {state}>"


class OperationThread:
    """Runs work in one thread, in order. Safe from any thread."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._queue: deque[tuple[Work[Any], Callable[[], Any]]] = deque()
        self._has_work = threading.Condition(self._lock)
        self._is_running = False

    def submit(self, work: Work[Any], run: Callable[[], Any]) -> None:
        """Have ``run()`` end ``work``, after what was submitted before."""
        with self._lock:
            self._queue.append((work, run))
            if self._is_running:
                self._has_work.notify()
            else:
                self._is_running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while (item := self._next()) is not None:
            try:
                _end(*item)
            except BaseException:  # a callback's, and it must not end this thread
                _log.exception("a callback of %r raised", item[0])
            del item  # or the result would live as long as the thread is idle

    def _next(self) -> tuple[Work[Any], Callable[[], Any]] | None:
        idle = Deadline(_IDLE, self._clock)
        with self._lock:
            while not self._queue:
                was_notified = self._clock.wait(self._has_work, idle.sleep_limit())
                if not was_notified and not self._queue:
                    self._is_running = False
                    return None
            return self._queue.popleft()


def _end(work: Work[Any], run: Callable[[], Any]) -> None:
    """Run it, and end the work with what it returns or raises."""
    try:
        result = run()
    except BaseException as error:
        work.set_exception(error)
    else:
        work.set_result(result)
