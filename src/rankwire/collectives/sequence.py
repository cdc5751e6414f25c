"""The sequence of operations: what one rank knows of its group's collectives.

Operations run one at a time in the order of their numbers, in any thread, so messages sent early
for a later one cannot block an earlier one. A successful operation sends only its own messages. A
rank that has waited for 50 ms reports its operation to the coordinator, then looks every 50 ms for
what the coordinator tells (``rendezvous.roll``): which ranks are missing, or that a rank has failed
or is in another operation. A call with invalid arguments gets a number as well, because the other
ranks have called it too.

A rank may learn of a failure after it has completed its own part. The ranks that know use a later
*epoch*, and messages of different epochs do not match, so the next operation fails on all ranks.
Then all are in one epoch again.

Locks: ``_lock`` guards numbers, turns and notices, and is held briefly. Only the lock of
``Background`` is taken under it, so that work is queued in the order of its numbers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec

from msgspec.structs import replace

from rankwire.backends.base import Backend
from rankwire.collectives.background import Background, Task
from rankwire.collectives.exchange import Exchange
from rankwire.collectives.fingerprints import tag_of
from rankwire.collectives.operation import Operation, error_of, root_of
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
from rankwire.wire.frames import Channel
from rankwire.wire.notices import MOST_BEFORE, Notice

P = ParamSpec("P")

# Description (the same on all ranks), steps, whether in the background, and timeout (None is the
# backend's default).
Plan = tuple[str, Callable[[Exchange], Any], bool, float | None]

_OF_ANOTHER_RANK = (PeerLostError, ChannelClosedError, CollectiveAbortedError)
_MOST_FAILURES = 1024  # reports kept of failures in operations to come
_MOST_OVER = 64  # failed operations whose tags are kept


class OperationSequence:
    """The collectives of one backend, on one rank. Safe from any thread.

    Attributes:
        backend: The group.
        others: All ranks of the group but this one.
        epoch: The number after the last operation that failed here.
        turn: The number of the operation that may run.
        agreement: The memory that the ranks share. Only for the operation that has its turn.
        running: The operation that has its turn, while it runs.
        failures: The first report of each recent failure on another rank, by the operation's
            number.
        before: Number and description of the last operations that succeeded here.
        explained: Ranks that have left or died, and whose reasons this rank has waited for.

    Size: what a rank knows of its group's operations is guarded by one lock.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._roll = backend.roll
        world_ranks = [backend.world_rank_of(rank) for rank in range(backend.world_size)]
        self._ranks = {world_rank: rank for rank, world_rank in enumerate(world_ranks)}
        self._members = backend.roll_members
        self.others = [rank for rank in range(backend.world_size) if rank != backend.rank]
        self.epoch = 0
        self.turn = 0
        self.agreement = SlotAgreement(backend)
        self._lock = threading.Lock()
        self._next = 0  # the number of the next operation to begin
        self.running: Operation | None = None
        self._turn_changed = threading.Condition(self._lock)
        self._ended: set[int] = set()  # numbers that ended before their turn
        self.failures: dict[int, Notice] = {}
        # Since the last success; and the number after the operations queued behind it.
        self._first_failure: tuple[RankwireError | None, int] | None = None
        self.explained: set[int | None] = set()
        self.before: deque[tuple[int, str]] = deque(maxlen=MOST_BEFORE)
        self._missing: tuple[int, tuple[int, ...]] = (-1, ())  # number, ranks
        self._others_tags: dict[int, set[int]] = {}  # of operations that have not failed here
        self._over: set[int] = set()  # operations that have failed here
        self._background = Background(f"rankwire-collectives-{backend.rank}", backend.clock)

    @classmethod
    def of(cls, backend: Backend) -> OperationSequence:
        """Return the sequence of a backend; create it if necessary."""
        with _making:
            if backend.operations is None:
                backend.operations = cls(backend)
            operations: OperationSequence = backend.operations
        return operations

    def call(self, name: str, prepare: Callable[P, Plan], *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run the next operation of the group, here or in the background.

        ``prepare`` checks its arguments and returns the plan. Returns the result of the steps, or
        the ``Work`` whose ``wait`` returns it.
        """
        over = self.backend.broken
        if self.backend.closed:
            over = ChannelClosedError("this backend is closed")
        if over is not None:
            return self._end_at_once(over.copy(), *prepare(*args, **kwargs))
        operation = Operation(self, name)
        task: Task | None = None
        try:
            description, run, async_op, timeout = prepare(*args, **kwargs)
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

    def _end_at_once(
        self, error: RankwireError, description: str, run: object, async_op: bool, limit: object
    ) -> Work[Any]:
        """Raise the error, or return a ``Work`` that raises it."""
        if not async_op:
            raise error
        work: Work[Any] = Work(description, self._background, -1)
        work.end(None, error.during(op=description, rank=self.backend.rank))
        return work

    def _give_up(self, failed: Operation, task: Task | None, why: BaseException) -> BaseException:
        """End an operation that has failed; return the error to raise. Safe to repeat."""
        goes_on = task is not None and not self._background.withdraw(
            task
        )  # it runs in the background
        return why if goes_on else failed.give_up(why)

    def _task(self, operation: Operation, run: Callable[[Exchange], Any]) -> Task:
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
                self._forget()
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

    # -- what the coordinator tells ----------------------------------------------------------------

    def report(self, notice: Notice) -> None:
        """Report to the coordinator that an operation waits, or has failed."""
        self._roll.report(replace(notice, members=self._members))

    def hear(self) -> None:
        """Process what the coordinator has told; raise if a rank of the group is lost."""
        backend = self.backend
        if backend.group in self._roll.untaken:
            for notice in self._roll.take(backend.group):
                self._take_in(notice)
        for rank in backend.lost_ranks():
            failure = backend.failure_of(rank)
            if failure is not None and not isinstance(failure, ChannelClosedError):
                raise failure.copy()  # a rank that has left may have done its part

    @property
    def has_news(self) -> bool:
        """Whether an operation must process notices before it begins or ends."""
        return bool(self._roll.untaken or self.failures)

    def _take_in(self, notice: Notice) -> None:
        number = notice.sequence
        if notice.src not in self._ranks:
            return  # it claims to be in this group
        with self._lock:
            if notice.is_failure:
                self._keep(notice)
                if len(self.failures) > _MOST_FAILURES:
                    del self.failures[max(self.failures)]  # the furthest away
            elif notice.state == "missing":
                self._missing = number, notice.missing
            tags = self._tags_of(notice)
            if number not in self._over:
                self._others_tags.setdefault(number, set()).update(tags)
                while len(self._others_tags) > _MOST_OVER:
                    del self._others_tags[min(self._others_tags)]
                return
        for tag in tags:
            self.backend.refuse((self.backend.group, Channel.COLLECTIVE, tag))

    def _tags_of(self, notice: Notice) -> set[int]:
        """Return the tags under which other ranks send for an operation, as a notice tells."""
        if notice.state in ("missing", "refused"):
            return set()
        descriptions = {notice.description, *notice.descriptions}
        return {tag_of(text, notice.sequence, notice.epoch) for text in descriptions}

    def tags_at(self, sequence: int) -> set[int]:
        """Return the tags of others' messages for a failed operation; later ones are refused."""
        with self._lock:
            self._over.add(sequence)
            while len(self._over) > _MOST_OVER:
                self._over.remove(min(self._over))
            return self._others_tags.pop(sequence, set())

    def failure_of(self, sequence: int) -> RankwireError | None:
        """Return why an operation cannot succeed, if another rank has reported it.

        That rank has failed in this operation, or in an earlier one whose part this rank had
        completed. Then the other ranks do not know yet that this one fails too.
        """
        error: RankwireError | None = None
        with self._lock:
            for number, notice in sorted(self.failures.items()):
                is_news = self.epoch <= number < sequence and self.turn == sequence
                if number == sequence or is_news:
                    src = self._ranks[notice.src]
                    error = error_of(notice, src, self.backend.rank, is_news=is_news)
                    # A rank that refused its arguments does not know this one's tags.
                    told = self.failures.get(sequence)
                    error.is_reported = told is not None and told.state != "refused"
                    break
        if isinstance(error, PeerLostError | CollectiveAbortedError):
            error.root = root_of(self.backend, error.peer)
        return error

    def note_failure(self, sequence: int, error: BaseException) -> None:
        """Keep the first of several failures in a row, for the operations queued behind it."""
        if self._first_failure is None or sequence >= self._first_failure[1]:
            first: RankwireError | None = None  # this rank's own failure
            if isinstance(error, _OF_ANOTHER_RANK) and error.peer is not None:
                first = error.kept()
                first.is_reported = False  # of the operations behind it
            self._first_failure = first, self._next

    def first_failure(self, sequence: int) -> RankwireError | None:
        """Return the failure of another rank behind which an operation was queued, if any."""
        first, end = self._first_failure or (None, 0)
        return first.copy() if first is not None and sequence < end else None

    def _is_settled(self, sequence: int) -> bool:
        """Whether an operation has ended here, and it or a later one has failed."""
        return sequence < 0 or (sequence < self.epoch and sequence < self.turn)

    def _forget(self) -> None:
        for sequence in [number for number in self.failures if self._is_settled(number)]:
            self._keep(self.failures.pop(sequence))

    def _keep(self, notice: Notice) -> None:
        """Keep the report of a failure until that operation is settled here."""
        if not self._is_settled(notice.sequence):
            self.failures.setdefault(notice.sequence, notice)
        elif notice.state == "left" and self._ranks[notice.src] == notice.culprit:
            # The rank has left the world: all operations after that one fail as well.
            self.failures[self.turn] = replace(notice, sequence=self.turn)

    def missing_at(self, sequence: int) -> list[int] | None:
        """Return the ranks that have not reached an operation, if the coordinator has told."""
        with self._lock:
            number, ranks = self._missing
        return None if number != sequence else [rank for rank in ranks if rank in self.others]

    @property
    def keeper(self) -> int | None:
        """The rank of this group that coordinates the world, if it is in this group."""
        return self._ranks.get(self._roll.keeper) if self._roll.is_kept else None

    def has_heard_last_of(self, rank: int) -> bool:
        """Whether the coordinator has passed on all reports of a rank that has left or died."""
        return self._roll.has_heard_last_of(self.backend.world_rank_of(rank))


_making = threading.Lock()
renew_in_child(_making)


def collective(
    prepare: Callable[Concatenate[Backend, P], Plan],
) -> Callable[Concatenate[Backend, P], Any]:
    """Make a collective of a function that checks its arguments and returns a plan."""
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
    return call  # type: ignore[return-value]  # mypy does not see the wrapped name
