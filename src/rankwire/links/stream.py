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

import select
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

from rankwire.links.sockets import wait_for
from rankwire.links.tcp_info import tcp_info, unsent_nbytes
from rankwire.wire.frames import DEFAULT_BUFFER_NBYTES, Buffer

__all__ = ["DescriptorStream", "SocketStream", "Stream", "stream_of"]

Write = Callable[[Sequence[Buffer], list[int]], None]
Read = Callable[[memoryview, list[int]], None]


class Stream(Protocol):
    """A connected stream of bytes, both ways. One reader and one writer at a time."""

    @property
    def transport(self) -> str:
        """``"unix"``, ``"tcp"`` or ``"memory"``."""

    @property
    def buffer_nbytes(self) -> int:
        """How much is best read at once."""

    @property
    def send(self) -> Callable[[Buffer], int]:
        """Sends what can be sent now and returns how much that was, as a socket does."""

    @property
    def sendmsg(self) -> Callable[[Sequence[Buffer]], int]:
        """Does the same with several pieces."""

    @property
    def recv_into(self) -> Callable[[memoryview], int]:
        """Reads into a buffer, as a socket does."""

    @property
    def recv_pending(self) -> Callable[[memoryview], int] | None:
        """Reads what was taken from the socket before, where there may be such a thing."""

    @property
    def write(self) -> Write | None:
        """Instead of ``send``: takes the beginning of several pieces and notes how much."""

    @property
    def read(self) -> Read | None:
        """Instead of ``recv_into``: fills the beginning of a buffer and notes how much."""

    def peek(self, nbytes: int) -> bytes:
        """Return the beginning of what is there to read, and leave it; empty at the end.

        Raises:
            BlockingIOError: Nothing is there now.
            OSError: The stream has failed.
        """

    def wait_readable(self, seconds: float) -> bool:
        """Sleep until there is something to read, the end included; False if the time passes."""

    def wait_writable(self, seconds: float, beside: Sequence[Watched] = ()) -> bool:
        """Sleep until something can be written.

        Returns False if the time passes, or as soon as one of the others has something to read.
        """

    def unsent_nbytes(self) -> int:
        """Return how many bytes have been written that the other end has not taken."""

    def tcp_info(self) -> bytes | None:
        """Return what the kernel knows of a TCP connection; None if it is none, or closed."""

    def peer_pid(self) -> int:
        """Return the process at the other end of a Unix socket, 0 if it cannot be seen."""

    def fileno(self) -> int:
        """Return the descriptor; -1 if there is none."""

    def shut_down(self) -> None:
        """End both directions: threads that wait wake up. Idempotent; safe from any thread."""

    def close(self) -> None:
        """Give back what the system has lent. Only when no thread uses it any more."""


class Watched(Protocol):
    """What may have something to read while another stream is waited for: one of its own kind."""

    def fileno(self) -> int: ...


class DescriptorStream:
    """What streams with a descriptor of the kernel have in common."""

    buffer_nbytes = DEFAULT_BUFFER_NBYTES
    write = None
    read = None

    def fileno(self) -> int:
        """Return the descriptor; -1 if there is none."""
        raise NotImplementedError

    def wait_readable(self, seconds: float) -> bool:
        """Sleep until there is something to read, the end included; False if the time passes."""
        return wait_for(self, select.POLLIN, seconds) != 0

    def wait_writable(self, seconds: float, beside: Sequence[Watched] = ()) -> bool:
        """Sleep until something can be written, or one of the others has something to read."""
        numbers = [number for other in beside if (number := other.fileno()) >= 0]
        return wait_for(self, select.POLLOUT, seconds, numbers) != 0

    def unsent_nbytes(self) -> int:
        """Return how many bytes have been written that the other end has not taken."""
        return unsent_nbytes(self)


class SocketStream(DescriptorStream):
    """A socket, whose own methods do the work: they are looked up once, not at every call."""

    recv_pending = None

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.transport = "unix" if sock.family == socket.AF_UNIX else "tcp"
        self.send: Callable[[Buffer], int] = sock.send
        self.sendmsg: Callable[[Sequence[Buffer]], int] = sock.sendmsg
        self.recv_into: Callable[[memoryview], int] = sock.recv_into
        self.fileno = sock.fileno  # type: ignore[method-assign]
        self.close = sock.close

    def peek(self, nbytes: int) -> bytes:
        """Return the beginning of what is there to read, and leave it; empty at the end."""
        return self._sock.recv(nbytes, socket.MSG_PEEK | socket.MSG_DONTWAIT)

    def tcp_info(self) -> bytes | None:
        """Return what the kernel knows of a TCP connection; None if it is none, or closed."""
        return None if self.transport == "unix" else tcp_info(self._sock)

    def peer_pid(self) -> int:
        """Return the process at the other end of a Unix socket by the kernel's word, or 0."""
        nbytes = struct.calcsize("3i")
        credentials = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, nbytes)
        return max(int(struct.unpack("3i", credentials)[0]), 0)

    def shut_down(self) -> None:
        """End both directions: a thread that waits wakes up."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # not connected any more: nothing to wake up


def stream_of(sock: socket.socket | Stream) -> Stream:
    """Return a socket as a stream; a stream as it is."""
    return SocketStream(sock) if isinstance(sock, socket.socket) else sock
