"""Sockets: addresses, options, listening and connecting, for TCP and Unix sockets alike.

The only place that knows address families. Everything returned is non-blocking.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from rankwire import runtime
from rankwire.deadline import Deadline
from rankwire.errors import (
    ConfigurationError,
    DeadlineExceededError,
    NoConnectionError,
    ResourceError,
)

if TYPE_CHECKING:
    from rankwire.transports.tls import TlsStream

# A vanished host is noticed on an idle link by keepalive (2 s idle, 3 probes 1 s apart) and on a
# busy one by the user timeout; neither alone covers both halves. The user timeout also ends a
# connection whose peer lives but does not read, so it is for those that are always read; for the
# others ``tcp_info.Unanswered`` asks the kernel.
_KEEPALIVE_IDLE, _KEEPALIVE_INTERVAL, _KEEPALIVE_PROBES = 2, 1, 3
_USER_TIMEOUT_MS = 4000
# What is lost on the way is sent again at least every second (Linux 6.15 and later); otherwise the
# pauses double, and a link that was cut for 3.1 s would be silent for 6.2.
_TCP_RTO_MAX_MS, _LONGEST_RESEND_PAUSE_MS = 44, 1000
# Room for a burst of small frames; the kernel bounds what it grants.
_BUFFER_NBYTES = 1 << 20
_CHECK_EVERY = 0.1  # seconds
_BACKLOG = 4096  # cut by the kernel to somaxconn
_WILDCARDS = ("0.0.0.0", "::")

Socket = runtime.Socket  # for signatures above this layer, where no socket is touched
AnySocket: TypeAlias = "Socket | TlsStream"  # what handshakes are done on
# What the system calls take: host and port, and for IPv6 flow and scope too.
_SocketAddress = tuple[Any, ...]


class Pollable(Protocol):
    """What one can wait for: a socket, or a stream around one."""

    def fileno(self) -> int:
        """Return the descriptor; -1 if there is none."""


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host and a port, as users write it: ``"10.0.0.1:29500"`` or ``"[::1]:29500"``."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> TcpAddress:
        """Parse ``host:port``.

        Raises:
            ConfigurationError: It is not of that form.
        """
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


def tune(sock: runtime.Socket) -> None:
    """Set the options that every connection has.

    It never blocks; on TCP it also has no delay and keepalive.
    """
    sock.setblocking(False)
    if sock.family == runtime.AF_UNIX:
        sock.setsockopt(runtime.SOL_SOCKET, runtime.SO_SNDBUF, _BUFFER_NBYTES)
        return
    sock.setsockopt(runtime.IPPROTO_TCP, runtime.TCP_NODELAY, 1)
    sock.setsockopt(runtime.SOL_SOCKET, runtime.SO_KEEPALIVE, 1)
    sock.setsockopt(runtime.IPPROTO_TCP, runtime.TCP_KEEPIDLE, _KEEPALIVE_IDLE)
    sock.setsockopt(runtime.IPPROTO_TCP, runtime.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL)
    sock.setsockopt(runtime.IPPROTO_TCP, runtime.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    with suppress(OSError):  # an older kernel
        sock.setsockopt(runtime.IPPROTO_TCP, _TCP_RTO_MAX_MS, _LONGEST_RESEND_PAUSE_MS)


def is_loopback_connection(sock: AnySocket) -> bool:
    """Whether both ends of a TCP connection are on loopback, so that no other host sees it."""
    return _is_loopback(sock.getsockname()[0]) and _is_loopback(sock.getpeername()[0])


def _is_loopback(host: str) -> bool:
    found = ipaddress.ip_address(host)
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped.is_loopback  # on a socket for both families
    return found.is_loopback


def expect_prompt_reading(sock: AnySocket) -> None:
    """Give up a TCP connection whose other end takes nothing for some seconds.

    For control connections, which are always read. Elsewhere a peer may be busy for long, and the
    kernel does not tell that from a cut cable.
    """
    if sock.family != runtime.AF_UNIX:
        sock.setsockopt(runtime.IPPROTO_TCP, runtime.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


def listen_tcp(address: TcpAddress) -> runtime.Socket:
    """Listen on exactly the address asked for; port 0 takes a free one.

    All interfaces are asked for by ``0.0.0.0`` or ``::``, and not by a name that happens to mean
    the same.
    """
    family, where = _resolve(address)[0]
    if ipaddress.ip_address(where[0]).is_unspecified and address.host not in _WILDCARDS:
        raise ConfigurationError(
            f"{address} would listen on all interfaces; if that is meant, write {where[0]}"
        )
    sock = _open_socket(family)
    try:
        sock.setsockopt(runtime.SOL_SOCKET, runtime.SO_REUSEADDR, 1)
        sock.bind(where)
    except OSError as error:
        sock.close()
        raise ConfigurationError(f"cannot listen on {address}: {_why(error)}") from error
    return sock


def listen_unix(path: str) -> runtime.Socket:
    """Listen on a socket file that only this user can reach (its folder is 0700)."""
    sock = _open_socket(runtime.AF_UNIX)
    try:
        sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigurationError(f"cannot listen on {path}: {_why(error)}") from error
    return sock


def start_listening(sock: runtime.Socket) -> None:
    """Accept connections from now on.

    Apart from ``listen_tcp`` so that a secret can be laid out between the two.
    """
    sock.listen(_BACKLOG)


def connect_tcp(
    address: TcpAddress, deadline: Deadline, *, check: Callable[[], None] = lambda: None
) -> runtime.Socket:
    """Connect once, to the first of a name's addresses that answers.

    Args:
        address: Where to.
        deadline: For the answer.
        check: Called now and then while waiting; what it raises ends the wait.

    Raises:
        NoConnectionError: No process listens there.
        DeadlineExceededError: No answer in time.
    """
    candidates = _resolve(address)
    failures: list[str] = []
    for index, (family, where) in enumerate(candidates):
        is_last = index == len(candidates) - 1
        # One that never answers leaves time for the others.
        limit = deadline if is_last else deadline.sooner(deadline.remaining() / 2)
        name = str(TcpAddress(str(where[0]), int(where[1])))
        try:
            return _connect(_open_socket(family), where, name, limit, check)
        except NoConnectionError as error:
            failures.append(error.message)
        except DeadlineExceededError as error:
            if is_last:
                raise
            failures.append(error.detail)
    raise NoConnectionError("; ".join(failures))


def connect_unix(
    path: str, deadline: Deadline, *, check: Callable[[], None] = lambda: None
) -> runtime.Socket:
    """Connect once to a socket file; raises as ``connect_tcp`` does."""
    return _connect(_open_socket(runtime.AF_UNIX), path, path, deadline, check)


def unix_peer(sock: runtime.Socket) -> tuple[int, int]:
    """Return the process at the other end and its user, by the word of the kernel."""
    credentials = sock.getsockopt(runtime.SOL_SOCKET, runtime.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


def wait_for(sock: Pollable, events: int, seconds: float, also_readable: Sequence[int] = ()) -> int:
    """Sleep until the socket has one of the ``select.POLL*`` events; return those it has.

    Returns 0 after ``seconds``, or when one of the other descriptors is readable.
    """
    poller = runtime.poll()
    for other in also_readable:
        poller.register(other, runtime.POLLIN)
    descriptor = sock.fileno()
    if descriptor < 0:
        return events  # it was closed meanwhile, which the next use of it will say
    also_input = runtime.POLLIN if descriptor in also_readable else 0
    poller.register(descriptor, events | also_input)
    # Rounded up: poll(0) for the last fraction of a millisecond would spin.
    for ready, which in poller.poll(int(seconds * 1000.0) + 1 if seconds > 0 else 0):
        if ready == descriptor:
            return which if events & runtime.POLLIN else which & ~runtime.POLLIN
    return 0


def wait_patiently(
    sock: Pollable, events: int, deadline: Deadline, check: Callable[[], None]
) -> bool:
    """Wait for events until the deadline, calling ``check`` now and then; False if it passes."""
    while True:
        if wait_for(sock, events, min(deadline.sleep_limit(), _CHECK_EVERY)):
            return True
        check()
        if deadline.expired:
            return False


def _resolve(address: TcpAddress) -> list[tuple[int, _SocketAddress]]:
    """Return the addresses that a name stands for, each once."""
    try:
        found = runtime.getaddrinfo(address.host, address.port, type=runtime.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise NoConnectionError(f"cannot resolve {address.host!r}: {_why(error)}") from error
    # "localhost" may resolve to ::1 first where the listener is on 127.0.0.1: IPv4 first, at both
    # ends.
    found.sort(key=lambda entry: entry[0] != runtime.AF_INET)
    return list(dict.fromkeys((family, where) for family, _, _, _, where in found))


def _connect(
    sock: runtime.Socket,
    where: _SocketAddress | str,
    name: str,
    deadline: Deadline,
    check: Callable[[], None],
) -> runtime.Socket:
    try:
        try:
            code = sock.connect_ex(where)
        except OSError as error:  # not even an address: a path that is too long
            raise NoConnectionError(f"cannot connect to {name}: {_why(error)}") from error
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
            raise NoConnectionError(f"cannot connect to {name}: nobody listens there")
        tune(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def _open_socket(family: int) -> runtime.Socket:
    try:
        return runtime.Socket(family, runtime.SOCK_STREAM | runtime.SOCK_NONBLOCK)
    except OSError as error:
        raise ResourceError(f"cannot open a socket: {_why(error)}") from error


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
