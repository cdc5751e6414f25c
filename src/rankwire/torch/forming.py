"""Forming: how the ranks of a process group find each other, through torch's store.

Every process that reaches torch's store can read and write there: it has no authentication, and the
file of a ``file://`` store is readable by all. So only what is no secret goes through it. Each rank
says which host and user it belongs to, as a hash, and whether it was given a secret. Rank 0 waits
for all of them, listens, and publishes its address:

- If all ranks are processes of one user on one host, it listens on loopback. Unless they were given
  a secret, they agree on one through a file in the runtime folder, which other users cannot read
  (``rendezvous/secret.py``).
- Otherwise all ranks must have been given the secret of the job, and rank 0 listens where the
  others can reach it. If they were not, all ranks refuse, and say how to give them one.

A process that writes lies into the store can prevent that the world forms. It cannot join, and
learns no secret.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

from rankwire.backends.tcp import TcpBackend
from rankwire.errors import ConfigurationError, RendezvousError
from rankwire.rendezvous.runtime_dir import host_id
from rankwire.rendezvous.secret import is_secret_given
from rankwire.texts import name_ranks
from rankwire.torch.launching import launched_secret

_PLACE = "rankwire/place"
_REFUSED = "refused"
_LOOPBACK = "127.0.0.1"
_PATIENCE = timedelta(seconds=5)

_HOW_TO_GIVE = """\
Make one, copy the file to every host, and name it to all ranks:
  (umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > ~/job.secret)
  export RANKWIRE_SECRET_FILE=~/job.secret"""


def form_world(store: Any, rank: int, size: int, timeout: timedelta) -> TcpBackend:
    """Return the backend of a world whose ranks share a store.

    Args:
        store: torch's, with a prefix of its own.
        rank: This rank.
        size: The number of ranks.
        timeout: For forming it, and for every operation without a limit of its own.

    Raises:
        RankwireError: The world did not form in time.
        ConfigurationError: The ranks have no secret, and need one.
    """
    seconds = timeout.total_seconds()
    secret = launched_secret()
    options: dict[str, Any] = {"secret": secret, "timeout": seconds, "join_timeout": seconds}
    store.set(_key_of(rank), f"{_identity()} {int(secret is not None or is_secret_given())}")
    if rank != 0:
        _wait_for(store, [_PLACE], size, timeout)
        place = store.get(_PLACE).decode()
        if place == _REFUSED:
            presences = _presences(store, size)
            store.set(_heard_key_of(rank), "")
            _check_secrets(presences)
            raise ConfigurationError("rank 0 has refused to listen, and says why")
        return TcpBackend(rank, size, place, **options)
    _wait_for(store, [_key_of(each) for each in range(size)], size, timeout)
    try:
        presences = _presences(store, size)
        _check_secrets(presences)
        listener = _listen(store, presences)
    except ConfigurationError:
        store.set(_PLACE, _REFUSED)
        with suppress(RuntimeError):  # the store may end with this process
            store.wait([_heard_key_of(each) for each in range(1, size)], _PATIENCE)
        raise
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    store.set(_PLACE, address)
    return TcpBackend(0, size, address, listener=listener, **options)


def _key_of(rank: int) -> str:
    return f"rankwire/rank {rank}"


def _heard_key_of(rank: int) -> str:
    return f"rankwire/rank {rank} has heard"


def _identity() -> str:
    """Return a text that is equal for two processes of one user on one host."""
    return hashlib.sha256(f"{host_id()} {os.geteuid()}".encode()).hexdigest()[:32]


def _wait_for(store: Any, keys: Sequence[str], size: int, timeout: timedelta) -> None:
    """Wait until keys are in the store.

    Raises:
        RendezvousError: They are not in time; it names the ranks that have not come to the store.
    """
    try:
        store.wait(list(keys), timeout)
    except RuntimeError as error:  # the time is up, or the process that has the store has ended
        missing = []
        with suppress(RuntimeError):
            missing = [rank for rank in range(size) if not store.check([_key_of(rank)])]
        reason = f"not all ranks came to torch's store within {timeout.total_seconds():g} s"
        if not missing:
            reason = f"rank 0 has not said where it is: {error}"
        raise RendezvousError(reason, missing=missing) from error


def _presences(store: Any, size: int) -> list[tuple[str, bool]]:
    """Return what each rank has said of itself: its host and user, and whether it has a secret."""
    said = [store.get(_key_of(rank)).decode().partition(" ") for rank in range(size)]
    return [(identity, has_secret == "1") for identity, _, has_secret in said]


def _are_at_one_place(presences: Sequence[tuple[str, bool]]) -> bool:
    return len({identity for identity, _ in presences}) == 1


def _check_secrets(presences: Sequence[tuple[str, bool]]) -> None:
    """See that all ranks were given a secret, or that none was and they can agree on one.

    Raises:
        ConfigurationError: It is not so; it says how to give them one.
    """
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


def _listen(store: Any, presences: Sequence[tuple[str, bool]]) -> socket.socket:
    """Bind a socket for rank 0 where the other ranks can reach it.

    Raises:
        ConfigurationError: No such address is known.
    """
    if _are_at_one_place(presences):
        return _bind(_LOOPBACK)
    for host in _hosts_of_rank_0(store):
        try:
            bound = _bind(host)
        except OSError:
            continue  # it is the address of another host
        if not ip_address(bound.getsockname()[0]).is_loopback:
            return bound
        bound.close()
    raise ConfigurationError(
        "rank 0 does not know by which address ranks of other hosts reach it: set MASTER_ADDR to "
        "an address of its host, on all ranks"
    )


def _hosts_of_rank_0(store: Any) -> Iterator[str]:
    """Yield the names by which the other ranks may know the host of rank 0."""
    if host := os.environ.get("MASTER_ADDR"):
        yield host
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    if host := getattr(store, "host", ""):
        yield host


def _bind(host: str) -> socket.socket:
    """Return a socket that is bound and does not listen: the backend lays out the secret first."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.bind(place)
    except OSError:
        bound.close()
        raise
    return bound
