"""Team: what one rank knows of its group's collectives, and how it runs one.

Every operation gets the next number of the group, and they run one after the other in this order,
in whatever threads: what is sent ahead for a later one cannot stand in the way of an earlier one.
If an operation goes well, its own messages are all that is sent. A rank that has waited for 50 ms
tells all others where it is; from then on it looks every 50 ms at what they tell. So ranks that are
in different operations find out, whoever waits for whom, and a rank whose time is up knows who
never came. A rank that fails tells all others, and they fail too.

Locks: ``_lock`` guards numbers, turns and notices, for moments; only the worker's is taken under
it, so that work is queued in the order of its numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from rankwire.backends.base import Backend
from rankwire.collectives.exchange import LOOK_EVERY, Exchange
from rankwire.collectives.fingerprints import NOTICE_TAG, tag_of
from rankwire.collectives.notices import Notice, failure_notice, pack, unpack
from rankwire.collectives.work import Work, Worker
from rankwire.deadline import Deadline
from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    DeadlineExceededError,
    InvalidMessageError,
    PeerLostError,
    RankwireError,
)
from rankwire.forking import renew_in_child
from rankwire.wire.frames import Channel
from rankwire.wire.loans import LoanRevokedError, whole_of

__all__ = ["Operation", "Team"]

T = TypeVar("T")
Run = Callable[[Exchange], T]

_NOW = Deadline(0.0)
_TELLING_PATIENCE = 0.05  # for one rank to take a notice; it is small
_TELLING_TRIES = 4
# With so many ranks, and each more of them, they wait 50 ms longer before they tell all others: a
# short delay of one of 256 would cost 65 thousand messages.
_MANY = 32
_CAUSE_PATIENCE = 1.0  # for the reason of a rank that took its messages back to arrive


class Team:
    """The collectives of one backend, on one rank. Safe from any thread."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._lock = threading.Lock()
        self._next = 0  # the number of the next operation to begin
        self._turn = 0  # the number of the one that may run
        self._turn_changed = threading.Condition(self._lock)
        self._ended: set[int] = set()  # numbers that have ended before their turn came
        self._waiting: dict[int, Notice] = {}  # the last one of each rank
        self._failures: dict[int, dict[int, Notice]] = {}  # by number, then by rank
        self._failed: set[int] = set()  # numbers that have failed here: no news of them is wanted
        self._worker = Worker(f"rankwire-collectives-{backend.rank}")

    @classmethod
    def of(cls, backend: Backend) -> Team:
        """Return the team of a backend, new if need be."""
        team: Team | None = backend.team
        if team is None:
            with _making:
                team = backend.team
                if team is None:
                    team = backend.team = cls(backend)
        return team

    def run(
        self, description: str, run: Run[T], *, timeout: float | None, async_op: bool
    ) -> T | Work[T]:
        """Run the next operation of the group, here or in the background.

        Args:
            description: What it is; the same words on all ranks.
            run: The steps.
            timeout: Seconds for all of it; None is the backend's default.
            async_op: Whether to return at once.
        """
        deadline = Deadline.of(timeout, self.backend.timeout)
        if self.backend.closed:
            raise ChannelClosedError("this backend is closed")
        operation = Operation(self, description, deadline)
        work: Work[T] | None = None
        try:
            with self._lock:
                operation.sequence = self._next
                self._next += 1
                if async_op:  # under the lock: the worker runs them in the order of their numbers
                    work = Work(description)
                    self._worker.submit(work, lambda: self._run_and_end(operation, run))
            return operation.run(run) if work is None else work
        finally:
            # Written out, and not a function: an interrupt at its first line would stop the group.
            if work is None:
                with self._lock:
                    if operation.sequence is not None:
                        self._ended.add(operation.sequence)
                    while self._turn in self._ended:
                        self._ended.discard(self._turn)
                        self._turn += 1
                    self._turn_changed.notify_all()

    def _run_and_end(self, operation: Operation, run: Run[T]) -> T:
        try:
            return operation.run(run)
        finally:
            with self._lock:
                assert operation.sequence is not None
                self._ended.add(operation.sequence)
                while self._turn in self._ended:
                    self._ended.discard(self._turn)
                    self._turn += 1
                self._turn_changed.notify_all()

    def is_turn_of(self, sequence: int, deadline: Deadline) -> bool:
        """Wait a while until all earlier operations have ended here; return whether they have."""
        if self._turn == sequence:
            return True
        with self._lock:
            return self._turn_changed.wait_for(
                lambda: self._turn == sequence, deadline.sleep_limit()
            )

    # -- notices -----------------------------------------------------------------------------------

    @property
    def telling_delay(self) -> float:
        """Seconds after which a waiting rank tells all others: more of them, if they are many."""
        return LOOK_EVERY * max(1, self.backend.world_size // _MANY)

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        rank = self.backend.rank
        return [other for other in range(self.backend.world_size) if other != rank]

    def tell(self, notice: Notice, ranks: Sequence[int] | None = None) -> list[int]:
        """Tell all others, or some of them, if they take it at once; return those that do not."""
        backend, payload = self.backend, pack(notice)
        untold = []
        for dst in self.others if ranks is None else ranks:
            try:
                backend.transmit(
                    dst,
                    Channel.COLLECTIVE,
                    backend.group,
                    NOTICE_TAG,
                    (payload,),
                    len(payload),
                    Deadline(_TELLING_PATIENCE),
                )
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
        for src in self.others:
            try:
                while True:
                    self._heard(src)
            except (DeadlineExceededError, ChannelClosedError):
                continue  # no more; who has left may have done its part
            except PeerLostError as error:
                lost = lost or error
        if lost is not None:
            raise lost

    def _heard(self, src: int) -> None:
        backend = self.backend
        payload = backend.receive(src, Channel.COLLECTIVE, backend.group, NOTICE_TAG, _NOW)
        try:
            notice = unpack(whole_of(payload))
        except InvalidMessageError as error:
            raise error.during(peer=src) from error.__cause__
        with self._lock:
            if notice.is_failure:
                if notice.sequence not in self._failed:
                    self._failures.setdefault(notice.sequence, {})[src] = notice
            else:
                self._waiting[src] = notice

    @property
    def has_bad_news(self) -> bool:
        """Whether another rank has failed in an operation, lately."""
        return bool(self._failures)

    def failure_of(self, sequence: int) -> RankwireError | None:
        """Return why an operation cannot succeed, if another rank has said so.

        A disagreement counts also when it came to light after this rank had done its part; then it
        ends the next operation, of which the others do not know yet.
        """
        error = self._failure_of(sequence)
        if isinstance(error, PeerLostError | CollectiveAbortedError):
            error.root = self._root_of(error.peer)
        return error

    def _root_of(self, peer: int | None) -> int | None:
        """Return whose failure it is that a peer has failed; asks the backend, without the lock."""
        backend = self.backend
        if peer is None or peer == backend.rank or not 0 <= peer < backend.world_size:
            return None
        known = backend.failure_of(peer)
        if known is not None and known.root is not None:
            return known.root
        return backend.world_rank_of(peer)

    def _failure_of(self, sequence: int) -> RankwireError | None:
        with self._lock:
            for number, notices in sorted(self._failures.items()):
                for src, notice in notices.items():
                    if number == sequence or (number < sequence and notice.state == "mismatch"):
                        self._forget(number)
                        error = notice.error(src, self.backend.rank)
                        error.is_reported = number == sequence
                        return error
        return None

    def forget(self, sequence: int) -> None:
        """An operation has failed here: what others say of it is of no use any more."""
        with self._lock:
            self._forget(sequence)

    def _forget(self, sequence: int) -> None:
        self._failed.add(sequence)
        self._failures.pop(sequence, None)

    def words_at(self, sequence: int) -> set[str]:
        """Return what other ranks have called the operation of a number."""
        with self._lock:
            words = {n.description for n in self._waiting.values() if n.sequence == sequence}
            return words | {n.description for n in self._failures.get(sequence, {}).values()}

    def other_operation(self, sequence: int, description: str) -> tuple[int, str] | None:
        """Return a rank that is in another operation under the same number, and what it is in."""
        with self._lock:
            for src, notice in self._waiting.items():
                if notice.sequence == sequence and notice.description != description:
                    return src, notice.description
        return None

    def is_ahead(self, rank: int, sequence: int) -> bool:
        """Whether a rank has said that it is in a later operation, and so is done with this one."""
        with self._lock:
            return rank in self._waiting and self._waiting[rank].sequence > sequence

    def words_of(self, rank: int) -> str:
        """Return what a rank has last said it is in."""
        with self._lock:
            return self._waiting[rank].description

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


class Operation:
    """One operation on one rank; used by the thread that runs it."""

    __slots__ = (
        "_ahead",
        "_deadline",
        "_description",
        "_tags",
        "_team",
        "_untold",
        "_words",
        "sequence",
    )

    def __init__(self, team: Team, description: str, deadline: Deadline) -> None:
        self._team = team
        self._description = description
        self._deadline = deadline
        self.sequence: int | None = None  # its number in the group, once it has one
        self._untold: list[int] | None = None  # who does not know yet that we wait; None: nobody
        self._ahead: int | None = None  # a rank that is done with this operation
        self._tags: list[int] = []
        self._words: set[str] = set()  # what other ranks call it

    def run(self, run: Run[T]) -> T:
        """Do the steps; on any error tell the others, so that nobody waits for this rank."""
        team = self._team
        self._tags.append(tag_of(self._description, self._sequence))
        exchange = Exchange(team.backend, self, self._tags[0], self._deadline)
        try:
            self._await_turn()
            if team.has_bad_news:
                self._raise_if_failed()
            result = run(exchange)
            exchange.settle()
            return result
        except BaseException as error:
            exchange.revoke()
            raise self._failed(error) from error.__cause__

    @property
    def _sequence(self) -> int:
        assert self.sequence is not None
        return self.sequence

    def _await_turn(self) -> None:
        """Wait for earlier operations to end, unless this one cannot succeed any more."""
        while not self._team.is_turn_of(self._sequence, self._deadline.sooner(LOOK_EVERY)):
            if self._deadline.expired:
                raise DeadlineExceededError(
                    self._deadline.limit, detail="an earlier one of this group is still running"
                )
            self._team.hear()
            self._raise_if_failed()

    def tag_of_part(self, part: int) -> int:
        """Return the tag of step 0 of a part."""
        self._tags.append(tag_of(f"{self._description} part {part}", self._sequence))
        return self._tags[-1]

    def _failed(self, error: BaseException) -> BaseException:
        if isinstance(error, LoanRevokedError):
            error = self._why_revoked()
        if not isinstance(error, RankwireError) or not error.is_reported:
            self._tell_failure(error)
        backend = self._team.backend
        self._words |= self._team.words_at(self._sequence)
        self._team.forget(self._sequence)
        for tag in [*self._tags, *(tag_of(words, self._sequence) for words in self._words)]:
            backend.refuse(backend.group, Channel.COLLECTIVE, tag)
        if isinstance(error, RankwireError):
            waited = self._deadline.waited
            error.during(op=self._description, rank=self._team.backend.rank, waited=waited)
        return error

    def _tell_failure(self, error: BaseException) -> None:
        rank = self._team.backend.rank
        notice = failure_notice(self._sequence, self._description, rank, error)
        untold = self._team.others
        for _ in range(_TELLING_TRIES):
            untold = self._team.tell(notice, untold)

    def look(self, src: int) -> None:
        """See whether there is still a reason to wait for a rank; tell the others once.

        Raises:
            RankwireError: There is none.
        """
        team = self._team
        if self._untold is None and self._deadline.waited >= team.telling_delay:
            self._untold = team.others
        if self._untold:
            self._untold = team.tell(Notice(self._sequence, self._description), self._untold)
        try:
            team.hear()
        finally:
            self._raise_if_failed()
        other = team.other_operation(self._sequence, self._description)
        if other is not None:
            rank, theirs = other
            raise self._mismatch(rank, f"{theirs} on rank {rank}")
        if team.is_ahead(src, self._sequence):
            # What it sent for this one came before it said so, and has been looked for since.
            if self._ahead == src:
                now = f"it is done with that number and in {team.words_of(src)}"
                raise self._mismatch(src, f"something else on rank {src}: {now}")
            self._ahead = src

    def _mismatch(self, rank: int, theirs: str) -> CollectiveMismatchError:
        return CollectiveMismatchError(
            f"collective number {self._sequence} of this group is {self._description} on rank "
            f"{self._team.backend.rank} and {theirs}; all ranks must call the same ones in the "
            "same order"
        ).during(peer=rank)

    def _raise_if_failed(self) -> None:
        self._words |= self._team.words_at(self._sequence)
        failure = self._team.failure_of(self._sequence)
        if failure is not None:
            raise failure

    def _why_revoked(self) -> RankwireError:
        """Another rank took back what this one was reading: it has failed, and says why."""
        patience = Deadline(_CAUSE_PATIENCE)
        while not patience.expired:
            try:
                self._team.hear()
                self._raise_if_failed()
            except RankwireError as error:
                return error
        return CollectiveAbortedError(-1, f"{self._description}, and took its messages back")

    def too_late(self, src: int) -> DeadlineExceededError:
        """Return the error of an operation whose time is up."""
        missing = self._team.absent(self._sequence) or [src]
        return DeadlineExceededError(self._deadline.limit, waiting_for=missing)
