"""The call that is being served: who asked, how much time is left, what it is nested in.

A function asks for it with ``current_call()``. Calls that the function makes in turn inherit from
it: their deadline cannot outlive its own, their chain is its own and one more, and they are given
up with it when its caller does not want the result any more.

This is what users and nested calls see of it. How it is run and answered is ``served_call``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from rankwire.deadline import Deadline
from rankwire.errors import CallCancelledError, DeadlineExceededError, RankwireError
from rankwire.links.reply import Reply
from rankwire.mesh.calls import CallPort
from rankwire.public_dir import PublicDir

if TYPE_CHECKING:
    from rankwire.rpc.worker import Worker


class MadeCall(NamedTuple):
    """A call in flight that a function being served has made."""

    port: CallPort
    dst: int
    name: str
    reply: Reply

    def give_up(self, error: RankwireError) -> None:
        """End it here with an error, and tell the callee, unless its reply has come.

        Whoever waits for it gets the error; callbacks are called.
        """
        if self.reply.abort(error):
            expired = isinstance(error, DeadlineExceededError)
            self.port.cancel(self.dst, self.reply.request_id, expired=expired)


class Wait(NamedTuple):
    """What the thread of a function being served waits for.

    Attributes:
        number: Unique in this agent: the same number is the same wait.
        dst: The rank that is called.
        name: The function called there.
        request_ids: The calls to that rank of which one has to end.
        is_for_room: Whether it waits for its turn to call, and not for a reply.
    """

    number: int
    dst: int
    name: str
    request_ids: Sequence[int]
    is_for_room: bool = False


class Call(PublicDir):
    """A call in service.

    Attributes:
        src: The rank that called.
        name: The function's name.
        deadline: When the caller gives up.
        depth: 0 for a call made by a program, 1 for one made while serving that, and so on.
        cancelled: Whether the caller does not want the result any more, for whatever reason.
            Long-running functions look at it now and then; calls that they wait for end with
            ``CallCancelledError``, or ``DeadlineExceededError`` if the call has ``expired``.
        worker: The serving thread's record, None on the event loop.
        outgoing: The calls that the function has in flight, by request id.
        waiting: What the function's own thread waits for, if that is a call.
        unanswered: A call that the function made and that ended only after this one's deadline;
            whoever asks why this one is late learns of it.
        was_late: Of a cancelled call, whether that was for lack of time.
    """

    _SHOWN = ("cancelled", "chain", "deadline", "depth", "expired", "name", "src")

    src: int
    name: str
    deadline: Deadline
    outgoing: dict[int, MadeCall]
    # Most calls end with these as they are: what is not set costs nothing.
    depth: int = 0
    links: Sequence[Any] = ()  # the chain as it travels: rank, name, rank, name ...
    cancelled: bool = False
    was_late: bool = False
    worker: Worker | None = None
    waiting: Wait | None = None
    unanswered: MadeCall | None = None

    @property
    def expired(self) -> bool:
        """Whether the call's time is up; of a cancelled one, whether that is why.

        So a call that is cancelled and not expired was cancelled on purpose, by its caller or by
        the end of this agent, or its caller is gone.
        """
        return self.was_late if self.cancelled else self.deadline.expired

    @property
    def chain(self) -> tuple[tuple[int, str], ...]:
        """The calls that this one is nested in, outermost first, as (rank, function name).

        Empty for a call made by a program. It is what the caller says; ``src`` is proved.
        """
        return tuple(_pairs(self.links))

    def deadline_of_nested(self, deadline: Deadline) -> Deadline:
        """Return the deadline of a call made now, which cannot outlive this one's."""
        left = self.deadline.remaining()
        return Deadline(left, deadline.clock) if left < deadline.limit else deadline

    def chain_of_nested(self, rank: int) -> list[Any]:
        """Return the chain of a call that is made while this one is served, by this rank."""
        return [*self.links, rank, self.name]

    def began(self, made: MadeCall) -> None:
        """Have a call that the function makes share the fate of this one."""
        self.outgoing[made.reply.request_id] = made
        if self.cancelled:  # whoever cancels sets this first, and then looks for calls
            self.give_up_nested()

    def ended(self, request_id: int) -> None:
        """Forget a call that the function has made."""
        if self.deadline.expired and request_id in self.outgoing:
            self.unanswered = self.outgoing[request_id]
        self.outgoing.pop(request_id, None)

    def give_up_nested(self) -> None:
        """End the calls that the function has in flight; their callees are told."""
        for made in list(self.outgoing.values()):
            made.give_up(self.cancellation())

    def cancellation(self) -> CallCancelledError | DeadlineExceededError:
        """Return the error of a call that the function makes although nobody wants its result."""
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


def current_call() -> Call | None:
    """Return the call that this function was called by, or None outside of one."""
    return serving.get()


def describe_chain(links: Sequence[Any]) -> str:
    """Return a chain of calls, as it travels, as text."""
    return " -> ".join(f"rank {rank} {name!r}" for rank, name in _pairs(links))


def _pairs(links: Sequence[Any]) -> Iterable[tuple[int, str]]:
    return zip(links[::2], links[1::2], strict=True)
