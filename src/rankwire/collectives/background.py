"""Background: runs the operations of a group that were called with ``async_op=True``, in order.

One thread at a time is the *runner*: the group's worker thread, or a thread that waits for a
``Work`` and runs all operations up to it, because a change of threads takes longer than a small
operation. A new operation wakes the worker, unless a waiting thread was faster last time. Then the
worker polls every 0.1 to 1 ms and runs operations older than 0.1 ms, because a wake-up would cost
the waiting thread 40 us. It is woken again after it has found such an operation, or nothing new
several times.

An interrupted waiting thread gives up the role, and the worker, which no interrupt reaches, ends
the operation that it had begun.

Lock: ``_lock`` guards the queue, the role and the worker's sleep; no other lock is taken under it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.collectives.work import CallbackThread, Work
from rankwire.deadline import Deadline
from rankwire.errors import ConfigurationError

_IDLE = 0.5  # seconds until a thread without work ends
_SOON = 100e-6  # seconds in which a thread may begin to wait for a new operation
_LONGEST_NAP = 1e-3  # seconds, the longest interval of a worker that polls
_LOOKS = 3  # polls without a new operation, after which it is woken again


@dataclass(eq=False, slots=True)
class Task:
    """One operation in the background. Used by the runner."""

    number: int
    steps: Callable[[], Any]
    give_up: Callable[[BaseException], BaseException]
    deadline: Deadline
    work: Work[Any]
    has_begun: bool = False
    is_over: bool = False
    interrupt: BaseException = field(default_factory=KeyboardInterrupt)  # made its runner leave
    _outcome: tuple[Any, BaseException | None] | None = None

    def due_in(self) -> float:
        """Return the seconds until the worker runs it, unless a waiting thread is faster."""
        return 0.0 if self.has_begun else _SOON - self.deadline.waited

    def run(self) -> BaseException | None:
        """Run it and end its work; return its error if that is an interrupt."""
        self.has_begun = True
        try:
            self._outcome = (self.steps(), None)
        except BaseException as error:
            self._outcome = (None, self._failure(error))
        return self._end(*self._outcome)

    def conclude(self) -> None:
        """End it after its runner was interrupted."""
        if self._outcome is None:
            try:
                self._outcome = (None, self._failure(self.interrupt))
            except BaseException as error:
                self._outcome = (None, error)
        self._end(*self._outcome)

    def _failure(self, error: BaseException) -> BaseException:
        failure = self.give_up(error)
        failure.__cause__ = error.__cause__
        return failure

    def _end(self, result: Any, error: BaseException | None) -> BaseException | None:
        self.work.end(result, error)
        self.is_over = True
        return None if isinstance(error, Exception) else error


class _Visit:
    """The runner's role in a waiting thread."""

    __slots__ = ("thread",)

    def __init__(self) -> None:
        self.thread = runtime.get_ident()


@dataclass(slots=True)
class _Polls:
    """Counts the polls of a worker without work. Used under the lock of its background."""

    submitted: int
    clock: Clock
    idle: Deadline
    nap: float = _SOON / 2
    left: int = 0  # polls without a new task before the worker sleeps

    def are_over(self, submitted: int) -> bool:
        """Count a poll; return whether the worker must end after a long time without tasks."""
        if submitted != self.submitted:  # and a waiting thread was faster
            self.submitted, self.left = submitted, _LOOKS
            self.nap = min(2 * self.nap, _LONGEST_NAP)
            self.idle = Deadline(_IDLE, self.clock)
        elif self.left:
            self.left -= 1
        elif self.idle.expired:
            self.idle = Deadline(_IDLE, self.clock)
            return True
        return False

    def pause(self) -> float:
        return self.nap if self.left else self.idle.sleep_limit()


class Background:
    """Runs tasks in order, in one thread at a time. Safe from any thread."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.clock = clock
        self._name = name
        self._callbacks = CallbackThread(f"{name}-callbacks", clock)
        self._lock = runtime.Lock()
        self._queue: deque[Task] = deque()
        self._submitted = 0
        self._runner: object | None = None  # the visit, or the worker's lock
        self._worker: runtime.Lock | None = None  # the lock on which the worker sleeps
        self._is_asleep = False  # until it is woken or times out
        self._is_called = True  # whether a new task wakes it

    def submit(self, task: Task) -> None:
        """Queue a task."""
        with self._lock:
            self._queue.append(task)
            self._submitted += 1
            if self._is_called:
                self._rouse()

    def withdraw(self, task: Task) -> bool:
        """Remove a task after an interrupt in ``submit``; return False if it has begun to run."""
        with self._lock:
            if task in self._queue:
                if task is self._queue[0] and self._runner is not None:
                    return False
                self._queue.remove(task)
            return not task.has_begun

    def help(self, number: int, limit: Deadline | None) -> None:
        """Run all tasks up to a number in this thread, unless another thread is the runner.

        Skip tasks whose own deadline is later than ``limit``. Raise an interrupt that ends a task.
        """
        runner = self._runner
        if type(runner) is _Visit and runner.thread == runtime.get_ident():
            raise ConfigurationError(
                "a signal handler waits for an operation of the group while its thread runs an "
                "earlier one; wait outside of the handler"
            )
        visit = _Visit()
        try:
            while (task := self._take(visit, number, limit)) is not None:
                interrupt = task.run()
                self._leave(visit)
                if interrupt is not None:
                    raise interrupt
                if task.number == number:
                    return
        except BaseException as error:
            try:
                self._leave(visit, error)
            except BaseException:
                self._leave(visit, error)  # interrupted: no thread could be the runner again
                raise
            raise

    def hurry(self) -> None:
        """Wake the worker at once, for a waiting thread that cannot run the queued tasks itself."""
        with self._lock:
            if self._free_head() is not None:
                self._rouse()

    def call_back(self, work: Work[Any]) -> None:
        """Run the callbacks of a finished work in the callback thread."""
        self._callbacks.submit(work)

    def _free_head(self) -> Task | None:
        """Return the first task if no thread runs it. Called with the lock held."""
        return self._queue[0] if self._queue and self._runner is None else None

    def _take(self, visit: object, number: int, limit: Deadline | None) -> Task | None:
        with self._lock:
            task = self._free_head()
            if task is None or task.number > number or task.has_begun:
                return None
            if limit is not None and task.deadline.remaining() > limit.remaining():
                return None
            self._runner = visit
            return task

    def _leave(self, visit: object, error: BaseException | None = None) -> None:
        """Give up the role and let the worker run the remaining tasks. Safe to repeat."""
        with self._lock:
            if self._runner is visit:
                # An interrupt may come after the removal: then the head has not begun, or is None.
                head = self._queue[0] if self._queue else None
                if head is not None and head.has_begun:
                    if head.is_over:
                        self._queue.popleft()
                    elif error is not None:
                        head.interrupt = error
                self._runner = None
            if self._queue and self._is_called:
                self._rouse()

    def _rouse(self) -> None:
        if self._is_asleep:
            assert self._worker is not None
            self._is_asleep = False
            self._worker.release()
        elif self._worker is None:
            worker = self._worker = runtime.Lock()
            try:
                worker.acquire()
                runtime.Thread(
                    target=self._work, args=(worker,), name=self._name, daemon=True
                ).start()
            except BaseException:
                self._worker = None  # if the thread has started, it sees this and ends
                raise

    def _work(self, worker: runtime.Lock) -> None:
        while (task := self._next(worker)) is not None:
            if task.has_begun:
                task.conclude()
            else:
                task.run()
            self._leave(worker)
            del task  # an idle thread would keep the result alive

    def _next(self, worker: runtime.Lock) -> Task | None:
        """Wait for the next task and become its runner; return None if the worker must end."""
        polls = _Polls(self._submitted, self.clock, Deadline(_IDLE, self.clock))
        is_hasty = True
        while True:
            with self._lock:
                if self._worker is not worker:
                    return None
                head = self._free_head()
                left = 0.0 if head is None or is_hasty else head.due_in()
                if head is not None and left <= 0.0:
                    self._runner = worker
                    return head
                if polls.are_over(self._submitted) and not self._queue and self._runner is None:
                    self._worker, self._is_called = None, True
                    return None
                self._is_asleep, self._is_called = True, head is None and not polls.left
            is_hasty = self._sleep(worker, left or polls.pause())

    def _sleep(self, worker: runtime.Lock, seconds: float) -> bool:
        if self.clock.acquire(worker, True, seconds):
            return True
        with self._lock:
            self._is_asleep = False
            return worker.acquire(False)  # it may have been woken after the timeout
