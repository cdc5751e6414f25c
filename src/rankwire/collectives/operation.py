"""Operation: one collective on one rank, from its turn to its end.

It runs the steps, looks up for other ranks' trouble while they wait, and on any error tells the
others, so that no rank waits for this one. Numbers, turns and what others told are the
``sequence``'s. Used by the thread that runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from rankwire.collectives.convening import Convening
from rankwire.collectives.exchange import LOOK_EVERY, Exchange
from rankwire.collectives.fingerprints import tag_of
from rankwire.collectives.notices import Notice, failure_notice
from rankwire.deadline import Deadline
from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    DeadlineExceededError,
    PeerLostError,
    RankwireError,
)
from rankwire.wire.frames import Channel
from rankwire.wire.loans import LoanRevokedError

if TYPE_CHECKING:
    from rankwire.backends.base import Backend
    from rankwire.collectives.sequence import OperationSequence

T = TypeVar("T")
Run = Callable[[Exchange], T]

_NO_TAGS: frozenset[int] = frozenset()
_TELLING_TRIES = 4
# What all ranks find out at the same time, so that not each of them has to tell all others.
_EVERYWHERE_AT_ONCE = (CollectiveMismatchError, DeadlineExceededError, PeerLostError)
_CAUSE_PATIENCE = 1.0  # for the reason of a rank that took its messages back to arrive
_FAREWELL_PATIENCE = 0.2  # for the failure upon which a rank has left to be told here too
_HEARING_PAUSE = 0.002
_HEAR_EVERY = 64  # operations in shared memory; a rank that is always late is told in each of them


class Operation(Exchange):
    """One operation on one rank.

    Attributes:
        description: What it is; the same words on all ranks.
        sequence: Its number in the group, once it has one.
        has_begun: Whether its arguments are right.
        has_succeeded: Whether it has ended well.
    """

    __slots__ = (
        "_ahead",
        "_convening",
        "_epoch",
        "_operations",
        "_others_tags",
        "_tags",
        "description",
        "has_begun",
        "has_succeeded",
        "sequence",
    )

    def __init__(self, operations: OperationSequence, description: str) -> None:
        Exchange.__init__(self, operations.backend)
        self._operations = operations
        self.description = description
        self.has_begun = False
        self.sequence: int | None = None
        self.has_succeeded = False
        self._epoch = operations.epoch  # known for sure once its turn has come
        self._convening: Convening | None = None  # once it has waited for a while
        self._ahead: int | None = None  # a rank that is done with this operation
        self._tags: list[int] = []
        self._others_tags = _NO_TAGS  # of messages that ranks send who call it otherwise

    def run(self, run: Run[T]) -> T:
        """Do the steps, when its turn has come."""
        operations = self._operations
        assert self.sequence is not None
        if operations.turn != self.sequence:
            self._await_turn()
        operations.running = self
        self._epoch = operations.epoch
        tag = tag_of(self.description, self.sequence, self._epoch)
        self._tags.append(tag)
        self.open(tag, self.deadline)
        operations.backend.opening_collective()
        if operations.failures:
            self._raise_if_failed()
        sharing = operations.sharing
        if sharing.epoch != self._epoch:
            sharing.agree(self, self._epoch)
        self.shared, self.hosts = sharing.slots, sharing.hosts
        result = run(self)
        if self.offers:
            self.settle()
        if self._sources:
            has_news = self.has_news()
        else:  # nothing was read, and what others tell must not fill the sockets
            is_shared = self.shared is not None or self.hosts is not None
            has_news = is_shared and not self.sequence % _HEAR_EVERY
        if has_news:
            self._hear_at_the_end()
        if self._convening is not None:
            self._convening.end()
        self.has_succeeded = True
        return result

    def run_and_end(self, run: Run[T]) -> T:
        """Do the steps, and let the next operation have its turn. After an error, ``give_up``."""
        result = self.run(run)
        self._operations.end(self)
        return result

    @property
    def _number(self) -> int:
        assert self.sequence is not None
        return self.sequence

    def _await_turn(self) -> None:
        """Wait for earlier operations to end, unless this one cannot succeed any more."""
        self._operations.hurry()
        while not self._operations.is_turn_of(self._number, self.deadline.sooner(LOOK_EVERY)):
            if self.deadline.expired:
                raise DeadlineExceededError(
                    self.deadline.limit, detail="an earlier one of this group is still running"
                )
            self._operations.hear()
            self._raise_if_failed()

    def _hear_at_the_end(self) -> None:
        """Something was told while this rank did its part: perhaps another one has given up."""
        with suppress(PeerLostError):  # a rank that has died since had done its part
            self._operations.hear()
        self._raise_if_failed()

    def tag_of_part(self, part: int) -> int:
        """Return the tag of step 0 of a part."""
        self._tags.append(tag_of(f"{self.description} part {part}", self._number, self._epoch))
        return self._tags[-1]

    # -- failing -----------------------------------------------------------------------------------

    def give_up(self, error: BaseException) -> BaseException:
        """End it after an error or an interrupt; return what to raise. Safe to repeat."""
        try:
            try:
                return self._fail(error)
            except BaseException:  # interrupted: the others must know, and count this one too
                self._fail(error)
                raise
        finally:
            try:
                self._operations.end(self)
            except BaseException:
                self._operations.end(self)  # interrupted: the group would stop at this number
                raise

    def _fail(self, error: BaseException) -> BaseException:
        if self.sequence is None:
            self._operations.refuse(self)
        return error if self.has_succeeded else self.failed(error)

    def failed(self, error: BaseException) -> BaseException:
        """End it: tell the others unless they know, and return what to raise. Safe to repeat."""
        operations, backend = self._operations, self._operations.backend
        self.revoke()
        if isinstance(error, LoanRevokedError):
            error = self._why_revoked()
        elif isinstance(error, (PeerLostError, ChannelClosedError)) and not error.is_reported:
            error = self._why_gone(error)
        if not isinstance(error, RankwireError) or not error.is_reported:
            self._tell_failure(error)
        elif self._tags:  # a rank that refused does not know what we have sent to it
            operations.tell(self._waiting(), operations.refusing(self._number))
        self._others_tags |= operations.tags_at(self._number)
        # A rank that knew of a failure that came as news here has sent under the epoch after it.
        ahead = tag_of(self.description, self._number, self._number)
        for tag in {*self._tags, ahead, *self._others_tags}:
            backend.refuse((backend.group, Channel.COLLECTIVE, tag))
        if isinstance(error, RankwireError) and self.has_begun:
            backend.explained(error, self.description, self.deadline)
        elif isinstance(error, RankwireError):
            error.during(op=self.description, rank=backend.rank)
        return error

    def _tell_failure(self, error: BaseException) -> None:
        operations, rank = self._operations, self._operations.backend.rank
        notice = operations.to_relay(self._number)
        if notice is None or not isinstance(error, RankwireError):
            notice = failure_notice(self._waiting(), rank, error, refused=not self.has_begun)
            if isinstance(error, _EVERYWHERE_AT_ONCE) and self._convening is not None:
                relay = self._convening.relay
                if relay is not None and not operations.tell(replace(notice, to_relay=True), relay):
                    return
        # Whose fault it is may leave when it hears of it: by then all others have been told.
        untold = sorted(operations.others, key=lambda dst: dst == notice.culprit)
        for _ in range(_TELLING_TRIES):
            untold = operations.tell(notice, untold)

    def _why_revoked(self) -> RankwireError:
        """Another rank took back what this one was reading: it has failed, and says why."""
        told = self._told_within(_CAUSE_PATIENCE)
        if told is not None:
            return told
        return CollectiveAbortedError(-1, f"{self.description}, and took its messages back")

    def _why_gone(self, error: PeerLostError | ChannelClosedError) -> RankwireError:
        """Return what was said before a rank went, if that was why it did.

        It said so itself, or heard it from a rank that has told this one too. A rank that was
        killed has nothing to say.
        """
        has_left = isinstance(error, ChannelClosedError) or error.remote_traceback != ""
        is_open = not self._operations.backend.closed
        told = self._told_within(_FAREWELL_PATIENCE if has_left and is_open else 0.0)
        if told is None:
            return error
        if isinstance(told, PeerLostError) and told.peer == error.peer:
            error.is_reported = told.is_reported  # the same, and more is known of it here
            return error
        return told

    def _told_within(self, seconds: float) -> RankwireError | None:
        """Return why the operation fails, if another rank says so in time."""
        patience = Deadline(seconds, self._operations.backend.clock)
        while True:
            lost: PeerLostError | None = None
            try:
                self._operations.hear()
            except PeerLostError as error:
                lost = error
            except RankwireError as error:
                return error
            told = self._operations.failure_of(self._number) or lost
            if told is not None or patience.expired:
                return told
            patience.clock.sleep(min(_HEARING_PAUSE, patience.sleep_limit()))

    def _raise_if_failed(self) -> None:
        self._others_tags |= self._operations.tags_at(self._number)
        failure = self._operations.failure_of(self._number)
        if failure is not None:
            raise failure

    # -- waiting -----------------------------------------------------------------------------------

    def look(self, src: int) -> None:
        """See whether there is still a reason to wait for a rank; tell the others once.

        Raises:
            RankwireError: There is none.
        """
        operations = self._operations
        if operations.backend.broken is not None:  # a rank was started anew meanwhile
            raise operations.backend.broken.copy()
        if self._convening is None:
            self._convening = Convening(operations, self._waiting(), self.deadline)
        try:
            operations.hear()
        finally:
            self._raise_if_failed()
        other = operations.elsewhere(self._number, self.description, self._epoch)
        if other is not None:
            rank, theirs = other
            if theirs.epoch == self._epoch:
                raise self._mismatch(rank, f"{theirs.description} on rank {rank}")
            raise CollectiveAbortedError(
                rank, f"collective number {theirs.epoch - 1} of this group, which went well here"
            )
        later = operations.later_words_of(src, self._number)
        if later is not None:
            # What it sent for this one came before it said so, and has been looked for since.
            if self._ahead == src:
                now = f"it is done with that number and in {later}"
                raise self._mismatch(src, f"something else on rank {src}: {now}")
            self._ahead = src
        self._convening.look()

    def _waiting(self) -> Notice:
        return Notice(self._number, self.description, epoch=self._epoch)

    def _mismatch(self, rank: int, theirs: str) -> CollectiveMismatchError:
        return CollectiveMismatchError(
            f"collective number {self._number} of this group is {self.description} on rank "
            f"{self._operations.backend.rank} and {theirs}; all ranks must call the same ones in "
            "the same order"
        ).during(peer=rank)

    def too_late(self, src: int) -> DeadlineExceededError:
        """Return the error of an operation whose time is up."""
        # Who has done its part without having to wait is named too: it may as well have stopped
        # half-way, and to leave out who has sent something has left out who stands still.
        missing = self._operations.absent(self._number) or [src]
        error = DeadlineExceededError(self.deadline.limit, waiting_for=missing)
        error.culprits = [self._operations.backend.world_rank_of(rank) for rank in missing]
        return error


def root_of(backend: Backend, peer: int | None) -> int | None:
    """Return whose failure it is that a peer has failed. Not under the lock of a sequence."""
    if peer is None or peer == backend.rank or not 0 <= peer < backend.world_size:
        return None
    known = backend.failure_of(peer)
    if known is not None and known.root is not None:
        return known.root
    return backend.world_rank_of(peer)
