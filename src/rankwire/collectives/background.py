"""Background: the operations of a group that a call does not wait for, one after the other.

They run in the order in which they were begun. All ranks begin them in the same order, so the
oldest one is running everywhere, and none waits for one that cannot start; groups do not wait for
each other. A group's worker thread runs them; but whoever waits for a ``Work`` runs all up to it
itself, if the worker is not at it: a change of threads takes longer than a small operation. One
thread at a time has the role of the *runner*; the oldest operation stays in the queue until it is
over.

The worker comes with the first operation and ends when there has been none for a while. It is
woken at once by an operation, as a rule. When it comes too late, because somebody waited and was
faster, it expects that to go on: it is not woken, looks by itself after 0.1 ms, then less and less
often, up to every millisecond, and runs what has waited for 0.1 ms. So who waits at once is hardly
disturbed (a wake-up costs it 40 us), and what nobody waits for is still run soon. When it finds
such an operation, or nothing new some times in a row, it is woken again.

An interrupt (Ctrl-C) may fall anywhere into a thread that waits. It leaves the role, and what it
has begun is ended by the worker, into which no interrupt falls. A signal handler that does not
raise cannot wait for a later operation while its thread runs an earlier one, which then stands
still: it is told so.

Lock: ``_lock`` guards the queue, the role and the worker's sleep; nothing else is taken under it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from rankwire.clock import Clock
from rankwire.collectives.work import CallbackThread, Work
from rankwire.deadline import Deadline
from rankwire.errors import ConfigurationError

_IDLE = 0.5  # seconds until a thread without work ends
_SOON = 100e-6  # seconds within which somebody may come to wait
_LONGEST_NAP = 1e-3  # seconds between two looks of a worker that is not woken
_LOOKS = 3  # in vain, until it is to be woken again


class Task:
    """One operation in the background. Used by the thread that is the runner.

    Args:
        number: Those of a group are ascending.
        run: Runs the operation to its end, if it goes well.
        give_up: Ends it after an error or an interrupt; returns why it has failed.
        deadline: That of the operation.

    Attributes:
        number: As above.
        deadline: As above.
        work: The handle, which ends with it.
        has_begun: Whether a thread has begun to run it.
        interrupt: What threw that thread out before it was over.
    """

    __slots__ = (
        "_give_up",
        "_outcome",
        "_run",
        "deadline",
        "has_begun",
        "interrupt",
        "is_over",
        "number",
        "work",
    )

    def __init__(
        self,
        number: int,
        run: Callable[[], Any],
        give_up: Callable[[BaseException], BaseException],
        deadline: Deadline,
        work: Work[Any],
    ) -> None:
        self.number = number
        self.deadline = deadline
        self.work = work
        self.has_begun = False
        self.is_over = False
        self.interrupt: BaseException = KeyboardInterrupt()
        self._run = run
        self._give_up = give_up
        self._outcome: tuple[Any, BaseException | None] | None = None

    def run(self) -> BaseException | None:
        """Run it and end its work; return what is not only its own error, but an interrupt."""
        self.has_begun = True
        try:
            self._outcome = (self._run(), None)
        except BaseException as error:
            self._outcome = (None, self._failure(error))
        return self._end(*self._outcome)

    def conclude(self) -> None:
        """Bring it to its end, after who ran it was interrupted."""
        if self._outcome is None:
            try:
                self._outcome = (None, self._failure(self.interrupt))
            except BaseException as error:
                self._outcome = (None, error)
        self._end(*self._outcome)

    def _failure(self, error: BaseException) -> BaseException:
        failure = self._give_up(error)
        failure.__cause__ = error.__cause__
        return failure

    def _end(self, result: Any, error: BaseException | None) -> BaseException | None:
        self.work.end(result, error)
        self.is_over = True
        return None if isinstance(error, Exception) else error


class _Visit:
    """That of a thread that may run some tasks, while it waits for one."""

    __slots__ = ("thread",)

    def __init__(self) -> None:
        self.thread = threading.get_ident()


class Background:
    """Runs work in order, in one thread at a time. Safe from any thread.

    Args:
        name: What the group's threads are called.
        clock: The world's.

    Attributes:
        clock: As above.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self.clock = clock
        self._name = name
        self._callbacks = CallbackThread(f"{name}-callbacks", clock)
        self._lock = threading.Lock()
        self._queue: deque[Task] = deque()
        self._submitted = 0
        self._runner: object | None = None  # the name of the visit of the thread that runs the head
        self._worker: threading.Lock | None = None  # the lock on which the worker sleeps
        self._is_asleep = False  # until it is woken, or too long
        self._is_called = True  # whether a new task wakes it

    def submit(self, task: Task) -> None:
        """Have a task run, after those that were submitted before."""
        with self._lock:
            self._queue.append(task)
            self._submitted += 1
            if self._is_called:
                self._rouse()

    def withdraw(self, task: Task) -> bool:
        """Take a task back, after an interrupt in ``submit``; False if it was run, or is."""
        with self._lock:
            if task in self._queue:
                if task is self._queue[0] and self._runner is not None:
                    return False
                self._queue.remove(task)
            return not task.has_begun

    def help(self, number: int, limit: Deadline | None) -> None:
        """Run all tasks up to a number here, unless another thread is about to.

        Args:
            number: Of the last one.
            limit: No task is begun here whose own deadline is later than this.

        Raises:
            BaseException: An interrupt fell into one of them.
            ConfigurationError: This thread runs one already, and a signal handler waits.
        """
        runner = self._runner
        if type(runner) is _Visit and runner.thread == threading.get_ident():
            raise ConfigurationError(
                "a signal handler waits for an operation of the group while its thread runs one "
                "that has to end before; wait outside of the handler"
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
                self._leave(visit, error)  # interrupted: nobody could ever be the runner again
                raise
            raise

    def hurry(self) -> None:
        """Have what is queued run without delay: somebody waits who cannot run it."""
        with self._lock:
            if self._queue and self._runner is None:
                self._rouse()

    def call_back(self, work: Work[Any]) -> None:
        """Have the callbacks of a work that is done called."""
        self._callbacks.submit(work)

    def _take(self, visit: object, number: int, limit: Deadline | None) -> Task | None:
        with self._lock:
            if self._runner is not None or not self._queue:
                return None
            task = self._queue[0]
            if task.number > number or task.has_begun:
                return None
            if limit is not None and task.deadline.remaining() > limit.remaining():
                return None
            self._runner = visit
            return task

    def _leave(self, visit: object, error: BaseException | None = None) -> None:
        """Give the role up, and have the worker do what is left. Safe to repeat."""
        with self._lock:
            if self._runner is visit:
                # After an interrupt behind the removal, the first one has not begun, or is missing.
                head = self._queue[0] if self._queue else None
                if head is not None and head.has_begun:
                    if head.is_over:
                        self._queue.popleft()
                    elif error is not None:
                        head.interrupt = error
                self._runner = None
            if self._queue and self._is_called:
                self._rouse()

    # -- the worker --------------------------------------------------------------------------------

    def _rouse(self) -> None:
        """Wake the worker if it sleeps, or start it."""
        if self._is_asleep:
            assert self._worker is not None
            self._is_asleep = False
            self._worker.release()
        elif self._worker is None:
            worker = self._worker = threading.Lock()
            try:
                worker.acquire()
                threading.Thread(
                    target=self._work, args=(worker,), name=self._name, daemon=True
                ).start()
            except BaseException:
                self._worker = None  # if it has come to be, it finds that it is not wanted
                raise

    def _work(self, worker: threading.Lock) -> None:
        while (task := self._next(worker)) is not None:
            if task.has_begun:
                task.conclude()
            else:
                task.run()
            self._leave(worker)
            del task  # or the result would live as long as the thread is idle

    def _next(self, worker: threading.Lock) -> Task | None:
        """Take the role for the next task, once there is one; None if none comes."""
        idle = Deadline(_IDLE, self.clock)
        submitted, looks, nap, is_hasty = self._submitted, 0, _SOON / 2, True
        while True:
            with self._lock:
                if self._worker is not worker:
                    return None
                head = self._queue[0] if self._queue and self._runner is None else None
                age = 0.0 if head is None else head.deadline.waited
                if head is not None and (is_hasty or age >= _SOON or head.has_begun):
                    self._runner = worker
                    return head
                if submitted != self._submitted:  # and somebody was faster
                    submitted, looks, nap = self._submitted, _LOOKS, min(2 * nap, _LONGEST_NAP)
                    idle = Deadline(_IDLE, self.clock)
                elif looks:
                    looks -= 1
                elif idle.expired:
                    if not self._queue and self._runner is None:
                        self._worker, self._is_called = None, True
                        return None
                    idle = Deadline(_IDLE, self.clock)
                self._is_asleep, self._is_called = True, head is None and not looks
            if head is not None:
                is_hasty = self._sleep(worker, _SOON - age)
            else:
                is_hasty = self._sleep(worker, nap if looks else idle.sleep_limit())

    def _sleep(self, worker: threading.Lock, seconds: float) -> bool:
        """Sleep for so long, or until woken; return whether it was."""
        if self.clock.acquire(worker, True, seconds):
            return True
        with self._lock:
            self._is_asleep = False
            return worker.acquire(False)  # it was woken at the last moment
