"""Sockets: the common part of TCP and Unix sockets as streams. Everything is non-blocking."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rankwire import runtime
from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError, NoConnectionError, ResourceError
from rankwire.override import override
from rankwire.transports.byte_stream import ByteStream, Pollable, look_at, wait_for
from rankwire.wire.frames import Buffer

_SIOCOUTQ = 0x5411
_MAX_VECTORS = 512  # POSIX promises only 16 vectors a call, Linux has 1024
_CHECK_EVERY = 0.1  # seconds
BACKLOG = 4096  # limited by the kernel to somaxconn

Socket = runtime.Socket  # for signatures above this layer, which uses no sockets
# The arguments of system calls: host and port, and for IPv6 flow and scope too; or a path.
SocketAddress = tuple[Any, ...] | str


class SocketStream(ByteStream):
    """A connected, non-blocking socket."""

    def __init__(self, sock: runtime.Socket) -> None:
        self.sock = sock
        self.fileno = sock.fileno  # type: ignore[method-assign]
        self.close = sock.close  # type: ignore[method-assign]
        self.recv_into = sock.recv_into
        self.send = sock.send
        self.look = look_at(sock.fileno())

    @override
    def read(self, buffer: memoryview, counts: list[int]) -> None:
        counts.extend(map(self.sock.recv_into, (buffer,)))

    @override
    def write(self, pieces: Sequence[Buffer], counts: list[int]) -> None:
        counts.extend(map(self.sock.sendmsg, (pieces[:_MAX_VECTORS],)))

    @override
    def peek(self, nbytes: int) -> bytes:
        return self.sock.recv(nbytes, runtime.MSG_PEEK | runtime.MSG_DONTWAIT)

    @override
    def unsent_nbytes(self) -> int:
        try:
            count = runtime.ioctl(self.fileno(), _SIOCOUTQ, bytes(4))
        except (OSError, ValueError):
            return 0  # it is closed
        return int.from_bytes(count, sys.byteorder)

    @override
    def shut_down(self) -> None:
        with suppress(OSError):  # not connected any more: no thread to wake
            self.sock.shutdown(runtime.SHUT_RDWR)


class SocketListener:
    """A listening socket; ``admit`` makes a stream of a connection, or refuses by ``OSError``."""

    def __init__(
        self, sock: runtime.Socket, admit: Callable[[runtime.Socket], SocketStream]
    ) -> None:
        self._sock = sock
        self._admit = admit
        self.fileno = sock.fileno
        self.close = sock.close
        sock.setblocking(False)

    def accept(self) -> SocketStream:
        """Return the next connection, see ``Listener``."""
        sock, _ = self._sock.accept()
        try:
            return self._admit(sock)
        except OSError as error:
            sock.close()
            raise ConnectionAbortedError(f"not accepted: {describe(error)}") from error


def open_socket(family: int) -> runtime.Socket:
    """Return a new socket; raises ``ResourceError`` without descriptors or memory."""
    try:
        return runtime.Socket(family, runtime.SOCK_STREAM | runtime.SOCK_NONBLOCK)
    except OSError as error:
        raise ResourceError(f"cannot open a socket: {describe(error)}") from error


def connect(
    sock: runtime.Socket,
    where: SocketAddress,
    name: str,
    deadline: Deadline,
    check: Callable[[], None],
) -> None:
    """Connect a socket to an address, called ``name`` in errors; close it if that fails.

    Calls ``check`` repeatedly while waiting; an exception from it ends the wait. Raises
    ``NoConnectionError`` if no process listens there, ``DeadlineExceededError`` without an answer.
    """
    try:
        try:
            code = sock.connect_ex(where)
        except OSError as error:  # not a valid address: a path that is too long
            raise NoConnectionError(f"cannot connect to {name}: {describe(error)}") from error
        if code == errno.EINPROGRESS:
            if not wait_patiently(sock, runtime.POLLOUT, deadline, check):
                raise DeadlineExceededError(deadline.limit, detail=f"no answer from {name}")
            code = sock.getsockopt(runtime.SOL_SOCKET, runtime.SO_ERROR)
        if code == errno.EAGAIN:  # a Unix socket whose backlog is full
            raise NoConnectionError(f"{name} has too many connections waiting")
        if code:
            raise NoConnectionError(f"cannot connect to {name}: {os.strerror(code)}")
        if sock.family != runtime.AF_UNIX and sock.getsockname() == sock.getpeername():
            # TCP simultaneous open: dialling a free ephemeral port can connect a socket to itself.
            raise NoConnectionError(f"cannot connect to {name}: no process listens there")
    except BaseException:
        sock.close()
        raise


def wait_patiently(
    sock: Pollable, events: int, deadline: Deadline, check: Callable[[], None]
) -> bool:
    """Wait for events until the deadline, calling ``check`` repeatedly; False if it passes."""
    while True:
        if wait_for(sock, events, min(deadline.sleep_limit(), _CHECK_EVERY)):
            return True
        check()
        if deadline.expired:
            return False


def describe(error: Exception) -> str:
    """Return the text of an error of the system, without its number."""
    return getattr(error, "strerror", None) or str(error)
