"""The call that is being served, as functions and nested calls see it.

A function gets it from ``current_call()``. Calls that the function makes inherit from it: their
deadline is no later, their chain is one call longer, and they are cancelled with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from rankwire.deadline import Deadline
from rankwire.errors import CallCancelledError, DeadlineExceededError, RankwireError
from rankwire.links.inbox import Reply
from rankwire.mesh.call_port import CallPort
from rankwire.public_dir import PublicDir

if TYPE_CHECKING:
    from rankwire.rpc.pool import Worker


class MadeCall(NamedTuple):
    """A call in flight, made by a function that is being served."""

    port: CallPort
    dst: int
    name: str
    reply: Reply

    @property
    def shown(self) -> str:
        """The function's name in reports: that of an internal one without its mark."""
        return self.name.lstrip("\0")

    def give_up(self, error: RankwireError) -> None:
        """Fail the call with an error and notify the callee, unless its reply has come."""
        if self.reply.abort(error):
            expired = isinstance(error, DeadlineExceededError)
            self.port.cancel(self.dst, self.reply.request_id, expired=expired)


class Wait(NamedTuple):
    """The wait of a function's thread for a call that the function has made."""

    number: int  # identifies this wait in this agent
    dst: int
    name: str
    request_ids: Sequence[int]  # the calls to that rank of which one has to end
    is_for_room: bool = False  # whether it waits for its turn to call (``max_in_flight``)
    others: Sequence[MadeCall] = ()  # or one of these


class GroupSource(NamedTuple):
    """Who made a group call."""

    origin: int  # as the rank says that passed it on
    src: int | None  # the same, if it came from that rank itself


class Call(PublicDir):
    """A call that is being served.

    Attributes:
        src: The rank that called: the connection on which the call came is that rank's. In a group
            call that another rank has passed on, reading it raises ``PermissionError``.
        name: The function's name.
        deadline: When the caller stops waiting.
        depth: 0 for a call made by a program, 1 for one made while serving that, and so on.
        cancelled: Whether the caller does not want the result any more, for any reason.
            Long-running functions should check it now and then; calls that they wait for end with
            ``CallCancelledError``, or ``DeadlineExceededError`` if the call has ``expired``.
    """

    _SHOWN = ("cancelled", "chain", "deadline", "depth", "expired", "name", "origin", "src")

    src: int
    name: str
    deadline: Deadline
    outgoing: dict[int, MadeCall]  # the function's calls in flight, by request id
    # Most calls never set these, so class attributes save the time.
    depth: int = 0
    links: Sequence[Any] = ()  # the chain as encoded: rank, name, rank, name ...
    cancelled: bool = False
    was_late: bool = False  # whether its time was up when it was cancelled
    worker: Worker | None = None  # None on the event loop
    waiting: Wait | None = None  # what the function's own thread waits for, if that is a call
    unanswered: MadeCall | None = None  # ended only after this call's deadline; for inquiries
    group: GroupSource | None = None  # if it is a rank's part of a group call

    @property
    def origin(self) -> int:
        """The rank that made the call.

        In a group call that other ranks have passed on, they name this rank, unverified. Otherwise
        it is ``src``, which is authenticated.
        """
        return self.src if self.group is None else self.group.origin

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed; for a cancelled call, whether that was the reason."""
        return self.was_late if self.cancelled else self.deadline.expired

    @property
    def chain(self) -> tuple[tuple[int, str], ...]:
        """The calls that this one is nested in, outermost first, as (rank, function name).

        Empty for a call made by a program. The caller supplies it unverified; ``src`` is
        authenticated.
        """
        return tuple(_pairs(self.links))

    def deadline_of_nested(self, deadline: Deadline) -> Deadline:
        """Return the deadline of a call made now: no later than this one's."""
        left = self.deadline.remaining()
        return Deadline(left, deadline.clock) if left < deadline.limit else deadline

    def chain_of_nested(self, rank: int) -> list[Any]:
        """Return the encoded chain of a call that this rank makes while it serves this one."""
        return [*self.links, rank, self.name]

    def began(self, made: MadeCall) -> None:
        """Note a call that the function makes, so that it is cancelled with this one."""
        self.outgoing[made.reply.request_id] = made
        if self.cancelled:  # a cancelling thread sets this before it reads ``outgoing``
            self.give_up_nested()

    def ended(self, request_id: int) -> None:
        """Remove a call that the function has made."""
        if self.deadline.expired and request_id in self.outgoing:
            self.unanswered = self.outgoing[request_id]
        self.outgoing.pop(request_id, None)

    def give_up_nested(self) -> None:
        """Cancel the calls that the function has in flight, and notify their callees."""
        for made in list(self.outgoing.values()):
            made.give_up(self.cancellation())

    def cancellation(self) -> CallCancelledError | DeadlineExceededError:
        """Return the error for calls that the function makes after this call was cancelled."""
        if self.expired:
            return DeadlineExceededError(
                self.deadline.limit,
                detail=f"it was made by {self.name!r}, for which rank {self.src} has no more time",
            )
        return CallCancelledError(
            f"it was made by {self.name!r}, whose caller, rank {self.src}, does not want the "
            "result any more"
        )

    def __repr__(self) -> str:
        return (
            f"<Call of {self.name!r} from rank {self.src}, depth {self.depth}, {self.deadline!r}>"
        )


serving: ContextVar[Call | None] = ContextVar("rankwire_call", default=None)


class MemberCall(Call):
    """What a function sees of its part of a group call.

    The agent has called the function itself, at the request of the caller or of a relay. A function
    that checks who calls must not take a relay for the caller, so ``src`` is readable only if there
    was no relay.
    """

    def __init__(self, call: Call) -> None:
        self.__dict__ = call.__dict__

    @property
    def src(self) -> int:  # type: ignore[override]
        """The rank that made the group call, if no other rank has passed it on."""
        if self.group is None or self.group.src is None:
            raise PermissionError(
                f"{self.name!r} reads who calls it (Call.src), and another rank has passed this "
                f"group call on: register it with direct=True; Call.origin is unverified"
            )
        return self.group.src

    def __repr__(self) -> str:
        return (
            f"<Call of {self.name!r} from the group call of rank {self.origin}, "
            f"depth {self.depth}, {self.deadline!r}>"
        )


def current_call() -> Call | None:
    """Return the call that runs this function, or None outside of a call."""
    call = serving.get()
    return call if call is None or call.group is None else MemberCall(call)


def describe_chain(links: Sequence[Any]) -> str:
    """Return an encoded chain of calls as text."""
    return " -> ".join(f"rank {rank} {name!r}" for rank, name in _pairs(links))


def _pairs(links: Sequence[Any]) -> Iterable[tuple[int, str]]:
    return zip(links[::2], links[1::2], strict=True)
