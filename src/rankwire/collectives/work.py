"""Work: the handle of an operation in the background.

Who waits for it runs it, if no other thread has begun to (``background``). Callbacks run in a
thread of their own (``callbacks``).
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Protocol, TypeVar

from rankwire.clock import Clock, SafeCondition
from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError
from rankwire.fork import guard, invalidate
from rankwire.public_dir import PublicDir

_log = logging.getLogger("rankwire")

T = TypeVar("T")

_RUNNING, _FINISHED = "RUNNING", "FINISHED"  # what the base class calls them


class _Group(Protocol):
    """What runs the operations of a group."""

    clock: Clock

    def help(self, number: int, limit: Deadline | None) -> None:
        """Run those up to a number here, as far as no other thread does."""

    def call_back(self, work: Work[Any]) -> None:
        """Have the callbacks of a work that is done called."""


class Work(PublicDir, Future[T]):
    """An operation that goes on in the background. Safe from any thread.

    A ``concurrent.futures.Future``, so ``done``, ``result``, ``exception`` and callbacks are as
    there; ``await`` works too. It cannot be cancelled: the other ranks count on it. If it is
    dropped, the operation still completes.

    Who waits runs the group's operations up to this one itself, those that no other thread has
    begun. An interrupt (Ctrl-C) then fails the one that it falls into as if it were a blocking one:
    the other ranks are told, and its ``Work`` has the ``KeyboardInterrupt``. With a ``timeout``
    that is shorter than what an operation's own limit leaves it, that one is waited for instead.
    """

    _SHOWN = ("description", "wait")

    def __init__(self, description: str, group: _Group, number: int) -> None:
        # As the base class does (a test compares), but for the condition, and that it runs already.
        self._state = _RUNNING
        self._result: Any = None
        self._exception: BaseException | None = None
        self._condition = SafeCondition()
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

    def done(self) -> bool:
        """Whether it has a result or an error."""
        return self._state == _FINISHED

    def _await(self, timeout: float | None) -> None:
        """Run it, or wait by the world's clock, and not by that of ``Future``."""
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
        """Call ``fn(self)`` when it is done; at once, in this thread, if it is.

        Otherwise in a thread for the callbacks of the group, in which they run one after the other
        in the order in which operations end. They may begin operations of the group and wait for
        them. What they raise is logged.
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
        """End it, and tell all who wait for that. Safe to repeat, after an interrupt."""
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
        """Call its callbacks, each of them once. For one thread at a time."""
        while self._callbacks:
            callback = self._callbacks.pop(0)
            try:
                callback(self)
            except BaseException:  # it must not end this thread
                _log.exception("a callback of %r raised", self)

    def close_in_child(self) -> None:
        """Make every use of it in a forked child an error: no thread will end it there."""
        invalidate(self)

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio  # here, because it takes as long to load as all of this package

        return asyncio.wrap_future(self).__await__()

    def __repr__(self) -> str:
        state = "running"
        if self.done():
            state = "done" if self.exception() is None else f"failed: {self.exception()}"
        return f"<Work {self.description}, {state}>"


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
