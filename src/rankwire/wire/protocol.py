"""The protocol of a connection: how it begins, whether memory may be lent, how it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

from rankwire.errors import ChannelClosedError, PeerLostError, ProtocolError, RankwireError
from rankwire.texts import MAX_REASON, one_line
from rankwire.wire.frames import LOAN, Channel, Envelope, Frame, Message, UnreadPayload, whole_of
from rankwire.wire.loans import Loan, unpack_loan

# The tag of a greeting: its sender can read the other end's memory or not, offers memory for a ring
# to it (``wire.ring``), or uses the ring that was offered.
_SAYS_NOTHING, _CAN_BORROW, _CANNOT_BORROW, _OFFERS_RING, _HAS_RING = range(5)

FAREWELL: Envelope = (0, int(Channel.FAREWELL), 0)
# Wakes a reader and changes nothing.
BELL: tuple[Envelope, Message] = ((0, int(Channel.GREETING), _SAYS_NOTHING), ((), 0))


class ConnectionState(Enum):
    """The state of a connection. Only the first two states can change."""

    UNUSED = "unused"  # the peer dialled and has sent nothing
    OPEN = "open"  # frames come and go
    LEFT = "left"  # the peer has sent a farewell; nothing comes after it
    GIVEN_UP = "given up"  # the peer closed it unused, and may dial again
    LOST = "lost"  # the stream ended or broke without a farewell
    SPOILED = "spoiled"  # the stream is invalid


class StreamEvent(Enum):
    """An event of a connection."""

    FRAMES = "frames"
    FAREWELL = "farewell"
    END = "end"
    VIOLATION = "violation"


_NEXT_STATES = {
    (ConnectionState.UNUSED, StreamEvent.FRAMES): ConnectionState.OPEN,
    (ConnectionState.UNUSED, StreamEvent.FAREWELL): ConnectionState.LEFT,
    (ConnectionState.UNUSED, StreamEvent.END): ConnectionState.GIVEN_UP,
    (ConnectionState.UNUSED, StreamEvent.VIOLATION): ConnectionState.SPOILED,
    (ConnectionState.OPEN, StreamEvent.FAREWELL): ConnectionState.LEFT,
    (ConnectionState.OPEN, StreamEvent.END): ConnectionState.LOST,
    (ConnectionState.OPEN, StreamEvent.VIOLATION): ConnectionState.SPOILED,
}


class Protocol:
    """The protocol state of one connection. For its one reader; every call is repeatable.

    ``incoming`` says whether the peer dialled; ``is_local`` whether the stream is a Unix socket,
    where memory can be lent. ``cannot_borrow`` is why this end cannot read the peer's memory; empty
    if it can.
    """

    def __init__(
        self, *, peer: int, incoming: bool, is_local: bool, cannot_borrow: str, max_nbytes: int
    ) -> None:
        self._peer = peer
        self._is_local = is_local
        self._cannot_borrow = cannot_borrow
        self._max_nbytes = max_nbytes
        self.state = ConnectionState.UNUSED if incoming else ConnectionState.OPEN
        # Whether the peer can read this end's memory; None before its greeting.
        self.can_lend: bool | None = None if is_local else False
        self.why_not_lend = "" if is_local else cannot_borrow
        self.ring_offer: bytes | None = None  # the peer's description of memory for a ring to it
        self.has_ring = False  # whether the peer writes to the ring that this end has offered

    def introduction(self) -> tuple[Envelope, Message]:
        """Return the greeting that says whether this end can read the peer's memory."""
        says = _CANNOT_BORROW if self._cannot_borrow else _CAN_BORROW
        reason = self._cannot_borrow.encode()
        return (0, int(Channel.GREETING), says), ((reason,), len(reason))

    def offering(self, offer: bytes) -> tuple[Envelope, Message]:
        """Return the greeting that offers the memory of a ring to this end."""
        return (0, int(Channel.GREETING), _OFFERS_RING), ((offer,), len(offer))

    def acceptance(self) -> tuple[Envelope, Message]:
        """Return the greeting that says that this end writes to the peer's ring now."""
        return (0, int(Channel.GREETING), _HAS_RING), ((), 0)

    def on_event(self, event: StreamEvent) -> None:
        """Change the state after an event, unless it is final."""
        self.state = _NEXT_STATES.get((self.state, event), self.state)

    def take(
        self, frames: Iterable[Frame], borrow: Callable[[Loan], UnreadPayload]
    ) -> tuple[list[Frame], ProtocolError | None]:
        """Process special frames; return the messages before a farewell or violation, and that."""
        messages: list[Frame] = []
        for frame in frames:
            group, channel, tag = frame.envelope
            if channel & LOAN:
                try:
                    parcel = borrow(self._loan(frame))
                    messages.append(Frame((group, channel & ~LOAN, tag), parcel))
                except ProtocolError as error:
                    return messages, error
            elif channel == Channel.FAREWELL:
                self.on_event(StreamEvent.FAREWELL)
                break
            elif channel == Channel.GREETING:
                self._greeted(tag, frame)
            else:
                messages.append(frame)
        return messages, None

    def _loan(self, frame: Frame) -> Loan:
        if self._cannot_borrow:
            raise ProtocolError("the peer lends memory to a process that cannot read it")
        return unpack_loan(whole_of(frame.payload), max_nbytes=self._max_nbytes)

    def _greeted(self, says: int, frame: Frame) -> None:
        if not self._is_local:
            return
        if says == _OFFERS_RING:
            self.ring_offer = bytes(whole_of(frame.payload))
        elif says == _HAS_RING:
            self.has_ring = True
        elif says == _CAN_BORROW:
            self.can_lend = True
        elif says == _CANNOT_BORROW:
            self.can_lend = False
            reason = whole_of(frame.payload)[: 4 * MAX_REASON]
            self.why_not_lend = one_line(reason.decode(errors="replace"))

    def end_of_stream(self, *, in_frame: bool, reason: str = "") -> RankwireError:
        """Return the error that the end of the stream, or ``reason`` if it broke, means now."""
        if self.state is ConnectionState.LEFT:
            return left(self._peer)
        if self.state in (ConnectionState.UNUSED, ConnectionState.GIVEN_UP):
            return ChannelClosedError("the connection was never used").during(peer=self._peer)
        if not reason:
            reason = "its connection ended" + (" in the middle of a message" if in_frame else "")
        return PeerLostError(self._peer, reason)


def left(peer: int) -> ChannelClosedError:
    """Return the error for operations that need a rank which has left without an error."""
    return ChannelClosedError(f"rank {peer} has left").during(peer=peer)
