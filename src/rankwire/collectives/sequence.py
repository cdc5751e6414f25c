"""The sequence of operations: what one rank knows of its group's collectives.

Every operation gets the next number of the group, and they run one after the other in this order,
in whatever threads: what is sent ahead for a later one cannot stand in the way of an earlier one.
If an operation goes well, its own messages are all that is sent. A rank that has waited for 50 ms
reports to the coordinator where it is, and looks every 50 ms at what the coordinator tells
(``rendezvous.roll``). So ranks that are in different operations find out, whichever waits for
which, and a rank whose time is up knows who never came. A rank that fails reports it, the others
are told, and they fail too; also one that refuses to begin, because of its arguments: that call has
a number as on the other ranks, so all stay in step.

A rank may hear too late that an operation has failed elsewhere: it has done its part and goes on.
Those who know go on in another *epoch*, and messages of different epochs do not match. So no rank
gets past the next operation; there the rank is told, and that operation fails on all. Afterwards
all are in one epoch again.

Locks: ``_lock`` guards numbers, turns and notices, for moments; only that of ``Background`` is
taken under it, so that work is queued in the order of its numbers.

Size: what a rank knows of its group's operations is guarded by one lock.
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

# What is to be done: its words (the same on all ranks), the steps, whether in the background, and
# the seconds for all of it (None is the backend's default).
Plan = tuple[str, Callable[[Exchange], Any], bool, float | None]

_OF_ANOTHER_RANK = (PeerLostError, ChannelClosedError, CollectiveAbortedError)
_MOST_FAILURES = 1024  # operations to come of which it is remembered that others failed in them
_MOST_OVER = 64  # failed operations of which it is remembered what others sent for them


class OperationSequence:
    """The collectives of one backend, on one rank. Safe from any thread.

    Attributes:
        backend: The group.
        others: All its ranks but this one.
        epoch: The number after the last operation that has failed here.
        turn: The number of the one that may run.
        agreement: The memory that its ranks share. Only for the one that has its turn.
        running: The one that has its turn, while it runs.
        failures: How operations have failed on other ranks, lately: the first report of each, by
            its number.
        before: Number and description of the last operations that succeeded here.
        explained: The ranks that are gone, and of which this rank has waited to be told why.

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
        self._ended: set[int] = set()  # numbers that have ended before their turn came
        self.failures: dict[int, Notice] = {}
        # Since the last operation that succeeded; and the number after those queued behind it.
        self._first_failure: tuple[RankwireError | None, int] | None = None
        self.explained: set[int | None] = set()
        self.before: deque[tuple[int, str]] = deque(maxlen=MOST_BEFORE)
        self._missing: tuple[int, tuple[int, ...]] = (-1, ())  # from an operation, who
        self._others_tags: dict[int, set[int]] = {}  # of operations that go on here
        self._over: set[int] = set()  # operations that have failed here
        self._background = Background(f"rankwire-collectives-{backend.rank}", backend.clock)

    @classmethod
    def of(cls, backend: Backend) -> OperationSequence:
        """Return the sequence of a backend, new if need be."""
        with _making:
            if backend.operations is None:
                backend.operations = cls(backend)
            operations: OperationSequence = backend.operations
        return operations

    def call(self, name: str, prepare: Callable[P, Plan], *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run the next operation of the group, here or in the background.

        It has a number also if it cannot be prepared, as on the other ranks, which are told.

        Args:
            name: What was called.
            prepare: Checks its arguments, and returns what is to be done.
            *args: Its arguments.
            **kwargs: Its arguments by name.

        Returns:
            What the steps return, or the ``Work`` whose ``wait`` returns it.
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
                if async_op:  # under the lock: they are queued in the order of their numbers
                    task = self._task(operation, run)
                    self._background.submit(task)
            return operation.run_and_end(run) if task is None else task.work
        except BaseException as error:
            try:
                failure = self._give_up(operation, task, error)
            except BaseException:
                self._give_up(operation, task, error)  # interrupted: the group would stop here
                raise
            raise failure from error.__cause__

    def _end_at_once(
        self, error: RankwireError, description: str, run: object, async_op: bool, limit: object
    ) -> Work[Any]:
        """Raise why no operation can begin any more, or return a ``Work`` that does."""
        if not async_op:
            raise error
        work: Work[Any] = Work(description, self._background, -1)
        work.end(None, error.during(op=description, rank=self.backend.rank))
        return work

    def _give_up(self, failed: Operation, task: Task | None, why: BaseException) -> BaseException:
        """End what could not begin or end here; return what to raise. Safe to repeat."""
        goes_on = task is not None and not self._background.withdraw(task)  # in the background
        return why if goes_on else failed.give_up(why)

    def _task(self, operation: Operation, run: Callable[[Exchange], Any]) -> Task:
        assert operation.sequence is not None
        work: Work[Any] = Work(operation.description, self._background, operation.sequence)
        steps = partial(operation.run_and_end, run)
        return Task(operation.sequence, steps, operation.give_up, operation.deadline, work)

    def hurry(self) -> None:
        """Have those in the background run without delay: a later one waits for its turn.

        Its thread does not run them: then it could not look whether its own has failed elsewhere.
        """
        self._background.hurry()

    def refuse(self, operation: Operation) -> None:
        """Give an operation that cannot begin a number, as it has on the other ranks."""
        with self._lock:
            operation.sequence = self._next
            self._next += 1

    def end(self, operation: Operation) -> None:
        """Let the next operation have its turn, once all before it have ended. Safe to repeat."""
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
            if self.turn != self._next:  # or there is no other one that could wait for its turn
                self._turn_changed.notify_all()

    def now(self) -> str:
        """Return the words of the operation that is under way here, if there is one."""
        running = self.running
        return "" if running is None else running.description

    def release(self) -> None:
        """Let go of the memory that is shared: the group is closed."""
        self.agreement.drop()

    def is_turn_of(self, sequence: int, deadline: Deadline) -> bool:
        """Wait a while until all earlier operations have ended here; return whether they have."""
        with self._lock:
            return self.backend.clock.wait_for(
                self._turn_changed, lambda: self.turn == sequence, deadline.sleep_limit()
            )

    # -- what the coordinator tells ----------------------------------------------------------------

    def report(self, notice: Notice) -> None:
        """Report to the coordinator that an operation waits, or has failed."""
        self._roll.report(replace(notice, members=self._members))

    def hear(self) -> None:
        """Process what the coordinator has told.

        Raises:
            PeerLostError: A rank of the group is lost.
        """
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
        """Whether there is something to look at before an operation begins or ends."""
        return bool(self._roll.untaken or self.failures)

    def _take_in(self, notice: Notice) -> None:
        number = notice.sequence
        if notice.src not in self._ranks:
            return  # it is not in this group, and says that it is
        with self._lock:
            if notice.is_failure:
                self._keep(notice)
                if len(self.failures) > _MOST_FAILURES:
                    del self.failures[max(self.failures)]  # what is furthest away
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
        """Return the tags under which other ranks send for an operation, as far as it says so."""
        if notice.state in ("missing", "refused"):
            return set()
        descriptions = {notice.description, *notice.descriptions}
        return {tag_of(text, notice.sequence, notice.epoch) for text in descriptions}

    def tags_at(self, sequence: int) -> set[int]:
        """Return the tags under which other ranks have sent for the operation of a number.

        From now on, what others tell of it is dropped at once.
        """
        with self._lock:
            self._over.add(sequence)
            while len(self._over) > _MOST_OVER:
                self._over.remove(min(self._over))
            return self._others_tags.pop(sequence, set())

    def failure_of(self, sequence: int) -> RankwireError | None:
        """Return why an operation cannot succeed, if another rank has reported it.

        Either that rank has failed in it, or in an earlier one of which this rank had done its part
        when it heard of that. Then the others do not know yet that this one fails too.
        """
        error: RankwireError | None = None
        with self._lock:
            for number, notice in sorted(self.failures.items()):
                is_news = self.epoch <= number < sequence and self.turn == sequence
                if number == sequence or is_news:
                    src = self._ranks[notice.src]
                    error = error_of(notice, src, self.backend.rank, is_news=is_news)
                    # A rank that refused does not know under which tags this one has sent.
                    told = self.failures.get(sequence)
                    error.is_reported = told is not None and told.state != "refused"
                    break
        if isinstance(error, PeerLostError | CollectiveAbortedError):
            error.root = root_of(self.backend, error.peer)
        return error

    def note_failure(self, sequence: int, error: BaseException) -> None:
        """Keep the first of several failures in a row, for the operations queued behind it."""
        if self._first_failure is None or sequence >= self._first_failure[1]:
            first: RankwireError | None = None  # it is this rank's own
            if isinstance(error, _OF_ANOTHER_RANK) and error.peer is not None:
                first = error.kept()
                first.is_reported = False  # in the operations behind it
            self._first_failure = first, self._next

    def first_failure(self, sequence: int) -> RankwireError | None:
        """Return the failure of another rank behind which an operation was queued, if any."""
        first, end = self._first_failure or (None, 0)
        return first.copy() if first is not None and sequence < end else None

    def _is_settled(self, sequence: int) -> bool:
        """Whether an operation has ended here, and it or a later one with a failure."""
        return sequence < 0 or (sequence < self.epoch and sequence < self.turn)

    def _forget(self) -> None:
        """Drop what was said of operations of which no news is wanted any more."""
        for sequence in [number for number in self.failures if self._is_settled(number)]:
            self._keep(self.failures.pop(sequence))

    def _keep(self, notice: Notice) -> None:
        """Keep how an operation has failed, until that is settled here."""
        if not self._is_settled(notice.sequence):
            self.failures.setdefault(notice.sequence, notice)
        elif notice.state == "left" and self._ranks[notice.src] == notice.culprit:
            # The rank has left the world: all operations after that one fail as well.
            self.failures[self.turn] = replace(notice, sequence=self.turn)

    def missing_at(self, sequence: int) -> list[int] | None:
        """Return the ranks that have not come to an operation, if the coordinator has told."""
        with self._lock:
            number, ranks = self._missing
        return None if number != sequence else [rank for rank in ranks if rank in self.others]

    @property
    def keeper(self) -> int | None:
        """The rank of this group that is to answer who is missing, if it is one of them."""
        return self._ranks.get(self._roll.keeper) if self._roll.is_kept else None

    def has_heard_last_of(self, rank: int) -> bool:
        """Whether the coordinator has nothing more to tell of a rank that is gone."""
        return self._roll.has_heard_last_of(self.backend.world_rank_of(rank))


_making = threading.Lock()
renew_in_child(_making)


def collective(
    prepare: Callable[Concatenate[Backend, P], Plan],
) -> Callable[Concatenate[Backend, P], Any]:
    """Make a collective of a function that returns a plan and whose first argument is the group."""
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
    return call  # type: ignore[return-value]  # mypy does not know that the name stays
