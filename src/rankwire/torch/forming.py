"""Forming: how the ranks of a process group find each other, through torch's store.

Rank 0 listens and publishes its address, and a secret that it has made. Whoever reaches the store
can read both: the store of torch has no authentication, so it must be as well guarded as the job.
Where ``RANKWIRE_SECRET_FILE`` names a file with a secret that all ranks have, that one is used and
not published.
"""

from __future__ import annotations

import os
import secrets
import socket
from datetime import timedelta
from typing import Any

from rankwire.backends.tcp import TcpBackend
from rankwire.errors import RendezvousError

_PLACE = "rankwire/place"
_LOOPBACK = "127.0.0.1"


def form_world(store: Any, rank: int, size: int, timeout: timedelta) -> TcpBackend:
    """Return the backend of a world whose ranks share a store.

    Args:
        store: torch's, with a prefix of its own.
        rank: This rank.
        size: The number of ranks.
        timeout: For forming it, and for every operation without a limit of its own.

    Raises:
        RankwireError: The world did not form in time.
    """
    seconds = timeout.total_seconds()
    options: dict[str, Any] = {"timeout": seconds, "join_timeout": seconds}
    has_file = "RANKWIRE_SECRET_FILE" in os.environ
    if rank == 0:
        listener = _listen()
        host, port = listener.getsockname()[:2]
        secret = "" if has_file else secrets.token_hex(32)
        store.set(_PLACE, f"{host} {port} {secret}")
        return TcpBackend(
            0, size, _join(host, port), secret=secret or None, listener=listener, **options
        )
    try:
        place = store.get(_PLACE).decode()
    except RuntimeError as error:  # what the stores of torch raise when their time is up
        raise RendezvousError(f"rank 0 has not said where it is: {error}") from error
    host, port, secret = place.split(" ")
    return TcpBackend(rank, size, _join(host, int(port)), secret=secret or None, **options)


def _listen() -> socket.socket:
    """Listen where the others are told to look for rank 0, if that is an address of this host."""
    for host in (os.environ.get("MASTER_ADDR"), _LOOPBACK):
        if host:
            try:
                family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
                return socket.create_server(place[:2], family=family)
            except OSError:
                continue  # it is the address of another host
    raise RendezvousError("rank 0 cannot listen, not even on loopback")


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
