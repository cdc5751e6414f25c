"""One connection: whole frames out, whole frames in, over any stream socket.

Writing: any thread; a *send lock* keeps frames whole. Header and payload leave in one system call,
straight from the caller's buffers. Once a part of a frame has left, the rest must follow: if it
does not (deadline, error, interrupt), the connection is failed, because its stream would go on at
an unknown place.

Reading: one thread at a time, which one is the business of the owner (``inbox.Inbox`` for receives
and replies, the poller of calls for requests). The parser's state stays here, so a reader whose
deadline passes in the middle of a frame loses nothing.

Failure is sticky: the first cause is kept in ``failure`` and raised by every later use. Foreign
exceptions end here: above, only errors of this package are seen.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Sequence
from time import perf_counter

from rankwire.deadline import Deadline
from rankwire.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    PeerLostError,
    ProtocolError,
    RankwireError,
)
from rankwire.links.sockets import wait_for
from rankwire.links.spinning import Spin
from rankwire.wire.frames import (
    Buffer,
    Channel,
    Frame,
    FrameParser,
    is_farewell,
    pack_header,
)

__all__ = ["Connection"]

# Joining and one send() beat sendmsg() by 0.25 us at 60 bytes, are even from 4 to 16 KiB, and lose
# 1.3 us at 64 KiB.
_JOIN_NBYTES = 16384
# POSIX promises only 16 vectors a call, Linux has 1024.
_MAX_VECTORS = 512
_PEEK_NBYTES = 1 << 16
# More than this, and the peer would wait while it could already be working: with 64 calls in flight
# 42-47 k calls a second, against 34-36 k with up to 64 frames held (two runs each).
_HOLD_FRAMES = 8
_LONGEST_SLEEP = 0.1
_BLOCKED_NAP = 0.001
# Reads that may follow a deadline, as long as there is more of the message: a limit of zero takes
# what has arrived, also if that is large.
_LAST_READS = 256
_NOTHING: Sequence[Frame] = ()


class Connection:
    """A stream of frames to and from one peer.

    Args:
        sock: Connected, authenticated and non-blocking. Owned from now on.
        peer: The rank at the other end, for errors.
        max_nbytes: Largest payload accepted from the peer.
        spin: How long a reader polls before it sleeps.
        on_rest: Called when the peer took only a part of a small frame in time; sees to it that the
            rest is flushed once it takes more. Any thread, with the send lock held.
        incoming: Whether the peer dialled. If it then closes without having sent anything, it gave
            up dialling; that is no failure.
        on_lost: Called once, in any thread, with the cause, when the connection ends in any way but
            a good one.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        peer: int,
        max_nbytes: int,
        spin: Spin | None = None,
        on_lost: Callable[[RankwireError], None] | None = None,
        on_rest: Callable[[Connection], None] | None = None,
        incoming: bool = False,
    ) -> None:
        self._on_rest = on_rest
        self.peer = peer
        self.failure: RankwireError | None = None
        self._on_lost = on_lost
        self._sock = sock
        self._parser = FrameParser(max_nbytes=max_nbytes)
        self._spin = spin or Spin(0.0)
        self._used = not incoming
        self._given_up = False
        # Returned by the last read; if the reader is interrupted before they are delivered, the
        # connection cannot go on as if nothing were missing.
        self.unclaimed: Sequence[Frame] = _NOTHING
        self._send_lock = threading.Lock()
        self._sequence = 0
        self._held: list[bytes] = []

    @property
    def transport(self) -> str:
        """``"unix"`` or ``"tcp"``."""
        return "unix" if self._sock.family == socket.AF_UNIX else "tcp"

    @property
    def is_holding(self) -> bool:
        """Whether frames wait here to be flushed."""
        return bool(self._held)

    def fileno(self) -> int:
        """Return the file descriptor, for pollers."""
        return self._sock.fileno()

    # -- writing -----------------------------------------------------------------------------------

    def send(
        self,
        channel: int,
        group: int,
        tag: int,
        buffers: Sequence[Buffer],
        nbytes: int,
        deadline: Deadline,
        *,
        hold: bool = False,
        while_blocked: Callable[[], object] | None = None,
    ) -> None:
        """Send one frame. Safe from any thread; the buffers are free again on return.

        Args:
            channel: Part of the envelope, as are ``group`` and ``tag``.
            group: The group's id.
            tag: The tag.
            buffers: The payload in pieces.
            nbytes: Their total size.
            deadline: For all of it, also for other threads' frames before it.
            hold: Whether a small frame may stay here until the next one leaves, or ``flush``.
                Whoever holds frames back sees to it that they are flushed soon.
            while_blocked: Called when the peer does not take more for now and something can be
                read; reads it, so that two ends which both send first do not wait for each other.
                The send lock is held: it must not send, nor call anything that may.

        Raises:
            DeadlineExceededError: Nothing was sent in time.
            RankwireError: The connection has failed.
        """
        self._begin_sending(deadline)
        try:
            if self.failure is not None:
                raise self.failure.copy()
            header = pack_header(channel, group, tag, nbytes, self._sequence)
            if nbytes > _JOIN_NBYTES:
                self._write([*self._held, header, *buffers], deadline, while_blocked, owned=False)
            elif hold and len(self._held) < _HOLD_FRAMES:
                self._held.append(b"".join((header, *buffers)))
            else:
                data = b"".join((*self._held, header, *buffers))
                self._write([data], deadline, while_blocked, owned=True)
            self._sequence += 1
            if channel == Channel.FAREWELL:
                self.failure = ChannelClosedError("this end has left").during(peer=self.peer)
        finally:
            self._send_lock.release()

    def flush(
        self, deadline: Deadline, *, while_blocked: Callable[[], object] | None = None
    ) -> None:
        """Send the frames that were held back, if the connection still stands."""
        if not self._held:
            return
        self._begin_sending(deadline)
        try:
            if self._held and self.failure is None:
                self._write([b"".join(self._held)], deadline, while_blocked, owned=True)
        finally:
            self._send_lock.release()

    def _begin_sending(self, deadline: Deadline) -> None:
        lock = self._send_lock
        if not lock.acquire(blocking=False) and not lock.acquire(timeout=deadline.sleep_limit()):
            raise DeadlineExceededError(
                deadline.limit,
                waiting_for=[self.peer],
                detail="other threads are still sending to it",
            )

    def _write(
        self,
        pieces: list[Buffer],
        deadline: Deadline,
        while_blocked: Callable[[], object] | None,
        *,
        owned: bool,
    ) -> None:
        """Write all of it, held frames included, or nothing; or fail the connection.

        Args:
            pieces: What to write.
            deadline: For all of it.
            while_blocked: See ``send``.
            owned: Whether the pieces are our own, so that what the peer does not take can be kept.
        """
        started = False
        try:
            while pieces:
                try:
                    if len(pieces) == 1:
                        count = self._sock.send(pieces[0])
                    else:
                        count = self._sock.sendmsg(pieces[:_MAX_VECTORS])
                except BlockingIOError:
                    self._wait_writable(deadline, while_blocked)
                    continue
                started = True
                if len(pieces) == 1 and count == len(pieces[0]):
                    break  # the usual case: a small frame, taken at once
                pieces = _after(pieces, count)
            if self._held:
                self._held.clear()
        except DeadlineExceededError:
            if not started:
                raise
            if owned:
                # Our own copy: the rest leaves before the next frame, and this one counts as sent.
                self._held[:] = [b"".join(pieces)]
                if self._on_rest is not None:
                    self._on_rest(self)
                return
            self.fail(PeerLostError(self.peer, "it took only a part of a message in time"))
            raise
        except OSError as error:
            left = self._farewell_is_waiting()
            raise self.fail(_left(self.peer) if left else _lost(self.peer, error)) from error
        except BaseException:
            self.fail(PeerLostError(self.peer, "sending a message to it was interrupted"))
            raise

    def _farewell_is_waiting(self) -> bool:
        """Whether the peer said goodbye before it closed: a farewell is the last frame, and bare.

        The reader may not have come to it, and on a connection that is only written there is no
        reader.
        """
        try:
            waiting = self._sock.recv(_PEEK_NBYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            return False
        return is_farewell(waiting)

    def _wait_writable(
        self, deadline: Deadline, while_blocked: Callable[[], object] | None
    ) -> None:
        interest = select.POLLOUT if while_blocked is None else select.POLLOUT | select.POLLIN
        ready = wait_for(self._sock, interest, deadline.sleep_limit())
        if not ready:
            raise self._not_taken(deadline)
        if while_blocked is not None and ready & select.POLLIN and not ready & select.POLLOUT:
            while_blocked()
            # If another thread has the reading role the input stays; do not look at it all the
            # time.
            wait_for(self._sock, select.POLLOUT, min(deadline.sleep_limit(), _BLOCKED_NAP))
            if deadline.expired:
                raise self._not_taken(deadline)

    def _not_taken(self, deadline: Deadline) -> DeadlineExceededError:
        return DeadlineExceededError(
            deadline.limit, waiting_for=[self.peer], detail="it does not take more data"
        )

    # -- reading -----------------------------------------------------------------------------------

    def read_ready(self) -> list[Frame] | None:
        """Return the frames that one read completes; None if there is nothing to read.

        One reader at a time, without waiting.

        Raises:
            RankwireError: The connection has failed; frames before that were returned earlier.
        """
        try:
            if self._parser.violation is not None:
                raise self._parser.violation
            count = self._sock.recv_into(self._parser.receive_buffer())
            if count == 0:
                self._given_up = not self._used and self.failure is None
                raise self.fail(self._end_of_stream())
            frames = self._parser.bytes_received(count)
            self._used = True
            self.unclaimed = frames
        except BlockingIOError:
            return None
        except ProtocolError as error:
            raise self.fail(error.during(peer=self.peer)) from error.__cause__
        except RankwireError:
            raise  # some of ours are also OSErrors
        except OSError as error:
            raise self.fail(_lost(self.peer, error)) from error
        except BaseException:
            # A signal: the bytes may have left the kernel without having reached the parser.
            self._parser.violation = ProtocolError("the stream is out of step")
            self.fail(PeerLostError(self.peer, "reading from it was interrupted"))
            raise
        if self._parser.has_courtesies:
            frames = self._without_courtesies(frames)
        return frames

    def _without_courtesies(self, frames: list[Frame]) -> list[Frame]:
        """Take greetings and the farewell out; nothing comes after a farewell."""
        self._parser.has_courtesies = False
        messages = []
        for frame in frames:
            if frame.channel == Channel.FAREWELL:
                self.failure = self.failure or _left(self.peer)
                break
            if frame.channel != Channel.GREETING:
                messages.append(frame)
        self.unclaimed = messages
        return messages

    def claim(self) -> None:
        """Take note that the frames last returned have been delivered."""
        self.unclaimed = _NOTHING

    @property
    def was_given_up(self) -> bool:
        """Whether the peer closed it without ever having sent anything."""
        if self._used or self.failure is not None:
            return self._given_up
        try:
            return not self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def read(self, deadline: Deadline) -> list[Frame]:
        """Return the next frames; none at the deadline, or when it has been silent for a while.

        One reader at a time; raises as ``read_ready`` does.
        """
        spin = self._spin
        if spin.budget > 0.0 and deadline.limit > 0.0:
            limit = perf_counter() + spin.budget
            while True:
                frames = self.read_ready()
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
            frames = self.read_ready()
            if frames:
                return frames
            patience = min(deadline.sleep_limit(), _LONGEST_SLEEP)
            if frames is not None:  # a part of a frame; there may be more of it
                late_reads += patience <= 0.0
            # Now and then the reader looks up: what it waits for may have ended in another way.
            elif patience <= 0.0 or not wait_for(self._sock, select.POLLIN, patience):
                break
        return []

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
        if self.failure is None:
            self.failure = cause
            if self._on_lost is not None and not isinstance(cause, ChannelClosedError):
                self._on_lost(cause)
        self._shut_down()
        return self.failure.copy()

    def farewell(self, deadline: Deadline) -> None:
        """Tell the peer that this end leaves in good order, if that can be said at once."""
        try:
            self.send(Channel.FAREWELL, 0, 0, (), 0, deadline)
        except RankwireError:
            return  # it is gone, or takes nothing any more: then it sees the end of the stream

    def greet(self, deadline: Deadline) -> None:
        """Tell the peer that this end is there; from now on an end of the stream is a death."""
        self.send(Channel.GREETING, 0, 0, (), 0, deadline)

    def close(self) -> None:
        """Close the socket. Only when no thread uses it any more."""
        if self.failure is None:
            self.failure = ChannelClosedError("this connection is closed").during(peer=self.peer)
        self._shut_down()
        self._sock.close()

    def _shut_down(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # not connected any more: nothing to wake up

    def __repr__(self) -> str:
        state = "open" if self.failure is None else f"failed: {self.failure.message}"
        return f"<Connection to rank {self.peer} over {self.transport}, {state}>"


def _after(pieces: list[Buffer], count: int) -> list[Buffer]:
    """Return what is left to send after ``count`` bytes have left."""
    for index, piece in enumerate(pieces):
        size = memoryview(piece).nbytes
        if count < size:
            return [memoryview(piece).cast("B")[count:], *pieces[index + 1 :]]
        count -= size
    return []


def _left(peer: int) -> ChannelClosedError:
    return ChannelClosedError(f"rank {peer} has left").during(peer=peer)


def _lost(peer: int, error: OSError) -> PeerLostError:
    return PeerLostError(peer, error.strerror or str(error))
