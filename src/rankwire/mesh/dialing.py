"""Dialling a peer of a world of processes: by its Unix socket on this host, else by TCP.

It knows where peers are and how they are authenticated; what the connection is used for is the
business of ``mesh``.
"""

from __future__ import annotations

import os
from typing import Literal

from rankwire.deadline import Deadline
from rankwire.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineExceededError,
    NoConnectionError,
    PeerLostError,
    RankwireError,
)
from rankwire.links.dialer import authenticate
from rankwire.mesh.peers import Peer
from rankwire.rendezvous.formation import Formation
from rankwire.rendezvous.runtime_dir import has_removed
from rankwire.transports import dial
from rankwire.transports.byte_stream import ByteStream
from rankwire.transports.tcp_stream import TcpAddress
from rankwire.wire.control_messages import Member
from rankwire.wire.handshake import Purpose, StillConnectedError
from rankwire.wire.protocol import left
from rankwire.wire.seals import Seals

Transport = Literal["auto", "tcp", "unix"]

# A peer that refuses connections has died or is leaving; the control connection says which within
# this time.
_REFUSED_PATIENCE = 0.5
# A host that is there answers at once, whatever its processes do.
_CONNECT_LIMIT = 5.0


class Dialling:
    """How one rank reaches the others.

    Args:
        me: Where this rank is.
        transport: What to use; ``"auto"`` prefers Unix sockets.
        formation: Has the keys.
    """

    def __init__(self, me: Member, transport: Transport, formation: Formation) -> None:
        self._me = me
        self._transport = transport
        self._formation = formation

    def open_stream(
        self, peer: Peer, purpose: Purpose, service: int, deadline: Deadline
    ) -> tuple[ByteStream, Seals | None]:
        """Return a connection to a peer that has let it in, and what its frames are sealed with.

        Raises:
            PeerLostError: The peer has gone.
            ChannelClosedError: It has left.
            DeadlineExceededError: No answer in time.
        """
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
                # On a busy machine a dial may be given up after the peer has let it in. The peer
                # sees that when its thread runs again, and lets the next one in.
                if deadline.expired:
                    raise DeadlineExceededError(
                        deadline.limit, waiting_for=[rank], detail=error.message
                    ) from error
                deadline.clock.sleep(0.005)
            except (NoConnectionError, AuthenticationError) as error:
                # All have proved the secret when the world formed: who hangs up now is going.
                if patience.expired or deadline.expired:
                    raise self._unreachable(peer, error) from error
                deadline.clock.sleep(0.005)

    def _unreachable(self, peer: Peer, error: RankwireError) -> RankwireError:
        """Return what has become of a peer that lets nobody in, if nobody has told.

        Who leaves removes its socket file; who is killed cannot.
        """
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
                # Another container of the same host does not see the file; or the peer is gone,
                # then TCP tells.
                if self._transport == "unix" or os.path.exists(member.unix_path):
                    raise
        limit = deadline.sooner(_CONNECT_LIMIT)
        try:
            return dial(f"tcp://{TcpAddress(member.host, member.port)}", limit, peer.check)
        except DeadlineExceededError as error:
            if limit is deadline:
                raise
            raise NoConnectionError(f"{error.detail} for {limit.limit:g} s") from error
