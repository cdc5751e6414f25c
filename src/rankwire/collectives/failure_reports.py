"""Failure reports: the reports of a group's ranks to each other, through the coordinator."""

from __future__ import annotations

from msgspec.structs import replace

from rankwire import runtime
from rankwire.backends.base import Backend
from rankwire.collectives.exchange import tag_of
from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    DeadlineExceededError,
    PeerLostError,
    RankwireError,
)
from rankwire.wire.control_messages import Notice
from rankwire.wire.frames import Channel

_MOST_FAILURES = 1024  # reports kept of failures in operations to come
_MOST_OVER = 64  # failed operations whose tags are kept


class FailureReports:
    """The reports of other ranks on a group's operations. The base of ``OperationSequence``.

    ``_lock`` guards it together with the numbers and turns of the sequence.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._roll = backend.roll
        self._ranks = {backend.world_rank_of(rank): rank for rank in range(backend.world_size)}
        self._members = backend.roll_members
        self.others = [rank for rank in range(backend.world_size) if rank != backend.rank]
        self.epoch = 0  # the number after the last operation that failed here
        self.turn = 0  # the number of the operation that may run
        self._lock = runtime.Lock()
        self.failures: dict[int, Notice] = {}  # the first report of each recent failure, by number
        self._missing: tuple[int, tuple[int, ...]] = (-1, ())  # number, ranks
        self._others_tags: dict[int, set[int]] = {}  # of operations that have not failed here
        self._over: set[int] = set()  # operations that have failed here

    def report(self, notice: Notice) -> None:
        """Report to the coordinator that an operation waits, or has failed."""
        self._roll.report(replace(notice, members=self._members))

    def hear(self) -> None:
        """Process the coordinator's notices; raise if a rank of the group is lost."""
        backend = self.backend
        if backend.group in self._roll.untaken:
            for notice in self._roll.take(backend.group):
                self._take_in(notice)
        for rank in backend.lost_ranks():
            failure = backend.failure_of(rank)
            # A rank that has left may have done its part.
            if failure is not None and not isinstance(failure, ChannelClosedError):
                raise failure.copy()

    @property
    def has_news(self) -> bool:
        """Whether an operation must process notices before it begins or ends."""
        return bool(self._roll.untaken or self.failures)

    def _take_in(self, notice: Notice) -> None:
        number = notice.sequence
        if notice.src not in self._ranks:
            return  # the sender is not in this group
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
            self.backend.messages.refuse((self.backend.group, Channel.COLLECTIVE, tag))

    def _tags_of(self, notice: Notice) -> set[int]:
        if notice.state in ("missing", "refused"):
            return set()
        descriptions = {notice.description, *notice.descriptions}
        return {tag_of(text, notice.sequence, notice.epoch) for text in descriptions}

    def tags_at(self, sequence: int) -> set[int]:
        """Return the tags of others' messages for a failed operation; refuse later ones."""
        with self._lock:
            self._over.add(sequence)
            while len(self._over) > _MOST_OVER:
                self._over.remove(min(self._over))
            return self._others_tags.pop(sequence, set())

    def failure_of(self, sequence: int) -> RankwireError | None:
        """Return why an operation cannot succeed, if another rank has reported it.

        That rank failed in this operation, or in an earlier one whose part this rank had completed;
        then the other ranks do not know yet that this one fails too.
        """
        error: RankwireError | None = None
        with self._lock:
            for number, notice in sorted(self.failures.items()):
                is_news = self.epoch <= number < sequence and self.turn == sequence
                if number == sequence or is_news:
                    src = self._ranks[notice.src]
                    error = error_of(notice, src, self.backend.rank, is_news=is_news)
                    error.is_local = True
                    # A rank that refused its arguments does not know this one's tags.
                    told = self.failures.get(sequence)
                    error.is_reported = told is not None and told.state != "refused"
                    break
        if isinstance(error, PeerLostError | CollectiveAbortedError):
            error.root = _root_of(self.backend, error.peer)
        return error

    def _is_settled(self, sequence: int) -> bool:
        """Whether an operation has ended here, and it or a later one has failed."""
        return sequence < 0 or (sequence < self.epoch and sequence < self.turn)

    def forget_settled(self) -> None:
        """Drop the reports of operations that are settled here. Called with the lock held."""
        for sequence in [number for number in self.failures if self._is_settled(number)]:
            self._keep(self.failures.pop(sequence))

    def _keep(self, notice: Notice) -> None:
        if not self._is_settled(notice.sequence):
            self.failures.setdefault(notice.sequence, notice)
        elif notice.state == "left" and self._ranks[notice.src] == notice.culprit:
            # The rank has left the world: all operations after that one fail as well.
            self.failures[self.turn] = replace(notice, sequence=self.turn)

    def missing_at(self, sequence: int) -> list[int] | None:
        """Return the ranks that have not reached an operation, if the coordinator has answered."""
        with self._lock:
            number, ranks = self._missing
        return None if number != sequence else [rank for rank in ranks if rank in self.others]

    @property
    def keeper(self) -> int | None:
        """The group rank of the coordinating rank, if it is in this group."""
        return self._ranks.get(self._roll.keeper) if self._roll.is_kept else None

    def has_heard_last_of(self, rank: int) -> bool:
        """Whether the coordinator has passed on all reports of a rank that left or was lost."""
        return self._roll.has_heard_last_of(self.backend.world_rank_of(rank))


def _root_of(backend: Backend, peer: int | None) -> int | None:
    """Return the world rank whose failure made a peer fail. Do not hold a sequence's lock."""
    if peer is None or peer == backend.rank or not 0 <= peer < backend.world_size:
        return None
    known = backend.failure_of(peer)
    if known is not None and known.root is not None:
        return known.root
    return backend.world_rank_of(peer)


def error_of(
    notice: Notice, sender: int, rank: int = -1, *, is_news: bool = False
) -> RankwireError:
    """Return the error for a rank's report; ``is_news`` if the operation succeeded here."""
    peer = sender if notice.culprit == rank else notice.culprit
    text = notice.text
    if is_news:
        text += f" (number {notice.sequence} of this group, which had succeeded on rank {rank})"
    if notice.state == "mismatch":
        return CollectiveMismatchError(text).during(peer=peer)
    if notice.state == "lost" and notice.culprit == rank:
        return PeerLostError(sender, f"it has lost this rank: {text}")
    if notice.state == "lost":
        return PeerLostError(peer, f"{text} (rank {sender} says)")
    said = "" if sender == peer else f" (rank {sender} says)"
    if notice.state == "left" and notice.culprit != rank:
        return ChannelClosedError(f"{text}{said}").during(peer=peer)
    if notice.state == "failed" and notice.culprit not in (sender, -1):
        return CollectiveAbortedError(peer, f"{text}{said}")
    reason = f"{notice.description}: {text}"
    return CollectiveAbortedError(sender, reason, waiting_for=notice.missing)


def failure_notice(
    waiting: Notice, rank: int, error: BaseException, *, refused: bool = False
) -> Notice:
    """Return the report of a rank's error, made from the notice of its wait."""
    state, culprit = "refused" if refused else "failed", rank
    text = error.message if isinstance(error, RankwireError) else repr(error)
    if isinstance(error, CollectiveMismatchError):
        state, culprit = "mismatch", rank if error.peer is None else error.peer
    elif isinstance(error, PeerLostError) and error.peer is not None:
        state, culprit, text = "lost", error.peer, error.reason
    elif isinstance(error, ChannelClosedError) and error.peer is not None:
        state, culprit = "left", error.peer
    elif isinstance(error, CollectiveAbortedError) and error.peer >= 0:
        culprit, text = error.peer, error.reason
    missing = tuple(error.waiting_for) if isinstance(error, DeadlineExceededError) else ()
    return replace(waiting, state=state, text=text, culprit=culprit, missing=missing, before=())
