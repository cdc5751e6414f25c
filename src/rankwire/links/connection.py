"""One connection: whole frames out, whole frames in, over any stream.

Writing is ``outbox.Outbox``: any thread. A large payload to a process of this host is lent
instead (``lender``): the frame describes it, the peer copies it out of this process's memory. What
the two ends say about that, and how a connection begins and ends, is ``wire.protocol``.

Reading: one thread at a time, which one is the business of the owner (``inbox.Inbox`` for receives
and replies, the poller of calls for requests). The parser's state stays here, so a reader whose
deadline passes in the middle of a frame, or who is interrupted there, loses nothing.

Failure is sticky: the first cause is kept in ``failure`` and raised by every later use. Foreign
exceptions end here: above, only errors of this package are seen.

Size: reading, and what the end of a stream means, need the same three objects (stream, parser,
protocol) in the same order; a third of the rest forwards to the writer and the protocol.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    ForkedProcessError,
    ProtocolError,
    RankwireError,
)
from rankwire.fork import guard
from rankwire.links.borrower import Borrowed
from rankwire.links.lender import Lent, Meanwhile
from rankwire.links.memory import allocate, probe
from rankwire.links.outbox import Outbox
from rankwire.links.send_handle import offer
from rankwire.transports import stream_of
from rankwire.transports.byte_stream import ByteStream
from rankwire.transports.shared_memory import CAN_SHARE
from rankwire.transports.spin import Spin
from rankwire.transports.tcp_stream import Unanswered
from rankwire.transports.unix_stream import UnixStream
from rankwire.wire.frames import (
    HEADER_NBYTES,
    SEAL_NBYTES,
    Envelope,
    Frame,
    Message,
)
from rankwire.wire.loans import Loan
from rankwire.wire.parser import FrameParser
from rankwire.wire.protocol import FAREWELL, ConnectionState, Protocol, StreamEvent, left
from rankwire.wire.receive import Destination
from rankwire.wire.ring import RING_NBYTES
from rankwire.wire.seals import Seals

_log = logging.getLogger("rankwire")

_PEEK_NBYTES = 1 << 16
_FIRST_SLEEP, _LONGEST_SLEEP = 1e-3, 0.1
# Reads that may follow a deadline, as long as there is more of the message: a limit of zero takes
# what has arrived, also if that is large.
_LAST_READS = 256


class Connection:
    """A stream of frames to and from one peer.

    Args:
        sock: Connected and authenticated: a stream, or a non-blocking socket. Owned from now on.
        peer: The rank at the other end, for errors.
        max_nbytes: Largest payload accepted from the peer.
        clock: By which its threads wait.
        spin: How long a reader polls before it sleeps.
        on_rest: Called when the peer took only a part of a small frame in time; sees to it that the
            rest is flushed once it takes more. Any thread, with the send lock held.
        incoming: Whether the peer dialled. If it then closes without having sent anything, it gave
            up dialling; that is no failure.
        single_copy: Whether the peer's memory may be read, and some be shared with it, where the
            kernel allows it.
        on_lost: Called in any thread with the cause when the connection ends in any way but a good
            one; returns the cause to keep, because its owner may know better.
        on_left: The same for a good end, if somebody waits for an answer.
        seals: What frames are sealed and checked with, as the handshake has made it; None if they
            are not sealed.

    Attributes:
        failure: Why it cannot be used any more, if that is so.
        send_small: ``send``, for what is never lent.
        post_small: ``send_small`` without waiting: ``Outbox.post``.
        at_once: A deadline that is over.
        has_parcels: Whether something lent was among the frames read; reset by who takes them.
        filling: Held while a payload is read, or is about to be, to where its receiver wants it.
            The mutex of an inbox may be taken under it.

    Size: it is all that its owners know of a peer's stream, so it has a verb for each of theirs.
    """

    # From here on a payload is lent. There and back take, lent and by stream: 238 and 126 us at 512
    # KiB, 321 and 216 us at 1 MiB, 0.77 and 1.17 ms at 4 MiB, 3.0 and 7.7 ms at 16 MiB.
    lend_from = 2 << 20

    def __init__(
        self,
        sock: runtime.Socket | ByteStream,
        *,
        peer: int,
        max_nbytes: int,
        clock: Clock,
        spin: Spin | None = None,
        on_lost: Callable[[RankwireError], RankwireError] | None = None,
        on_left: Callable[[RankwireError], RankwireError] | None = None,
        on_rest: Callable[[Connection], None] | None = None,
        incoming: bool = False,
        single_copy: bool = True,
        seals: Seals | None = None,
    ) -> None:
        self.stream = stream = stream_of(sock)
        self.peer = peer
        self.failure: RankwireError | None = None
        self.has_parcels = False
        self.filling = runtime.Lock()
        # What reads it once it is known to be in use, if that is one read of a bare socket.
        self._recv_into: Callable[[memoryview], int] | None = None
        self._may_share = single_copy and seals is None
        self._ending: RankwireError | None = None  # the first cause, while its owner is asked
        self._on_lost = on_lost
        self._on_left = on_left
        self._clock = clock
        self._spin = spin or Spin(0.0, clock)
        # A ring does not look for messages that are too large: no message in it may be.
        self._may_offer = (
            self._may_share and self._spin.most > 0.0 and CAN_SHARE and max_nbytes >= RING_NBYTES
        )
        self._unanswered = Unanswered(clock)
        self._pid, cannot_borrow = probe(stream) if single_copy else (0, "it is turned off")
        self._protocol = Protocol(
            peer=peer,
            incoming=incoming,
            is_local=isinstance(stream, UnixStream),
            cannot_borrow=cannot_borrow,
            max_nbytes=max_nbytes,
        )
        self._writer = Outbox(
            stream,
            peer=peer,
            seal=None if seals is None else seals.outgoing,
            on_rest=None if on_rest is None else lambda: on_rest(self),
            fail=self.fail,
            explain=self._why_not_sent,
        )
        self.send_small = self._writer.send  # ``send`` for less than ``lend_from``, without a hop
        self.post_small = self._writer.post  # the same, without waiting
        self.at_once = Deadline(0.0, clock)
        self._lent: list[Lent] = []  # posted, until the peer has read it
        self._farewell_nbytes = HEADER_NBYTES if seals is None else HEADER_NBYTES + SEAL_NBYTES
        self._parser = FrameParser(
            max_nbytes=max_nbytes,
            seal=None if seals is None else seals.incoming,
            allocate=allocate,
            buffer_nbytes=stream.buffer_nbytes,
        )
        guard(self)

    @property
    def transport(self) -> str:
        """``"unix"``, ``"tcp"`` or ``"memory"``."""
        return self.stream.transport

    @property
    def can_lend(self) -> bool | None:
        """Whether the peer can read this process's memory; None until it has said so."""
        return self._protocol.can_lend

    @property
    def why_not_lend(self) -> str:
        """If it cannot, why."""
        return self._protocol.why_not_lend

    @property
    def is_holding(self) -> bool:
        """Whether frames wait here to be flushed, or have to be put in order."""
        return self._writer.is_holding

    @property
    def frames_sent(self) -> int:
        """How many frames have been sent, counting those that wait here."""
        return self._writer.frames_sent

    @property
    def queued_nbytes(self) -> int:
        """Bytes that the peer has not taken: held back here, in a ring or in the kernel."""
        ring = self._writer.ring
        in_ring = 0 if ring is None else ring.unread_nbytes
        return self._writer.held_nbytes + in_ring + self.stream.unsent_nbytes()

    def is_unanswered(self, seconds: float) -> bool:
        """Whether the peer's host has not acknowledged what is under way for so long.

        To be asked again and again, by one thread: it compares with what it saw before.
        """
        waiting = self._unanswered.look(self.stream)
        return waiting is not None and waiting.waited >= seconds

    def fileno(self) -> int:
        """Return the file descriptor, for pollers."""
        return self.stream.fileno()

    # -- writing -----------------------------------------------------------------------------------

    def send(
        self,
        envelope: Envelope,
        message: Message,
        deadline: Deadline,
        hold: bool = False,
        meanwhile: Meanwhile | None = None,
    ) -> None:
        """Send one frame. Safe from any thread; the buffers are free again on return.

        Args:
            envelope: Under which it is received.
            message: The payload.
            deadline: For all of it, also for other threads' frames before it.
            hold: Whether a small frame may stay here until the next one leaves, or ``flush``.
                Whoever holds frames back sees to it that they are flushed soon.
            meanwhile: What to read when the peer does not take more for now, so that two ends which
                both send first do not wait for each other. The send lock may be held.

        Raises:
            DeadlineExceededError: It was not taken in time. If ``may_have_arrived``, a part of it
                was, and the rest follows in the background; else it never arrives.
            RankwireError: The connection has failed.
        """
        if message[1] >= self.lend_from and self._protocol.can_lend:
            if deadline.limit <= 0.0:  # the peer cannot have read it in no time
                raise self._writer.not_taken(deadline)
            handle = offer(self, envelope, message, deadline, meanwhile)
            if handle is not None:
                try:
                    handle.settle(deadline)
                finally:
                    handle.revoke()  # also if an interrupt fell before ``settle``
            return
        self._writer.send(envelope, message, deadline, hold, meanwhile)

    def flush(self, deadline: Deadline, *, meanwhile: Meanwhile | None = None) -> None:
        """Send the frames that were held back.

        Raises:
            RankwireError: The peer does not take them now, or the connection has failed.
        """
        self._writer.flush(deadline, meanwhile)

    def greet(self, deadline: Deadline) -> None:
        """Tell the peer that this end is there; from now on an end of the stream is a death."""
        self.send(*self._protocol.greeting(), deadline)

    def introduce(self, *, is_read: bool = True) -> None:
        """Tell a peer of this host whether we can read its memory. At once, on a new connection.

        Args:
            is_read: Whether much will be read here; then a ring is offered first.
        """
        if isinstance(self.stream, UnixStream):
            if is_read and self._may_offer:
                self._offer_ring(self.stream)
            self.send(*self._protocol.introduction(), AT_ONCE)
            self._take_offer()

    def _offer_ring(self, stream: UnixStream) -> None:
        """Let the peer write through memory, while this end polls it."""
        try:
            offer = stream.offer_ring()
        except OSError as error:
            _log.debug("there is no memory for a ring from rank %d: %s", self.peer, error)
            return
        self._parser.ring = stream.ring
        self.send(*self._protocol.offering(offer), AT_ONCE)

    def _take_offer(self) -> None:
        """Write through the memory that the peer has offered, if it has and it can be opened.

        Not before this end has introduced itself: a peer that dialled may still give up.
        """
        offer, stream = self._protocol.ring_offer, self.stream
        if offer is None or not self._may_share or not self._writer.frames_sent:
            return
        self._protocol.ring_offer = None
        if self._writer.ring is not None or not isinstance(stream, UnixStream):
            return
        try:
            ring = stream.open_ring(offer)
            self._writer.send(*self._protocol.acceptance(), AT_ONCE)
            self._writer.ring = ring
        except (OSError, ValueError, RankwireError) as error:
            _log.debug("there is no ring to rank %d: %s", self.peer, error)

    def farewell(self, deadline: Deadline) -> None:
        """Tell the peer that this end leaves in good order, if that can be said at once."""
        end = ChannelClosedError("this end has left").during(peer=self.peer)
        try:
            self._writer.send(FAREWELL, ((), 0), deadline, last=end)
        except RankwireError:
            return  # it is gone, or takes nothing any more: then it sees the end of the stream
        self.failure = self.failure or end

    def _why_not_sent(self, error: OSError) -> RankwireError:
        if self._protocol.state is ConnectionState.OPEN and self._farewell_is_waiting():
            return left(self.peer)
        return self._end_of_stream(error)

    # -- reading -----------------------------------------------------------------------------------

    @property
    def undelivered(self) -> deque[Frame]:
        """The frames that have been read and that nobody has taken."""
        return self._parser.state[0]

    def receive(self, deadline: Deadline, beside: Sequence[ByteStream] | None = ()) -> deque[Frame]:
        """Return the next frames; none at the deadline, or when it has been silent for a while.

        One reader at a time; takes and raises as ``receive_ready`` does.

        Args:
            deadline: How long.
            beside: Streams of other connections: as soon as one of them can be read, it returns
                too. If None, it waits only for a millisecond.
        """
        longest = _FIRST_SLEEP if beside is None else _LONGEST_SLEEP
        late_reads = 0
        was_woken = False
        while late_reads < _LAST_READS:
            if deadline.limit > 0.0 and not self._parser.state[0] and not was_woken:
                self._spin.finds(*self.stream.look)
            frames = self.receive_ready()
            if frames:
                return frames
            patience = min(deadline.sleep_limit(), longest)
            if frames is not None:  # a part of a frame; there may be more of it
                late_reads += patience <= 0.0
                was_woken = False
                continue
            # Now and then the reader looks up: what it waits for may have ended in another way.
            if patience <= 0.0 or not self.stream.wait(patience, beside or ()):
                break
            was_woken = True
        return self._parser.state[0]

    def receive_ready(self) -> deque[Frame] | None:
        """Return the frames that have come; None if there is nothing to read.

        One reader at a time, without waiting. Whoever takes a frame removes it: what stays, also
        because the reader was interrupted, is returned again.

        Raises:
            RankwireError: The connection has failed; frames before that were returned earlier.
        """
        parser = self._parser
        if parser.state[0]:
            return parser.state[0]
        try:
            if parser.ring is not None and parser.take_records():
                return parser.state[0]
            if self._recv_into is None or parser.state[3][5] is not None:  # in a large payload
                with self.filling:
                    self._take_in_otherwise()
            elif not (is_whole := parser.take_in(self._recv_into)):
                with self.filling:
                    self._take_further(is_whole)
        except BlockingIOError:
            return None
        except ProtocolError as error:
            raise self._spoiled(error) from error.__cause__
        except RankwireError:
            raise  # some of ours are also OSErrors
        except OSError as error:
            if not self._finds_last_records():
                raise self._ended(error) from error
        return parser.state[0]

    def _take_in_otherwise(self) -> None:
        """Take in the first that comes, a large payload, or what has no fast path."""
        parser, stream = self._parser, self.stream
        if parser.violation is not None:
            raise parser.violation.copy()
        self._take_further(False if parser.read_by(stream.read) else None)
        if stream.has_pending:
            self._read_pending()
        self._recv_into = stream.recv_into

    def _take_further(self, is_whole: bool | None) -> None:
        """Go on with what the parser took in: whole, a part, or None at the end of the stream."""
        if is_whole is None:
            if self._finds_last_records():
                return
            raise self._ended()
        if self._protocol.state is ConnectionState.UNUSED:
            self._protocol.on_event(StreamEvent.FRAMES)
        if not is_whole:
            self._parse()

    def _finds_last_records(self) -> bool:
        """Take what was put into the ring before the stream ended, and after the last look."""
        try:
            return self._parser.take_records()
        except ProtocolError as error:
            raise self._spoiled(error) from None

    def place_by(
        self, find_place: Callable[[Envelope, int, memoryview], Destination | None]
    ) -> None:
        """Have large payloads read to where their receivers want them, which is asked for."""
        self._parser.find_place = find_place

    def vacate(self, destination: Destination) -> None:
        """Read nothing more to there; what has come moves out. With ``filling`` held."""
        self._parser.vacate(destination)

    def read_ready(self) -> list[Frame] | None:
        """Return what ``receive_ready`` does, and take it: for readers that nobody interrupts."""
        frames = self.receive_ready()
        return None if frames is None else self._taken(frames)

    def read(self, deadline: Deadline) -> list[Frame]:
        """Return what ``receive`` does, and take it."""
        return self._taken(self.receive(deadline))

    def _taken(self, frames: Collection[Frame]) -> list[Frame]:
        taken = list(frames)
        self._parser.frames.clear()
        return taken

    def _parse(self) -> None:
        state, has_special = self._parser.parse()
        if has_special:
            self._take_special(state[0])
        self._parser.commit(state)

    def _read_pending(self) -> None:
        """Read what the stream has taken from its socket, which a poller would not see there."""
        while self.stream.has_pending:
            try:
                self._parser.read_by(self.stream.read)
                self._parse()
            except ProtocolError as error:
                if not self._parser.frames:
                    raise
                self._spoiled(error)  # raised by the next read
                return

    def _take_special(self, frames: deque[Frame]) -> None:
        """Take out what is for the connection itself. Safe to repeat: nobody has the frames yet."""
        messages, violation = self._protocol.take(frames, self._borrow)
        if violation is not None:
            self._parser.spoil(violation)
            if not messages:
                raise violation
        frames.clear()
        frames.extend(messages)
        self._take_offer()
        if self._protocol.has_ring and isinstance(self.stream, UnixStream):
            self.stream.ring_is_open()
        if self._protocol.state is ConnectionState.LEFT:
            self._writer.failure = self.failure = self.failure or left(self.peer)
        if self._parser.violation is not None:
            # Raised by the next read; now, so that nobody sleeps until there is more to read.
            self._spoiled(self._parser.violation)

    def _borrow(self, loan: Loan) -> Borrowed:
        self.has_parcels = True
        return Borrowed(loan, self._pid, self.peer, self._clock, self.fail)

    def await_introduction(self, deadline: Deadline, check: Callable[[], None]) -> None:
        """Wait until a peer of this host has introduced itself, on a connection we dialled.

        Args:
            deadline: How long.
            check: Called now and then while waiting; what it raises ends the wait.

        Raises:
            DeadlineExceededError: It has not, in time.
        """
        while self.can_lend is None and self.failure is None:
            if self.read_ready() is None and self.can_lend is None:
                patience = min(deadline.sleep_limit(), _LONGEST_SLEEP)
                if not self.stream.wait(patience):
                    check()
                    if deadline.expired:
                        raise DeadlineExceededError(deadline.limit, waiting_for=[self.peer])

    # -- ending ------------------------------------------------------------------------------------

    def _ended(self, error: OSError | None = None) -> RankwireError:
        """The stream has ended or broken: return what to raise."""
        cause = self._end_of_stream(error)
        if self.failure is None:  # else this end has closed it
            self._protocol.on_event(StreamEvent.END)
        return self.fail(cause)

    def _spoiled(self, error: ProtocolError) -> RankwireError:
        """What came is not a valid stream: return what to raise."""
        self._protocol.on_event(StreamEvent.VIOLATION)
        return self.fail(error.during(peer=self.peer))

    def _end_of_stream(self, error: OSError | None = None) -> RankwireError:
        reason = "" if error is None else error.strerror or str(error)
        return self._protocol.end_of_stream(in_frame=self._parser.in_frame, reason=reason)

    @property
    def was_given_up(self) -> bool:
        """Whether the peer closed it without ever having sent anything."""
        if self._protocol.state is not ConnectionState.UNUSED or self.failure is not None:
            return self._protocol.state is ConnectionState.GIVEN_UP
        try:
            return not self.stream.peek(1)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def look_for_end(self) -> None:
        """Raise if the connection has ended, also if nobody reads it. Safe from any thread."""
        if self.failure is None:
            try:
                waiting = self.stream.peek(_PEEK_NBYTES)
                if waiting and not self._is_only_a_farewell(waiting):
                    return  # whoever reads this connection will come to it
                cause = left(self.peer) if waiting else self._end_of_stream()
            except BlockingIOError:
                return
            except OSError as error:
                cause = self._end_of_stream(error)
            self.fail(cause)
        assert self.failure is not None
        raise self.failure.copy()

    def _is_only_a_farewell(self, waiting: bytes) -> bool:
        """Whether nothing but a farewell is there to read, and not the end of a message."""
        if len(waiting) != self._farewell_nbytes or self._parser.in_frame:
            return False
        return self._parser.is_farewell(waiting)

    def _farewell_is_waiting(self) -> bool:
        """Whether the peer said goodbye before it closed: a farewell is the last frame, and bare.

        The reader may not have come to it, and on a connection that is only written there is no
        reader.
        """
        try:
            waiting = self.stream.peek(_PEEK_NBYTES)
        except OSError:
            return False
        return self._parser.is_farewell(waiting)

    def fail(self, cause: RankwireError) -> RankwireError:
        """Give up the connection; whoever waits on it wakes up.

        Returns the first cause, ready to be raised.
        """
        # First of all, for what follows can wait and be interrupted: nothing can be sent any more.
        cause = self._ending = self._ending or cause.kept()
        self.stream.shut_down()
        if self.failure is None:
            if self._on_lost is not None and not isinstance(cause, ChannelClosedError):
                cause = self._on_lost(cause)
            self._end(cause)
        assert self.failure is not None
        return self.failure.copy()

    def _end(self, cause: RankwireError) -> None:
        """Keep the first cause. The writer's first: it must not send when nothing is read."""
        self._writer.failure = self._writer.failure or cause
        self.failure = self.failure or cause

    def explain_end(self, error: RankwireError) -> RankwireError:
        """Return the cause of an end for which somebody waits; a farewell may have a reason."""
        if self._on_left is not None and isinstance(error, ChannelClosedError):
            return self._on_left(error)
        return error

    def close(self) -> None:
        """Close the socket. Only when no thread uses it any more."""
        self._end(ChannelClosedError("this connection is closed").during(peer=self.peer))
        self.stream.shut_down()
        self.stream.close()
        self._drop_rings()
        for lent in self._lent:
            lent.revoke()

    def keep(self, lent: Lent) -> None:
        """Keep a loan alive until the peer has read it, or the connection is closed."""
        for other in list(self._lent):
            if other.is_over:
                with suppress(ValueError):  # another thread has removed it
                    self._lent.remove(other)
        self._lent.append(lent)

    def _drop_rings(self) -> None:
        if isinstance(self.stream, UnixStream):
            self.stream.drop_ring()
        self._parser.ring = self._writer.ring = None

    def close_in_child(self) -> None:
        """Close what a forked child shares with its parent, without ending the parent's stream."""
        self.failure = ForkedProcessError("this connection")
        self.filling = runtime.Lock()
        self._writer.close_in_child(self.failure)
        self.stream.close()
        self._drop_rings()

    def __repr__(self) -> str:
        state = "open" if self.failure is None else f"failed: {self.failure.message}"
        return f"<Connection to rank {self.peer} over {self.transport}, {state}>"
