"""Reads frames from a stream, one thread at a time, and finds out why the stream has ended.

The owner decides which thread reads: ``inbox.Inbox`` for receives and replies, the poller of calls
for requests. The parser's state stays here, so a reader loses nothing if its deadline passes or an
interrupt comes in the middle of a frame.

Failure is sticky: every later use raises the first cause. All errors raised are of this package.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import ChannelClosedError, ProtocolError, RankwireError
from rankwire.links.borrower import Borrowed
from rankwire.transports.byte_stream import ByteStream
from rankwire.transports.spin import Spin
from rankwire.transports.unix_stream import UnixStream
from rankwire.wire.frames import HEADER_NBYTES, SEAL_NBYTES, Frame
from rankwire.wire.loans import Loan
from rankwire.wire.parser import FrameParser
from rankwire.wire.protocol import ConnectionState, Protocol, StreamEvent, left

if TYPE_CHECKING:
    from rankwire.links.outbox import Outbox


_PEEK_NBYTES = 1 << 16
Explain = Callable[[RankwireError], RankwireError]


class ConnectionEnd:
    """The part of a connection that handles its end; see ``Connection`` for the arguments.

    ``fail`` and ``look_for_end`` are safe from any thread.

    Attributes:
        failure: Why the connection has failed, or None.
    """

    outbox: Outbox

    def __init__(
        self,
        stream: ByteStream,
        protocol: Protocol,
        parser: FrameParser,
        *,
        peer: int,
        is_sealed: bool,
        on_lost: Explain | None,
        on_left: Explain | None,
    ) -> None:
        self.stream = stream
        self.peer = peer
        self.failure: RankwireError | None = None
        self._protocol = protocol
        self.parser = parser
        self._ending: RankwireError | None = None  # the first cause, while ``on_lost`` runs
        self._on_lost = on_lost
        self._on_left = on_left
        self._farewell_nbytes = HEADER_NBYTES + (SEAL_NBYTES if is_sealed else 0)

    def _ended(self, error: OSError | None = None) -> RankwireError:
        cause = self._end_of_stream(error)
        if self.failure is None:  # else this end has closed it
            self._protocol.on_event(StreamEvent.END)
        return self.fail(cause)

    def _spoiled(self, error: ProtocolError) -> RankwireError:
        self._protocol.on_event(StreamEvent.VIOLATION)
        return self.fail(error.during(peer=self.peer))

    def _end_of_stream(self, error: OSError | None = None) -> RankwireError:
        reason = "" if error is None else error.strerror or str(error)
        return self._protocol.end_of_stream(in_frame=self.parser.in_frame, reason=reason)

    def _why_not_sent(self, error: OSError) -> RankwireError:
        # The last bytes may be a farewell: a connection that only writes has no reader.
        with suppress(OSError):
            is_open = self._protocol.state is ConnectionState.OPEN
            if is_open and self.parser.is_farewell(self.stream.peek(_PEEK_NBYTES)):
                return left(self.peer)
        return self._end_of_stream(error)

    @property
    def was_given_up(self) -> bool:
        """Whether the peer closed it without having sent anything."""
        if self._protocol.state is not ConnectionState.UNUSED or self.failure is not None:
            return self._protocol.state is ConnectionState.GIVEN_UP
        try:
            return not self.stream.peek(1)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def look_for_end(self) -> None:
        """Raise if the connection has ended, even if no thread reads it. Safe from any thread."""
        if self.failure is None:
            try:
                waiting = self.stream.peek(_PEEK_NBYTES)
                is_one_frame = len(waiting) == self._farewell_nbytes and not self.parser.in_frame
                if waiting and not (is_one_frame and self.parser.is_farewell(waiting)):
                    return  # the reader will find it
                cause = left(self.peer) if waiting else self._end_of_stream()
            except BlockingIOError:
                return
            except OSError as error:
                cause = self._end_of_stream(error)
            self.fail(cause)
        assert self.failure is not None
        raise self.failure.copy()

    def fail(self, cause: RankwireError) -> RankwireError:
        """Fail the connection and wake its threads; return the first cause, ready to be raised."""
        # First, because the rest may wait and be interrupted.
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
        self.outbox.failure = self.outbox.failure or cause
        self.failure = self.failure or cause

    def explain_end(self, error: RankwireError) -> RankwireError:
        """Return the cause of an end for a waiting caller; a farewell may have a reason."""
        if self._on_left is not None and isinstance(error, ChannelClosedError):
            return self._on_left(error)
        return error


_FIRST_SLEEP, LONGEST_SLEEP = 1e-3, 0.1
# Reads after a deadline: a limit of zero takes what has arrived, even if that is large.
_LAST_READS = 256


class FrameReader(ConnectionEnd):
    """The incoming direction of a connection, which sets all attributes declared here.

    Attributes:
        filling: Held while a payload is read into its receiver's memory, or is about to be. The
            mutex of an inbox may be taken under it.
        has_parcels: Whether a lent message was among the frames read; the thread that takes them
            resets it.
    """

    filling: runtime.Lock
    has_parcels = False
    _clock: Clock
    _spin: Spin  # how long a reader polls before it sleeps
    _pid: int  # the process to borrow from; 0 if the kernel forbids it
    # Reads a connection in use, if one read of a bare socket does that.
    _recv_into: Callable[[memoryview], int] | None = None

    def receive(self, deadline: Deadline, beside: Sequence[ByteStream] | None = ()) -> deque[Frame]:
        """Return the next frames; none at the deadline, or after a while of silence.

        Returns early when one of the streams ``beside`` can be read; None limits the wait to a
        millisecond.
        """
        longest = _FIRST_SLEEP if beside is None else LONGEST_SLEEP
        late_reads = 0
        was_woken = False
        while late_reads < _LAST_READS:
            if deadline.limit > 0.0 and not self.parser.state[0] and not was_woken:
                self._spin.finds(*self.stream.look)
            frames = self.receive_ready()
            if frames:
                return frames
            patience = min(deadline.sleep_limit(), longest)
            if frames is not None:  # a part of a frame; more of it may have arrived
                late_reads += patience <= 0.0
                was_woken = False
                continue
            # The wait is limited, because the awaited event may happen elsewhere.
            if patience <= 0.0 or not self.stream.wait(patience, beside or ()):
                break
            was_woken = True
        return self.parser.state[0]

    def receive_ready(self) -> deque[Frame] | None:
        """Return the frames that have arrived; None if there is nothing to read. Does not wait.

        The caller removes each frame that it takes: the next call returns the others again.
        """
        parser = self.parser
        if parser.state[0]:
            return parser.state[0]
        try:
            if parser.ring is not None and parser.take_records():
                return parser.state[0]
            if self._recv_into is None or parser.state[3].large is not None:  # in a large payload
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
            raise  # some of our own errors are also OSErrors
        except OSError as error:
            if not self._finds_last_records():
                raise self._ended(error) from error
        return parser.state[0]

    def _take_in_otherwise(self) -> None:
        """Read the first bytes, a large payload, or a stream without a fast path."""
        parser, stream = self.parser, self.stream
        if parser.violation is not None:
            raise parser.violation.copy()
        self._take_further(False if parser.read_by(stream.read) else None)
        if stream.has_pending:
            self._read_pending()
        self._recv_into = stream.recv_into

    def _take_further(self, is_whole: bool | None) -> None:
        """Parse what was read: a whole frame, a part, or None at the end of the stream."""
        if is_whole is None:
            if self._finds_last_records():
                return
            raise self._ended()
        if self._protocol.state is ConnectionState.UNUSED:
            self._protocol.on_event(StreamEvent.FRAMES)
        if not is_whole:
            self._parse()

    def _finds_last_records(self) -> bool:
        """Take what the peer wrote to the ring after the last look and before the stream ended."""
        try:
            return self.parser.take_records()
        except ProtocolError as error:
            raise self._spoiled(error) from None

    def read_ready(self) -> list[Frame] | None:
        """Take and return the frames of ``receive_ready``, in a thread without interrupts."""
        frames = self.receive_ready()
        return None if frames is None else self._taken(frames)

    def read(self, deadline: Deadline) -> list[Frame]:
        """Take and return the frames of ``receive``."""
        return self._taken(self.receive(deadline))

    def _taken(self, frames: Collection[Frame]) -> list[Frame]:
        taken = list(frames)
        self.parser.frames.clear()
        return taken

    def _parse(self) -> None:
        state, has_special = self.parser.parse()
        if has_special:
            self._take_special(state[0])
        self.parser.commit(state)

    def _read_pending(self) -> None:
        """Read what the stream holds beyond its socket, where no poller sees it."""
        while self.stream.has_pending:
            try:
                self.parser.read_by(self.stream.read)
                self._parse()
            except ProtocolError as error:
                if not self.parser.frames:
                    raise
                self._spoiled(error)  # raised by the next read
                return

    def _take_special(self, frames: deque[Frame]) -> None:
        """Process the connection's own frames. Safe to repeat: no thread has taken them yet."""
        messages, violation = self._protocol.take(frames, self._borrow)
        if violation is not None:
            self.parser.spoil(violation)
            if not messages:
                raise violation
        frames.clear()
        frames.extend(messages)
        self._take_offer()
        if self._protocol.has_ring and isinstance(self.stream, UnixStream):
            self.stream.ring_is_open()
        if self._protocol.state is ConnectionState.LEFT:
            self.outbox.failure = self.failure = self.failure or left(self.peer)
        if self.parser.violation is not None:
            # The next read raises it. Now, so that no thread sleeps until more arrives.
            self._spoiled(self.parser.violation)

    def _borrow(self, loan: Loan) -> Borrowed:
        self.has_parcels = True
        return Borrowed(loan, self._pid, self.peer, self._clock, self.fail)

    def _take_offer(self) -> None:
        """Take the ring that the peer has offered, if any. Implemented by the subclass."""
