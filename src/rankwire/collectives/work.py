"""Work: the handle of an operation in the background, and the thread that runs its callbacks.

Callbacks run in a thread of their own, because they may begin operations and wait for them.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Protocol, TypeVar

from rankwire import runtime
from rankwire.clock import Clock, SafeCondition
from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError
from rankwire.fork import guard, invalidate
from rankwire.public_dir import PublicDir

_log = logging.getLogger("rankwire")

T = TypeVar("T")

_RUNNING, _FINISHED = "RUNNING", "FINISHED"  # names of the base class


class _Group(Protocol):
    clock: Clock

    def help(self, number: int, limit: Deadline | None) -> None: ...

    def call_back(self, work: Work[Any]) -> None: ...


class Work(PublicDir, Future[T]):
    """An operation that runs in the background. Safe from any thread.

    It is a ``concurrent.futures.Future``, so ``done``, ``result``, ``exception``, callbacks and
    ``await`` work as usual. It cannot be cancelled, and it completes even if you drop the handle.

    A thread that waits for it runs the group's operations up to this one, except those that another
    thread has begun, and those whose own deadline is later than your ``timeout``. An interrupt
    (Ctrl-C) then fails the operation that it reaches, on all ranks.
    """

    _SHOWN = ("description", "wait")

    def __init__(self, description: str, group: _Group, number: int) -> None:
        # As the base class does (a test compares), with another condition and state.
        self._state = _RUNNING
        self._result: Any = None
        self._exception: BaseException | None = None
        self._condition: runtime.Condition = SafeCondition()
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []
        self.description = description
        self._group = group
        self._number = number
        self._callbacks: list[Callable[[Work[T]], object]] = []
        guard(self)

    def wait(self, timeout: float | None = None) -> T:
        """Return the operation's result, or raise its error.

        Args:
            timeout: Seconds to wait; None waits until the operation's own timeout.

        Raises:
            DeadlineExceededError: The operation is not done in time. It continues.
        """
        try:
            return self.result(timeout)
        except FutureTimeoutError:
            if self.done():
                return self.result(0)  # it has just ended, or this is its own error
            assert timeout is not None
            error = DeadlineExceededError(timeout, detail=f"{self.description} goes on")
            raise error.during(op="wait", waited=timeout) from None

    def result(self, timeout: float | None = None) -> T:
        """Return the result or raise the error; raise ``TimeoutError`` after ``timeout``."""
        self._await(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the operation's error, or None if it succeeded; wait as ``result`` does."""
        self._await(timeout)
        return super().exception(0)

    def done(self) -> bool:
        """Return whether the operation has a result or an error."""
        return self._state == _FINISHED

    def _await(self, timeout: float | None) -> None:
        if self._state == _FINISHED:
            return
        clock = self._group.clock
        if timeout is None:
            self._group.help(self._number, None)
        elif timeout > 0.0:
            limit = Deadline(timeout, clock)
            self._group.help(self._number, limit)
            timeout = limit.remaining() if timeout < math.inf else None
        if self._state != _FINISHED:
            with self._condition:
                clock.wait_for(self._condition, self.done, timeout)

    def add_done_callback(self, fn: Callable[[Work[T]], object]) -> None:
        """Call ``fn(self)`` when the operation is done; at once, in this thread, if it is already.

        Otherwise the group's callback thread calls it, in the order in which operations end.
        Callbacks may begin operations of the group and wait for them. Their exceptions are logged.
        """
        with self._condition:
            if self._state != _FINISHED:
                self._callbacks.append(fn)
                return
        try:
            fn(self)
        except Exception:
            _log.exception("a callback of %r raised", self)

    def end(self, result: Any, error: BaseException | None) -> None:
        """Set the result or error and wake waiting threads. Safe to repeat after an interrupt."""
        if self._state == _FINISHED:
            with self._condition:
                self._condition.notify_all()
        elif error is not None:
            self.set_exception(error)
        else:
            self.set_result(result)
        if self._callbacks:
            self._group.call_back(self)

    def call_back(self) -> None:
        """Run the callbacks, each once. For one thread at a time."""
        while self._callbacks:
            callback = self._callbacks.pop(0)
            try:
                callback(self)
            except BaseException:  # keep the thread for other callbacks
                _log.exception("a callback of %r raised", self)

    def close_in_child(self) -> None:
        """Make every use of it in a forked child an error, because no thread will end it there."""
        invalidate(self)

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio  # takes as long to load as this package

        return asyncio.wrap_future(self).__await__()

    def __repr__(self) -> str:
        state = "running"
        if self.done():
            state = "done" if self.exception() is None else f"failed: {self.exception()}"
        return f"<Work {self.description}, {state}>"


_IDLE = 0.5  # seconds until a thread without callbacks ends


class CallbackThread:
    """Runs callbacks in one thread, in the order in which work was done. Safe from any thread.

    ``_lock`` guards the queue and which thread serves it; callbacks run without it.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._lock = runtime.Lock()
        self._has_work = runtime.Condition(self._lock)
        self._queue: deque[Work[Any]] = deque()
        self._server: object | None = None  # identifies the running thread

    def submit(self, work: Work[Any]) -> None:
        """Queue the callbacks of a work. Safe to repeat after an interrupt."""
        with self._lock:
            self._queue.append(work)
            if self._server is not None:
                self._has_work.notify()
                return
            server = self._server = object()
            try:
                runtime.Thread(
                    target=self._run, args=(server,), name=self._name, daemon=True
                ).start()
            except BaseException:
                self._server = None  # if the thread has started, it sees this and ends
                raise

    def _run(self, server: object) -> None:
        while (work := self._next(server)) is not None:
            work.call_back()
            del work  # an idle thread would keep the result alive

    def _next(self, server: object) -> Work[Any] | None:
        idle = Deadline(_IDLE, self._clock)
        with self._lock:
            while self._server is server and not self._queue:
                was_notified = self._clock.wait(self._has_work, idle.sleep_limit())
                if not was_notified and not self._queue and self._server is server:
                    self._server = None
            return self._queue.popleft() if self._server is server else None
