"""The sequence of operations: what one rank knows of its group's collectives.

Operations run one at a time in the order of their numbers, in any thread. A successful one sends
only its own messages. A rank that has waited for 50 ms reports its operation to the coordinator,
then checks every 50 ms for notices (``rendezvous.roll``): ranks are missing, have failed or are in
another operation. A call with invalid arguments gets a number too, because the other ranks have
called it as well.

A rank may learn of a failure after it has completed its own part. The ranks that know use a later
*epoch*, and messages of different epochs do not match, so the next operation fails on all ranks and
puts them into one epoch again.

Locks: ``_lock`` guards numbers, turns and notices, and is held briefly. Only the lock of
``Background`` is taken under it, so that work is queued in the order of its numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec

from rankwire import runtime
from rankwire.backends.base import Backend, Operations
from rankwire.collectives.background import Background, Task
from rankwire.collectives.failure_reports import FailureReports
from rankwire.collectives.operation import Operation
from rankwire.collectives.slots import SlotAgreement
from rankwire.collectives.work import Work
from rankwire.deadline import Deadline
from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    ConfigurationError,
    PeerLostError,
    RankwireError,
)
from rankwire.fork import renew_in_child
from rankwire.observe.stacks import show_as
from rankwire.wire.control_messages import MOST_BEFORE

P = ParamSpec("P")

# An operation's description (the same on all ranks) and its steps.
Plan = tuple[str, Callable[[Operation], Any]]

_OF_ANOTHER_RANK = (PeerLostError, ChannelClosedError, CollectiveAbortedError)


class OperationSequence(FailureReports):
    """The collectives of one backend, on one rank. Safe from any thread."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.agreement = SlotAgreement(backend)  # only for the operation that has its turn
        self._next = 0  # the number of the next operation to begin
        self.running: Operation | None = None  # the operation that has its turn
        self._turn_changed = runtime.Condition(self._lock)
        self._ended: set[int] = set()  # numbers that ended before their turn
        # Since the last success; and the number after the operations queued behind it.
        self._first_failure: tuple[RankwireError | None, int] | None = None
        self.explained: set[int | None] = set()  # gone ranks whose reasons this rank has awaited
        self.before: deque[tuple[int, str]] = deque(maxlen=MOST_BEFORE)  # the last successes
        self._background = Background(f"rankwire-collectives-{backend.rank}", backend.clock)

    @classmethod
    def of(cls, backend: Backend) -> Operations:
        """Return the sequence of a backend; create it if necessary."""
        with _making:
            if backend.operations is None:
                backend.operations = cls(backend)
            return backend.operations

    def call(self, name: str, prepare: Callable[..., Plan], *args: Any, **kwargs: Any) -> Any:
        """Run the next operation of the group, here or in the background (``async_op=True``).

        ``prepare`` checks the arguments and returns the plan. Return the result, or its ``Work``.
        """
        async_op = kwargs.get("async_op", False)
        over = self.backend.broken
        if self.backend.closed:
            over = ChannelClosedError("this backend is closed")
        if over is not None:
            description, _ = prepare(*args, **kwargs)
            if not async_op:
                raise over.copy()
            return self._failed_work(over.copy(), description)
        operation = Operation(self, name)
        task: Task | None = None
        try:
            description, run = prepare(*args, **kwargs)
            timeout = kwargs.get("timeout")
            limit = self.backend.timeout if timeout is None else timeout
            deadline = Deadline(limit, self.backend.clock)
            operation.description, operation.deadline = description, deadline
            operation.has_begun = True
            with self._lock:
                operation.sequence = self._next
                self._next += 1
                if async_op:  # under the lock: queued in the order of the numbers
                    task = self._task(operation, run)
                    self._background.submit(task)
            return operation.run_and_end(run) if task is None else task.work
        except BaseException as error:
            try:
                failure = self._give_up(operation, task, error)
            except BaseException:
                self._give_up(operation, task, error)  # interrupted: the turn must pass on
                raise
            raise failure from error.__cause__

    def _failed_work(self, error: RankwireError, description: str) -> Work[Any]:
        work: Work[Any] = Work(description, self._background, -1)
        work.end(None, error.during(op=description, rank=self.backend.rank))
        return work

    def _give_up(self, failed: Operation, task: Task | None, why: BaseException) -> BaseException:
        """End an operation that has failed; return the error to raise. Safe to repeat."""
        runs_on = task is not None and not self._background.withdraw(task)
        return why if runs_on else failed.give_up(why)

    def _task(self, operation: Operation, run: Callable[[Operation], Any]) -> Task:
        assert operation.sequence is not None
        work: Work[Any] = Work(operation.description, self._background, operation.sequence)
        steps = partial(operation.run_and_end, run)
        return Task(operation.sequence, steps, operation.give_up, operation.deadline, work)

    def hurry(self) -> None:
        """Run background operations without delay, because a later one waits for its turn."""
        self._background.hurry()

    def refuse(self, operation: Operation) -> None:
        """Give a number to an operation with invalid arguments, as it has on the other ranks."""
        with self._lock:
            operation.sequence = self._next
            self._next += 1

    def end(self, operation: Operation) -> None:
        """Pass the turn on, once all earlier operations have ended. Safe to repeat."""
        with self._lock:
            sequence = operation.sequence
            if sequence is None:
                return
            if self.running is operation:
                self.running = None
            if operation.has_succeeded:
                self.before.append((sequence, operation.description))
                self._first_failure = None
            else:
                self.epoch = max(self.epoch, sequence + 1)
            if sequence > self.turn:
                self._ended.add(sequence)
            elif sequence == self.turn:
                self.turn += 1
            while self.turn in self._ended:
                self.turn += 1
                self._ended.discard(self.turn - 1)
            if self.failures:
                self.forget_settled()
            if self.turn != self._next:  # or no operation waits for its turn
                self._turn_changed.notify_all()

    def now(self) -> str:
        """Return the description of the running operation; empty if none runs."""
        running = self.running
        return "" if running is None else running.description

    def release(self) -> None:
        """Release the shared memory: the group is closed."""
        self.agreement.drop()

    def is_turn_of(self, sequence: int, deadline: Deadline) -> bool:
        """Wait for an operation's turn until the deadline; return whether it has come."""
        with self._lock:
            return self.backend.clock.wait_for(
                self._turn_changed, lambda: self.turn == sequence, deadline.sleep_limit()
            )

    def note_failure(self, sequence: int, error: BaseException) -> None:
        """Keep the first of several failures in a row, for the operations queued behind it."""
        if self._first_failure is None or sequence >= self._first_failure[1]:
            first: RankwireError | None = None  # this rank's own failure
            if isinstance(error, _OF_ANOTHER_RANK) and error.peer is not None:
                first = error.kept()
                first.is_reported = False  # of the operations behind it
            self._first_failure = first, self._next

    def first_failure(self, sequence: int) -> RankwireError | None:
        """Return another rank's failure behind which an operation was queued, if any."""
        first, end = self._first_failure or (None, 0)
        return first.copy() if first is not None and sequence < end else None


_making = runtime.Lock()
renew_in_child(_making)


def collective(prepare: Callable[Concatenate[Backend, P], Plan]) -> Callable[..., Any]:
    """Make a collective of a function that checks its arguments and returns a plan.

    The function declares the keywords ``async_op`` and ``timeout`` for ``OperationSequence.call``,
    and overloads for type checkers: the result depends on the arguments.
    """
    name = prepare.__name__

    @wraps(prepare)
    def call(backend: Backend, *args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            operations = backend.operations or OperationSequence.of(backend)
        except AttributeError:
            kind = type(backend).__name__
            raise ConfigurationError(
                f"the first argument of {name} is a backend, not {kind}"
            ).during(op=name) from None
        try:
            return operations.call(name, prepare, backend, *args, **kwargs)
        except RankwireError as error:
            error.during(op=name, rank=backend.rank)
            raise

    show_as(name, call)
    return call
