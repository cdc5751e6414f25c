"""Which of several addresses is rank 0's, where its launcher leaves that open.

Rank 0 takes the first that is its own host's and that others can reach; the others look at all of
them, again and again, until one is listened at. Who listens is proved later, when the world is
joined: here nothing is said and nothing believed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from contextlib import suppress

from rankwire import runtime
from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError, NoConnectionError, RendezvousError
from rankwire.transports.sockets import TcpAddress, connect_tcp

# For one address that does not answer at all, such as behind a firewall; and between two rounds.
_LOOK = 1.0
_PAUSE = 0.1


def own_address(addresses: Sequence[str]) -> str:
    """Return the first that stands for this host as others reach it; else the first."""
    for address in addresses:
        host = TcpAddress.parse(address).host
        with suppress(OSError):
            found = runtime.getaddrinfo(host, 0, runtime.AF_INET, runtime.SOCK_STREAM)
            where = found[0][4][0]
            # Debian's /etc/hosts has a host's own name as 127.0.1.1.
            if not ipaddress.ip_address(where).is_loopback and _is_here(str(where)):
                return address
    return addresses[0]


def _is_here(host: str) -> bool:
    with runtime.Socket(runtime.AF_INET, runtime.SOCK_DGRAM) as probe, suppress(OSError):
        probe.bind((host, 0))
        return True
    return False


def find_rank_0(addresses: Sequence[str], deadline: Deadline) -> str:
    """Return the first address at which a process listens, and wait for that.

    Raises:
        RendezvousError: None did in time.
    """
    while True:
        for address in addresses:
            with suppress(NoConnectionError, DeadlineExceededError):
                connect_tcp(TcpAddress.parse(address), deadline.sooner(_LOOK)).close()
                return address
        if deadline.remaining() <= _PAUSE:
            raise RendezvousError(
                f"nobody listened at {', '.join(addresses)} within {deadline.limit:g} s",
                missing=[0],
            )
        deadline.clock.sleep(_PAUSE)
