"""One connection: sends and receives whole frames over any stream.

``outbox.Outbox`` writes, from any thread. A large payload to a process of this host is lent instead
(``lender``): the frame describes it, and the peer copies it from this process's memory.
``frame_reader`` reads and ends a connection, ``wire.protocol`` begins it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    ForkedProcessError,
    RankwireError,
)
from rankwire.fork import guard
from rankwire.links.frame_reader import LONGEST_SLEEP, FrameReader
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
from rankwire.wire.frames import Envelope, Message
from rankwire.wire.parser import FrameParser
from rankwire.wire.protocol import BELL, FAREWELL, Protocol
from rankwire.wire.ring import RING_NBYTES
from rankwire.wire.seals import Seals

_log = logging.getLogger("rankwire")


class Connection(FrameReader):
    """A stream of frames to and from one peer.

    Args:
        sock: Connected and authenticated: a stream, or a non-blocking socket. Owned from now on.
        on_rest: Called in any thread, with the send lock held, when the peer took only a part of a
            frame in time; has the rest flushed once the peer takes more.
        incoming: Whether the peer dialled. If it closes without having sent anything, it gave up
            dialling, which is no failure.
        single_copy: Whether to read and share memory with the peer where the kernel allows it.
        on_lost: Called in any thread with the cause if the connection fails; returns the cause to
            keep, because its owner may know more.
        on_left: The same for a peer that left in good order, if a thread waits for an answer.

    Attributes:
        send_small: ``send`` for messages that are never lent.
        post_small: ``send_small`` without waiting.
    """

    # Payloads from this size are lent. Round trip, lent and by stream: 238 and 126 us at 512 KiB,
    # 321 and 216 us at 1 MiB, 0.77 and 1.17 ms at 4 MiB, 3.0 and 7.7 ms at 16 MiB.
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
        on_rest: Callable[[Connection], None] = lambda connection: None,
        incoming: bool = False,
        single_copy: bool = True,
        seals: Seals | None = None,
    ) -> None:
        stream = stream_of(sock)
        pid, cannot_borrow = probe(stream) if single_copy else (0, "it is turned off")
        super().__init__(
            stream,
            Protocol(
                peer=peer,
                incoming=incoming,
                is_local=isinstance(stream, UnixStream),
                cannot_borrow=cannot_borrow,
                max_nbytes=max_nbytes,
            ),
            FrameParser(
                max_nbytes=max_nbytes,
                seal=None if seals is None else seals.incoming,
                allocate=allocate,
                buffer_nbytes=stream.buffer_nbytes,
            ),
            peer=peer,
            is_sealed=seals is not None,
            on_lost=on_lost,
            on_left=on_left,
        )
        self.filling = runtime.Lock()
        self._clock = clock
        self._spin = spin or Spin(0.0, clock)
        self._pid = pid
        self._may_share = single_copy and seals is None
        self._unanswered = Unanswered(clock)
        self.outbox = Outbox(
            stream,
            peer=peer,
            seal=None if seals is None else seals.outgoing,
            on_rest=lambda: on_rest(self),
            fail=self.fail,
            explain=self._why_not_sent,
        )
        self.send_small = self.outbox.send
        self.post_small = self.outbox.post
        self.at_once = Deadline(0.0, clock)
        self._lent: list[Lent] = []  # posted, until the peer has read it
        guard(self)

    @property
    def transport(self) -> str:
        """``"unix"``, ``"tcp"`` or ``"memory"``."""
        return self.stream.transport

    @property
    def can_lend(self) -> bool | None:
        """Whether the peer can read this process's memory; None before its introduction."""
        return self._protocol.can_lend

    @property
    def why_not_lend(self) -> str:
        """Why the peer cannot read this process's memory."""
        return self._protocol.why_not_lend

    @property
    def queued_nbytes(self) -> int:
        """Bytes that the peer has not taken: held here, in a ring or in the kernel."""
        ring = self.outbox.ring
        in_ring = 0 if ring is None else ring.unread_nbytes
        return self.outbox.held_nbytes + in_ring + self.stream.unsent_nbytes()

    def is_unanswered(self, seconds: float) -> bool:
        """Whether the peer's host has not acknowledged sent data for so many seconds.

        Call it repeatedly from one thread: it compares with the previous call.
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
        """Send one frame. Safe from any thread; the caller may reuse the buffers on return.

        The deadline includes the frames of other threads before it. With ``hold``, a small frame
        may wait for the next one; the caller flushes soon. While the peer takes no more, the thread
        reads ``meanwhile``, perhaps with the send lock held. If a ``DeadlineExceededError`` has
        ``may_have_arrived``, the peer took a part, and the rest follows in the background;
        otherwise the frame never arrives.
        """
        if message[1] >= self.lend_from and self._protocol.can_lend:
            if deadline.limit <= 0.0:  # the peer cannot read it in no time
                raise self.outbox.not_taken(deadline)
            handle = offer(self, envelope, message, deadline, meanwhile)
            if handle is not None:
                try:
                    handle.settle(deadline)
                finally:
                    handle.revoke()  # also if an interrupt stopped the thread before ``settle``
            return
        self.outbox.send(envelope, message, deadline, hold, meanwhile)

    def greet(self, deadline: Deadline) -> None:
        """Greet the peer; from now on it takes an end of the stream for a failure."""
        self.send(*BELL, deadline)

    def introduce(self, *, is_read: bool = True) -> None:
        """On a new connection, send the introduction, and a ring offer if ``is_read``."""
        if isinstance(self.stream, UnixStream):
            # A ring does not check for too large messages, so all that fit must be allowed.
            is_ring_safe = CAN_SHARE and self.parser.max_nbytes >= RING_NBYTES
            if is_read and is_ring_safe and self._may_share and self._spin.most > 0.0:
                self._offer_ring(self.stream)
            self.send(*self._protocol.introduction(), AT_ONCE)
            self._take_offer()

    def _offer_ring(self, stream: UnixStream) -> None:
        try:
            offer = stream.offer_ring()
        except OSError as error:
            _log.debug("there is no memory for a ring from rank %d: %s", self.peer, error)
            return
        self.parser.ring = stream.ring
        self.send(*self._protocol.offering(offer), AT_ONCE)

    def _take_offer(self) -> None:
        """Write through the ring that the peer has offered, if it can be opened.

        Only after this end's introduction: a peer that dialled may still give up.
        """
        offer, stream = self._protocol.ring_offer, self.stream
        if offer is None or not self._may_share or not self.outbox.frames_sent:
            return
        self._protocol.ring_offer = None
        if self.outbox.ring is not None or not isinstance(stream, UnixStream):
            return
        try:
            ring = stream.open_ring(offer)
            self.outbox.send(*self._protocol.acceptance(), AT_ONCE)
            self.outbox.ring = ring
        except (OSError, ValueError, RankwireError) as error:
            _log.debug("there is no ring to rank %d: %s", self.peer, error)

    def farewell(self, deadline: Deadline) -> None:
        """Notify the peer that this end leaves in good order, if it takes that at once."""
        end = ChannelClosedError("this end has left").during(peer=self.peer)
        try:
            self.outbox.send(FAREWELL, ((), 0), deadline, last=end)
        except RankwireError:
            return  # it is gone, or takes no more: then it sees the end of the stream
        self.failure = self.failure or end

    def await_introduction(self, deadline: Deadline, check: Callable[[], None]) -> None:
        """Wait until a peer of this host has introduced itself, on a dialled connection.

        Calls ``check`` repeatedly; an exception from it ends the wait. Raises
        ``DeadlineExceededError``.
        """
        while self.can_lend is None and self.failure is None:
            if self.read_ready() is None and self.can_lend is None:
                patience = min(deadline.sleep_limit(), LONGEST_SLEEP)
                if not self.stream.wait(patience):
                    check()
                    if deadline.expired:
                        raise DeadlineExceededError(deadline.limit, waiting_for=[self.peer])

    # -- ending ------------------------------------------------------------------------------------

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
        self.parser.ring = self.outbox.ring = None

    def close_in_child(self) -> None:
        """Close what a forked child shares with its parent, without ending the parent's stream."""
        self.failure = ForkedProcessError("this connection")
        self.filling = runtime.Lock()
        self.outbox.close_in_child(self.failure)
        self.stream.close()
        self._drop_rings()

    def __repr__(self) -> str:
        state = "open" if self.failure is None else f"failed: {self.failure.message}"
        return f"<Connection to rank {self.peer} over {self.transport}, {state}>"
