"""Check that joining ranks can be reached, before authentication; find rank 0's address."""

from __future__ import annotations

import ipaddress
import os
import resource
from collections.abc import Callable, Sequence
from contextlib import suppress

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError, NoConnectionError, RankwireError, RendezvousError
from rankwire.links.acceptor import Acceptor
from rankwire.links.connection import Connection
from rankwire.rendezvous.runtime_dir import host_id
from rankwire.transports.tcp_stream import TcpAddress, connect_tcp
from rankwire.wire.control_messages import Join, Member

_LIMIT = 5.0
_LOOK = 1.0  # seconds for an address that does not answer, for example behind a firewall
_PAUSE = 0.1  # seconds between two rounds over all addresses


class Reachability:
    """Connects to each joining rank on a separate thread, and closes the connection again.

    Behind address translation or a firewall, a rank's advertised address may not work. The
    acceptor's thread calls ``on_answer`` with the connection, the join request and an error text or
    "".
    """

    def __init__(
        self, acceptor: Acceptor, on_answer: Callable[[Connection, Join, str], None]
    ) -> None:
        self._acceptor = acceptor
        self._on_answer = on_answer
        self._host_id = host_id()
        self._waiting: dict[int, tuple[Connection, Join]] = {}  # ranks that wait for an answer
        self._tried: set[int] = set()

    def check(self, connection: Connection, join: Join) -> None:
        """Check whether a rank can be reached; a rank on this host always can."""
        if join.member.host_id == self._host_id:
            self._on_answer(connection, join, "")
            return
        rank = join.member.rank
        self._waiting[rank] = connection, join
        if rank not in self._tried:
            self._try(rank, connection, join)

    def forget(self, rank: int) -> None:
        """Drop the request of a lost rank."""
        self._waiting.pop(rank, None)

    def _try(self, rank: int, connection: Connection, join: Join) -> None:
        def answered(trouble: str) -> None:
            self._tried.discard(rank)
            if rank not in self._waiting:
                return
            if self._waiting[rank][0] is connection:
                del self._waiting[rank]
                self._on_answer(connection, join, trouble)
            else:  # the rank connected again
                self._try(rank, *self._waiting[rank])

        call_back(
            join.member,
            lambda trouble: self._acceptor.call_soon(lambda: answered(trouble)),
            self._acceptor.clock,
        )
        self._tried.add(rank)


def call_back(member: Member, tell: Callable[[str], None], clock: Clock) -> None:
    """Connect to a member on a new thread, and pass ``tell`` the error text or ""."""

    def attempt() -> None:
        trouble = ""
        try:
            where = TcpAddress(member.host, member.port)
            connect_tcp(where, Deadline(_LIMIT, clock)).close()
        except DeadlineExceededError as error:
            trouble = f"{error.detail} within {_LIMIT:g} s"
        except RankwireError as error:
            trouble = error.message
        tell(trouble)

    runtime.Thread(target=attempt, name="rankwire-call-back", daemon=True).start()


def own_address(addresses: Sequence[str]) -> str:
    """Return the first address of this host that is not loopback; else the first address."""
    for address in addresses:
        host = TcpAddress.parse(address).host
        with suppress(OSError):
            found = runtime.getaddrinfo(host, 0, runtime.AF_INET, runtime.SOCK_STREAM)
            where = found[0][4][0]
            # Debian's /etc/hosts maps a host's own name to 127.0.1.1.
            if not ipaddress.ip_address(where).is_loopback and _is_here(str(where)):
                return address
    return addresses[0]


def _is_here(host: str) -> bool:
    with runtime.Socket(runtime.AF_INET, runtime.SOCK_DGRAM) as probe, suppress(OSError):
        probe.bind((host, 0))
        return True
    return False


def find_rank_0(addresses: Sequence[str], deadline: Deadline) -> str:
    """Wait until a process listens at an address and return it, or raise RendezvousError."""
    while True:
        for address in addresses:
            with suppress(NoConnectionError, DeadlineExceededError):
                connect_tcp(TcpAddress.parse(address), deadline.sooner(_LOOK)).close()
                return address
        if deadline.remaining() <= _PAUSE:
            raise RendezvousError(
                f"no process listened at {', '.join(addresses)} within {deadline.limit:g} s",
                missing=[0],
            )
        deadline.clock.sleep(_PAUSE)


def allow_files(more: int) -> int:
    """Raise the soft limit of open files by ``more``; return how many are missing.

    The soft limit is often 1024, for programs that use ``select``. Child processes inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _open_now() + more
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return 0
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return needed - limit


def _open_now() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # a container without /proc: assume an ordinary program
        return 64
