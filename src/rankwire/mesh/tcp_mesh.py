"""The mesh of a world of processes: Unix sockets within a host, TCP between hosts.

The constructor performs the rendezvous: rank 0 listens and coordinates, the others join, and all
return when the whole world is up. This module knows the peers' addresses and takes the control
plane's reports.

Threads: the acceptor accepts connections and receives the reports; everything else runs in the
user's threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import (
    ChannelClosedError,
    MembershipError,
    PeerLostError,
    PeerUnresponsiveError,
    ProtocolError,
    RankwireError,
)
from rankwire.mesh.inquiries import ControlInquiries
from rankwire.mesh.mesh import NEW_GROUP, Mesh
from rankwire.mesh.peers import Peer
from rankwire.mesh.roll_client import RollClient
from rankwire.mesh.segments import Segments
from rankwire.mesh.tcp_connections import Introductions, TcpConnections, Transport
from rankwire.override import override
from rankwire.rendezvous.formation import Formation
from rankwire.rendezvous.runtime_dir import remove_socket_file
from rankwire.texts import name_ranks
from rankwire.transports.byte_stream import ByteStream
from rankwire.transports.shared_memory import CAN_SHARE
from rankwire.transports.spin import DEFAULT_SPIN, share_cores
from rankwire.wire.control_messages import (
    AgentSays,
    Answer,
    Fallen,
    Gone,
    Joined,
    Member,
    Notice,
    Question,
    Suspected,
    World,
)
from rankwire.wire.handshake import Hello, Purpose
from rankwire.wire.protocol import left
from rankwire.wire.seals import Seals

_log = logging.getLogger("rankwire")

_UNANSWERED_LIMIT = 4.5
# A process that has just been woken up, or has too few cores, reads its reports late.
_LATE_NEWS_PATIENCE = 0.5


class TcpMesh(Mesh):
    """A rank of a world of processes; the constructor forms the world.

    ``make_formation`` is called with the ``owner``, this mesh. The other arguments are as for
    ``TcpBackend``.

    Attributes:
        formation: Forms the world, and owns its control connections.
        is_watched: Whether a coordinator reports which ranks are gone.
        introductions: Connects to all peers when the coordinator is gone.
    """

    shares_memory = CAN_SHARE
    inquiries: ControlInquiries

    def __init__(
        self,
        rank: int,
        world_size: int,
        make_formation: Callable[..., Formation],
        *,
        timeout: float | None,
        join_timeout: float,
        transport: Transport,
        spin: float | None,
        max_message_nbytes: int,
        single_copy: bool,
        segment_nbytes: int,
        clock: Clock,
    ) -> None:
        why_not = 'Unix sockets are turned off by transport="tcp"' if transport == "tcp" else ""
        super().__init__(
            rank,
            world_size,
            timeout=timeout,
            max_message_nbytes=max_message_nbytes,
            clock=clock,
            segments=Segments(segment_nbytes, clock, why_not),
        )
        self._transport = transport
        self._spin = DEFAULT_SPIN if spin is None else spin
        self._single_copy = single_copy
        self.is_watched = True
        self.introductions = Introductions(self)
        self.formation = make_formation(owner=self)
        self.security = self.formation.policy.mode
        self.inquiries = ControlInquiries(self, self.formation)
        self.roll = RollClient(self.formation.report)
        try:
            self.formation.form(Deadline(join_timeout, clock))
        except BaseException:
            self.formation.close()
            raise

    def on_formed(self, world: World) -> None:
        """Create the peers. The formation calls this once, before any of them can dial."""
        self._me = world.members[self.rank]
        self.incarnation = self._me.incarnation
        self.ranks_return = world.are_restarted
        if world.late:
            self.broken = MembershipError(
                f"{name_ranks(world.late)} joined when the world had formed already; {NEW_GROUP}"
            )
        local = sum(member.host_id == self._me.host_id for member in world.members)
        self.connections = connections = TcpConnections(
            self, self._me, self._transport, single_copy=self._single_copy
        )
        connections.spin = self._spin
        connections.shares_cores = share_cores(local)
        self.segments.spin = 0.0 if connections.shares_cores else self._spin
        self.hosts = [member.host_id for member in world.members]
        self._coordinator = self.roll.keeper = world.coordinator
        for member in world.members:
            if member.rank != self.rank:
                self.peers[member.rank] = self._meet(member)

    def _meet(self, member: Member) -> Peer:
        return Peer(
            member,
            self.clock,
            await_verdict=self._await_verdict,
            on_lost=self.events.lost,
            explain=self._explain_end,
            lookout=self.lookout,
        )

    # -- what the acceptor asks, on its thread ------------------------------------------------

    def on_gone(self, gone: Gone) -> None:
        """Take the control plane's report that a rank has crashed or left."""
        try:
            self._take_in(gone)
        finally:
            self.roll.note_gone(gone.rank)
            self.segments.disturb()

    def _take_in(self, gone: Gone) -> None:
        if gone.rank == self.rank:
            for rank, peer in self.peers.items():
                reason = f"the others have given up this rank: {gone.reason}"
                peer.judge(PeerLostError(rank, reason, root=self.rank))
            return
        if gone.rank not in self.peers:
            raise ProtocolError(f"the coordinator reports rank {gone.rank}, which does not exist")
        peer = self.peers[gone.rank]
        if gone.orderly:
            peer.leave(left(gone.rank))
            return
        kind = PeerUnresponsiveError if gone.silent else PeerLostError
        loss = kind(gone.rank, gone.reason, remote_traceback=gone.traceback)
        peer.judge(self._losses.explain(loss, cause=gone.cause))
        if not gone.silent and peer.member.host_id == self._me.host_id and peer.member.unix_path:
            remove_socket_file(peer.member.unix_path)  # a killed process cannot remove its own

    def on_notice(self, notice: Notice) -> None:
        """Keep the coordinator's notice about a collective; wake the threads that wait in it."""
        self.roll.deliver(notice)
        self.segments.disturb()

    def on_joined(self, joined: Joined) -> None:
        """Take the control plane's report that a rank was restarted, and is back."""
        member = joined.member
        self.roll.note_back(member.rank)
        if member.rank not in self.peers:
            raise ProtocolError(f"the coordinator reports rank {member.rank}, which is not a peer")
        self.formation.keys.take(joined)
        self.hosts[member.rank] = member.host_id
        self._replace(self._meet(member))

    @override
    def tell_agent(self, says: AgentSays) -> bool:
        return self.formation.report(says)

    def on_question(self, question: Question) -> Answer:
        """Return what this process is doing."""
        return self.inquiries.answer(question)

    def on_answer(self, answer: Answer) -> None:
        """Take the answer to a question of this rank."""
        self.inquiries.on_answer(answer)

    @override
    def enter(self, hello: Hello, stream: ByteStream, seals: Seals | None) -> None:
        if hello.purpose is Purpose.INQUIRY:
            self.inquiries.take(hello.rank, stream, seals)
        else:
            super().enter(hello, stream, seals)

    def on_suspected(self, suspected: Suspected) -> None:
        """Take the control plane's report that a rank is silent, or responds again."""
        rank, seconds = suspected.rank, suspected.seconds
        peer = self.peers.get(rank)
        if peer is None:
            return  # this rank itself, or a launcher
        peer.is_suspected = seconds > 0.0
        peer.silent_for = seconds  # no beat reports the coordinator's silence
        if peer.is_suspected:
            _log.warning("rank %d has been silent for %.1f s", rank, seconds)
        else:
            _log.warning("rank %d responds again", rank)
        self.events.suspected(rank, seconds)

    def on_silences(self, silent: dict[int, float]) -> None:
        """Take the coordinator's report of the ranks that missed a beat."""
        for rank, peer in self.peers.items():
            peer.silent_for = silent.get(rank, 0.0)

    def on_coordinator_gone(self, error: RankwireError) -> None:
        """Note that no coordinator reports any more which ranks are gone."""
        self.is_watched = self.ranks_return = self.roll.is_kept = False
        self.presences.end()
        for other in self.peers.values():  # no report would end the suspicion
            other.is_suspected, other.silent_for = False, 0.0
        peer = self.peers.get(self._coordinator)
        if peer is not None:
            if isinstance(error, ChannelClosedError):
                peer.leave(left(peer.member.rank))
            else:
                peer.judge(error)
        self.introductions.begin()

    def look_for_silence(self) -> None:
        """Look for unresponsive hosts on busy connections; without a coordinator, also for ends."""
        for peer in self.peers.values():
            peer.look_for_silence(_UNANSWERED_LIMIT)
            if not self.is_watched:
                peer.look_for_end()

    def _explain_end(self, error: RankwireError) -> RankwireError:
        return self._losses.explain(error, is_told=self.is_watched)

    def _await_verdict(self, peer: Peer, patience: float) -> None:
        acceptor = self.formation.acceptor
        assert acceptor is not None  # there is a peer
        # The acceptor's own thread brings the verdict, so it must not wait for it.
        if self.is_watched and not self.closed and not acceptor.is_current_thread:
            if not peer.is_judged_within(patience):
                acceptor.catch_up(Deadline(_LATE_NEWS_PATIENCE, self.clock))

    # -- leaving -----------------------------------------------------------------------------------

    @override
    def close(self, *, error: BaseException | None = None) -> None:
        self.introductions.cancel()
        if error is None and self._coordinator == self.rank and not self.closed:
            self.roll.leave()  # the other ranks lose the roll with this one
        super().close(error=error)

    @override
    def tell_fall(self, fallen: Fallen) -> None:
        self.formation.close(fallen)

    @override
    def depart(self) -> None:
        self.formation.close()
        self.inquiries.close()
        self.introductions.join()
