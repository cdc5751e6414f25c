"""Writes whole frames to a stream, from any thread, in the order of their numbers.

A *send lock* keeps frames whole. One system call sends header and payload, directly from the
caller's buffers. Once a part of a frame is sent, the rest must follow: at a deadline or an
interrupt it is copied and sent later, before anything else.

A write is noted before its first byte is sent (``_Journal``), the C function that sends also notes
how much it has sent, and one assignment (``_outgoing``) replaces both. The next writer completes an
interrupted write.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError, PeerLostError, RankwireError
from rankwire.links.lender import Meanwhile
from rankwire.transports.byte_stream import ByteStream
from rankwire.wire.frames import (
    FIRST_SPECIAL,
    HEADER,
    SEQUENCE_MASK,
    Buffer,
    Envelope,
    Message,
    first_bytes,
    skip_bytes,
)
from rankwire.wire.protocol import BELL
from rankwire.wire.ring import RingWriter
from rankwire.wire.seals import Seal, SealInProgress

if TYPE_CHECKING:
    from rankwire.links.outbox import Queued

T = TypeVar("T")

_log = logging.getLogger("rankwire")

# Joining and one send() beat sendmsg() by 0.25 us at 60 bytes, and lose 1.3 us at 64 KiB.
JOIN_NBYTES = 16384
# With more, the peer waits while it could already work: with 64 calls in flight 42-47 k calls a
# second, against 34-36 k with up to 64 frames held (two runs each).
_HOLD_FRAMES = 8
_LONGEST_SLEEP = 0.1
_BLOCKED_NAP = 0.001
_BELL_PATIENCE = 0.1  # seconds; a thread that is sending wakes the reader as well

# The state between two writes. Plain tuples: named ones cost 0.3 us more a frame.
_Outgoing = tuple[
    int,  # the sequence number of the next frame
    tuple[Buffer, ...],  # what is sent before it, from our own memory
]
# A write that has begun and is not finished.
_Journal = tuple[
    _Outgoing,  # the state before
    Sequence[Buffer],  # all that is to be sent: held frames, then the frame if there is one
    bool,  # whether there is one,
    bool,  # and whether it is in our own memory
    list[int],  # how many bytes were sent, call by call
    SealInProgress | None,  # the last piece, if it is made while the others are sent
]


class FrameWriter:
    """The outgoing direction of one connection. Every method is safe from any thread.

    ``on_rest`` is as for ``Connection``. ``fail`` fails the connection with a cause, and returns
    the error to raise. ``explain`` returns the cause behind an error of the stream.

    Attributes:
        failure: Why nothing can be sent any more. Set by the owner.
        ring: The ring beside the stream, if there is one. Set by the owner.
        waiting: Messages that are sent before the next frame; see ``outbox``.
    """

    def __init__(
        self,
        stream: ByteStream,
        *,
        peer: int,
        seal: Seal | None,
        on_rest: Callable[[], None],
        fail: Callable[[RankwireError], RankwireError],
        explain: Callable[[OSError], RankwireError],
    ) -> None:
        self._stream = stream
        self._send = stream.send
        self._peer = peer
        self._seal = seal
        self._on_rest = on_rest
        self._fail = fail
        self._explain = explain
        self._lock = runtime.Lock()
        self._reading: int | None = None  # the thread that has the lock and reads
        self._outgoing: _Outgoing = (0, ())
        self._journal: _Journal | None = None
        self.failure: RankwireError | None = None
        self.ring: RingWriter | None = None
        self.waiting: list[Queued] = []

    @property
    def is_holding(self) -> bool:
        """Whether frames wait to be flushed, or an interrupted write must be completed."""
        return bool(self._outgoing[1] or self.waiting) or self._journal is not None

    @property
    def frames_sent(self) -> int:
        """How many frames have been sent, counting those that wait here."""
        return self._outgoing[0]

    @property
    def held_nbytes(self) -> int:
        """Bytes that wait here."""
        waiting = [queued.message[1] for queued in self.waiting[:] if queued.number is None]
        return sum(map(len, self._outgoing[1]), sum(waiting))

    def send(
        self,
        envelope: Envelope,
        message: Message,
        deadline: Deadline,
        hold: bool = False,
        meanwhile: Meanwhile | None = None,
        last: RankwireError | None = None,
    ) -> None:
        """Send one frame, as ``Connection.send`` does, but never lend it.

        ``last`` is the reason why nothing can be sent after this frame. Branches replace calls
        here: each call would cost every message 40 ns.
        """
        grip: list[bool] = []
        ring, is_put = self.ring, False
        try:
            grip.extend(map(self._lock.acquire, (False,)))  # see rankwire.interrupts
            if self._journal or self.failure is not None or self.waiting or not grip[0]:
                self._begin(grip, deadline, meanwhile)
            before = sequence, held = self._outgoing
            buffers, nbytes = message
            group, channel, tag = envelope
            header = HEADER.pack(channel, sequence & SEQUENCE_MASK, group, tag, nbytes)
            coming = None
            if self._seal is not None:
                buffers, coming = self._seal.around(sequence, header, channel, message)
            frame = b"" if nbytes > JOIN_NBYTES else b"".join((header, *buffers))
            if not frame:
                self._write((header, *buffers), deadline, meanwhile, is_owned=False, coming=coming)
            elif hold and len(held) < _HOLD_FRAMES:
                self._outgoing = (sequence + 1, (*held, frame))
            elif held or self._send is None:
                self._write((frame,), deadline, meanwhile, is_owned=True)
            elif ring is not None and channel < FIRST_SPECIAL and ring.put(frame):
                is_put = True  # with the number of the next one, which the stream does not see
            else:
                # What ``_write`` does, for a frame that is taken at once, as almost all are.
                counts: list[int] = []
                self._journal = (before, (frame,), True, True, counts, None)
                try:
                    counts.extend(map(self._send, (frame,)))
                except OSError:  # the next attempt raises it again
                    counts.append(0)
                if counts[0] == len(frame):
                    self._outgoing = (sequence + 1, ())
                    self._journal = None
                else:
                    self._finish(deadline, meanwhile)
            if last is not None:
                self.failure = last
        except BaseException:
            if grip[-1:] == [True]:
                try:
                    self._put_in_order(True)
                finally:  # a second interrupt may have stopped the first time
                    self._put_in_order(True)
            raise
        finally:
            if grip[-1:] == [True]:
                self._lock.release()
        # After the lock, which is a memory barrier.
        if is_put and ring is not None and not ring.is_polled():
            self._wake_reader(deadline.clock)

    def _wake_reader(self, clock: Clock) -> None:
        try:
            self.send(*BELL, Deadline(_BELL_PATIENCE, clock))
        except RankwireError as error:  # the peer has input to read, or reads no more
            _log.debug("rank %d was not woken: %s", self._peer, error)

    def flush(self, deadline: Deadline, meanwhile: Meanwhile | None = None) -> None:
        """Send the held frames; raise ``RankwireError`` if the peer takes none."""
        if self.is_holding:
            self._locked(self._flush, deadline, meanwhile)

    def _flush(self, grip: list[bool], deadline: Deadline, meanwhile: Meanwhile | None) -> None:
        self._begin(grip, deadline, meanwhile)
        if self._outgoing[1]:
            self._write((), deadline, meanwhile, is_owned=True)

    def _locked(self, act: Callable[..., T], *args: Any) -> T:
        """Call a function that takes the send lock into a list, as ``send`` does; release it."""
        grip: list[bool] = []
        try:
            return act(grip, *args)
        except BaseException:
            if grip[-1:] == [True]:
                try:
                    self._put_in_order(True)
                finally:  # as in ``send``
                    self._put_in_order(True)
            raise
        finally:
            if grip[-1:] == [True]:
                self._lock.release()

    def close_in_child(self, failure: RankwireError) -> None:
        """Fail in a forked child, where the thread that holds the lock does not exist."""
        self.failure = failure
        self._lock = runtime.Lock()

    def not_taken(
        self, deadline: Deadline, detail: str = "it does not take more data"
    ) -> DeadlineExceededError:
        """Return the error of a frame that was not taken in time."""
        return DeadlineExceededError(deadline.limit, waiting_for=[self._peer], detail=detail)

    def _begin(self, grip: list[bool], deadline: Deadline, meanwhile: Meanwhile | None) -> None:
        """Take the send lock if this thread does not have it, and send what is queued."""
        self._take_lock(grip, deadline)
        while self.waiting and not self._sends_waiting(grip, deadline, meanwhile):
            self._take_lock(grip, deadline)

    def _sends_waiting(self, _: list[bool], _deadline: Deadline, _by: Meanwhile | None) -> bool:
        """Send the queue of an ``Outbox``; False if the lock was released first."""
        return True

    def _take_lock(self, grip: list[bool], deadline: Deadline) -> None:
        """Take the send lock if this thread does not have it, and complete an interrupted write."""
        if self._reading == runtime.get_ident():
            raise self.not_taken(deadline, "this thread is sending to it")
        if grip[-1:] != [True] and not deadline.take(self._lock, grip):
            raise self.not_taken(deadline, "other threads are still sending to it")
        if self._journal is not None:
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
        coming: SealInProgress | None = None,
    ) -> None:
        """Write the held frames and then a frame, if any; keep the rest at the deadline.

        Raises ``DeadlineExceededError`` if nothing of the frame was sent, or there was none.
        """
        held = self._outgoing[1]
        if is_owned and held and frame and sum(map(len, (*held, *frame))) <= 2 * JOIN_NBYTES:
            pieces: Sequence[Buffer] = (b"".join((*held, *frame)),)
        else:
            pieces = (*held, *frame)
        self._journal = (self._outgoing, pieces, bool(frame), is_owned, [], coming)
        self._finish(deadline, meanwhile)

    def _finish(self, deadline: Deadline, meanwhile: Meanwhile | None) -> None:
        assert self._journal is not None
        (sequence, _), pieces, is_new, is_owned, counts, coming = self._journal
        try:
            pieces = skip_bytes(pieces, sum(counts)) if counts else pieces
            while pieces:
                is_taken = True
                ready = pieces
                if coming is not None:
                    if len(pieces) == 1:
                        coming.finish()
                    elif not coming.is_made:
                        ready = pieces[:-1]
                try:
                    self._stream.write(ready, counts)
                except BlockingIOError:
                    # No ``continue`` here: CPython looks for signals at that jump, and has no
                    # handler for it.
                    is_taken = False
                if is_taken:
                    pieces = skip_bytes(pieces, counts[-1])
                elif coming is None or not coming.go_on():
                    self._wait_writable(deadline, meanwhile)
            self._outgoing = (sequence + is_new, ())
            self._journal = None
        except RankwireError as error:  # the deadline, or what was read or checked meanwhile
            self._put_in_order(True)
            self._explain_rest(error, has_begun=self.frames_sent > sequence, is_owned=is_owned)
        except OSError as error:
            cause = self._fail(self._explain(error))
            # Not before: no other frame may follow one that has begun.
            self._journal = None
            raise cause from error

    def _explain_rest(self, error: RankwireError, *, has_begun: bool, is_owned: bool) -> None:
        """Raise why a frame was not written; a small one that has begun counts as sent."""
        if has_begun and isinstance(error, DeadlineExceededError):
            if is_owned:
                return
            error.may_have_arrived = True
            error.explain("it has taken a part, and the rest follows")
        raise error

    def _put_in_order(self, is_sender_there: bool) -> None:
        """Keep the rest of a write that ended early. Safe to repeat.

        If the sender is gone after several interrupts, the memory of its frame may have changed.
        """
        if self._journal is None:
            return
        (sequence, held), pieces, is_new, is_owned, counts, coming = self._journal
        if coming is not None:
            coming.finish()
        count, held_nbytes = sum(counts), sum(map(len, held))
        has_begun = is_new and count > held_nbytes
        rest: Sequence[Buffer] = skip_bytes(pieces, count)
        if not has_begun:
            rest = first_bytes(rest, held_nbytes - count) if is_new else rest
        elif not is_owned and rest:
            if not is_sender_there:
                reason = "sending to it was interrupted again and again"
                self._fail(PeerLostError(self._peer, reason))
            rest = [bytes(piece) for piece in rest]
        self._outgoing = (sequence + has_begun, tuple(rest))
        self._journal = None
        if rest:
            try:
                self._on_rest()
            except BaseException:
                self._on_rest()  # interrupted: no other thread would flush the rest
                raise

    def _wait_writable(self, deadline: Deadline, meanwhile: Meanwhile | None) -> None:
        if meanwhile is None:
            if not self._stream.wait(deadline.sleep_limit(), to_write=True):
                raise self.not_taken(deadline)
            return
        # The wait is limited: by then there may be more connections to read.
        patience = min(deadline.sleep_limit(), _LONGEST_SLEEP)
        if not self._stream.wait(patience, meanwhile.watch(), to_write=True):
            self._reading = runtime.get_ident()
            try:
                is_read = meanwhile.read()
            finally:
                self._reading = None
            if not is_read:  # but some input stays; do not look at it all the time
                self._stream.wait(min(deadline.sleep_limit(), _BLOCKED_NAP), to_write=True)
            if deadline.expired:
                raise self.not_taken(deadline)
