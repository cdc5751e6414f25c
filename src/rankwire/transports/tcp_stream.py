"""TCP: addresses, options, listening and connecting.

A place to listen at is ``host``, ``host:port``, ``host:low-high`` or ``:low-high``; the host is an
address, a name, or a network interface such as ``eth1``. Omitted parts are chosen.
"""

from __future__ import annotations

import ipaddress
import math
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import ConfigurationError, DeadlineExceededError, NoConnectionError
from rankwire.override import override
from rankwire.transports.byte_stream import ByteStream, Exposure
from rankwire.transports.sockets import BACKLOG, SocketStream, connect, describe, open_socket

# A vanished host is noticed on an idle link by keepalive (2 s idle, 3 probes 1 s apart) and on a
# busy one by the user timeout. That also ends a connection whose peer runs but does not read, so it
# is for connections that are always read; for others ``Unanswered`` asks the kernel.
_KEEPALIVE_IDLE, _KEEPALIVE_INTERVAL, _KEEPALIVE_PROBES = 2, 1, 3
_USER_TIMEOUT_MS = 4000
# Lost packets are sent again at least every second (Linux 6.15 and later); otherwise the pauses
# double, and a link that was cut for 3.1 s would be silent for 6.2.
_TCP_RTO_MAX_MS, _LONGEST_RESEND_PAUSE_MS = 44, 1000
_WILDCARDS = ("0.0.0.0", "::")
_ACK_TOLERANCE = 0.05  # seconds: the kernel counts milliseconds, and rounds
_TCP_INFO = struct.Struct("=24xI28xI")  # tcpi_unacked and tcpi_last_ack_recv in struct tcp_info
_SIOCGIFADDR = 0x8915
_IFREQ_NBYTES = 256
_ADDRESS_OFFSET = 20


class TcpStream(SocketStream):
    """A TCP connection."""

    transport = "tcp"

    @classmethod
    def admit(cls, sock: runtime.Socket) -> TcpStream:
        """Return an accepted socket as a stream."""
        tune_tcp(sock)
        return cls(sock)

    @property
    def exposure(self) -> Exposure:  # type: ignore[override]
        """``"loopback"`` if both ends are on loopback, so that no other host sees it."""
        ends = (self.sock.getsockname(), self.sock.getpeername())
        return "loopback" if all(_is_loopback(end[0]) for end in ends) else "network"

    @override
    def unacknowledged(self) -> tuple[int, int] | None:
        try:
            info = self.sock.getsockopt(runtime.IPPROTO_TCP, runtime.TCP_INFO, _TCP_INFO.size)
        except OSError:
            return None  # it is closed
        under_way, last_ms = _TCP_INFO.unpack(info)
        return under_way, last_ms


@dataclass(slots=True)
class Unanswered:
    """Measures how long the other host has not acknowledged sent data.

    A full window is acknowledged, so a process that does not read differs from a host that is gone.
    Keepalive (not while data is under way) and the user timeout (which counts a full window too) do
    not see the difference. For one thread, which calls it repeatedly.
    """

    _clock: Clock
    _since: Deadline | None = None
    _acknowledged: float = 0.0

    def look(self, stream: ByteStream) -> Deadline | None:
        """Return a deadline that began when the silence was first seen; None without silence."""
        info = stream.unacknowledged()
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


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host and a port, as users write it: ``"10.0.0.1:29500"`` or ``"[::1]:29500"``."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> TcpAddress:
        """Parse ``host:port``; raises ``ConfigurationError`` if it has another form."""
        host, separator, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ConfigurationError(f"write an IPv6 address as [host]:port, not {text!r}")
        if not separator or not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigurationError(f"an address is written host:port, not {text!r}")
        return cls(host, int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this host can reach it."""
        try:
            return self.host == "localhost" or _is_loopback(self.host)
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def tune_tcp(sock: runtime.Socket) -> None:
    """Set the options of a connected socket: no delay, and keepalive."""
    sock.setblocking(False)
    sock.setsockopt(runtime.IPPROTO_TCP, runtime.TCP_NODELAY, 1)
    sock.setsockopt(runtime.SOL_SOCKET, runtime.SO_KEEPALIVE, 1)
    sock.setsockopt(runtime.IPPROTO_TCP, runtime.TCP_KEEPIDLE, _KEEPALIVE_IDLE)
    sock.setsockopt(runtime.IPPROTO_TCP, runtime.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL)
    sock.setsockopt(runtime.IPPROTO_TCP, runtime.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    with suppress(OSError):  # an older kernel
        sock.setsockopt(runtime.IPPROTO_TCP, _TCP_RTO_MAX_MS, _LONGEST_RESEND_PAUSE_MS)


def _is_loopback(host: str) -> bool:
    found = ipaddress.ip_address(host)
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped.is_loopback  # on a socket for both families
    return found.is_loopback


def expect_prompt_reading(stream: ByteStream) -> None:
    """Fail a TCP connection whose other end takes nothing for some seconds.

    For control connections, which are always read. Elsewhere a peer may be busy for long.
    """
    if isinstance(stream, SocketStream) and stream.transport == "tcp":
        option = (runtime.IPPROTO_TCP, runtime.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
        stream.sock.setsockopt(*option)


def listen_tcp(address: TcpAddress) -> runtime.Socket:
    """Listen on exactly the given address; port 0 takes a free one.

    Only ``0.0.0.0`` or ``::`` means all interfaces, not a name that resolves to them.
    """
    family, where = _resolve(address)[0]
    if ipaddress.ip_address(where[0]).is_unspecified and address.host not in _WILDCARDS:
        raise ConfigurationError(
            f"{address} would listen on all interfaces; if that is meant, write {where[0]}"
        )
    sock = open_socket(family)
    try:
        sock.setsockopt(runtime.SOL_SOCKET, runtime.SO_REUSEADDR, 1)
        sock.bind(where)
    except OSError as error:
        sock.close()
        raise ConfigurationError(f"cannot listen on {address}: {describe(error)}") from error
    return sock


def start_listening(sock: runtime.Socket) -> None:
    """Accept connections from now on; separate, so that a secret can be written first."""
    sock.listen(BACKLOG)


def connect_tcp(
    address: TcpAddress, deadline: Deadline, *, check: Callable[[], None] = lambda: None
) -> runtime.Socket:
    """Connect once, to the first of a name's addresses that answers; see ``sockets.connect``."""
    candidates = _resolve(address)
    failures: list[str] = []
    for index, (family, where) in enumerate(candidates):
        is_last = index == len(candidates) - 1
        # An address that never answers leaves time for the others.
        limit = deadline if is_last else deadline.sooner(deadline.remaining() / 2)
        name = str(TcpAddress(str(where[0]), int(where[1])))
        try:
            sock = open_socket(family)
            connect(sock, where, name, limit, check)
            tune_tcp(sock)
            return sock
        except NoConnectionError as error:
            failures.append(error.message)
        except DeadlineExceededError as error:
            if is_last:
                raise
            failures.append(error.detail)
    raise NoConnectionError("; ".join(failures))


def _resolve(address: TcpAddress) -> list[tuple[int, tuple[Any, ...]]]:
    try:
        found = runtime.getaddrinfo(address.host, address.port, type=runtime.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise NoConnectionError(f"cannot resolve {address.host!r}: {describe(error)}") from error
    # "localhost" may resolve to ::1 first while the listener is on 127.0.0.1: IPv4 first.
    found.sort(key=lambda entry: entry[0] != runtime.AF_INET)
    return list(dict.fromkeys((family, where) for family, _, _, _, where in found))


def dial_tcp(where: str, deadline: Deadline, check: Callable[[], None]) -> TcpStream:
    """Connect to ``host:port``, see ``transports.dial``."""
    return TcpStream(connect_tcp(TcpAddress.parse(where), deadline, check=check))


@dataclass(frozen=True, slots=True)
class ListeningPlace:
    """Where to listen; an empty host and port 0 are chosen when listening."""

    host: str = ""
    low: int = 0
    high: int = 0

    @classmethod
    def parse(cls, text: str) -> ListeningPlace:
        """Parse what users write; raises ``ConfigurationError`` if it is not of that form."""
        host, separator, ports = text.rpartition(":")
        if not separator or text.endswith("]") or (":" in host and not host.endswith("]")):
            host, ports = text, "0"  # a bare host; also a bare IPv6 address
        low, dash, high = ports.partition("-")
        first, last = _port(low, text), _port(high if dash else low, text)
        if first > last:
            raise ConfigurationError(f"the ports of {text!r} are none: write low-high")
        return cls(_interface_address(host.strip("[]")), first, last)

    @property
    def specific_host(self) -> str:
        """The host, unless it stands for all interfaces: then others cannot connect to it."""
        return "" if self.host in ("0.0.0.0", "::") else self.host


def listen_somewhere(place: ListeningPlace, host: str) -> runtime.Socket:
    """Listen at the first free port of a place, on ``host`` if the place names none.

    Raises ``ConfigurationError`` if no port is free, or the address is not one of this host.
    """
    host = place.host or host
    trouble: ConfigurationError | None = None
    for port in range(place.low, place.high + 1):
        try:
            sock = listen_tcp(TcpAddress(host, port))
        except ConfigurationError as error:
            trouble = error
            continue
        try:
            start_listening(sock)  # if two sockets have bound the port, one fails here
        except OSError as error:
            sock.close()
            trouble = ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror}")
            continue
        return sock
    assert trouble is not None
    if place.low != place.high:
        raise ConfigurationError(
            f"no port from {place.low} to {place.high} can be listened at ({trouble.message})"
        ) from trouble
    raise trouble


def _port(text: str, whole: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise ConfigurationError(
            f"a place to listen at is written host, host:port or host:low-high, not {whole!r}"
        )
    return int(text)


def _interface_address(host: str) -> str:
    if not host or host not in (name for _, name in runtime.if_nameindex()):
        return host
    request = struct.pack(f"{_IFREQ_NBYTES}s", host.encode()[:15])
    with runtime.Socket(runtime.AF_INET, runtime.SOCK_DGRAM) as probe:
        try:
            answer = runtime.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            raise ConfigurationError(
                f"the network interface {host} has no IPv4 address: {error.strerror}"
            ) from error
    return runtime.inet_ntoa(answer[_ADDRESS_OFFSET : _ADDRESS_OFFSET + 4])
