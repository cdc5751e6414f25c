"""TcpBackend: ranks in processes of one or several hosts.

Construction is the rendezvous: rank 0 listens and coordinates, the others join, and all return when
the whole world is up. Afterwards it is a ``mesh``: over Unix sockets where both ranks are on one
host and over TCP otherwise. This module knows where peers are, how they are dialled, and what the
control plane says of them.

Threads: the acceptor accepts connections and hears who has gone; everything else happens in the
threads of the user.

Size: a quarter of it are the arguments of a world, and what they mean.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from rankwire.backends.mesh import Mesh
from rankwire.clock import REAL_TIME, Clock
from rankwire.deadline import Deadline
from rankwire.errors import (
    ChannelClosedError,
    ConfigurationError,
    MembershipError,
    PeerLostError,
    PeerUnresponsiveError,
    ProtocolError,
    RankwireError,
)
from rankwire.links.connection import Connection
from rankwire.mesh.dialing import Dialling, Transport
from rankwire.mesh.introductions import Introductions
from rankwire.mesh.peers import Peer
from rankwire.mesh.roll_client import RollClient
from rankwire.mesh.segments import DEFAULT_SEGMENT_NBYTES, Segments
from rankwire.mesh.transport import NEW_GROUP
from rankwire.observe.stacks import stacks
from rankwire.observe.status import PeerStatus
from rankwire.rendezvous.formation import Formation
from rankwire.rendezvous.own_listeners import OwnKeys, OwnListeners
from rankwire.rendezvous.runtime_dir import remove_socket_file
from rankwire.rendezvous.secret import given_secret
from rankwire.shutdown import close_at_exit
from rankwire.texts import name_ranks
from rankwire.transports.byte_stream import ByteStream
from rankwire.transports.poller import EpollPoller
from rankwire.transports.security import Integrity, Security, Tls, choose_policy
from rankwire.transports.shared_memory import CAN_SHARE
from rankwire.transports.shared_segment import SharedSegment
from rankwire.transports.sockets import Socket
from rankwire.transports.spin import DEFAULT_SPIN, share_cores
from rankwire.transports.tcp_stream import ListeningPlace, TcpAddress
from rankwire.wire.control_messages import (
    DEFAULT_PATIENCE,
    SHORTEST_FAIL_AFTER,
    AgentSays,
    Doing,
    Fallen,
    Gone,
    Joined,
    Member,
    Notice,
    Patience,
    Suspected,
    World,
)
from rankwire.wire.frames import DEFAULT_MAX_MESSAGE_NBYTES
from rankwire.wire.handshake import Purpose
from rankwire.wire.protocol import left
from rankwire.wire.seals import Seals

_log = logging.getLogger("rankwire")

DEFAULT_JOIN_TIMEOUT = 300.0
_UNANSWERED_LIMIT = 4.5
# A process that has just been woken up, or has too few cores, reads its news late.
_LATE_NEWS_PATIENCE = 0.5


class TcpBackend(Mesh):
    """One rank of a world whose ranks are processes.

    Construction returns when all ranks are up, or fails on all of them, naming the ranks that are
    missing. Start the ranks in any order.

    Args:
        rank: This process's rank.
        world_size: The number of ranks; the same everywhere.
        address: ``host:port`` at which rank 0 listens. Rank 0 may use port 0 and read the chosen
            one from ``address``.
        secret: At least 16 bytes that all ranks know, or what a launcher gave this rank instead.
            Not needed on loopback, where ranks of one user find each other.
        job: A name; ranks of different jobs refuse each other.
        timeout: Seconds for every operation without its own timeout; None is
            ``RANKWIRE_TIMEOUT``, or else 60.
        join_timeout: Seconds for the world to form.
        transport: ``"auto"`` uses Unix sockets within a host and TCP between hosts; the others
            force one.
        spin: Seconds a waiting thread polls before it sleeps; None is 200 us. If there are more
            ranks than cores on this host, it yields the core between polls.
        max_message_nbytes: Largest message sent or accepted.
        single_copy: Read large messages of ranks on this host straight out of their memory, where
            the kernel allows it; ``link_to`` says whether.
        segment_nbytes: Bytes of memory that the ranks of a group on one host share for collectives
            on small and middle arrays, at most; 0 for none. Used if all of them can.
        listen: Where this rank listens: ``host``, ``host:port``, ``host:low-high`` or
            ``:low-high``; the host may be a network interface. Without it: the address that reached
            the rendezvous, and any free port. One port serves everything. For rank 0, where to
            listen if the host of ``address`` is not one of its own.
        advertise: The host by which others reach this rank, if that is not where it listens. The
            coordinator tries it before it lets the rank in.
        suspect_after: Seconds of silence after which a rank is suspected. This only calls
            ``on_peer_suspected``. The smallest value of all ranks applies.
        fail_after: Seconds of silence after which a rank is given up with
            ``PeerUnresponsiveError``, although its connection is open: it is stopped, swapping, or
            holds the interpreter lock. Dead processes and cut links are noticed sooner. At least
            0.1. The smallest value of all ranks applies.
        has_coordinator: Whether a launcher coordinates at ``address``, and not rank 0.
        security: ``"auto"`` protects by the address: ``"local"`` on loopback, ``"auth"`` elsewhere
            (frames are sealed), ``"tls"`` if ``tls`` is given. ``"insecure"`` runs without a
            secret. The same on all ranks; see ``SECURITY.md``.
        integrity: What protects payloads above 64 KiB of messages and collectives where frames are
            sealed: ``"crc"`` finds damage, ``"mac"`` also alteration.
        tls: Files for TLS between hosts.
        listener: For rank 0: a TCP socket that is bound and listening already. Owned by the backend
            from now on.
        clock: The clock that all waits use. It must run in real time, because the operating system
            waits for sockets.

    Raises:
        RendezvousError: The world did not form; ``missing`` has the absent ranks.
        AuthenticationError: The secrets differ.
        ConfigurationError: An argument is invalid.

    Size: it is a mesh, and has a method for each thing that the control plane tells it.
    """

    _SHOWN = ("address", "link_to")

    shares_memory = CAN_SHARE

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
    ) -> None:
        super().__init__(
            rank,
            world_size,
            timeout=timeout,
            max_message_nbytes=max_message_nbytes,
            peers={},
            clock=clock,
            single_copy=single_copy,
        )
        if transport not in ("auto", "tcp", "unix"):
            raise ConfigurationError(f'transport is "auto", "tcp" or "unix", not {transport!r}')
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
        self._transport = transport
        self._wanted_spin = spin
        self._segments = Segments(segment_nbytes, clock)
        self._is_watched = True
        self._introductions = Introductions(self._peers.values, self._greet, clock)
        where = TcpAddress.parse(address)
        policy = choose_policy(security, where, integrity=integrity, tls=tls)
        self.security = policy.mode
        self.ranks_return = has_coordinator
        if listener is not None and (self.rank != 0 or has_coordinator):
            raise ConfigurationError("only a rank 0 that coordinates takes a listener")
        insecure = policy.mode == "insecure"
        found = given_secret(secret, loopback=where.is_loopback, insecure=insecure)
        listeners = OwnListeners(
            self.rank,
            ListeningPlace() if listen is None else ListeningPlace.parse(listen),
            advertise=advertise,
            share_files=transport != "tcp",
            listener=listener,
        )
        self._formation = Formation(
            self,
            where,
            keys=OwnKeys(self.rank, found),
            listeners=listeners,
            job=job,
            policy=policy,
            patience=Patience(suspect_after, fail_after),
            has_coordinator=has_coordinator,
        )
        self.roll = RollClient(self._formation.report)
        self.roll.add(self)
        try:
            self._formation.form(Deadline(join_timeout, clock))
        except BaseException:
            self._formation.close()
            raise
        close_at_exit(self)

    def on_formed(self, world: World) -> None:
        """Get to know the peers. Called once by the formation, before any of them can dial."""
        self._me = world.members[self.rank]
        self.incarnation = self._me.incarnation
        if world.late:
            self.broken = MembershipError(
                f"{name_ranks(world.late)} joined when the world had formed already; {NEW_GROUP}"
            )
        self._dialling = Dialling(self._me, self._transport, self._formation)
        local = sum(member.host_id == self._me.host_id for member in world.members)
        self.spin = DEFAULT_SPIN if self._wanted_spin is None else self._wanted_spin
        self.shares_cores = share_cores(local)
        self._hosts = [member.host_id for member in world.members]
        self._coordinator = self.roll.keeper = world.coordinator
        for member in world.members:
            if member.rank != self.rank:
                self._peers[member.rank] = self._meet(member)

    def _meet(self, member: Member) -> Peer:
        return Peer(
            member,
            self.clock,
            await_verdict=self._await_verdict,
            on_lost=self._events.lost,
            explain=self._explain_end,
            lookout=self.lookout,
        )

    @property
    def hosts(self) -> Sequence[object]:
        """Where each rank is: those of ranks on one host are equal."""
        return self._hosts

    @property
    def address(self) -> str:
        """``host:port`` at which rank 0 listens, with the port that was chosen."""
        return str(self._formation.address)

    # -- shared memory -----------------------------------------------------------------------------

    def new_segment(self, rank: int, size: int) -> SharedSegment | None:
        """Make memory for the ranks of a group on this host to meet in."""
        if self._transport == "tcp":
            return None
        return self._segments.make(rank, size, self.spin_in_segments)

    def why_nothing_shared(self) -> str:
        """Return why collectives do not meet in shared memory; empty if they can, from here."""
        if not CAN_SHARE:
            return "memory is shared on Linux and x86-64 only"
        if self._transport == "tcp":
            return 'Unix sockets are turned off by transport="tcp"'
        return self._segments.why_not()

    def open_segment(self, src: int, offer: bytes, rank: int, size: int) -> SharedSegment | None:
        """Open what another rank has made, and has told this one of."""
        connection = self._peers[src].inbox.connection
        pid = 0
        with suppress(OSError):  # closed meanwhile
            pid = 0 if connection is None else connection.stream.peer_pid()
        return self._segments.open(pid, offer, rank, size, self.spin_in_segments)

    # -- connections -------------------------------------------------------------------------------

    def new_poller(self) -> EpollPoller:
        """Return an epoll."""
        return EpollPoller()

    def flush_when_possible(self, connection: Connection) -> None:
        """Have the acceptor's thread send what a connection holds back."""
        acceptor = self._formation.acceptor
        assert acceptor is not None  # there is a peer
        acceptor.flush_when_possible(connection)

    def open_stream(
        self, peer: Peer, purpose: Purpose, service: int, deadline: Deadline
    ) -> tuple[ByteStream, Seals | None]:
        """Return a connection to a peer that has let it in, and what its frames are sealed with."""
        return self._dialling.open_stream(peer, purpose, service, deadline)

    # -- what the acceptor asks, on its thread ------------------------------------------------

    def on_gone(self, gone: Gone) -> None:
        """Hear from the control plane that a rank has died or left."""
        try:
            self._take_in(gone)
        finally:
            self.roll.note_gone(gone.rank)
            self._segments.disturb()

    def _take_in(self, gone: Gone) -> None:
        if gone.rank == self.rank:
            for rank, peer in self._peers.items():
                reason = f"the others have given up this rank: {gone.reason}"
                peer.judge(PeerLostError(rank, reason, root=self.rank))
            return
        if gone.rank not in self._peers:
            raise ProtocolError(f"the coordinator reports rank {gone.rank}, which does not exist")
        peer = self._peers[gone.rank]
        if gone.orderly:
            peer.leave(left(gone.rank))
            return
        kind = PeerUnresponsiveError if gone.silent else PeerLostError
        loss = kind(gone.rank, gone.reason, remote_traceback=gone.traceback)
        peer.judge(self._losses.explain(loss, cause=gone.cause))
        if not gone.silent and peer.member.host_id == self._me.host_id and peer.member.unix_path:
            remove_socket_file(peer.member.unix_path)  # a killed process cannot remove its own

    def on_notice(self, notice: Notice) -> None:
        """Keep what the coordinator tells about a collective, for those who wait in it."""
        self.roll.deliver(notice)
        self._segments.disturb()

    def on_joined(self, joined: Joined) -> None:
        """Hear from the control plane that a rank was started anew, and is back."""
        member = joined.member
        self.roll.note_back(member.rank)
        if member.rank not in self._peers:
            raise ProtocolError(f"the coordinator reports rank {member.rank}, which is not a peer")
        self._formation.keys.take(joined)
        self._hosts[member.rank] = member.host_id
        self._replace(self._meet(member))

    def tell_agent(self, says: AgentSays) -> bool:
        """Tell the coordinator what an agent of this rank does."""
        return self._formation.report(says)

    def describe_doing(self) -> Doing:
        """Return what this process does, for those who wait for it."""
        return Doing(stacks(), self.status().waiting_on, self.blocked_on())

    def on_suspected(self, suspected: Suspected) -> None:
        """Hear from the control plane that a rank has become silent, or is heard again."""
        rank, seconds = suspected.rank, suspected.seconds
        peer = self._peers.get(rank)
        if peer is None:
            return  # this rank itself, or a launcher
        peer.is_suspected = seconds > 0.0
        peer.silent_for = seconds  # of the coordinator, no beat tells
        if peer.is_suspected:
            _log.warning("rank %d has been silent for %.1f s", rank, seconds)
        else:
            _log.warning("rank %d responds again", rank)
        self._events.suspected(rank, seconds)

    def on_silences(self, silent: dict[int, float]) -> None:
        """Hear from the coordinator who missed a beat."""
        for rank, peer in self._peers.items():
            peer.silent_for = silent.get(rank, 0.0)

    def on_coordinator_gone(self, error: RankwireError) -> None:
        """Hear that nobody tells any more who is gone."""
        self._is_watched = self.roll.is_kept = False
        self._presences.end()
        for other in self._peers.values():  # nobody would say any more that it is heard again
            other.is_suspected, other.silent_for = False, 0.0
        peer = self._peers.get(self._coordinator)
        if peer is not None:
            if isinstance(error, ChannelClosedError):
                peer.leave(left(peer.member.rank))
            else:
                peer.judge(error)
        self._introductions.begin()

    def look_for_silence(self) -> None:
        """Look for what nobody tells, now and then.

        Hosts that do not answer on a busy connection; without a coordinator, also ends.
        """
        for peer in self._peers.values():
            peer.look_for_silence(_UNANSWERED_LIMIT)
            if not self._is_watched:
                peer.look_for_end()

    def _explain_end(self, error: RankwireError) -> RankwireError:
        return self._losses.explain(error, is_told=self._is_watched)

    def _await_verdict(self, peer: Peer, patience: float) -> None:
        acceptor = self._formation.acceptor
        assert acceptor is not None  # there is a peer
        # The acceptor brings the verdict: its own thread must not wait for it.
        if self._is_watched and not self._closed and not acceptor.is_current_thread:
            if not peer.is_judged_within(patience):
                acceptor.catch_up(Deadline(_LATE_NEWS_PATIENCE, self.clock))

    def status_of(self, rank: int) -> PeerStatus:
        """Return what is known about a peer; its silence by this rank's own count if it has one."""
        status = super().status_of(rank)
        silences = self._formation.silences()
        return replace(status, silent_for=silences.get(status.rank, status.silent_for))

    def silences(self) -> dict[int, float]:
        """Return the ranks that missed beats, with the seconds of their silence."""
        counted = self._formation.silences()
        seconds = {
            rank: counted.get(rank, peer.silent_for)
            for rank, peer in self._peers.items()
            if peer.failure is None
        }
        return {rank: silence for rank, silence in seconds.items() if silence}

    def _greet(self, peer: Peer) -> None:
        deadline = Deadline(self.timeout, self.clock)
        self._dial_messages(peer, deadline).greet(deadline)

    # -- leaving -----------------------------------------------------------------------------------

    def close(self, *, error: BaseException | None = None) -> None:
        """Leave; introductions that have not begun do not begin any more."""
        self._introductions.cancel()
        if error is None and self._coordinator == self.rank and not self._closed:
            self.roll.leave()  # the others lose the roll with this rank
        super().close(error=error)

    def tell_fall(self, fallen: Fallen) -> None:
        """Tell the others by which error this rank leaves, in last words to the coordinator."""
        self._formation.close(fallen)

    def depart(self) -> None:
        """Say the last words on the control connections, if none were said."""
        self._formation.close()
        self._introductions.join()

    def leave_at_exit(self, error: BaseException | None) -> None:
        """Leave at the end of the interpreter, by the error that the program ends with."""
        self.close(error=error)

    def __repr__(self) -> str:
        gone = [rank for rank, peer in self._peers.items() if peer.failure is not None]
        state = "closed" if self._closed else f"gone: {gone}" if gone else "all up"
        return f"<TcpBackend rank {self.rank} of {self.world_size} at {self.address}, {state}>"
