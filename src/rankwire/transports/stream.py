"""Streams: what a connection needs of whatever carries its bytes.

A stream is a socket (``SocketStream``), TLS around one (``tls.TlsStream``) or a pipe inside this
process (``memory_stream.MemoryStream``). All calls return at once; only the two waits sleep. It
knows neither frames nor ranks.

How bytes are counted is part of the contract, because a signal may end a thread between any two
bytecodes. A socket's own methods are C functions, and the connection notes what they return in the
same step (``list.extend(map(stream.send, ...))``). A stream that is written in Python cannot be
called so: it has ``write`` and ``read`` instead, which note the count in the list they are given,
at the moment from which on it is true.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.fork import renew_in_child
from rankwire.transports.sockets import Pollable, unix_peer, wait_for
from rankwire.wire.frames import DEFAULT_BUFFER_NBYTES, Buffer
from rankwire.wire.ring import AWAKE, RingReader

_ACK_TOLERANCE = 0.05  # seconds: the kernel counts milliseconds, and rounds


class Unanswered:
    """For how long the other host has acknowledged nothing although there is something to.

    A process that does not read is told from a host that is gone: a full window is acknowledged.
    Neither keepalive (not while data is under way) nor the user timeout (which counts a full window
    too) tells this. One thread asks, again and again.
    """

    __slots__ = ("_acknowledged", "_clock", "_since")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: Deadline | None = None
        self._acknowledged = 0.0

    def look(self, stream: Stream) -> Deadline | None:
        """Return what was begun when the silence was first seen; None if there is none."""
        info = stream.tcp_info()
        if info is None:
            return None
        under_way, last_ms = info
        acknowledged = self._clock.now() - last_ms / 1000
        if not under_way:
            self._since = None
        elif self._since is None or acknowledged > self._acknowledged + _ACK_TOLERANCE:
            self._since = Deadline(math.inf, self._clock)
            self._acknowledged = acknowledged
        return self._since


_SIOCOUTQ = 0x5411
_TCP_INFO = struct.Struct("=24xI28xI")  # tcpi_unacked and tcpi_last_ack_recv in struct tcp_info

_barrier = runtime.Lock()
renew_in_child(_barrier)

Write = Callable[[Sequence[Buffer], list[int]], None]
Read = Callable[[memoryview, list[int]], None]


class Watched(Pollable, Protocol):
    """What may have something to read while another stream is waited for: one of its own kind."""

    def look_away(self) -> bool:
        """Have all that comes from now on come over the stream: whoever is about to sleep there.

        Returns:
            Whether something is in the ring, and nobody should sleep.
        """


class Stream(Watched, Protocol):
    """A connected stream of bytes, both ways. One reader and one writer at a time."""

    transport: str  # "unix", "tcp" or "memory"
    buffer_nbytes: int  # how much is best read at once

    def send(self, data: Buffer, /) -> int:
        """Send what can be sent now and return how much that was, as a socket does."""

    def sendmsg(self, pieces: Sequence[Buffer], /) -> int:
        """Send what can be sent now of several pieces, and return how much that was."""

    def recv_into(self, buffer: memoryview, /) -> int:
        """Read into a buffer, as a socket does."""

    @property
    def recv_pending(self) -> Callable[[memoryview], int] | None:
        """Reads what was taken from the socket before, where there may be such a thing."""

    @property
    def write(self) -> Write | None:
        """Instead of ``send``: takes the beginning of several pieces and notes how much."""

    @property
    def read(self) -> Read | None:
        """Instead of ``recv_into``: fills the beginning of a buffer and notes how much."""

    ring: RingReader | None  # the lane in shared memory beside it, if there is one

    def peek(self, nbytes: int) -> bytes:
        """Return the beginning of what is there to read, and leave it; empty at the end.

        Raises:
            BlockingIOError: Nothing is there now.
            OSError: The stream has failed.
        """

    def wait_readable(self, seconds: float, beside: Sequence[Watched] = ()) -> bool:
        """Sleep until there is something to read, the end included.

        Returns False if the time passes, or as soon as one of the others has something to read.
        """

    def wait_writable(self, seconds: float, beside: Sequence[Watched] = ()) -> bool:
        """Sleep until something can be written.

        Returns False if the time passes, or as soon as one of the others has something to read.
        """

    def unsent_nbytes(self) -> int:
        """Return how many bytes have been written that the other end has not taken."""

    def tcp_info(self) -> tuple[int, int] | None:
        """Return how much of a TCP connection is under way, and how old the last answer is.

        That is segments and milliseconds; None if it is no TCP connection, or closed.
        """

    def peer_pid(self) -> int:
        """Return the process at the other end of a Unix socket, 0 if it cannot be seen."""

    def shut_down(self) -> None:
        """End both directions: threads that wait wake up. Idempotent; safe from any thread."""

    def close(self) -> None:
        """Give back what the system has lent. Only when no thread uses it any more."""


class DescriptorStream:
    """What streams over a socket have in common."""

    buffer_nbytes = DEFAULT_BUFFER_NBYTES
    write = None
    read = None
    ring: RingReader | None = None

    def __init__(self, sock: runtime.Socket) -> None:
        self._sock = sock
        self.transport = "unix" if sock.family == runtime.AF_UNIX else "tcp"
        self.fileno = sock.fileno
        self.close = sock.close

    def look_away(self) -> bool:
        """Have all that comes from now on come over the stream; return what is in the ring."""
        ring = self.ring
        if ring is None:
            return False
        ring.words[AWAKE] = 0
        # What was written before that is seen from now on: taking a lock is a memory barrier.
        with _barrier:
            pass
        return ring.has_records()

    def wait_readable(self, seconds: float, beside: Sequence[Watched] = ()) -> bool:
        """Sleep until something can be read here, or on one of the others."""
        return self.look_away() or self._wait(runtime.POLLIN, seconds, beside)

    def wait_writable(self, seconds: float, beside: Sequence[Watched] = ()) -> bool:
        """Sleep until something can be written, or one of the others has something to read."""
        return self._wait(runtime.POLLOUT, seconds, beside)

    def _wait(self, event: int, seconds: float, beside: Sequence[Watched]) -> bool:
        if any(other.look_away() for other in beside):
            return False
        numbers = [number for other in beside if (number := other.fileno()) >= 0]
        return wait_for(self, event, seconds, numbers) != 0

    def unsent_nbytes(self) -> int:
        """Return how many bytes have been written that the other end has not taken."""
        try:
            count = runtime.ioctl(self.fileno(), _SIOCOUTQ, bytes(4))
        except (OSError, ValueError):
            return 0  # it is closed
        return int.from_bytes(count, sys.byteorder)

    def tcp_info(self) -> tuple[int, int] | None:
        """Return how much of a TCP connection is under way, and how old the last answer is."""
        if self.transport == "unix":
            return None
        try:
            info = self._sock.getsockopt(runtime.IPPROTO_TCP, runtime.TCP_INFO, _TCP_INFO.size)
        except OSError:
            return None  # it is closed
        under_way, last_ms = _TCP_INFO.unpack(info)
        return under_way, last_ms

    def peer_pid(self) -> int:
        """Return the process at the other end of a Unix socket by the kernel's word, or 0."""
        return max(unix_peer(self._sock)[0], 0)

    def shut_down(self) -> None:
        """End both directions: a thread that waits wakes up."""
        ring = self.ring
        if ring is not None:
            ring.words[AWAKE] = 0  # who writes is to find the end of the stream
        with suppress(OSError):  # not connected any more: nothing to wake up
            self._sock.shutdown(runtime.SHUT_RDWR)


class SocketStream(DescriptorStream):
    """A socket, whose own methods do the work: they are looked up once, not at every call."""

    recv_pending = None

    def __init__(self, sock: runtime.Socket) -> None:
        super().__init__(sock)
        self.send: Callable[[Buffer], int] = sock.send
        self.sendmsg: Callable[[Sequence[Buffer]], int] = sock.sendmsg
        self.recv_into: Callable[[memoryview], int] = sock.recv_into

    def peek(self, nbytes: int) -> bytes:
        """Return the beginning of what is there to read, and leave it; empty at the end."""
        return self._sock.recv(nbytes, runtime.MSG_PEEK | runtime.MSG_DONTWAIT)


def first_bytes(pieces: Sequence[Buffer], nbytes: int) -> bytes | memoryview:
    """Return the beginning of a message in one piece, uncopied if it is in one."""
    views: list[memoryview] = []
    for piece in pieces:
        view = memoryview(piece)
        if view.nbytes:
            views.append(view.cast("B")[:nbytes])
            nbytes -= len(views[-1])
            if not nbytes:
                break
    return views[0] if len(views) == 1 else b"".join(views)


def stream_of(sock: runtime.Socket | Stream) -> Stream:
    """Return a socket as a stream; a stream as it is."""
    return SocketStream(sock) if isinstance(sock, runtime.Socket) else sock
