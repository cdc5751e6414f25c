"""connect(): the place in the world that a launcher gave to this process.

A launcher leaves a few environment variables; one small function per launcher turns them into a
``Place``, and ``_LAUNCHERS`` lists those functions. Nothing here knows how processes are started,
and nothing in ``run`` knows how a world is joined: the two share only the names below.

The secret is never in the environment. ``RANKWIRE_SECRET_FD`` names an inherited pipe that holds
it; it is read once, closed, and the variable removed, so that programs which this rank starts find
neither. This process remembers the secret, so that ``connect()`` works again after the first world
was closed.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from rankwire.backends.tcp import DEFAULT_JOIN_TIMEOUT, TcpBackend
from rankwire.deadline import Deadline
from rankwire.errors import ConfigurationError, RendezvousError
from rankwire.forking import renew_in_child
from rankwire.links.protection import Tls

__all__ = ["Place", "connect"]

RANK = "RANKWIRE_RANK"
WORLD_SIZE = "RANKWIRE_WORLD_SIZE"
ADDRESS = "RANKWIRE_ADDRESS"
JOB = "RANKWIRE_JOB"
SECRET_FD = "RANKWIRE_SECRET_FD"
LISTEN_FD = "RANKWIRE_LISTEN_FD"
SECURITY = "RANKWIRE_SECURITY"
TLS_CERT, TLS_KEY, TLS_CA = "RANKWIRE_TLS_CERT", "RANKWIRE_TLS_KEY", "RANKWIRE_TLS_CA"

# A launcher writes 32 bytes. Above this it is not a secret but some other pipe.
_MAX_SECRET_NBYTES = 4096
# Between two tries to join while the last world still stands.
_PAUSE = 0.05

Environment = MutableMapping[str, str]


@dataclass(frozen=True, slots=True)
class Place:
    """What a launcher tells one rank.

    Attributes:
        rank: This process's index, from 0.
        world_size: The number of ranks.
        address: ``host:port`` at which rank 0 listens.
        job: Name of the job; ranks of another job are refused.
        secret: The job's secret; None leaves it to the backend's own sources.
        listener: For rank 0, the socket that listens at ``address`` already.
    """

    rank: int
    world_size: int
    address: str
    job: str = "default"
    secret: bytes | None = field(default=None, repr=False)
    listener: socket.socket | None = None


def connect(**options: Any) -> TcpBackend:
    """Join the world that this process was started for, and return when it is complete.

    May be called again in the same process after the first backend was closed, by all ranks alike.
    Safe from any thread.

    Args:
        **options: Arguments of ``TcpBackend``; they override what the launcher says.

    Raises:
        ConfigurationError: No launcher started this process, or its variables are incomplete.
        RendezvousError: The world did not form in time.
    """
    security = _read_security(os.environ)  # first: it may raise, and a place holds a socket
    place = _find_place(os.environ)
    arguments: dict[str, Any] = {
        "rank": place.rank,
        "world_size": place.world_size,
        "address": place.address,
        "job": place.job,
        "secret": place.secret,
        "listener": place.listener,
        **security,
    }
    arguments.update(options)
    if place.listener is not None and ("address" in options or "listener" in options):
        # The inherited socket listens at the launcher's address, not at this one.
        place.listener.close()
        arguments["listener"] = options.get("listener")
    try:
        backend = _join(arguments)
    except BaseException:
        if place.listener is not None:
            place.listener.close()
        raise
    _memory.has_connected = True
    return backend


def _join(arguments: dict[str, Any]) -> TcpBackend:
    """Join; after an earlier world, also wait until rank 0 has left that one too."""
    deadline = Deadline(arguments.get("join_timeout", DEFAULT_JOIN_TIMEOUT))
    while True:
        try:
            return TcpBackend(**arguments)
        except RendezvousError as error:
            # At the same address, a world that has formed refuses whoever comes later.
            is_old_world = _memory.has_connected and not error.missing
            if not is_old_world or deadline.remaining() <= _PAUSE:
                raise
        time.sleep(_PAUSE)
        arguments["join_timeout"] = deadline.remaining()


def _find_place(environ: Environment) -> Place:
    for read in _LAUNCHERS:
        place = read(environ)
        if place is not None:
            return place
    raise ConfigurationError(
        f"no launcher started this process: {RANK}, {WORLD_SIZE} and {ADDRESS} are not set."
        " Start it with `rankwire run -n 4 script.py`, or build a TcpBackend from your own settings"
    )


def _read_rankwire_run(environ: Environment) -> Place | None:
    """Read what ``rankwire run`` sets; by hand, the first three variables are enough."""
    if RANK not in environ:
        return None
    missing = [name for name in (WORLD_SIZE, ADDRESS) if name not in environ]
    if missing:
        raise ConfigurationError(
            f"{RANK} is set, but not {' and '.join(missing)}."
            " Start all ranks with `rankwire run -n 4 script.py`, which sets them"
        )
    rank = _read_integer(environ, RANK)
    listener = _take_listener(environ)
    if listener is not None and rank != 0:
        listener.close()
        listener = None
    return Place(
        rank=rank,
        world_size=_read_integer(environ, WORLD_SIZE),
        address=environ[ADDRESS],
        job=environ.get(JOB, "default"),
        secret=_memory.take_secret(environ),
        listener=listener,
    )


# Asked in this order; the first that knows its variables wins.
_LAUNCHERS: tuple[Callable[[Environment], Place | None], ...] = (_read_rankwire_run,)


class _Memory:
    """What this process keeps between two connects: the secret, as its pipe is read only once."""

    def __init__(self) -> None:
        self.has_connected = False
        self._lock = threading.Lock()
        renew_in_child(self._lock)
        self._secret: bytes | None = None

    def take_secret(self, environ: Environment) -> bytes | None:
        with self._lock:
            if SECRET_FD in environ:
                fd = _read_integer(environ, SECRET_FD)
                del environ[SECRET_FD]
                self._secret = _read_secret(fd)
            return self._secret


_memory = _Memory()


def _read_secret(fd: int) -> bytes:
    """Return what the pipe ``fd`` holds, and close it.

    Never blocks: the launcher wrote before it started us.
    """
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            # Some other file that got this number: it is not ours to read or close.
            raise ConfigurationError(
                f"{SECRET_FD}={fd} is not the pipe of a launcher;"
                " this process inherited the variable but not the pipe"
            )
        os.set_blocking(fd, False)
        secret = os.read(fd, _MAX_SECRET_NBYTES + 1)
    except OSError as error:
        raise ConfigurationError(
            f"the job's secret cannot be read from {SECRET_FD}={fd}: {error.strerror}."
            " Only a process that `rankwire run` itself started can join the world"
        ) from error
    os.close(fd)
    if not secret:
        raise ConfigurationError(f"{SECRET_FD}={fd} is empty: another process has read the secret")
    if len(secret) > _MAX_SECRET_NBYTES:
        raise ConfigurationError(f"{SECRET_FD}={fd} holds too much to be a secret")
    return secret


def _read_security(environ: Environment) -> dict[str, Any]:
    """Return what the environment says about protection, as arguments of ``TcpBackend``."""
    found: dict[str, Any] = {}
    if environ.get(SECURITY):
        found["security"] = environ[SECURITY]
    files = {name: environ[name] for name in (TLS_CERT, TLS_KEY, TLS_CA) if environ.get(name)}
    if files:
        missing = [name for name in (TLS_CERT, TLS_KEY, TLS_CA) if name not in files]
        if missing:
            raise ConfigurationError(
                f"{' and '.join(missing)} is not set, and TLS needs all of cert, key and ca"
            )
        found["tls"] = Tls(cert=files[TLS_CERT], key=files[TLS_KEY], ca=files[TLS_CA])
    return found


def _take_listener(environ: Environment) -> socket.socket | None:
    if LISTEN_FD not in environ:
        return None
    fd = _read_integer(environ, LISTEN_FD)
    del environ[LISTEN_FD]
    try:
        os.set_inheritable(fd, False)
        listener = socket.socket(fileno=fd)
        listener.setblocking(False)
        return listener
    except OSError as error:
        raise ConfigurationError(
            f"{LISTEN_FD}={fd} is not the listening socket of a launcher: {error.strerror}"
        ) from error


def _read_integer(environ: Environment, name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigurationError(f"{name} is {environ[name]!r}, not an integer") from None
