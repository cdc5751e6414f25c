"""TcpBackend: ranks in processes of one or several hosts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from rankwire.backends.arguments import check_world
from rankwire.backends.base import Backend
from rankwire.backends.roles import roles_of_world
from rankwire.clock import REAL_TIME, Clock
from rankwire.deadline import Deadline
from rankwire.errors import ConfigurationError, RankwireError
from rankwire.finalizers import close_at_exit
from rankwire.mesh.connections import Link
from rankwire.mesh.segments import DEFAULT_SEGMENT_NBYTES
from rankwire.mesh.tcp_connections import Transport
from rankwire.mesh.tcp_mesh import TcpMesh
from rankwire.rendezvous.formation import Formation, OwnListeners
from rankwire.rendezvous.secret import OwnKeys, given_secret
from rankwire.transports.security import Integrity, Security, Tls, choose_policy
from rankwire.transports.sockets import Socket
from rankwire.transports.tcp_stream import ListeningPlace, TcpAddress
from rankwire.wire.control_messages import DEFAULT_PATIENCE, SHORTEST_FAIL_AFTER, Patience
from rankwire.wire.frames import DEFAULT_MAX_MESSAGE_NBYTES
from rankwire.wire.handshake import job_id

DEFAULT_JOIN_TIMEOUT = 300.0


class TcpBackend(Backend):
    """One rank of a world whose ranks are processes.

    The constructor returns when all ranks are up, or fails on all of them, naming the missing
    ranks. Start the ranks in any order.

    Args:
        rank: This process's rank.
        world_size: The number of ranks; the same everywhere.
        address: ``host:port`` at which rank 0 listens. Rank 0 may use port 0 and read the chosen
            one from ``address``.
        secret: At least 16 bytes that all ranks share, or the launcher's key for this rank. Not
            needed on loopback, where ranks of one user find each other.
        job: A name; ranks of different jobs refuse each other.
        timeout: Default seconds for operations; None uses ``RANKWIRE_TIMEOUT``, or else 60.
        join_timeout: Seconds for the world to form.
        transport: ``"auto"`` uses Unix sockets within a host and TCP between hosts; ``"tcp"`` and
            ``"unix"`` force one.
        spin: Seconds that a waiting thread polls before it sleeps; None is 200 us. With more ranks
            than cores on this host, it yields the core between polls.
        max_message_nbytes: Largest message sent or accepted.
        single_copy: Read large messages of ranks on this host directly from their memory, where the
            kernel allows it; ``link_to`` says whether.
        segment_nbytes: Maximum bytes of memory that the ranks of a group on one host share for
            collectives on small and middle arrays; 0 for none. Used if all of them can.
        listen: Where this rank listens: ``host``, ``host:port``, ``host:low-high`` or
            ``:low-high``; the host may be a network interface. Default: the address that reached
            the rendezvous, and any free port. One port serves everything. For rank 0, where to
            listen if the host of ``address`` is not one of its own.
        advertise: The host by which others reach this rank, if it differs from where it listens.
            The coordinator tries it before it admits the rank.
        suspect_after: Seconds of silence after which a rank is suspected. This only calls
            ``on_peer_suspected``. The smallest value of all ranks applies.
        fail_after: Seconds of silence after which a rank is removed with
            ``PeerUnresponsiveError``, although its connection is open: it is stopped, swapping, or
            holds the interpreter lock. Dead processes and cut links are noticed sooner. At least
            0.1. The smallest value of all ranks applies.
        has_coordinator: Whether a launcher coordinates at ``address``, and not rank 0.
        security: ``"auto"`` protects by the address: ``"local"`` on loopback, ``"auth"`` elsewhere
            (frames are sealed), ``"tls"`` if ``tls`` is given. ``"insecure"`` runs without a
            secret. The same on all ranks; see ``SECURITY.md``.
        integrity: What protects payloads above 64 KiB of messages and collectives where frames are
            sealed: ``"crc"`` detects damage, ``"mac"`` also alteration.
        tls: Files for TLS between hosts.
        listener: For rank 0: a bound and listening TCP socket, which the backend owns from now on.
        clock: The clock that all waits use. It must run in real time, because the operating system
            waits for sockets.
        roles: The role of each rank, such as ``["trainer", "rollout", "rollout"]``; the same on all
            ranks. ``rankwire run`` gives them.

    Raises:
        RendezvousError: The world did not form; ``missing`` has the absent ranks.
        AuthenticationError: The secrets differ.
        ConfigurationError: An argument is invalid.
    """

    _SHOWN = ("address", "link_to")

    mesh: TcpMesh
    _MESH: ClassVar[type[TcpMesh]] = TcpMesh

    def __init__(
        self,
        rank: int,
        world_size: int,
        address: str,
        *,
        secret: bytes | str | None = None,
        job: str = "default",
        timeout: float | None = None,
        join_timeout: float = DEFAULT_JOIN_TIMEOUT,
        transport: Transport = "auto",
        spin: float | None = None,
        max_message_nbytes: int = DEFAULT_MAX_MESSAGE_NBYTES,
        single_copy: bool = True,
        segment_nbytes: int = DEFAULT_SEGMENT_NBYTES,
        listen: str | None = None,
        advertise: str | None = None,
        suspect_after: float = DEFAULT_PATIENCE.suspect_after,
        fail_after: float = DEFAULT_PATIENCE.fail_after,
        has_coordinator: bool = False,
        security: Security = "auto",
        integrity: Integrity = "crc",
        tls: Tls | None = None,
        listener: Socket | None = None,
        clock: Clock = REAL_TIME,
        roles: Sequence[str] | None = None,
    ) -> None:
        rank, world_size = check_world(rank, world_size)
        names = roles_of_world(roles, world_size)
        if transport not in ("auto", "tcp", "unix"):
            raise ConfigurationError(f'transport is "auto", "tcp" or "unix", not {transport!r}')
        where = TcpAddress.parse(address)
        policy = choose_policy(security, where, integrity=integrity, tls=tls)
        if listener is not None and (rank != 0 or has_coordinator):
            raise ConfigurationError("only a rank 0 that coordinates takes a listener")
        listeners = OwnListeners(
            rank,
            ListeningPlace() if listen is None else ListeningPlace.parse(listen),
            advertise=advertise,
            share_files=transport != "tcp",
            listener=listener,
        )
        is_insecure = policy.mode == "insecure"
        secret = given_secret(secret, loopback=where.is_loopback, insecure=is_insecure)
        make_formation = partial(
            Formation,
            address=where,
            keys=OwnKeys(rank, secret),
            listeners=listeners,
            job=job_id(job),
            policy=policy,
            patience=_check_patience(suspect_after, fail_after, clock),
            has_coordinator=has_coordinator,
        )
        mesh = self._MESH(
            rank,
            world_size,
            make_formation,
            timeout=timeout,
            join_timeout=join_timeout,
            transport=transport,
            spin=spin,
            max_message_nbytes=max_message_nbytes,
            single_copy=single_copy,
            segment_nbytes=segment_nbytes,
            clock=clock,
        )
        super().__init__(mesh)
        self.roles = names
        close_at_exit(self)

    @property
    def address(self) -> str:
        """``host:port`` at which rank 0 listens, with the port that was chosen."""
        return str(self.mesh.formation.address)

    def link_to(self, rank: int, timeout: float | None = None) -> Link:
        """Return how messages to a rank are sent; connect first if necessary."""
        deadline = Deadline.of(timeout, self.timeout, self.clock)
        try:
            return self.mesh.connections.link_to(self._check_peer(rank), deadline)
        except RankwireError as error:
            raise self.failed(error, "link_to", deadline, rank) from error.__cause__

    def leave_at_exit(self, error: BaseException | None) -> None:
        """Leave at the end of the interpreter, with the error that ends the program."""
        self.close(error=error)

    def __repr__(self) -> str:
        gone = [rank for rank, peer in self.mesh.peers.items() if peer.failure is not None]
        state = "closed" if self.closed else f"gone: {gone}" if gone else "all up"
        return f"<TcpBackend rank {self.rank} of {self.world_size} at {self.address}, {state}>"


def _check_patience(suspect_after: float, fail_after: float, clock: Clock) -> Patience:
    suspect_after = Deadline(suspect_after, clock).limit
    fail_after = Deadline(fail_after, clock).limit
    if not 0 < suspect_after <= fail_after:
        raise ConfigurationError(
            "a rank is suspected before it is given up: 0 < suspect_after <= fail_after, not "
            f"{suspect_after!r} and {fail_after!r}"
        )
    if fail_after < SHORTEST_FAIL_AFTER:
        raise ConfigurationError(
            f"a rank is given up after {SHORTEST_FAIL_AFTER:g} s of silence or later, not "
            f"fail_after={fail_after!r}"
        )
    return Patience(suspect_after, fail_after)
