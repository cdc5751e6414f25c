"""One connection: whole frames out, whole frames in, over any stream socket.

Writing: any thread; a *send lock* keeps frames whole. Header and payload leave in one system call,
straight from the caller's buffers. Once a part of a frame has left, the rest must follow: at a
deadline or an interrupt it is copied and leaves later, before anything else.

A signal may end a writer between any two bytecodes. So what is being written is noted before the
first byte of it leaves (``_Writing``), how much has left is noted by the same call of a C function
that sends it, and what follows from both is one assignment (``_outgoing``). Whoever writes next
puts in order what it finds.

A large payload to a process of this host is lent instead (``single_copy``): the frame describes it,
the peer copies it out of this process's memory. Each end says in its greeting whether it can do
that with the other's memory.

Reading: one thread at a time, which one is the business of the owner (``inbox.Inbox`` for receives
and replies, the poller of calls for requests). The parser's state stays here, so a reader whose
deadline passes in the middle of a frame, or who is interrupted there, loses nothing.

Failure is sticky: the first cause is kept in ``failure`` and raised by every later use. Foreign
exceptions end here: above, only errors of this package are seen.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from time import perf_counter

from rankwire.deadline import Deadline
from rankwire.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    ForkedProcessError,
    PeerLostError,
    ProtocolError,
    RankwireError,
)
from rankwire.fork import guard
from rankwire.links.allocation import allocate
from rankwire.links.borrower import Borrowed
from rankwire.links.lender import Lent, Meanwhile, lend
from rankwire.links.process_memory import probe
from rankwire.links.spin import Spin
from rankwire.links.stream import Stream, stream_of
from rankwire.links.tcp_info import Unanswered
from rankwire.texts import MAX_REASON, one_line
from rankwire.wire.frames import (
    HEADER_NBYTES,
    LOAN,
    SEAL_NBYTES,
    Buffer,
    Channel,
    Envelope,
    Frame,
    FrameParser,
    Message,
    pack_header,
)
from rankwire.wire.loans import LoanRefusedError, unpack_loan, whole_of
from rankwire.wire.seals import Seals

__all__ = ["Connection"]

# Joining and one send() beat sendmsg() by 0.25 us at 60 bytes, are even from 4 to 16 KiB, and lose
# 1.3 us at 64 KiB.
_JOIN_NBYTES = 16384
# POSIX promises only 16 vectors a call, Linux has 1024.
_MAX_VECTORS = 512
_PEEK_NBYTES = 1 << 16
# What a greeting says, in its tag, about reading the other end's memory.
_SAYS_NOTHING, _CAN_BORROW, _CANNOT_BORROW = 0, 1, 2
# More than this, and the peer would wait while it could already be working: with 64 calls in flight
# 42-47 k calls a second, against 34-36 k with up to 64 frames held (two runs each).
_HOLD_FRAMES = 8
_LONGEST_SLEEP = 0.1
_BLOCKED_NAP = 0.001
# Reads that may follow a deadline, as long as there is more of the message: a limit of zero takes
# what has arrived, also if that is large.
_LAST_READS = 256


# What a connection knows between two writes. Plain tuples: named ones cost 0.3 us more a frame.
_Outgoing = tuple[
    int,  # the sequence number of the next frame
    tuple[Buffer, ...],  # what leaves before it, out of memory of our own
]
# A write that has begun and is not finished.
_Writing = tuple[
    _Outgoing,  # what was known before
    Sequence[
        Buffer
    ],  # all that is to leave: what was held back, and then the frame if there is one
    bool,  # whether there is one,
    bool,  # and whether it is in memory of our own
    list[int],  # how many bytes have left, call by call
]


class Connection:
    """A stream of frames to and from one peer.

    Args:
        sock: Connected and authenticated: a stream, or a non-blocking socket. Owned from now on.
        peer: The rank at the other end, for errors.
        max_nbytes: Largest payload accepted from the peer.
        spin: How long a reader polls before it sleeps.
        on_rest: Called when the peer took only a part of a small frame in time; sees to it that the
            rest is flushed once it takes more. Any thread, with the send lock held.
        incoming: Whether the peer dialled. If it then closes without having sent anything, it gave
            up dialling; that is no failure.
        single_copy: Whether the peer's memory may be read, where the kernel allows it.
        on_lost: Called in any thread with the cause when the connection ends in any way but a good
            one; returns the cause to keep, because its owner may know better.
        on_left: The same for a good end, if somebody waits for an answer.
        seals: What frames are sealed and checked with, as the handshake has made it; None if they
            are not sealed.
    """

    # From here on a payload is lent. There and back take, lent and by stream: 238 and 126 us at 512
    # KiB, 321 and 216 us at 1 MiB, 0.77 and 1.17 ms at 4 MiB, 3.0 and 7.7 ms at 16 MiB.
    lend_from = 2 << 20

    def __init__(
        self,
        sock: socket.socket | Stream,
        *,
        peer: int,
        max_nbytes: int,
        spin: Spin | None = None,
        on_lost: Callable[[RankwireError], RankwireError] | None = None,
        on_left: Callable[[RankwireError], RankwireError] | None = None,
        on_rest: Callable[[Connection], None] | None = None,
        incoming: bool = False,
        single_copy: bool = True,
        seals: Seals | None = None,
    ) -> None:
        self._on_rest = on_rest
        self._max_nbytes = max_nbytes
        # Whether we can read the peer's memory, and whether it can read ours, once it has said so.
        self.stream = stream = stream_of(sock)
        self.transport = stream.transport
        self._pid, self._why_not_borrow = probe(stream) if single_copy else (0, "it is turned off")
        self.can_lend: bool | None = None if self.transport == "unix" else False
        self.why_not_lend = "" if self.can_lend is None else self._why_not_borrow
        self.peer = peer
        self.failure: RankwireError | None = None
        self._ending: RankwireError | None = None  # the first cause, while its owner is asked
        self._on_lost = on_lost
        self._on_left = on_left
        self._stream_write = stream.write
        self._stream_read = stream.read
        self._seal = None if seals is None else seals.outgoing
        self._parser = FrameParser(
            max_nbytes=max_nbytes,
            seal=None if seals is None else seals.incoming,
            allocate=allocate,
            buffer_nbytes=stream.buffer_nbytes,
        )
        self._spin = spin or Spin(0.0)
        self._used = not incoming
        self.has_parcels = False  # set when something lent was among the frames read
        self._given_up = False
        self._unanswered = Unanswered()
        self._send_lock = threading.Lock()
        self._outgoing: _Outgoing = (0, ())
        self._writing: _Writing | None = None
        guard(self)

    @property
    def is_holding(self) -> bool:
        """Whether frames wait here to be flushed, or have to be put in order."""
        return bool(self._outgoing[1]) or self._writing is not None

    @property
    def frames_sent(self) -> int:
        """How many frames have been sent, counting those that wait here."""
        return self._outgoing[0]

    @property
    def queued_nbytes(self) -> int:
        """Bytes that the peer has not taken: held back here, or in the kernel."""
        return sum(map(len, self._outgoing[1])) + self.stream.unsent_nbytes()

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
        *,
        hold: bool = False,
        lend: bool = True,
        meanwhile: Meanwhile | None = None,
    ) -> None:
        """Send one frame. Safe from any thread; the buffers are free again on return.

        Args:
            envelope: Under which it is received.
            message: The payload.
            deadline: For all of it, also for other threads' frames before it.
            hold: Whether a small frame may stay here until the next one leaves, or ``flush``.
                Whoever holds frames back sees to it that they are flushed soon.
            lend: Whether a large payload may be lent; not if the peer has refused to borrow it.
            meanwhile: What to read when the peer does not take more for now, so that two ends which
                both send first do not wait for each other. The send lock may be held.

        Raises:
            DeadlineExceededError: It was not taken in time. If ``may_have_arrived``, a part of it
                was, and the rest follows in the background; else it never arrives.
            RankwireError: The connection has failed.
        """
        if lend and message[1] >= self.lend_from and self.can_lend:
            if deadline.limit <= 0.0:  # nobody can have read it in no time
                raise self._not_taken(deadline)
            lent = self.offer(envelope, message, deadline, meanwhile=meanwhile)
            if lent is None:
                return
            try:
                self.settle(lent, deadline, meanwhile=meanwhile)
                return
            except LoanRefusedError:
                hold = False  # memory of a kind that only this process can read
            finally:
                lent.revoke()  # also if an interrupt fell before it was waited for
        self._send(envelope, message, deadline, hold, meanwhile)

    def offer(
        self,
        envelope: Envelope,
        message: Message,
        deadline: Deadline,
        *,
        meanwhile: Meanwhile | None = None,
    ) -> Lent | None:
        """Send one frame, but do not wait for a peer that borrows its payload.

        Returns:
            The loan to ``settle``, until when the buffers must not change; None if there is none
            and they are free already.
        """
        if message[1] >= self.lend_from and self.can_lend:
            loan = lend(*message)
            if loan is not None:
                lent, description = loan
                group, channel, tag = envelope
                parcel = (description,), len(description)
                try:
                    self._send((group, channel | LOAN, tag), parcel, deadline, False, meanwhile)
                except BaseException:
                    try:
                        lent.revoke()
                    finally:
                        lent.revoke()  # a second interrupt may have fallen into the first
                    raise
                return lent
        self._send(envelope, message, deadline, False, meanwhile)
        return None

    def settle(self, lent: Lent, deadline: Deadline, *, meanwhile: Meanwhile | None = None) -> None:
        """Wait until the peer has read what it borrowed; then the memory is free again.

        Raises:
            DeadlineExceededError: It has not; the loan is revoked, and the message is not sent.
            RankwireError: The connection has failed.
        """
        lent.settle(deadline, self.peer, self.look_for_end, meanwhile)

    def wait_for_receipt(
        self, lent: Lent, deadline: Deadline, *, meanwhile: Meanwhile | None = None
    ) -> bool:
        """Do the same, but return False at the deadline, and leave the loan as it is."""
        return lent.wait(deadline, self.look_for_end, meanwhile)

    def look_for_end(self) -> None:
        """Raise if the connection has ended, also if nobody reads it. Safe from any thread."""
        if self.failure is None:
            try:
                waiting = self.stream.peek(_PEEK_NBYTES)
                if waiting and not self._is_only_a_farewell(waiting):
                    return  # whoever reads this connection will come to it
                cause = _left(self.peer) if waiting else self._end_of_stream()
            except BlockingIOError:
                return
            except OSError as error:
                cause = _lost(self.peer, error)
            self.fail(cause)
        assert self.failure is not None
        raise self.failure.copy()

    def _is_only_a_farewell(self, waiting: bytes) -> bool:
        """Whether nothing but a farewell is there to read, and not the end of a message."""
        nbytes = HEADER_NBYTES if self._seal is None else HEADER_NBYTES + SEAL_NBYTES
        if len(waiting) != nbytes or self._parser.in_frame:
            return False
        return self._parser.is_farewell(waiting)

    def _send(
        self,
        envelope: Envelope,
        message: Message,
        deadline: Deadline,
        hold: bool,
        meanwhile: Meanwhile | None,
    ) -> None:
        grip: list[bool] = []
        try:
            self._begin_sending(grip, deadline)
            sequence, held = self._outgoing
            buffers, nbytes = message
            header = pack_header(envelope, nbytes, sequence)
            if self._seal is not None:
                buffers = self._seal.around(sequence, header, envelope[1], buffers, nbytes)
            if nbytes > _JOIN_NBYTES:
                self._write((header, *buffers), deadline, meanwhile, is_owned=False)
            elif hold and len(held) < _HOLD_FRAMES:
                self._outgoing = (sequence + 1, (*held, b"".join((header, *buffers))))
            else:
                self._write((b"".join((header, *buffers)),), deadline, meanwhile, is_owned=True)
            if envelope[1] == Channel.FAREWELL:
                self.failure = ChannelClosedError("this end has left").during(peer=self.peer)
        finally:
            if grip[-1:] == [True]:
                self._send_lock.release()

    def flush(self, deadline: Deadline, *, meanwhile: Meanwhile | None = None) -> None:
        """Send the frames that were held back.

        Raises:
            RankwireError: The peer does not take them now, or the connection has failed.
        """
        if not self.is_holding:
            return
        grip: list[bool] = []
        try:
            self._begin_sending(grip, deadline)
            if self._outgoing[1]:
                self._write((), deadline, meanwhile, is_owned=True)
        finally:
            if grip[-1:] == [True]:
                self._send_lock.release()

    def _begin_sending(self, grip: list[bool], deadline: Deadline) -> None:
        """Take the send lock, as ``Deadline.take`` does; then the stream is at a known place."""
        if not deadline.take(self._send_lock, grip):
            raise DeadlineExceededError(
                deadline.limit,
                waiting_for=[self.peer],
                detail="other threads are still sending to it",
            )
        if self._writing is not None:
            self._put_in_order(False)
        if self.failure is not None:
            raise self.failure.copy()

    def _write(
        self,
        frame: Sequence[Buffer],
        deadline: Deadline,
        meanwhile: Meanwhile | None,
        *,
        is_owned: bool,
    ) -> None:
        """Write what was held back and then a frame: all of the frame, or nothing of it.

        If the peer does not take all of it in time, the rest is kept.

        Args:
            frame: The frame in pieces; none to write only what was held back.
            deadline: For all of it.
            meanwhile: See ``send``.
            is_owned: Whether the frame is in memory of our own.

        Raises:
            DeadlineExceededError: Nothing of the frame has left, or there was none.
        """
        before = sequence, held = self._outgoing
        if is_owned and held and frame and sum(map(len, held)) <= _JOIN_NBYTES:
            pieces: Sequence[Buffer] = (b"".join((*held, *frame)),)
        else:
            pieces = (*held, *frame)
        is_new = bool(frame)
        counts: list[int] = []
        self._writing = (before, pieces, is_new, is_owned, counts)
        try:
            try:
                while pieces:
                    is_taken = True
                    try:
                        if self._stream_write is not None:
                            self._stream_write(pieces, counts)
                        elif len(pieces) == 1:
                            counts.extend(map(self.stream.send, pieces))
                        else:
                            counts.extend(map(self.stream.sendmsg, (pieces[:_MAX_VECTORS],)))
                    except BlockingIOError:
                        # No ``continue`` here: CPython looks for signals at that jump, and has no
                        # handler for it.
                        is_taken = False
                    if not is_taken:
                        self._wait_writable(deadline, meanwhile)
                    elif len(pieces) == 1 and counts[-1] == len(pieces[0]):
                        break  # the usual case: a small frame, taken at once
                    else:
                        pieces = _after(pieces, counts[-1])
                self._outgoing = (sequence + is_new, ())
                self._writing = None
            except RankwireError as error:  # the deadline, or what was read or checked meanwhile
                self._put_in_order(True)
                has_begun = self.frames_sent > sequence
                if has_begun and isinstance(error, DeadlineExceededError):
                    if is_owned:
                        return  # a small frame counts as sent
                    error.may_have_arrived = True
                    error.explain("it has taken a part, and the rest follows")
                raise
            except OSError as error:
                cause = self.fail(self._why_not_sent(error))
                # Not before: what has begun must not be followed by another frame.
                self._writing = None
                raise cause from error
        except BaseException:
            try:
                self._put_in_order(True)
            finally:  # a second interrupt may have fallen into the first time
                self._put_in_order(True)
            raise

    def _put_in_order(self, is_sender_there: bool) -> None:
        """Keep the rest of a write that ended early. Safe to repeat.

        Args:
            is_sender_there: Whether the frame's memory is as the sender left it. If not, it was
                interrupted again and again.
        """
        if self._writing is None:
            return
        (sequence, held), pieces, is_new, is_owned, counts = self._writing
        count, held_nbytes = sum(counts), sum(map(len, held))
        has_begun = is_new and count > held_nbytes
        rest = _after(pieces, count)
        if not has_begun:
            rest = _until(rest, held_nbytes - count) if is_new else rest
        elif not is_owned and rest:
            if not is_sender_there:
                self.fail(PeerLostError(self.peer, "sending to it was interrupted again and again"))
            rest = [bytes(piece) for piece in rest]
        self._outgoing = (sequence + has_begun, tuple(rest))
        self._writing = None
        if rest and self._on_rest is not None:
            try:
                self._on_rest(self)
            except BaseException:
                self._on_rest(self)  # interrupted: nobody else would see to the rest
                raise

    def _why_not_sent(self, error: OSError) -> RankwireError:
        if not self._used:
            return self._end_of_stream()
        return _left(self.peer) if self._farewell_is_waiting() else _lost(self.peer, error)

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

    def _wait_writable(self, deadline: Deadline, meanwhile: Meanwhile | None) -> None:
        if meanwhile is None:
            if not self.stream.wait_writable(deadline.sleep_limit()):
                raise self._not_taken(deadline)
            return
        # Now and then it looks up: by then there may be more connections to read.
        patience = min(deadline.sleep_limit(), _LONGEST_SLEEP)
        if not self.stream.wait_writable(patience, meanwhile.watch()):
            meanwhile.read()
            # If another thread has the reading role the input stays; do not look at it all the
            # time.
            self.stream.wait_writable(min(deadline.sleep_limit(), _BLOCKED_NAP))
            if deadline.expired:
                raise self._not_taken(deadline)

    def _not_taken(self, deadline: Deadline) -> DeadlineExceededError:
        return DeadlineExceededError(
            deadline.limit, waiting_for=[self.peer], detail="it does not take more data"
        )

    # -- reading -----------------------------------------------------------------------------------

    @property
    def undelivered(self) -> deque[Frame]:
        """The frames that have been read and that nobody has taken."""
        return self._parser.frames

    def receive_ready(self) -> deque[Frame] | None:
        """Return the frames that have come; None if there is nothing to read.

        One reader at a time, without waiting. Whoever takes a frame removes it: what stays, also
        because the reader was interrupted, is returned again.

        Raises:
            RankwireError: The connection has failed; frames before that were returned earlier.
        """
        parser = self._parser
        frames = parser.frames
        if frames:
            return frames
        try:
            if parser.violation is not None:
                raise parser.violation
            if self._stream_read is None:
                count = parser.read(self.stream.recv_into)
            else:
                count = parser.read_by(self._stream_read)
            if not count:
                self._note_if_given_up()
                raise self.fail(self._end_of_stream())
            self._used = True
            self._parse()
            if self.stream.recv_pending is not None:
                self._read_pending(self.stream.recv_pending)
        except BlockingIOError:
            return None
        except ProtocolError as error:
            raise self.fail(error.during(peer=self.peer)) from error.__cause__
        except RankwireError:
            raise  # some of ours are also OSErrors
        except OSError as error:
            if not self._used:
                self._note_if_given_up()
                raise self.fail(self._end_of_stream()) from error
            raise self.fail(_lost(self.peer, error)) from error
        return parser.frames

    def _note_if_given_up(self) -> None:
        """Once said, it stays: a reader may be interrupted then, and come here again."""
        self._given_up = self._given_up or (not self._used and self.failure is None)

    def _parse(self) -> None:
        state, has_special = self._parser.parse()
        if has_special:
            self._take_courtesies(state[0])
        self._parser.commit(state)

    def _read_pending(self, recv_pending: Callable[[memoryview], int]) -> None:
        """Read all that TLS has taken from the socket, which a poller would not see there."""
        while True:
            try:
                self._parser.read(recv_pending)
                self._parse()
            except BlockingIOError:
                return
            except ProtocolError as error:
                if not self._parser.frames:
                    raise
                self.fail(error.during(peer=self.peer))  # raised by the next read
                return

    def _take_courtesies(self, frames: deque[Frame]) -> None:
        """Take greetings and the farewell out; make parcels of what is lent.

        Nothing comes after a farewell. Safe to repeat: the frames are nobody's yet.
        """
        messages: list[Frame] = []
        for frame in frames:
            channel = frame.envelope[1]
            if channel & LOAN:
                parcel = self._borrow(frame, is_first=not messages)
                if parcel is None:
                    break
                messages.append(parcel)
            elif channel == Channel.FAREWELL:
                self.failure = self.failure or _left(self.peer)
                break
            elif channel == Channel.GREETING:
                self._greeted(frame)
            else:
                messages.append(frame)
        frames.clear()
        frames.extend(messages)
        if self._parser.violation is not None:
            # Raised by the next read; now, so that nobody sleeps until there is more to read.
            self.fail(self._parser.violation.during(peer=self.peer))

    def _borrow(self, frame: Frame, *, is_first: bool) -> Frame | None:
        """Make a parcel of what is lent; None if it is a violation, with frames before it."""
        try:
            if not self._pid:
                raise ProtocolError("the peer lends memory to a process that cannot read it")
            loan = unpack_loan(whole_of(frame.payload), max_nbytes=self._max_nbytes)
        except ProtocolError as error:
            self._parser.violation = error
            if not is_first:
                return None
            raise self.fail(error.during(peer=self.peer)) from error.__cause__
        self.has_parcels = True
        parcel = Borrowed(loan, self._pid, self.peer, self.fail)
        group, channel, tag = frame.envelope
        return Frame((group, channel & ~LOAN, tag), parcel)

    def _greeted(self, frame: Frame) -> None:
        if self.transport != "unix":
            return
        says = frame.envelope[2]
        if says == _CAN_BORROW:
            self.can_lend = True
        elif says == _CANNOT_BORROW:
            self.can_lend = False
            reason = whole_of(frame.payload)[: 4 * MAX_REASON]
            self.why_not_lend = one_line(reason.decode(errors="replace"))

    @property
    def was_given_up(self) -> bool:
        """Whether the peer closed it without ever having sent anything."""
        if self._used or self.failure is not None:
            return self._given_up
        try:
            return not self.stream.peek(1)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def receive(self, deadline: Deadline) -> Collection[Frame]:
        """Return the next frames; none at the deadline, or when it has been silent for a while.

        One reader at a time; takes and raises as ``receive_ready`` does.
        """
        spin = self._spin
        if spin.budget > 0.0 and deadline.limit > 0.0:
            limit = perf_counter() + spin.budget
            while True:
                frames = self.receive_ready()
                if frames:
                    spin.paid()
                    return frames
                if perf_counter() >= limit:
                    if frames is None:
                        spin.wasted()
                    break
        else:
            spin.skipped()
        late_reads = 0
        while late_reads < _LAST_READS:
            frames = self.receive_ready()
            if frames:
                return frames
            patience = min(deadline.sleep_limit(), _LONGEST_SLEEP)
            if frames is not None:  # a part of a frame; there may be more of it
                late_reads += patience <= 0.0
            # Now and then the reader looks up: what it waits for may have ended in another way.
            elif patience <= 0.0 or not self.stream.wait_readable(patience):
                break
        return ()

    def read_ready(self) -> list[Frame] | None:
        """Do as ``receive_ready``, and take what it returns: for readers that nobody interrupts."""
        frames = self.receive_ready()
        return None if frames is None else self._taken(frames)

    def read(self, deadline: Deadline) -> list[Frame]:
        """Do as ``receive``, and take what it returns."""
        return self._taken(self.receive(deadline))

    def _taken(self, frames: Collection[Frame]) -> list[Frame]:
        taken = list(frames)
        self._parser.frames.clear()
        return taken

    def _end_of_stream(self) -> RankwireError:
        if not self._used:
            return ChannelClosedError("the connection was never used").during(peer=self.peer)
        if self._parser.in_frame:
            return PeerLostError(self.peer, "its connection ended in the middle of a message")
        return PeerLostError(self.peer, "its connection ended")

    # -- ending ------------------------------------------------------------------------------------

    def fail(self, cause: RankwireError) -> RankwireError:
        """Give up the connection; whoever waits on it wakes up.

        Returns the first cause, ready to be raised.
        """
        # First of all, for what follows can wait and be interrupted: nothing can be sent any more.
        cause = self._ending = self._ending or cause
        self.stream.shut_down()
        if self.failure is None:
            if self._on_lost is not None and not isinstance(cause, ChannelClosedError):
                cause = self._on_lost(cause)
            self.failure = self.failure or cause
        return self.failure.copy()

    def explain_end(self, error: RankwireError) -> RankwireError:
        """Return the cause of an end for which somebody waits; a farewell may have a reason."""
        if self._on_left is not None and isinstance(error, ChannelClosedError):
            return self._on_left(error)
        return error

    def farewell(self, deadline: Deadline) -> None:
        """Tell the peer that this end leaves in good order, if that can be said at once."""
        try:
            self.send((0, Channel.FAREWELL, 0), ((), 0), deadline)
        except RankwireError:
            return  # it is gone, or takes nothing any more: then it sees the end of the stream

    def greet(self, deadline: Deadline) -> None:
        """Tell the peer that this end is there; from now on an end of the stream is a death."""
        self.send((0, Channel.GREETING, _SAYS_NOTHING), ((), 0), deadline)

    def introduce(self) -> None:
        """Tell a peer of this host whether we can read its memory. At once, on a new connection."""
        if self.transport == "unix":
            says = _CAN_BORROW if self._pid else _CANNOT_BORROW
            reason = self._why_not_borrow.encode()
            self.send((0, Channel.GREETING, says), ((reason,), len(reason)), Deadline(0.0))

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
                if not self.stream.wait_readable(patience):
                    check()
                    if deadline.expired:
                        raise DeadlineExceededError(deadline.limit, waiting_for=[self.peer])

    def close(self) -> None:
        """Close the socket. Only when no thread uses it any more."""
        if self.failure is None:
            self.failure = ChannelClosedError("this connection is closed").during(peer=self.peer)
        self.stream.shut_down()
        self.stream.close()

    def forsake(self) -> None:
        """See ``Forkable``. Closed, not shut down: that would end the parent's connection."""
        self.failure = ForkedProcessError("this connection")
        self._send_lock = threading.Lock()
        self.stream.close()

    def __repr__(self) -> str:
        state = "open" if self.failure is None else f"failed: {self.failure.message}"
        return f"<Connection to rank {self.peer} over {self.transport}, {state}>"


def _after(pieces: Sequence[Buffer], count: int) -> list[Buffer]:
    """Return what is left to send after ``count`` bytes have left."""
    for index, piece in enumerate(pieces):
        size = memoryview(piece).nbytes
        if count < size:
            return [memoryview(piece).cast("B")[count:], *pieces[index + 1 :]]
        count -= size
    return []


def _until(pieces: Sequence[Buffer], nbytes: int) -> list[Buffer]:
    """Return the first ``nbytes`` of what is to be sent."""
    beginning: list[Buffer] = []
    for piece in pieces:
        if not nbytes:
            break
        beginning.append(memoryview(piece).cast("B")[:nbytes])
        nbytes -= len(beginning[-1])
    return beginning


def _left(peer: int) -> ChannelClosedError:
    return ChannelClosedError(f"rank {peer} has left").during(peer=peer)


def _lost(peer: int, error: OSError) -> PeerLostError:
    return PeerLostError(peer, error.strerror or str(error))
