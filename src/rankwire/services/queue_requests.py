"""The requests that a rank makes of one queue.

Each request has a number. If it fails here, by its deadline, an interrupt or the end of the call
that is being served, the owner is told to undo it, so that no item and no place is lost. Only the
loss of the owner leaves open what became of a put.
"""

from __future__ import annotations

from collections import deque
from contextvars import Context
from typing import Any, NoReturn

from rankwire.codec.codec import Codec
from rankwire.deadline import Deadline
from rankwire.errors import (
    ChannelClosedError,
    ConfigurationError,
    DeadlineExceededError,
    FunctionNotFoundError,
    InvalidMessageError,
    OverloadedError,
    PeerLostError,
    QueueEndedError,
    RankwireError,
)
from rankwire.services.queue_client import QueueClient
from rankwire.services.queue_items import pack
from rankwire.services.queue_users import QueueOutcome

_ANSWER_LIMIT = 1.0  # seconds to learn what became of a request whose deadline has passed
# After these, the owner has nothing to undo, or cannot be told. After any other error it may have
# served the request: its reply was too large, or failed.
_LEAVE_NOTHING = (
    ChannelClosedError,
    ConfigurationError,
    FunctionNotFoundError,
    OverloadedError,
    PeerLostError,
    QueueEndedError,
)

Request = list[int]  # what the owner finds the queue, the user and the request by


class QueueRequests:
    """Makes requests of one queue. Every method is safe from any thread."""

    def __init__(self, client: QueueClient, name: str, owner: int, number: int) -> None:
        self.name = name
        self.owner = owner
        self._client = client
        self._number = number
        # Gets whose items came; the owner is not told yet.
        self.received = client.received.setdefault((owner, number), deque())

    @property
    def codec(self) -> Codec:
        """The codec of the agent."""
        return self._client.codec

    def new(self) -> Request:
        """Return a new request; its last item is its own number."""
        return self._client.new_request(self._number)

    def deadline(self, timeout: float | None) -> Deadline:
        """Return the deadline for a user's ``timeout=``."""
        return self._client.deadline_of(timeout)

    def ask(self, function: str, deadline: Deadline, request: Request, *args: Any) -> Any:
        """Make a request, and return its value; raise what it failed with."""
        try:
            reply = self._client.call(self.owner, function, deadline, request, *args)
            if type(reply) is not list or len(reply) != 2:
                raise InvalidMessageError("the reply of a queue's owner is not a pair")
            outcome, value = reply
            if outcome != QueueOutcome.DONE:
                self._raise(outcome, value)
        except RankwireError as error:
            error.op = f"queue.{function} {self.name!r}"
            error.during(rank=self._client.rank, peer=self.owner, waited=deadline.waited)
            raise
        return value

    def ask_once(self, function: str, timeout: float | None) -> Any:
        """Make a request that does not wait at the owner, and needs no undoing."""
        return self.ask(function, self.deadline(timeout), self.new())

    def _raise(self, outcome: int, value: Any) -> NoReturn:
        queue = f"queue {self.name!r} on rank {self.owner}"
        error: RankwireError
        if outcome == QueueOutcome.ENDED:
            error = QueueEndedError(f"{queue} has ended")
        elif outcome == QueueOutcome.FULL:
            error = OverloadedError(f"{queue} is full")
        elif outcome == QueueOutcome.TOO_MANY:
            error = OverloadedError(f"{queue}: too many requests or items of this rank wait there")
        elif outcome == QueueOutcome.PRODUCER_GONE:
            error = PeerLostError(value, f"before it had ended its part of {queue}")
        elif outcome == QueueOutcome.UNKNOWN:
            error = PeerLostError(self.owner, f"it was restarted, and had queue {self.name!r}")
        elif outcome == QueueOutcome.NO_SLOT:
            error = ConfigurationError(f"this slot of {queue} was filled or given back")
        elif outcome == QueueOutcome.CLOSED:
            error = ChannelClosedError(f"{queue} is closing")
        else:
            error = ChannelClosedError(f"{queue} has taken this rank for lost")
        if outcome in (QueueOutcome.ENDED, QueueOutcome.FULL):
            error.accepted = value or 0
        raise error

    # -- putting -----------------------------------------------------------------------------------

    def put(
        self,
        payloads: list[bytes],
        version: float | None,
        key: float,
        deadline: Deadline,
        accepted_before: int = 0,
    ) -> None:
        """Put items, or raise an error that says which were accepted."""
        request, packed = self.new(), pack(payloads)
        try:
            self.ask("put", deadline, request, packed, version, key)
        except BaseException as error:
            if not self._were_accepted(error, request, len(payloads), accepted_before):
                raise

    def take_slot(self, timeout: float | None) -> Request:
        """Take a place; return what fills it or gives it back."""
        request = self.new()
        try:
            self.ask("slot", self.deadline(timeout), request)
        except BaseException as error:
            self.undo(request, error)
            raise
        return request

    def fill(self, request: Request, payload: bytes, version: float | None, key: float) -> None:
        """Put an item into a slot."""
        try:
            self.ask("fill", self.deadline(None), request, pack([payload]), version, key)
        except BaseException as error:
            if not self._were_accepted(error, request, 1, 0):
                raise

    def _were_accepted(
        self, error: BaseException, request: Request, count: int, before: int
    ) -> bool:
        """Note in an error which items were accepted; return whether all were after all."""
        answer = self.undo(request, error)
        if not isinstance(error, RankwireError):
            return False
        if answer is not None and answer[0] >= 0:
            accepted, unconfirmed = answer[0], 0
        elif getattr(error, "may_have_run", False):
            accepted, unconfirmed = 0, count
        else:
            accepted, unconfirmed = error.accepted, 0
        error.accepted, error.unconfirmed = before + accepted, unconfirmed
        return bool(accepted == count)

    # -- undoing -----------------------------------------------------------------------------------

    def give_back(self, request: Request, keep: int = 0) -> None:
        """Undo a request, but ``keep`` its first items; without waiting."""
        try:
            self._client.call_soon(self.owner, "withdraw", request, keep).disregard()
        except BaseException:  # interrupted; twice is no harm
            self._client.call_soon(self.owner, "withdraw", request, keep).disregard()
            raise

    def undo(self, request: Request, error: BaseException) -> list[Any] | None:
        """Undo a request that failed; return what the owner knows of it, if it was asked.

        Only after a deadline, this waits for the owner.
        """
        if isinstance(error, _LEAVE_NOTHING):
            return None
        if not isinstance(error, DeadlineExceededError):
            self.give_back(request)
            return None
        if not error.may_have_run:
            return None
        try:
            answer = self._withdrawn(request)
        except BaseException:  # interrupted
            self.give_back(request)
            raise
        waits = f"waits in queue {self.name!r}"
        if answer is not None and waits not in error.detail:
            # The owner had ended it before it was asked for a reason.
            error.explain(f"it {waits}: {answer[1]}")
        return answer

    def _withdrawn(self, request: Request) -> list[Any] | None:
        future = self._client.call_soon(self.owner, "withdraw", request, 0)
        future.disregard()
        try:
            # A call that is being served may have no time left.
            outcome, value = Context().run(future.result, _ANSWER_LIMIT)
        except (RankwireError, TimeoutError):
            return None
        return value if outcome == QueueOutcome.DONE else None
