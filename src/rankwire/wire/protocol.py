"""The protocol of a connection: how it begins, who may lend to whom, how it ends. Pure.

Two small state machines. The *course* says whether there is anything to be expected of the peer:

    =========  ====================================================================
    state      meaning
    =========  ====================================================================
    UNUSED     the peer dialled and has not said anything
    OPEN       frames come and go
    LEFT       the peer has said farewell; nothing comes after that
    GIVEN_UP   the peer closed what it had dialled and never used: it may dial again
    LOST       the stream ended or broke without a farewell
    SPOILED    what came is not a valid stream
    =========  ====================================================================

    =========  =======  =======  ========  ========
    in         frames   leaving  end       violation
    =========  =======  =======  ========  ========
    UNUSED     OPEN     LEFT     GIVEN_UP  SPOILED
    OPEN       OPEN     LEFT     LOST      SPOILED
    =========  =======  =======  ========  ========

The other four are final. *Lending* says whether the peer can read this process's memory: unknown
on a Unix socket until its greeting tells, never anywhere else.

It knows frames, not sockets, processes or locks. Everything may be repeated: a reader that was
interrupted comes here again with the same frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

from rankwire.errors import ChannelClosedError, PeerLostError, ProtocolError, RankwireError
from rankwire.texts import MAX_REASON, one_line
from rankwire.wire.frames import LOAN, Channel, Envelope, Frame, Message
from rankwire.wire.loans import Loan, Parcel, unpack_loan, whole_of

# What a greeting says, in its tag: whether its sender can read the other end's memory, what memory
# there is for a ring to it (``wire.ring``), and that it uses the one that was offered.
_SAYS_NOTHING, _CAN_BORROW, _CANNOT_BORROW, _OFFERS_RING, _HAS_RING = range(5)

FAREWELL: Envelope = (0, int(Channel.FAREWELL), 0)
# Says nothing, so it wakes a reader and changes nothing.
BELL: tuple[Envelope, Message] = ((0, int(Channel.GREETING), _SAYS_NOTHING), ((), 0))


class Course(Enum):
    """How far a connection has come, as the peer is heard."""

    UNUSED = "unused"
    OPEN = "open"
    LEFT = "left"
    GIVEN_UP = "given up"
    LOST = "lost"
    SPOILED = "spoiled"


class Happening(Enum):
    """What can happen to it."""

    FRAMES = "frames"
    FAREWELL = "farewell"
    END = "end"
    VIOLATION = "violation"


_COURSES = {
    (Course.UNUSED, Happening.FRAMES): Course.OPEN,
    (Course.UNUSED, Happening.FAREWELL): Course.LEFT,
    (Course.UNUSED, Happening.END): Course.GIVEN_UP,
    (Course.UNUSED, Happening.VIOLATION): Course.SPOILED,
    (Course.OPEN, Happening.FRAMES): Course.OPEN,
    (Course.OPEN, Happening.FAREWELL): Course.LEFT,
    (Course.OPEN, Happening.END): Course.LOST,
    (Course.OPEN, Happening.VIOLATION): Course.SPOILED,
}


def course_after(course: Course, happening: Happening) -> Course:
    """Return the next state; the last one stays."""
    return _COURSES.get((course, happening), course)


class Protocol:
    """What both ends have said on one connection. For its one reader.

    Args:
        peer: The rank at the other end, for errors.
        incoming: Whether the peer dialled.
        is_local: Whether it is a Unix socket, where memory can be lent.
        cannot_borrow: Why this end cannot read the peer's memory; empty if it can.
        max_nbytes: Largest payload that is accepted.

    Attributes:
        course: See the module.
        can_lend: Whether the peer can read this end's memory; None as long as that is not known.
        why_not_lend: If it cannot, why.
        ring_offer: What the peer says of memory through which it can be written to, if it does.
        has_ring: Whether the peer writes to the memory that this end has offered.
    """

    def __init__(
        self, *, peer: int, incoming: bool, is_local: bool, cannot_borrow: str, max_nbytes: int
    ) -> None:
        self._peer = peer
        self._is_local = is_local
        self._cannot_borrow = cannot_borrow
        self._max_nbytes = max_nbytes
        self.course = Course.UNUSED if incoming else Course.OPEN
        self.can_lend: bool | None = None if is_local else False
        self.why_not_lend = "" if is_local else cannot_borrow
        self.ring_offer: bytes | None = None
        self.has_ring = False

    # -- what this end says ------------------------------------------------------------------------

    def introduction(self) -> tuple[Envelope, Message]:
        """Return the greeting that tells whether this end can read the peer's memory."""
        says = _CANNOT_BORROW if self._cannot_borrow else _CAN_BORROW
        reason = self._cannot_borrow.encode()
        return (0, int(Channel.GREETING), says), ((reason,), len(reason))

    def greeting(self) -> tuple[Envelope, Message]:
        """Return the one that only tells that this end is there."""
        return BELL

    def offering(self, offer: bytes) -> tuple[Envelope, Message]:
        """Return the one that offers memory through which this end can be written to."""
        return (0, int(Channel.GREETING), _OFFERS_RING), ((offer,), len(offer))

    def acceptance(self) -> tuple[Envelope, Message]:
        """Return the one that says that this end writes there from now on."""
        return (0, int(Channel.GREETING), _HAS_RING), ((), 0)

    # -- what the peer says ------------------------------------------------------------------------

    def happened(self, happening: Happening) -> None:
        """Move on."""
        self.course = course_after(self.course, happening)

    def take(
        self, frames: Iterable[Frame], borrow: Callable[[Loan], Parcel]
    ) -> tuple[list[Frame], ProtocolError | None]:
        """Hear greetings, a farewell and offers of memory among frames that have come.

        Args:
            frames: What has come.
            borrow: Makes a parcel of what is lent.

        Returns:
            The messages, in order; and what is wrong with what follows them, if anything is.
            Nothing after that counts.
        """
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
                self.happened(Happening.FAREWELL)
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

    # -- how it ended ------------------------------------------------------------------------------

    def end_of_stream(self, *, in_frame: bool, reason: str = "") -> RankwireError:
        """Return what an end of the stream means now.

        Args:
            in_frame: Whether it fell into the middle of a frame.
            reason: What the stream says, if it broke.
        """
        if self.course is Course.LEFT:
            return left(self._peer)
        if self.course in (Course.UNUSED, Course.GIVEN_UP):
            return ChannelClosedError("the connection was never used").during(peer=self._peer)
        if not reason:
            reason = "its connection ended" + (" in the middle of a message" if in_frame else "")
        return PeerLostError(self._peer, reason)


def left(peer: int) -> ChannelClosedError:
    """Return the error of whatever needs a rank that has left in good order."""
    return ChannelClosedError(f"rank {peer} has left").during(peer=peer)
