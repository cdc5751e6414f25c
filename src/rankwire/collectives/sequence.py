"""The sequence of operations: what one rank knows of its group's collectives.

Every operation gets the next number of the group, and they run one after the other in this order,
in whatever threads: what is sent ahead for a later one cannot stand in the way of an earlier one.
If an operation goes well, its own messages are all that is sent. Ranks that have waited for 50 ms
tell each other where they are (``convening``), and look every 50 ms at what others tell. So ranks
that are in different operations find out, whichever waits for which, and a rank whose time is up
knows who never came. A rank that fails tells all others, and they fail too; also one that refuses
to begin, because of its arguments: that call has a number as on the other ranks, so all stay in
step.

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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec

from msgspec.structs import replace

from rankwire.backends.base import Backend
from rankwire.collectives.background import Background, Task
from rankwire.collectives.exchange import Exchange
from rankwire.collectives.fingerprints import NOTICE_TAG, tag_of
from rankwire.collectives.notices import Notice, pack, unpack
from rankwire.collectives.operation import Operation, root_of
from rankwire.collectives.sharing import Sharing
from rankwire.collectives.work import Work
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    DeadlineExceededError,
    InvalidMessageError,
    PeerLostError,
    RankwireError,
)
from rankwire.fork import renew_in_child
from rankwire.wire.frames import Channel
from rankwire.wire.loans import whole_of

P = ParamSpec("P")

# What is to be done: its words (the same on all ranks), the steps, whether in the background, and
# the seconds for all of it (None is the backend's default).
Plan = tuple[str, Callable[[Exchange], Any], bool, float | None]

# Who waits in an operation, and who is in which later one.
Roll = tuple[tuple[int, ...], tuple[tuple[int, int, str], ...]]

_TELLING_PATIENCE = 0.05  # for one rank to take a notice; it is small
_MOST_HEARD = 1024  # notices of one rank at once; who says more must not hold the reader
_MOST_FAILURES = 1024  # operations to come of which it is remembered that others failed in them
_MOST_REFUSED = 64  # operations refused here of which it is remembered what others sent for them


class OperationSequence:
    """The collectives of one backend, on one rank. Safe from any thread.

    Attributes:
        backend: The group.
        others: All its ranks but this one.
        epoch: The number after the last operation that has failed here.
        turn: The number of the one that may run.
        sharing: The memory that its ranks share. Only for the one that has its turn.
        running: The one that has its turn, while it runs.
        failures: What ranks that have failed in an operation, lately, said of it: by its number,
            then by rank.

    Size: what a rank knows of its group's operations is guarded by one lock.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._notices = (backend.group, Channel.COLLECTIVE, NOTICE_TAG)
        self.others = [rank for rank in range(backend.world_size) if rank != backend.rank]
        self.epoch = 0
        self.turn = 0
        self.sharing = Sharing(backend)
        self._lock = threading.Lock()
        self._next = 0  # the number of the next operation to begin
        self.running: Operation | None = None
        self._turn_changed = threading.Condition(self._lock)
        self._ended: set[int] = set()  # numbers that have ended before their turn came
        self._waiting: dict[int, Notice] = {}  # where each rank was last said to be
        self._conveners: dict[int, Notice] = {}  # who convenes, and in which operation
        self._asking: list[int] = []  # who wants the roll
        self.failures: dict[int, dict[int, Notice]] = {}
        self._refused: dict[int, set[int]] = {}  # tags that others used for what was refused here
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
            self._refused[self._next] = set()
            operation.sequence = self._next
            self._next += 1
            while len(self._refused) > _MOST_REFUSED:
                del self._refused[min(self._refused)]

    def end(self, operation: Operation) -> None:
        """Let the next operation have its turn, once all before it have ended. Safe to repeat."""
        with self._lock:
            sequence = operation.sequence
            if sequence is None:
                return
            if self.running is operation:
                self.running = None
            if not operation.has_succeeded:
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
        self.sharing.drop()

    def is_turn_of(self, sequence: int, deadline: Deadline) -> bool:
        """Wait a while until all earlier operations have ended here; return whether they have."""
        with self._lock:
            return self.backend.clock.wait_for(
                self._turn_changed, lambda: self.turn == sequence, deadline.sleep_limit()
            )

    # -- notices -----------------------------------------------------------------------------------

    def tell(self, notice: Notice, ranks: Sequence[int] | None = None) -> list[int]:
        """Tell all others, or some of them, if they take it at once; return those that do not."""
        backend, payload = self.backend, pack(notice)
        untold = []
        for dst in self.others if ranks is None else ranks:
            try:
                patience = Deadline(_TELLING_PATIENCE, backend.clock)
                backend.transmit(dst, self._notices, ((payload,), len(payload)), patience)
            except DeadlineExceededError:
                untold.append(dst)
            except RankwireError:
                continue  # it is gone
        return untold

    def hear(self) -> None:
        """Take in what the others have told.

        Raises:
            PeerLostError: One of them is gone.
        """
        lost: PeerLostError | None = None
        backend = self.backend
        for src in backend.sources(self._notices):
            try:
                for _ in range(_MOST_HEARD):
                    self._heard(src)
            except (DeadlineExceededError, ChannelClosedError):
                continue  # no more; who has left may have done its part
            except PeerLostError as error:
                lost = lost or error
        if lost is not None:
            raise lost

    def _heard(self, src: int) -> None:
        backend = self.backend
        payload = backend.receive(src, self._notices, AT_ONCE)
        try:
            notice = unpack(whole_of(payload))
        except InvalidMessageError as error:
            raise error.during(peer=src) from error.__cause__
        with self._lock:
            self._take_in(src, notice)
            if notice.sequence not in self._refused:
                return
            tag = tag_of(notice.description, notice.sequence, notice.epoch)
            tags = self._refused[notice.sequence]
            if tag in tags or len(tags) >= backend.world_size:  # each rank has sent for one
                return
            tags.add(tag)
        backend.refuse((backend.group, Channel.COLLECTIVE, tag))

    def _take_in(self, src: int, notice: Notice) -> None:
        here, ahead = notice.here, notice.ahead
        missing = notice.missing[: self.backend.world_size]
        notice = replace(notice, here=(), ahead=(), missing=missing)  # long, and it may be kept
        if notice.is_failure:
            self._conveners.pop(src, None)
            if not self._is_settled(notice.sequence):
                self.failures.setdefault(notice.sequence, {})[src] = notice
                if len(self.failures) > _MOST_FAILURES:
                    del self.failures[max(self.failures)]  # what is furthest away
        elif notice.state == "done":
            self._conveners.pop(src, None)
        elif notice.state == "roll":
            for rank in here:
                self._note(rank, notice)
            for rank, sequence, description in ahead:
                self._note(rank, Notice(sequence, description))
        else:
            self._waiting[src] = notice
            if notice.state == "convening":
                self._conveners[src] = notice
            elif notice.state == "asking" and src not in self._asking:
                self._asking.append(src)

    def _note(self, rank: int, notice: Notice) -> None:
        """Take in where a rank is, as a convener says; the rank itself may have said more."""
        if not 0 <= rank < self.backend.world_size or rank == self.backend.rank:
            return
        known = self._waiting.get(rank)
        if known is None or known.sequence < notice.sequence:
            self._waiting[rank] = notice

    def conveners(self, since: int) -> list[int]:
        """Return the ranks that convene in an operation of a number or a later one."""
        with self._lock:
            return [src for src, notice in self._conveners.items() if notice.sequence >= since]

    def convener(self, sequence: int) -> int | None:
        """Return the lowest rank that convenes in an operation and is not gone."""
        with self._lock:
            found = [src for src, notice in self._conveners.items() if notice.sequence == sequence]
        return min((src for src in found if self.backend.failure_of(src) is None), default=None)

    def roll(self, sequence: int) -> Roll:
        """Return who waits in an operation, this rank apart, and who is in which later one."""
        with self._lock:
            here = sorted(src for src, n in self._waiting.items() if n.sequence == sequence)
            ahead = sorted(
                (src, n.sequence, n.description)
                for src, n in self._waiting.items()
                if n.sequence > sequence
            )
        return tuple(here), tuple(ahead)

    def take_asking(self) -> list[int]:
        """Return who wants the roll; from now on they have it."""
        with self._lock:
            asking, self._asking = self._asking, []
        return asking

    def failure_of(self, sequence: int) -> RankwireError | None:
        """Return why an operation cannot succeed, if another rank has said so.

        Either that rank has failed in it, or in an earlier one of which this rank had done its part
        when it heard of that. Then the others do not know yet that this one fails too.
        """
        error: RankwireError | None = None
        with self._lock:
            for number, notices in sorted(self.failures.items()):
                is_news = self.epoch <= number < sequence and self.turn == sequence
                if number == sequence or is_news:
                    src, notice = next(iter(notices.items()))
                    error = notice.error(src, self.backend.rank, is_news=is_news)
                    told = self.failures.get(sequence, {}).values()
                    error.is_reported = any(not notice.to_relay for notice in told)
                    break
        if isinstance(error, PeerLostError | CollectiveAbortedError):
            error.root = root_of(self.backend, error.peer)
        return error

    def to_relay(self, sequence: int) -> Notice | None:
        """Return what a rank has told this one of an operation, that it may tell it to all."""
        with self._lock:
            for src, notice in self.failures.get(sequence, {}).items():
                if notice.to_relay:
                    return replace(notice, to_relay=False, said_by=src)
        return None

    def _is_settled(self, sequence: int) -> bool:
        """Whether an operation has ended here, and it or a later one with a failure."""
        return sequence < 0 or (sequence < self.epoch and sequence < self.turn)

    def _forget(self) -> None:
        """Drop what was said of operations of which no news is wanted any more."""
        for sequence in [number for number in self.failures if self._is_settled(number)]:
            del self.failures[sequence]

    def refusing(self, sequence: int) -> list[int]:
        """Return the ranks that have refused to begin an operation."""
        with self._lock:
            notices = self.failures.get(sequence, {})
            return [src for src, notice in notices.items() if notice.state == "refused"]

    def tags_at(self, sequence: int) -> set[int]:
        """Return the tags under which other ranks have sent for the operation of a number."""
        with self._lock:
            notices = [n for n in self._waiting.values() if n.sequence == sequence]
            notices += self.failures.get(sequence, {}).values()
            return {tag_of(n.description, sequence, n.epoch) for n in notices}

    def elsewhere(self, sequence: int, description: str, epoch: int) -> tuple[int, Notice] | None:
        """Return a rank that waits in vain under the same number, and what it said.

        It is in another operation, or knows of an earlier failure that is not known here. Who is
        behind in that will hear it from us.
        """
        with self._lock:
            for src, notice in self._waiting.items():
                if notice.sequence == sequence and notice.epoch >= epoch:
                    if notice.epoch > epoch or notice.description != description:
                        return src, notice
        return None

    def later_words_of(self, rank: int, sequence: int) -> str | None:
        """Return what a rank says it is in, if that is a later operation than this."""
        with self._lock:
            notice = self._waiting.get(rank)
            return notice.description if notice is not None and notice.sequence > sequence else None

    def absent(self, sequence: int) -> list[int]:
        """Return the ranks that have not said that they came to this operation or a later one."""
        with self._lock:
            return [
                rank
                for rank in self.others
                if rank not in self._waiting or self._waiting[rank].sequence < sequence
            ]


_making = threading.Lock()
renew_in_child(_making)
