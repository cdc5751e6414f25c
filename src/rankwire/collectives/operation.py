"""Operation: one collective on one rank, from its turn to its end.

It runs the steps, checks for failures of other ranks while they wait, and reports its own errors to
the coordinator. The ``sequence`` has the numbers, turns and received notices. Used by the thread
that runs the operation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from rankwire.collectives.exchange import LOOK_EVERY, Exchange, tag_of
from rankwire.collectives.failure_reports import failure_notice
from rankwire.deadline import Deadline
from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    DeadlineExceededError,
    PeerLostError,
    RankwireError,
)
from rankwire.observe.stacks import line_of_program
from rankwire.override import override
from rankwire.wire.control_messages import Notice
from rankwire.wire.frames import Channel
from rankwire.wire.receive import MessageWithdrawnError

if TYPE_CHECKING:
    from rankwire.collectives.sequence import OperationSequence


T = TypeVar("T")

_CAUSE_PATIENCE = 1.0  # seconds for the report of a rank that has withdrawn its messages
# Seconds for the coordinator to pass on a rank's last report; it takes milliseconds.
_FAREWELL_PATIENCE = 1.0
_HEARING_PAUSE = 0.002
_ASK_BEFORE = 3.5 * LOOK_EVERY  # seconds before the deadline to ask which ranks are missing
_ANSWER_PATIENCE = 0.5  # seconds after the deadline for the answer; mostly it is there before
# The number of waiting ranks that ask a missing rank what it is doing: each dials it.
_MOST_ASKING = 8


class Operation(Exchange):
    """One operation on one rank; ``description`` is the same text on all ranks."""

    __slots__ = (
        "_epoch",
        "_has_asked",
        "_has_reported",
        "_operations",
        "_tags",
        "description",
        "has_begun",
        "has_succeeded",
        "sequence",
    )

    def __init__(self, operations: OperationSequence, description: str) -> None:
        backend = operations.backend
        Exchange.__init__(self, backend, backend.rank, backend.world)
        self._operations = operations
        self.description = description
        self.has_begun = False  # whether its arguments are valid
        self.sequence: int | None = None  # its number in the group, once it has one
        self.has_succeeded = False
        self._epoch = operations.epoch  # final once its turn has come
        self._has_reported = False  # to the coordinator, that it waits
        self._has_asked = False  # the coordinator, which ranks are missing
        self._tags: list[int] = []

    def run_and_end(self, run: Callable[[Operation], T]) -> T:
        """Run the steps in its turn, then pass the turn on. After an error, call ``give_up``."""
        operations = self._operations
        assert self.sequence is not None
        if operations.turn != self.sequence:
            self._await_turn()
        operations.running = self
        self._epoch = operations.epoch
        tag = tag_of(self.description, self.sequence, self._epoch)
        self._tags.append(tag)
        self.tag = tag
        operations.backend.mesh.opening_collective()
        if operations.has_news:
            self._look_at_news()
        agreement = operations.agreement
        if agreement.epoch != self._epoch:
            agreement.agree(self, self._epoch)
        self.shared, self.hosts = agreement.slots, agreement.hosts
        result = run(self)
        if self.offers:
            self.settle()
        if operations.has_news:
            self._look_at_news()
        self.has_succeeded = True
        operations.end(self)
        return result

    @property
    def _number(self) -> int:
        assert self.sequence is not None
        return self.sequence

    def _await_turn(self) -> None:
        self._operations.hurry()
        while not self._operations.is_turn_of(self._number, self.deadline.sooner(LOOK_EVERY)):
            if self.deadline.expired:
                raise DeadlineExceededError(
                    self.deadline.limit, detail="an earlier one of this group is still running"
                )
            self._operations.hear()
            self._raise_if_failed()

    def _look_at_news(self) -> None:
        with suppress(PeerLostError):  # a rank that has just died had done its part
            self._operations.hear()
        self._raise_if_failed()

    def begin_part(self, part: int) -> None:
        """Use another tag from now on, so that the operation may repeat steps."""
        self._tags.append(tag_of(f"{self.description} part {part}", self._number, self._epoch))
        self.tag = self._tags[-1]

    def give_up(self, error: BaseException) -> BaseException:
        """End it after an error or an interrupt; return the error to raise. Safe to repeat."""
        try:
            try:
                return self._fail(error)
            except BaseException:  # interrupted: the other ranks must know that this one failed
                self._fail(error)
                raise
        finally:
            try:
                self._operations.end(self)
            except BaseException:
                self._operations.end(self)  # interrupted: no later operation would get its turn
                raise

    def _fail(self, error: BaseException) -> BaseException:
        """Notify the other ranks unless they know; return the error to raise. Safe to repeat."""
        operations, backend = self._operations, self._operations.backend
        if self.sequence is None:
            operations.refuse(self)
        if self.has_succeeded:
            return error
        self.revoke()
        error = self._cause_of(error)
        if not isinstance(error, RankwireError) or not error.is_reported:
            refused = not self.has_begun
            operations.report(failure_notice(self._waiting(), self.rank, error, refused=refused))
        operations.note_failure(self._number, error)
        # A rank that knew of an earlier failure before this rank did has sent under a later epoch.
        ahead = tag_of(self.description, self._number, self._number)
        for tag in {*self._tags, ahead, *operations.tags_at(self._number)}:
            backend.messages.refuse((backend.group, Channel.COLLECTIVE, tag))
        if isinstance(error, RankwireError) and self.has_begun:
            backend.explained(error, self.description, self.deadline)
        elif isinstance(error, RankwireError):
            error.during(op=self.description, rank=backend.rank)
        return error

    def _cause_of(self, error: BaseException) -> BaseException:
        """Return another rank's failure that led to an error, or the error itself."""
        if isinstance(error, RankwireError):
            error = self._backend.adopted(None, error)
        if isinstance(error, MessageWithdrawnError):
            told = self._told_within(_CAUSE_PATIENCE)
            if told is None:
                return CollectiveAbortedError(-1, f"{self.description}, and took its messages back")
            return told
        if isinstance(error, (PeerLostError, ChannelClosedError)) and not error.is_reported:
            return self._why_gone(error)
        return error

    def _why_gone(self, error: PeerLostError | ChannelClosedError) -> RankwireError:
        """Return the reported failure that made a rank leave; wait once for that report.

        It explains all operations that are queued behind the failed one.
        """
        operations = self._operations
        first = operations.first_failure(self._number)
        if first is not None and isinstance(error, ChannelClosedError):
            return first
        waits = not operations.backend.closed and error.peer not in operations.explained
        told = self._told_within(_FAREWELL_PATIENCE if waits else 0.0, error.peer)
        operations.explained.add(error.peer)
        if told is None:
            return error
        if isinstance(told, PeerLostError) and told.peer == error.peer:
            error.is_reported = told.is_reported  # this error has more details
            return error
        return told

    def _told_within(self, seconds: float, gone: int | None = None) -> RankwireError | None:
        """Return why the operation fails, if another rank reports it in time.

        ``gone`` has left or was lost; its own report arrives before the notice of its end.
        """

        def hear() -> tuple[RankwireError | None, bool]:
            is_last = gone is not None and self._operations.has_heard_last_of(gone)
            lost: PeerLostError | None = None
            try:
                self._operations.hear()
            except PeerLostError as error:
                lost = error
            except RankwireError as error:
                return error, True
            told = self._operations.failure_of(self._number) or lost
            return told, told is not None or is_last

        return self._poll(seconds, hear)

    def _poll(self, seconds: float, hear: Callable[[], tuple[T, bool]]) -> T:
        patience = Deadline(seconds, self._backend.clock)
        while True:
            found, is_done = hear()
            if is_done or patience.expired:
                return found
            patience.clock.sleep(min(_HEARING_PAUSE, patience.sleep_limit()))

    def _raise_if_failed(self) -> None:
        failure = self._operations.failure_of(self._number)
        if failure is not None:
            raise failure

    def look(self, src: int) -> None:
        """Raise if this operation cannot succeed; report once that this rank waits."""
        operations = self._operations
        if operations.backend.broken is not None:  # a rank was restarted meanwhile
            raise operations.backend.broken.copy()
        try:
            operations.hear()
        finally:
            self._raise_if_failed()
        asks = not self._has_asked and self.deadline.remaining() <= _ASK_BEFORE
        if asks or not self._has_reported:
            operations.report(replace(self._waiting(), state="asking" if asks else "waiting"))
            self._has_reported = True
            self._has_asked = self._has_asked or asks

    def _waiting(self) -> Notice:
        return Notice(
            self._backend.group,
            self._number,
            self.description,
            epoch=self._epoch,
            where=line_of_program(),
            before=tuple(each for each in self._operations.before if each[0] >= self._epoch),
        )

    @override
    def too_late(self, src: int) -> DeadlineExceededError:
        # Ranks that have sent a message count as missing too: a rank may stop half-way.
        operations, limit = self._operations, self.deadline.limit
        missing, detail = self._await_answer(), ""
        if missing is None and self._has_asked and operations.keeper in operations.others:
            missing, detail = [operations.keeper], "it coordinates the world, and does not answer"
        elif missing is None:
            missing = operations.others
        error = DeadlineExceededError(limit, waiting_for=missing or [src], detail=detail)
        error.culprits = [operations.backend.world_rank_of(rank) for rank in error.waiting_for]
        here = self.rank - sum(rank < self.rank for rank in missing)
        if here >= _MOST_ASKING:
            error.during(op=self.description)  # has context, so this rank does not ask them
        return error

    def _await_answer(self) -> list[int] | None:
        def hear() -> tuple[list[int] | None, bool]:
            with suppress(PeerLostError):
                self._operations.hear()
            self._raise_if_failed()
            missing = self._operations.missing_at(self._number)
            return missing, missing is not None or not self._has_asked

        return self._poll(_ANSWER_PATIENCE, hear)
