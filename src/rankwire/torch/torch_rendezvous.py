"""Form the world of a process group: through torch's store, or by a launcher.

Every process that reaches torch's store can read and write it, so it never contains a secret. Each
rank writes a hash of its host and user, and whether it has a secret. If all are processes of one
user on one host, rank 0 listens on loopback, and they can agree on a secret through a private file.
Otherwise all need the job's secret. False entries can prevent the world from forming, no more.

Under another launcher (``rankwire run``, ``mpiexec``, ``srun``) or with ``rankwire://``, the world
forms first, then a store for torch: a private file or a ``TCPStore``.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist

from rankwire import runtime
from rankwire.backends.connect import connect
from rankwire.backends.tcp import TcpBackend
from rankwire.collectives.objects import broadcast_object
from rankwire.errors import ConfigurationError, RendezvousError
from rankwire.rendezvous.runtime_dir import host_id
from rankwire.rendezvous.secret import is_secret_given
from rankwire.texts import name_ranks

_ADDRESS_KEY = "rankwire/place"
_REFUSED = "refused"
_LOOPBACK = "127.0.0.1"
_PATIENCE = timedelta(seconds=5)

_HOW_TO_GIVE = """\
Make one, copy the file to every host, and name it to all ranks:
  (umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > ~/job.secret)
  export RANKWIRE_SECRET_FILE=~/job.secret"""


def form_world(store: Any, rank: int, size: int, timeout: timedelta) -> TcpBackend:
    """Return the backend of a world whose ranks share a store, or raise ``RankwireError``."""
    seconds = timeout.total_seconds()
    secret = launched_secret()
    options: dict[str, Any] = {"secret": secret, "timeout": seconds, "join_timeout": seconds}
    store.set(_key_of(rank), f"{_identity()} {int(secret is not None or is_secret_given())}")
    if rank != 0:
        _wait_for(store, [_ADDRESS_KEY], size, timeout)
        place = store.get(_ADDRESS_KEY).decode()
        if place == _REFUSED:
            presences = _presences(store, size)
            store.set(_heard_key_of(rank), "")
            _check_secrets(presences)
            raise ConfigurationError("rank 0 refused to listen; its own error says why")
        return TcpBackend(rank, size, place, **options)
    _wait_for(store, [_key_of(each) for each in range(size)], size, timeout)
    try:
        presences = _presences(store, size)
        _check_secrets(presences)
        listener = _listen(store, presences)
    except ConfigurationError:
        store.set(_ADDRESS_KEY, _REFUSED)
        with suppress(RuntimeError):  # the store may end with this process
            store.wait([_heard_key_of(each) for each in range(1, size)], _PATIENCE)
        raise
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    store.set(_ADDRESS_KEY, address)
    return TcpBackend(0, size, address, listener=listener, **options)


def _key_of(rank: int) -> str:
    return f"rankwire/rank {rank}"


def _heard_key_of(rank: int) -> str:
    return f"rankwire/rank {rank} has heard"


def _identity() -> str:
    return hashlib.sha256(f"{host_id()} {os.geteuid()}".encode()).hexdigest()[:32]


def _wait_for(store: Any, keys: Sequence[str], size: int, timeout: timedelta) -> None:
    try:
        store.wait(list(keys), timeout)
    except RuntimeError as error:  # timeout, or the process that hosts the store has ended
        missing = []
        with suppress(RuntimeError):
            missing = [rank for rank in range(size) if not store.check([_key_of(rank)])]
        reason = f"not all ranks reached torch's store within {timeout.total_seconds():g} s"
        if not missing:
            reason = f"rank 0 has not published its address: {error}"
        raise RendezvousError(reason, missing=missing) from error


def _presences(store: Any, size: int) -> list[tuple[str, bool]]:
    said = [store.get(_key_of(rank)).decode().partition(" ") for rank in range(size)]
    return [(identity, has_secret == "1") for identity, _, has_secret in said]


def _are_at_one_place(presences: Sequence[tuple[str, bool]]) -> bool:
    return len({identity for identity, _ in presences}) == 1


def _check_secrets(presences: Sequence[tuple[str, bool]]) -> None:
    without = [rank for rank, (_, has_secret) in enumerate(presences) if not has_secret]
    if not _are_at_one_place(presences):
        why = "the ranks of this job are not all processes of one user on one host"
    elif len(without) < len(presences):
        why = "the other ranks have one"
    else:
        return
    if without:
        verb = "needs" if len(without) == 1 else "need"
        raise ConfigurationError(
            f"{name_ranks(without)} {verb} the secret of the job, because {why}. {_HOW_TO_GIVE}"
        )


def _listen(store: Any, presences: Sequence[tuple[str, bool]]) -> runtime.Socket:
    if _are_at_one_place(presences):
        return _bind(_LOOPBACK)
    for host in _hosts_of_rank_0(store):
        try:
            bound = _bind(host)
        except OSError:
            continue  # the address of another host
        if not ip_address(bound.getsockname()[0]).is_loopback:
            return bound
        bound.close()
    raise ConfigurationError(
        "rank 0 does not know the address by which other hosts reach it: set MASTER_ADDR to an "
        "address of its host, on all ranks"
    )


def _hosts_of_rank_0(store: Any) -> Iterator[str]:
    if host := os.environ.get("MASTER_ADDR"):
        yield host
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    if host := getattr(store, "host", ""):
        yield host


def _bind(host: str) -> runtime.Socket:
    """Return a bound socket that does not listen yet: the backend stores the secret first."""
    family, kind, protocol, _, place = runtime.getaddrinfo(host, 0, type=runtime.SOCK_STREAM)[0]
    bound = runtime.Socket(family, kind, protocol)
    try:
        bound.bind(place)
    except OSError:
        bound.close()
        raise
    return bound


_SCHEME = "rankwire"
_ADDRESS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
_VARIABLES = ("RANK", "WORLD_SIZE", *_ADDRESS_VARIABLES)

_formed: list[TcpBackend] = []  # a formed world without its process group, if any
_taken: list[TcpBackend] = []  # a launcher's world, which forms once: later groups reuse it
_secret: list[bytes] = []  # for worlds formed later, between hosts


def take_formed(rank: int, size: int) -> TcpBackend | None:
    """Return the launcher's world for the default group; None if torch's store is used."""
    if _formed and (_formed[0].rank, _formed[0].world_size) == (rank, size):
        _taken[:] = [_formed.pop()]
        return _taken[0]
    return None


def launched_secret() -> bytes | None:
    """Return the secret that the ranks agreed on inside a launcher's world, if any."""
    return _secret[0] if _secret else None


def register_launchers() -> None:
    """Register ``rankwire://`` with torch, and a fallback for ``env://`` under other launchers."""
    # Not by attribute: ``torch.distributed.rendezvous`` is a function of the same name.
    handlers = getattr(import_module("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    if _SCHEME in handlers:
        return
    dist.register_rendezvous_handler(_SCHEME, _meet)
    of_environment = handlers.get("env")
    if of_environment is not None:

        def meet(url: str, timeout: timedelta | None = None, **options: Any) -> Any:
            needed = _ADDRESS_VARIABLES if "?" in url else _VARIABLES  # the URL has the rank
            is_torchs = all(name in os.environ for name in needed)
            if timeout is not None:
                options["timeout"] = timeout
            return (of_environment if is_torchs else _meet)(url, **options)

        handlers["env"] = meet


def _meet(
    url: str, timeout: timedelta | None = None, **options: Any
) -> Iterator[tuple[Any, int, int]]:
    limit: dict[str, Any] = {} if timeout is None else {"join_timeout": timeout.total_seconds()}
    standing = [backend for backend in _taken if not backend.closed]
    backend = standing[0] if standing else connect(**limit)
    _check_place(backend, url)
    if not standing:
        _formed[:] = [backend]
    yield _store(backend), backend.rank, backend.world_size


def _check_place(backend: TcpBackend, url: str) -> None:
    launched = {"rank": backend.rank, "world_size": backend.world_size}
    for name, (value, *_) in parse_qs(urlsplit(url).query).items():
        if name in launched and value not in ("-1", str(launched[name])):
            error = ConfigurationError(
                f"the program says {name} {value}, but its launcher says {launched[name]}"
            )
            backend.close(error=error)
            raise error


def _store(backend: TcpBackend) -> Any:
    hosts = backend.hosts
    is_first = backend.rank == 0
    if all(host == hosts[0] for host in hosts):
        folder = tempfile.mkdtemp(prefix="rankwire-store-") if is_first else None
        if folder is not None:
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return dist.FileStore(f"{broadcast_object(backend, folder)}/store", backend.world_size)
    host = backend.address.rpartition(":")[0].strip("[]")
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if is_first else None
    own = None if store is None else (store.port, runtime.token_bytes(32))
    port, secret = broadcast_object(backend, own)
    _secret[:] = [secret]
    return store or dist.TCPStore(host, port, is_master=False)
