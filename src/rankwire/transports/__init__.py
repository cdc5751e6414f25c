"""Bytes between two processes: sockets, TLS, memory, shared memory, and how threads wait for them.

A transport may import ``wire`` and the modules without a folder. It knows no frames, ranks or
connections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rankwire import runtime
from rankwire.deadline import Deadline
from rankwire.errors import ConfigurationError
from rankwire.transports.byte_stream import ByteStream, Listener
from rankwire.transports.sockets import SocketListener
from rankwire.transports.tcp_stream import (
    TcpAddress,
    TcpStream,
    dial_tcp,
    listen_tcp,
    start_listening,
)
from rankwire.transports.unix_stream import UnixStream, dial_unix, listen_unix

__all__ = ["TRANSPORTS", "Scheme", "dial", "listen", "listener_of", "stream_of"]

_Dial = Callable[[str, Deadline, Callable[[], None]], ByteStream]


class Scheme(NamedTuple):
    """How processes connect by addresses of one scheme."""

    dial: _Dial  # takes what follows the scheme, a deadline, and what to call while waiting
    listen: Callable[[str], runtime.Socket | Listener]


def _listen_tcp(where: str) -> runtime.Socket:
    sock = listen_tcp(TcpAddress.parse(where))
    start_listening(sock)
    return sock


# By scheme. Worlds in one process make their streams in pairs (``memory_stream``), and TLS wraps a
# TCP connection (``security.Policy``): neither has an address.
TRANSPORTS = {"tcp": Scheme(dial_tcp, _listen_tcp), "unix": Scheme(dial_unix, listen_unix)}


def dial(address: str, deadline: Deadline, check: Callable[[], None] = lambda: None) -> ByteStream:
    """Connect once to an address such as ``tcp://10.0.0.1:29500`` or ``unix:///tmp/socket``.

    Calls ``check`` repeatedly while waiting; an exception from it ends the wait. Raises
    ``NoConnectionError`` if no process listens there, ``DeadlineExceededError`` without an answer.
    """
    scheme, where = _find(address)
    return scheme.dial(where, deadline, check)


def listen(address: str) -> Listener:
    """Listen at an address of the same form; raises ``ConfigurationError`` if that fails."""
    scheme, where = _find(address)
    return listener_of(scheme.listen(where))


def _find(address: str) -> tuple[Scheme, str]:
    scheme, _, where = address.partition("://")
    if scheme not in TRANSPORTS:
        raise ConfigurationError(f"no transport for {address!r}: one of {', '.join(TRANSPORTS)}")
    return TRANSPORTS[scheme], where


def stream_of(sock: runtime.Socket | ByteStream) -> ByteStream:
    """Return a connected socket as a stream; a stream as it is."""
    return sock if isinstance(sock, ByteStream) else _kind_of(sock)(sock)


def listener_of(sock: runtime.Socket | Listener) -> Listener:
    """Return a listening socket as a listener; a listener as it is."""
    return SocketListener(sock, _kind_of(sock).admit) if isinstance(sock, runtime.Socket) else sock


def _kind_of(sock: runtime.Socket) -> type[UnixStream | TcpStream]:
    return UnixStream if sock.family == runtime.AF_UNIX else TcpStream
