"""Connections in a world of processes: by Unix socket within a host, by TCP between hosts.

Also connects a rank to all others when the coordinator is gone: without its reports, each rank
notices the others' ends on its own connections, so every two ranks need one.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Literal

from rankwire import runtime
from rankwire.deadline import Deadline
from rankwire.errors import (
    AuthenticationError,
    ChannelClosedError,
    ConfigurationError,
    DeadlineExceededError,
    NoConnectionError,
    PeerLostError,
    RankwireError,
)
from rankwire.links.connection import Connection
from rankwire.links.dialer import authenticate
from rankwire.mesh.connections import Connections
from rankwire.mesh.peers import Peer
from rankwire.override import override
from rankwire.rendezvous.runtime_dir import has_removed
from rankwire.transports import dial
from rankwire.transports.byte_stream import ByteStream
from rankwire.transports.poller import EpollPoller
from rankwire.transports.tcp_stream import TcpAddress
from rankwire.wire.control_messages import Member
from rankwire.wire.handshake import Purpose, StillConnectedError
from rankwire.wire.protocol import left
from rankwire.wire.seals import Seals

if TYPE_CHECKING:
    from rankwire.mesh.tcp_mesh import TcpMesh

_log = logging.getLogger("rankwire")

Transport = Literal["auto", "tcp", "unix"]

# A peer that refuses connections has crashed or is leaving; the control connection reports which
# within this time.
_REFUSED_PATIENCE = 0.5
# A reachable host answers at once, whatever its processes do.
_CONNECT_LIMIT = 5.0
_INTRODUCTIONS_DELAY = 0.2  # seconds
# For introductions under way to notice that this rank has closed. One that resolves a name does
# not; it ends by itself.
_INTRODUCTIONS_PATIENCE = 2.0


class TcpConnections(Connections):
    """Connects one rank of a world of processes; ``me`` is its own address."""

    def __init__(
        self, mesh: TcpMesh, me: Member, transport: Transport, *, single_copy: bool
    ) -> None:
        super().__init__(mesh, single_copy=single_copy)
        self._me = me
        self._transport = transport
        self._formation = mesh.formation

    @override
    def new_poller(self) -> EpollPoller:
        return EpollPoller()

    @override
    def flush_when_possible(self, connection: Connection) -> None:
        acceptor = self._formation.acceptor
        assert acceptor is not None  # there is a peer
        acceptor.flush_when_possible(connection)

    @override
    def open_stream(
        self, peer: Peer, purpose: Purpose, service: int, deadline: Deadline
    ) -> tuple[ByteStream, Seals | None]:
        rank = peer.member.rank
        hello = self._formation.hello(purpose, rank, service)
        patience = Deadline(_REFUSED_PATIENCE, deadline.clock)
        while True:
            peer.check()
            try:
                sock = self._connect(peer, deadline)
                try:
                    return authenticate(
                        sock,
                        hello,
                        key=self._formation.keys.shared[rank],
                        deadline=deadline,
                        check=peer.check,
                        policy=self._formation.policy,
                    )
                except BaseException:
                    sock.close()
                    raise
            except StillConnectedError as error:
                # On a busy machine the dialler may give up after the peer has accepted. The peer
                # sees that when its thread runs again, and then accepts the next one.
                if deadline.expired:
                    raise DeadlineExceededError(
                        deadline.limit, waiting_for=[rank], detail=error.message
                    ) from error
                deadline.clock.sleep(0.005)
            except (NoConnectionError, AuthenticationError) as error:
                # All ranks proved the secret when the world formed: a peer that hangs up now is
                # going.
                if patience.expired or deadline.expired:
                    raise self._unreachable(peer, error) from error
                deadline.clock.sleep(0.005)

    def _unreachable(self, peer: Peer, error: RankwireError) -> RankwireError:
        # No report came. A rank that leaves removes its socket file; a killed one cannot.
        rank, member = peer.member.rank, peer.member
        if member.host_id == self._me.host_id and has_removed(member.unix_path):
            return left(rank)
        return PeerLostError(rank, error.message)

    def _connect(self, peer: Peer, deadline: Deadline) -> ByteStream:
        member = peer.member
        here = member.host_id == self._me.host_id and member.unix_path
        if self._transport == "unix" and not here:
            raise ConfigurationError(
                f"rank {member.rank} is on another host: no Unix socket reaches it"
            )
        if here:
            try:
                return dial(f"unix://{member.unix_path}", deadline, peer.check)
            except NoConnectionError:
                # Another container of the same host does not see the file. Or the peer is gone:
                # then TCP finds out.
                if self._transport == "unix" or os.path.exists(member.unix_path):
                    raise
        limit = deadline.sooner(_CONNECT_LIMIT)
        try:
            return dial(f"tcp://{TcpAddress(member.host, member.port)}", limit, peer.check)
        except DeadlineExceededError as error:
            if limit is deadline:
                raise
            raise NoConnectionError(f"{error.detail} for {limit.limit:g} s") from error


class Introductions:
    """Connects to all peers, because the coordinator is gone.

    Not at once: mostly all ranks are leaving. ``begin`` starts one thread that waits and joins the
    others, and one for each peer while it connects.
    """

    def __init__(self, mesh: TcpMesh) -> None:
        self._mesh = mesh
        self._is_ending = runtime.Event()
        self._thread = runtime.Thread(target=self._run, name="rankwire-introductions", daemon=True)

    def begin(self) -> None:
        """Connect to all peers after a delay of 0.2 s."""
        self._thread.start()

    def cancel(self) -> None:
        """Prevent introductions that have not begun."""
        self._is_ending.set()

    def join(self) -> None:
        """Wait for those under way, at most ``_INTRODUCTIONS_PATIENCE`` seconds."""
        if self._thread.ident is not None:
            self._mesh.clock.join(self._thread, _INTRODUCTIONS_PATIENCE)

    def _run(self) -> None:
        if self._mesh.clock.wait(self._is_ending, _INTRODUCTIONS_DELAY):
            return
        # All at once: an unreachable peer must not delay the others.
        threads = [
            runtime.Thread(
                target=self._introduce, args=(peer,), name="rankwire-introduction", daemon=True
            )
            for peer in self._mesh.peers.values()
            if peer.failure is None
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            self._mesh.clock.join(thread)

    def _introduce(self, peer: Peer) -> None:
        try:
            self._greet(peer)
        except PeerLostError as error:
            peer.fail(error)
        except ChannelClosedError as error:
            peer.leave(error)
        except RankwireError as error:
            _log.debug("rank %d was not greeted: %s", peer.member.rank, error)

    def _greet(self, peer: Peer) -> None:
        deadline = Deadline(self._mesh.timeout, self._mesh.clock)
        self._mesh.connections.for_messages(peer, deadline).greet(deadline)
