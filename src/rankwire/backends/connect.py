"""connect(): joins the world at the place that a launcher gave to this process.

``schedulers`` reads the launchers' variables; this module takes the inherited descriptors, keeps
what later calls need, and joins. It does not know how processes are started.

The secret of ``rankwire run`` stays with the launcher; a rank gets its own key, which admits it as
this rank only. The key is never in the environment. ``RANKWIRE_SECRET_FD`` names an inherited
socket over which the launcher sends it to this process alone (``secret``); the socket is read once
and closed, and the variable removed. This process keeps the key, so that ``connect()`` works again
after the first world was closed.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from rankwire import runtime
from rankwire.backends.roles import parse_roles
from rankwire.backends.tcp import DEFAULT_JOIN_TIMEOUT, TcpBackend
from rankwire.clock import REAL_TIME, Clock
from rankwire.deadline import Deadline
from rankwire.environment import DEBUG_RANK
from rankwire.errors import ConfigurationError, RankwireError, RendezvousError
from rankwire.fork import renew_in_child
from rankwire.mesh.tcp_connections import Transport
from rankwire.observe.tracebacks import install
from rankwire.rendezvous.reachability import find_rank_0, own_address
from rankwire.rendezvous.schedulers import (
    HYDRA_JOB,
    OURS,
    Assignment,
    find_assignment,
    read_integer,
)
from rankwire.rendezvous.secret import ask_for_secret
from rankwire.transports.security import Integrity, Security, Tls, files_of
from rankwire.transports.sockets import Socket
from rankwire.transports.tcp_stream import ListeningPlace
from rankwire.wire.keys import RankKey

_log = logging.getLogger("rankwire")

SECRET_FD = "RANKWIRE_SECRET_FD"
SECURITY = "RANKWIRE_SECURITY"
# The files themselves, or a folder made by `rankwire certificates`.
TLS_FILES = TLS_CERT, TLS_KEY, TLS_CA = "RANKWIRE_TLS_CERT", "RANKWIRE_TLS_KEY", "RANKWIRE_TLS_CA"
TLS_NAMES = "RANKWIRE_TLS_NAMES"
TLS_DIR = "RANKWIRE_TLS_DIR"
LISTEN, ADVERTISE = "RANKWIRE_LISTEN", "RANKWIRE_ADVERTISE"
SEGMENT = "RANKWIRE_SEGMENT"
ROLES = "RANKWIRE_ROLES"
_SETTINGS = {"security": SECURITY, "listen": LISTEN, "advertise": ADVERTISE}

# Seconds between two attempts to join while the last world still exists.
_PAUSE = 0.05
# Names as the kernel shortens them.
_HYDRA_PROXIES = ("hydra_pmi_proxy", "hydra_bstrap_pr")

Environment = MutableMapping[str, str]


class ConnectOptions(TypedDict, total=False):
    """The arguments of ``TcpBackend``, where they are described."""

    rank: int
    world_size: int
    address: str
    secret: bytes | str | None
    job: str
    timeout: float | None
    join_timeout: float
    transport: Transport
    spin: float | None
    max_message_nbytes: int
    single_copy: bool
    segment_nbytes: int
    listen: str | None
    advertise: str | None
    suspect_after: float
    fail_after: float
    has_coordinator: bool
    security: Security
    integrity: Integrity
    tls: Tls | None
    listener: Socket | None
    clock: Clock
    roles: Sequence[str] | None


def connect(**options: Unpack[ConnectOptions]) -> TcpBackend:
    """Join the world that this process was started for, and return when it is complete.

    This looks for a launcher in this order: ``rankwire run``, torchrun, Open MPI, MPICH and Intel
    MPI, Slurm's ``srun``, and plain ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``.
    It logs which one it used. ``RANKWIRE_LAUNCHER`` (``rankwire``, ``torchrun``, ``openmpi``,
    ``mpich``, ``slurm``, ``env``) chooses another one.

    When the backend is closed, a process can call this again, if all ranks do. Safe from any
    thread.

    ``RANKWIRE_LISTEN``, ``RANKWIRE_ADVERTISE`` and ``RANKWIRE_SECURITY``, and for TLS
    ``RANKWIRE_TLS_DIR`` (a folder made by ``rankwire certificates``) or ``RANKWIRE_TLS_CERT``,
    ``_KEY``, ``_CA`` and ``_NAMES`` set the arguments of those names; ``RANKWIRE_SEGMENT`` sets
    ``segment_nbytes``, ``RANKWIRE_TIMEOUT`` sets ``timeout``, ``RANKWIRE_ROLES`` sets ``roles``.

    Under ``rankwire run``, an error that ends the program is printed in short form.
    ``RANKWIRE_FULL_TRACEBACK=1`` prints all of it.

    Args:
        **options: Arguments of ``TcpBackend``; they override the environment.

    Raises:
        ConfigurationError: No launcher started this process, or its variables are incomplete.
        RendezvousError: The world did not form in time.
    """
    for option in options:
        if option not in ConnectOptions.__optional_keys__:
            raise TypeError(f"connect() got an unexpected keyword argument {option!r}")
    place = _find_assignment(os.environ)
    if place.launcher == OURS:
        install()
    arguments: dict[str, Any] = {
        "rank": place.rank,
        "world_size": place.world_size,
        "address": place.address,
        "job": place.job,
        "secret": place.secret,
        # The launcher's coordinator does not serve another address.
        "has_coordinator": place.has_coordinator and "address" not in options,
        "clock": REAL_TIME,
        **options,
    }
    if "world_size" not in options and os.environ.get(ROLES):
        arguments.setdefault("roles", parse_roles(os.environ[ROLES]))
    arguments = _read_settings(os.environ, arguments) | arguments
    _log.info(
        "rank %s of %s, started by %s; the world forms at %s",
        arguments["rank"],
        arguments["world_size"],
        place.launcher,
        arguments["address"],
    )
    try:
        if place.others and "address" not in options:
            _settle_address(place, arguments)
        backend = _join(arguments)
    except RankwireError as error:
        if place.advice and "address" not in options:
            error.add_note(f"started by {place.launcher}: {place.advice}")
        raise
    _memory.has_connected = True
    return backend


def _settle_address(place: Assignment, arguments: dict[str, Any]) -> None:
    deadline = Deadline(arguments.get("join_timeout", DEFAULT_JOIN_TIMEOUT), arguments["clock"])
    addresses = (place.address, *place.others)
    if place.rank == 0:
        arguments["address"] = own_address(addresses)
    else:
        arguments["address"] = find_rank_0(addresses, deadline)
        arguments["join_timeout"] = deadline.remaining()
    _log.info("of %s, rank 0 is at %s", ", ".join(addresses), arguments["address"])


def _join(arguments: dict[str, Any]) -> TcpBackend:
    """Join; after an earlier world, also wait until rank 0 has left that one."""
    deadline = Deadline(arguments.get("join_timeout", DEFAULT_JOIN_TIMEOUT), arguments["clock"])
    while True:
        try:
            return TcpBackend(**arguments)
        except RendezvousError as error:
            # At the same address, a world that has formed refuses ranks that come later.
            is_old_world = _memory.has_connected and not error.missing
            if not is_old_world or deadline.remaining() <= _PAUSE:
                raise
        deadline.clock.sleep(_PAUSE)
        arguments["join_timeout"] = deadline.remaining()


def _find_assignment(environ: Environment) -> Assignment:
    seen = dict(environ)
    if "PMI_RANK" in seen:
        seen[HYDRA_JOB] = _process_id_of_ancestor(_HYDRA_PROXIES)
    place = find_assignment(seen)
    if place.launcher != OURS:
        return place
    return replace(place, secret=_memory.take_secret(environ))


def _process_id_of_ancestor(names: tuple[str, ...]) -> str:
    process = os.getppid()
    while process > 1:
        try:
            # "pid (name) state parent ...", and the name may hold any character
            head, _, tail = Path(f"/proc/{process}/stat").read_text().rpartition(")")
        except OSError:
            break  # hidden, gone, or not Linux
        if head.partition("(")[2] in names:
            return str(process)
        process = int(tail.split()[1])
    return ""


class _Memory:
    """State between two calls of ``connect``: the key, because the launcher sends it only once."""

    def __init__(self) -> None:
        self.has_connected = False
        self._lock = runtime.Lock()
        renew_in_child(self._lock)
        self._secret: RankKey | None = None

    def take_secret(self, environ: Environment) -> RankKey | None:
        with self._lock:
            if SECRET_FD in environ:
                fd = read_integer(environ, SECRET_FD)
                del environ[SECRET_FD]
                self._secret = RankKey(ask_for_secret(fd, named=f"{SECRET_FD}={fd}"))
            return self._secret


_memory = _Memory()


def _read_settings(environ: Environment, known: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: environ[variable] for name, variable in _SETTINGS.items() if environ.get(variable)
    }
    if environ.get(DEBUG_RANK):
        found["timeout"] = math.inf
    if environ.get(SEGMENT):
        found["segment_nbytes"] = read_integer(environ, SEGMENT)
    if "listen" in found and known["rank"] == 0 and not known["has_coordinator"]:
        # All ranks of a host have the same variable, but this rank's port is fixed: the others
        # connect to it.
        found["listen"] = ListeningPlace.parse(found["listen"]).host or None
    if "tls" not in known and (tls := _read_tls(environ, known["rank"])):
        found["tls"] = tls
    return found


def _read_tls(environ: Environment, rank: int) -> Tls | None:
    files = {name: environ[name] for name in TLS_FILES if environ.get(name)}
    folder = environ.get(TLS_DIR)
    if folder and files:
        raise ConfigurationError(f"{TLS_DIR} and {next(iter(files))} are both set: choose one")
    if folder:
        return files_of(folder, rank)
    if not files:
        return None
    missing = [name for name in TLS_FILES if name not in files]
    if missing:
        raise ConfigurationError(
            f"{' and '.join(missing)} is not set, and TLS needs all of cert, key and ca"
        )
    names = {"names": environ[TLS_NAMES]} if environ.get(TLS_NAMES) else {}
    return Tls(cert=files[TLS_CERT], key=files[TLS_KEY], ca=files[TLS_CA], **names)
