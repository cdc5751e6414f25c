"""TcpBackend: ranks in processes of one or several hosts.

Construction is the rendezvous: rank 0 listens and coordinates, the others join, and all return when
the whole world is up. Afterwards it is a ``mesh``: over Unix sockets where both ranks are on one
host and over TCP otherwise. This module knows where peers are, how they are dialled, and what the
control plane says of them.

Threads: the doorkeeper accepts connections and hears who has gone; everything else happens in the
threads of the user.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from rankwire.backends.base import DEFAULT_TIMEOUT
from rankwire.backends.exit_report import Fall
from rankwire.backends.mesh import Mesh
from rankwire.backends.peers import Peer
from rankwire.backends.status import PeerStatus
from rankwire.backends.tcp_formation import Formation
from rankwire.deadline import Deadline
from rankwire.errors import (
    AuthenticationError,
    ChannelClosedError,
    ConfigurationError,
    DeadlineExceededError,
    NoConnectionError,
    PeerLostError,
    PeerUnresponsiveError,
    ProtocolError,
    RankwireError,
)
from rankwire.links.connection import Connection
from rankwire.links.dialer import authenticate
from rankwire.links.poller import EpollPoller
from rankwire.links.security import Integrity, Security, Tls, choose_policy
from rankwire.links.sockets import TcpAddress, connect_tcp, connect_unix
from rankwire.links.spin import default_spin
from rankwire.rendezvous.control_messages import (
    DEFAULT_PATIENCE,
    SHORTEST_FAIL_AFTER,
    Fallen,
    Gone,
    Patience,
    Suspected,
    World,
)
from rankwire.rendezvous.runtime_dir import has_removed, remove_socket_file
from rankwire.shutdown import close_at_exit
from rankwire.wire.frames import DEFAULT_MAX_MESSAGE_NBYTES
from rankwire.wire.handshake import Purpose
from rankwire.wire.seals import Seals

if TYPE_CHECKING:
    import socket

    from rankwire.links.tls import AnySocket

__all__ = ["TcpBackend", "Transport"]

_log = logging.getLogger("rankwire")

Transport = Literal["auto", "tcp", "unix"]

DEFAULT_JOIN_TIMEOUT = 300.0
# A peer that refuses connections has died or is leaving; the control connection says which within
# this time.
_REFUSED_PATIENCE = 0.5
_INTRODUCTION_DELAY = 0.2
# For introductions under way to notice that this rank has closed. One that looks up a name does
# not; it is left to end by itself.
_INTRODUCTIONS_PATIENCE = 2.0
# A host that is there answers at once, whatever its processes do.
_CONNECT_LIMIT = 5.0
_UNANSWERED_LIMIT = 4.5


class TcpBackend(Mesh):
    """A rank of a world of processes.

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
        timeout: Seconds for every operation without a limit of its own.
        join_timeout: Seconds for the world to form.
        transport: ``"auto"`` uses Unix sockets within a host and TCP between hosts; the others
            force one.
        spin: Seconds a waiting thread polls before it sleeps; None chooses by the number of ranks
            and cores.
        max_message_nbytes: Largest message sent or accepted.
        single_copy: Read large messages of ranks on this host straight out of their memory, where
            the kernel allows it; ``link_to`` tells.
        listen: Where this rank listens: ``host``, ``host:port``, ``host:low-high`` or
            ``:low-high``; the host may be a network interface. Without it: the address that reached
            the rendezvous, and any free port. One port serves everything. For rank 0, where to
            listen if the host of ``address`` is not one of its own.
        advertise: The host by which others reach this rank, if that is not where it listens. The
            coordinator tries it before it lets the rank in.
        suspect_after: Seconds of silence after which a rank is suspected, which is told
            (``on_peer_suspected``) and changes nothing. The smallest of all ranks' counts.
        fail_after: Seconds of silence after which a rank is given up with
            ``PeerUnresponsiveError``, though its connection stands: it is stopped, swapping, or
            holds the interpreter lock. Dead processes and cut links are noticed sooner. At least
            0.1. The smallest of all ranks' counts.
        has_coordinator: Whether a launcher coordinates at ``address``, and not rank 0.
        security: ``"auto"`` protects by the address: ``"local"`` on loopback, ``"auth"`` elsewhere
            (frames are sealed), ``"tls"`` if ``tls`` is given. ``"insecure"`` runs without a
            secret. The same on all ranks; see ``SECURITY.md``.
        integrity: What protects payloads above 64 KiB of messages and collectives where frames are
            sealed: ``"crc"`` finds damage, ``"mac"`` also alteration.
        tls: Files for TLS between hosts.
        listener: For rank 0: a TCP socket that is bound and listening already. Owned by the backend
            from now on.

    Raises:
        RendezvousError: The world did not form; ``missing`` has the absent ranks.
        AuthenticationError: The secrets differ.
        ConfigurationError: The arguments cannot work.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        address: str,
        *,
        secret: bytes | str | None = None,
        job: str = "default",
        timeout: float = DEFAULT_TIMEOUT,
        join_timeout: float = DEFAULT_JOIN_TIMEOUT,
        transport: Transport = "auto",
        spin: float | None = None,
        max_message_nbytes: int = DEFAULT_MAX_MESSAGE_NBYTES,
        single_copy: bool = True,
        listen: str | None = None,
        advertise: str | None = None,
        suspect_after: float = DEFAULT_PATIENCE.suspect_after,
        fail_after: float = DEFAULT_PATIENCE.fail_after,
        has_coordinator: bool = False,
        security: Security = "auto",
        integrity: Integrity = "crc",
        tls: Tls | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        super().__init__(
            rank,
            world_size,
            timeout=timeout,
            max_message_nbytes=max_message_nbytes,
            peers={},
            single_copy=single_copy,
        )
        if transport not in ("auto", "tcp", "unix"):
            raise ConfigurationError(f'transport is "auto", "tcp" or "unix", not {transport!r}')
        suspect_after, fail_after = Deadline(suspect_after).limit, Deadline(fail_after).limit
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
        self._is_watched = True
        self._closing = threading.Event()
        self._introductions = threading.Thread(
            target=self._introduce, name="rankwire-introductions", daemon=True
        )
        where = TcpAddress.parse(address)
        policy = choose_policy(security, where, integrity=integrity, tls=tls)
        self.security = policy.mode
        self._formation = Formation(
            self,
            where,
            secret=secret,
            job=job,
            policy=policy,
            share_files=transport != "tcp",
            listener=listener,
            patience=Patience(suspect_after, fail_after),
            has_coordinator=has_coordinator,
            listen=listen,
            advertise=advertise,
        )
        try:
            self._formation.form(Deadline(join_timeout))
        except BaseException:
            self._formation.close()
            raise
        close_at_exit(self)

    def on_formed(self, world: World) -> None:
        """Get to know the peers. Called once by the formation, before any of them can dial."""
        self._me = world.members[self.rank]
        local = sum(member.host_id == self._me.host_id for member in world.members)
        self.spin = default_spin(local) if self._wanted_spin is None else self._wanted_spin
        self._hosts = [member.host_id for member in world.members]
        self._coordinator = world.coordinator
        for member in world.members:
            if member.rank != self.rank:
                self._peers[member.rank] = Peer(
                    member,
                    expects_verdict=self._expects_verdict,
                    catch_up=self._formation.catch_up,
                    on_lost=self._events.lost,
                    explain=self._explain_end,
                )

    @property
    def hosts(self) -> Sequence[object]:
        """See ``Backend.hosts``."""
        return self._hosts

    @property
    def address(self) -> str:
        """``host:port`` at which rank 0 listens, with the port that was chosen."""
        return str(self._formation.address)

    # -- connections -------------------------------------------------------------------------------

    def new_poller(self) -> EpollPoller:
        """See ``Mesh.new_poller``."""
        return EpollPoller()

    def flush_when_possible(self, connection: Connection) -> None:
        """See ``Mesh.flush_when_possible``: the doorkeeper does it."""
        self._formation.flush_when_possible(connection)

    def open_stream(
        self, peer: Peer, purpose: Purpose, service: int, deadline: Deadline
    ) -> tuple[AnySocket, Seals | None]:
        """See ``Mesh.open_stream``."""
        rank = peer.member.rank
        hello = self._formation.hello(purpose, rank, service)
        patience = Deadline(_REFUSED_PATIENCE)
        while True:
            peer.check()
            try:
                sock = self._connect(peer, deadline)
                try:
                    return authenticate(
                        sock,
                        hello,
                        key=self._formation.key_with(rank),
                        deadline=deadline,
                        check=peer.check,
                        policy=self._formation.policy,
                    )
                except BaseException:
                    sock.close()
                    raise
            except (NoConnectionError, AuthenticationError) as error:
                # All have proved the secret when the world formed: who hangs up now is going.
                if patience.expired or deadline.expired:
                    raise self._unreachable(peer, error) from error
                time.sleep(0.005)

    def _unreachable(self, peer: Peer, error: RankwireError) -> RankwireError:
        """Return what has become of a peer that lets nobody in, if nobody has told.

        Who leaves removes its socket file; who is killed cannot.
        """
        rank, member = peer.member.rank, peer.member
        if member.host_id == self._me.host_id and has_removed(member.unix_path):
            return ChannelClosedError(f"rank {rank} has left").during(peer=rank)
        return PeerLostError(rank, error.message)

    def _connect(self, peer: Peer, deadline: Deadline) -> socket.socket:
        member = peer.member
        here = member.host_id == self._me.host_id and member.unix_path
        if self._transport == "unix" and not here:
            raise ConfigurationError(
                f"rank {member.rank} is on another host: no Unix socket reaches it"
            )
        if here:
            try:
                return connect_unix(member.unix_path, deadline, check=peer.check)
            except NoConnectionError:
                # Another container of the same host does not see the file; or the peer is gone,
                # then TCP tells.
                if self._transport == "unix" or os.path.exists(member.unix_path):
                    raise
        limit = deadline.sooner(_CONNECT_LIMIT)
        try:
            return connect_tcp(TcpAddress(member.host, member.port), limit, check=peer.check)
        except DeadlineExceededError as error:
            if limit is deadline:
                raise
            raise NoConnectionError(f"{error.detail} for {limit.limit:g} s") from error

    # -- the house of the doorkeeper, on its thread ------------------------------------------------

    def on_gone(self, gone: Gone) -> None:
        """Hear from the control plane that a rank has died or left."""
        if gone.rank == self.rank:
            for rank, peer in self._peers.items():
                reason = f"the others have given up this rank: {gone.reason}"
                peer.judge(PeerLostError(rank, reason, root=self.rank))
            return
        if gone.rank not in self._peers:
            raise ProtocolError(f"the coordinator tells of rank {gone.rank}, which does not exist")
        peer = self._peers[gone.rank]
        if gone.orderly:
            peer.leave(ChannelClosedError(f"rank {gone.rank} has left").during(peer=gone.rank))
            return
        kind = PeerUnresponsiveError if gone.silent else PeerLostError
        loss = kind(gone.rank, gone.reason, remote_traceback=gone.traceback)
        peer.judge(self._losses.explain(loss, cause=gone.cause))
        if not gone.silent and peer.member.host_id == self._me.host_id and peer.member.unix_path:
            remove_socket_file(peer.member.unix_path)  # a killed process cannot remove its own

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
            _log.warning("rank %d is heard again", rank)
        self._events.suspected(rank, seconds)

    def on_silences(self, silent: dict[int, float]) -> None:
        """Hear from the coordinator who missed a beat."""
        for rank, peer in self._peers.items():
            peer.silent_for = silent.get(rank, 0.0)

    def on_coordinator_gone(self, error: RankwireError) -> None:
        """Hear that nobody tells any more who is gone."""
        self._is_watched = False
        for other in self._peers.values():  # nobody would say any more that it is heard again
            other.is_suspected, other.silent_for = False, 0.0
        peer = self._peers.get(self._coordinator)
        if peer is not None:
            if isinstance(error, ChannelClosedError):
                peer.leave(
                    ChannelClosedError(f"rank {peer.member.rank} has left").during(
                        peer=peer.member.rank
                    )
                )
            else:
                peer.judge(error)
        self._introductions.start()

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

    def _expects_verdict(self) -> bool:
        return self._is_watched and not self._closed and not self._formation.is_doorkeeper

    def status_of(self, rank: int) -> PeerStatus:
        """See ``Backend.status_of``."""
        status = super().status_of(rank)
        silences = self._formation.silences()
        return replace(status, silent_for=silences.get(status.rank, status.silent_for))

    def _introduce(self) -> None:
        """Connect to everyone, because the coordinator is gone.

        It would have told who dies. Now each rank hears of the others' ends on its own connections,
        and for that every two must have one. Not at once: mostly everyone leaves by now.
        """
        if self._closing.wait(_INTRODUCTION_DELAY):
            return
        # All at once: one that is out of reach must not keep the others from being noticed.
        threads = [
            threading.Thread(
                target=self._greet, args=(peer,), name="rankwire-introduction", daemon=True
            )
            for peer in self._peers.values()
            if peer.failure is None
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _greet(self, peer: Peer) -> None:
        try:
            deadline = Deadline(self.timeout)
            self._dial_messages(peer, deadline).greet(deadline)
        except PeerLostError as error:
            peer.fail(error)
        except ChannelClosedError as error:
            peer.leave(error)
        except RankwireError as error:
            _log.debug("rank %d was not greeted: %s", peer.member.rank, error)

    # -- leaving -----------------------------------------------------------------------------------

    def close(self, *, error: BaseException | None = None) -> None:
        """See ``Mesh.close``. Introductions under way are told to end."""
        self._closing.set()
        super().close(error=error)

    def tell_fall(self, fall: Fall) -> None:
        """See ``Mesh.tell_fall``: the last words on the control connection."""
        root = None if fall.cause == self.rank else fall.cause
        self._formation.close(Fallen(fall.reason, fall.traceback, root, fall.exit_code))

    def depart(self) -> None:
        """See ``Mesh.depart``."""
        self._formation.close()
        if self._introductions.ident is not None:
            self._introductions.join(_INTRODUCTIONS_PATIENCE)

    def leave_at_exit(self, error: BaseException | None) -> None:
        """See ``Leaving``."""
        self.close(error=error)

    def __repr__(self) -> str:
        gone = [rank for rank, peer in self._peers.items() if peer.failure is not None]
        state = "closed" if self._closed else f"gone: {gone}" if gone else "all up"
        return f"<TcpBackend rank {self.rank} of {self.world_size} at {self.address}, {state}>"
