"""Launching: torch programs under every launcher that ``rankwire.connect`` knows.

torch's own ``env://`` needs ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``. Where
they are missing and another launcher has started this process (``rankwire run``, ``mpiexec``,
``srun``), the world is formed by rankwire first, with its own authentication; torch's store comes
after it and carries no secret. Within one host the store is a file that only this user can read,
between hosts it is torch's, over TCP. ``init_method="rankwire://"`` asks for it by name.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist

from rankwire.backends.connect import connect
from rankwire.backends.tcp import TcpBackend
from rankwire.collectives.objects import broadcast_object
from rankwire.errors import ConfigurationError

_SCHEME = "rankwire"
_PLACE = ("MASTER_ADDR", "MASTER_PORT")
_VARIABLES = ("RANK", "WORLD_SIZE", *_PLACE)

_formed: list[TcpBackend] = []  # the world that waits for its process group, if there is one
# The one that was taken last: a launcher's world forms once, and who comes next meets in it.
_taken: list[TcpBackend] = []
_secret: list[bytes] = []  # of the worlds that are formed after it, between hosts


def take_formed(rank: int, size: int) -> TcpBackend | None:
    """Return the world that was formed for the default group; None if torch's store is the way."""
    if _formed and (_formed[0].rank, _formed[0].world_size) == (rank, size):
        _taken[:] = [_formed.pop()]
        return _taken[0]
    return None


def launched_secret() -> bytes | None:
    """Return the secret that the ranks of a launcher's world have agreed on within it, if any."""
    return _secret[0] if _secret else None


def register_launchers() -> None:
    """Have torch find the worlds of other launchers: by name, and where ``env://`` cannot work."""
    # As an attribute of its package it is a function of the same name.
    handlers = getattr(import_module("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    if _SCHEME in handlers:
        return
    dist.register_rendezvous_handler(_SCHEME, _meet)
    of_environment = handlers.get("env")
    if of_environment is not None:

        def meet(url: str, timeout: timedelta | None = None, **options: Any) -> Any:
            needed = _PLACE if "?" in url else _VARIABLES  # the program says who it is
            is_torchs = all(name in os.environ for name in needed)
            return (of_environment if is_torchs else _meet)(url, **_given(timeout), **options)

        handlers["env"] = meet


def _given(timeout: timedelta | None) -> dict[str, timedelta]:
    return {} if timeout is None else {"timeout": timeout}


def _meet(
    url: str, timeout: timedelta | None = None, **options: Any
) -> Iterator[tuple[Any, int, int]]:
    """Form the world, and yield a store, the rank and the number of ranks, as torch wants them.

    While a world stands that was formed here, the next one's ranks meet in that.
    """
    limit = {} if timeout is None else {"join_timeout": timeout.total_seconds()}
    standing = [backend for backend in _taken if not backend.closed]
    backend = standing[0] if standing else connect(**limit)
    _check_place(backend, url)
    if not standing:
        _formed[:] = [backend]
    yield _store(backend), backend.rank, backend.world_size


def _check_place(backend: TcpBackend, url: str) -> None:
    """See that a program that says its rank is the one that the launcher means.

    Raises:
        ConfigurationError: It is not.
    """
    launched = {"rank": backend.rank, "world_size": backend.world_size}
    for name, (value, *_) in parse_qs(urlsplit(url).query).items():
        if name in launched and value not in ("-1", str(launched[name])):
            error = ConfigurationError(
                f"the program says {name} {value}, its launcher {launched[name]}"
            )
            backend.close(error=error)
            raise error


def _store(backend: TcpBackend) -> Any:
    """Return a store that all ranks share."""
    hosts = backend.hosts
    is_first = backend.rank == 0
    if all(host == hosts[0] for host in hosts):
        folder = tempfile.mkdtemp(prefix="rankwire-store-") if is_first else None
        if folder is not None:
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return dist.FileStore(f"{broadcast_object(backend, folder)}/store", backend.world_size)
    host = backend.address.rpartition(":")[0].strip("[]")
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if is_first else None
    own = None if store is None else (store.port, secrets.token_bytes(32))
    port, secret = broadcast_object(backend, own)
    _secret[:] = [secret]
    return store or dist.TCPStore(host, port, is_master=False)
