"""The call port: how requests and replies travel on a backend, for the RPC layer above.

A port belongs to one agent: its *service* number is the same at all ranks, and ports of different
services never meet. Outgoing: ``call`` sends a request and returns its ``Reply``, and the thread
that wants it waits in that (and reads the connection itself). Incoming: one thread at a time waits
in ``poll`` for what other ranks ask, or this one itself.

The port does not know what is in a payload, functions or futures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from rankwire.deadline import Deadline
from rankwire.links.inbox import Reply
from rankwire.mesh.presence import UNATTENDED, Presence
from rankwire.wire.frames import Message
from rankwire.wire.receive import Receive

OWN = object()  # the origin of a call of a rank to itself


class IncomingCall(msgspec.Struct, eq=False):
    """A request from another rank, or from this one.

    Attributes:
        src: The rank that calls.
        request_id: Its number for the call.
        payload: The request.
        origin: Where the reply goes and what the request came over, known to the port; its end is
            reported as ``CallerGone``. ``OWN`` for a call of this rank to itself.
        is_wanted: Whether the caller wants the reply, as far as is known here.
    """

    # A Struct is made in C; a frozen dataclass takes 0.63 us, and there is one a call.
    src: int
    request_id: int
    payload: bytearray
    origin: Any
    is_wanted: bool = True

    def __repr__(self) -> str:
        return f"<IncomingCall {self.request_id} from rank {self.src}, {len(self.payload)} bytes>"


@dataclass(frozen=True, slots=True)
class CallCancelled:
    """The caller does not want the reply any more; ``expired`` if its time is up."""

    src: int
    request_id: int
    expired: bool = False


@dataclass(frozen=True, slots=True)
class CallerGone:
    """No reply can reach the calls any more that came over ``origin``."""

    src: int
    origin: Any


@dataclass(frozen=True, slots=True)
class RepliesDue:
    """Replies have come for which somebody asked to be called back; ``call_back`` does that."""

    call_back: Callable[[], None]


PortEvent = IncomingCall | CallCancelled | CallerGone | RepliesDue


class Serving(NamedTuple):
    """A call that is being served, or waits for that.

    Attributes:
        src: The rank that made it.
        name: The function's name.
        seconds: How long it has run; if it waits, since it arrived.
        workers: If it waits, of how many workers one has to be free first; else 0.
    """

    src: int
    name: str
    seconds: float
    workers: int = 0


class CallPort(ABC):
    """Requests out and replies back; requests in and replies out.

    Safe from any thread unless it says otherwise.

    Attributes:
        presence: How the agent tells the others of its name what it does, and waits for them.
    """

    presence: Presence = UNATTENDED

    @abstractmethod
    def call(
        self,
        dst: int,
        request_id: int,
        message: Message,
        deadline: Deadline,
        on_reply: Callable[[Receive], None] | None = None,
        hold: bool = False,
        limit: float = float("inf"),
    ) -> Reply | None:
        """Send a request; return its pending reply, or None if there is no room for it.

        Args:
            dst: The rank to call.
            request_id: Unique for this port.
            message: The payload; its buffers are free again on return.
            deadline: For connecting and sending.
            on_reply: Called once the reply, or the peer's failure, is known; in any thread, without
                locks held.
            hold: Whether it may be sent a moment later, together with others; waiting for it,
                ``attend``, or the next call to that rank sends it.
            limit: Calls to that rank that may be in flight.
        """

    @abstractmethod
    def cancel(self, dst: int, request_id: int, *, expired: bool = False) -> None:
        """Tell the callee that the reply is not wanted: now, or as soon as that can be sent.

        Args:
            dst: The callee.
            request_id: The call.
            expired: Whether that is because the caller's time is up.
        """

    @abstractmethod
    def wait_for_room(self, dst: int, limit: int, deadline: Deadline) -> bool:
        """Wait until fewer than ``limit`` calls to ``dst`` are in flight.

        Returns False if the deadline passes first.
        """

    @abstractmethod
    def calls_to(self, dst: int) -> list[int]:
        """Return the request ids of the calls to ``dst`` that are in flight."""

    @abstractmethod
    def attend(self, *, patiently: bool = False) -> bool:
        """Have replies that no thread waits for looked after by whoever is in ``poll``.

        Args:
            patiently: Leave those of a rank alone whose replies were read by somebody since the
                last look.

        Returns:
            Whether any call is in flight.
        """

    @abstractmethod
    def attend_to(self, dst: int, reply: Reply) -> None:
        """Have a reply of ``dst`` that no thread waits for read as soon as it comes.

        That is done by whoever reads its connection then, or is in ``poll``.
        """

    @abstractmethod
    def poll(self, deadline: Deadline | None = None) -> list[PortEvent]:
        """Return what other ranks ask, or nothing at the deadline or after ``wake``.

        One thread at a time. Without a deadline it waits for as long as that takes.

        Raises:
            ChannelClosedError: The backend is closed; there is nothing more to wait for.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make ``poll`` return."""

    @abstractmethod
    def tell_serving(self, serving: Callable[[], list[Serving]]) -> None:
        """Say how to learn which calls are being served; asked in any thread, without waiting."""

    @abstractmethod
    def reply(
        self, call: IncomingCall, message: Message, deadline: Deadline, hold: bool = False
    ) -> None:
        """Answer a request.

        Args:
            call: The request.
            message: The payload; its buffers are free again on return.
            deadline: For sending.
            hold: Whether it may be sent a moment later, together with others; ``flush`` or the next
                ``poll`` sends it.
        """

    @abstractmethod
    def drop_reply(self, call: IncomingCall) -> None:
        """Note that the caller does not want the reply; one that it is just reading is taken back.

        Safe also while another thread is in ``reply`` for the same call.
        """

    @abstractmethod
    def flush(self) -> None:
        """Send the replies that were held back."""

    @abstractmethod
    def in_flight(self) -> int:
        """Return how many calls of this port wait for a reply."""

    @abstractmethod
    def close(self) -> None:
        """Say farewell to all and end every wait. Idempotent.

        A thread in ``poll`` gets ``ChannelClosedError``.
        """
