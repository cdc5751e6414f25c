"""Mesh: how one rank of a world reaches the others.

It knows world ranks and the ids of groups; users see ``Backend``, which checks arguments, and
translates ranks and errors. Subclasses say how a stream to a peer is opened and learn which ranks
are gone (``tcp_mesh``, ``simulated_mesh``).

Locks, in order: ``_close_lock``, a peer's ``dial_lock``, then those inside ports, peers, inboxes
and connections. ``docs/thread-model.md`` has the whole table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.environment import default_timeout, report_unknown
from rankwire.errors import ChannelClosedError, PeerLostError, RankwireError
from rankwire.fork import guard, invalidate
from rankwire.mesh.call_port import CallPort
from rankwire.mesh.connections import Connections, Ports
from rankwire.mesh.events import PeerEvents
from rankwire.mesh.group_ranks import GroupCallPort, GroupRanks
from rankwire.mesh.message_port import Lookout, MessagePort
from rankwire.mesh.peers import MAX_CONNECTIONS_OF_A_RANK, Peer
from rankwire.mesh.presence import Presences
from rankwire.mesh.roll_client import RollClient
from rankwire.mesh.segments import Segments
from rankwire.observe.blame import Losses, describe_failure
from rankwire.transports.byte_stream import ByteStream
from rankwire.transports.shared_segment import SharedSegment
from rankwire.wire.control_messages import AgentSays, Fallen
from rankwire.wire.handshake import BETWEEN_RANKS, Hello, Purpose, Status
from rankwire.wire.seals import Seals

if TYPE_CHECKING:
    from rankwire.mesh.inquiries import Inquiries

# What to do about a group with a rank that was restarted since the group was made.
NEW_GROUP = "for collectives, all ranks make a new group: SubBackend(backend, ranks)"

_FAREWELL_PATIENCE = 0.2


class Mesh(ABC):
    """A rank that is connected to its peers. Every method is safe from any thread.

    Args:
        rank: This process's index, from 0.
        world_size: The number of ranks.
        timeout: Seconds for operations without a timeout; None is ``RANKWIRE_TIMEOUT``, or else 60.
        max_message_nbytes: Largest message sent or accepted.
        clock: The clock of the world.
        peers: The other ranks, by rank; may be filled later.
        segments: Makes memory that ranks of one host share; None if ranks of this kind share none.

    Attributes:
        peers: The other ranks, by rank. A restarted rank is another peer.
        connections: Connects to them; set by the subclass, before there are peers.
        messages: Sends to them, and receives from them.
        inquiries: What is known about them, and what they say that they are doing; set likewise.
        ports: The call ports of this rank.
        presences: What agents of this rank tell the others.
        lookout: Reads all connections, for a thread that has waited for a while.
        incarnation: How many times a launcher restarted this rank alone.
        joins: How many times another rank was restarted, since this one is in the world.
        broken: Why the world has no collectives any more: a rank was restarted since it formed.
        security: How connections are protected; see ``Backend``.
        ranks_return: Whether a lost rank may be restarted, and come back.
        events: Calls back when a peer is lost, silent or back.
        roll: Reports collectives to the coordinator.
        shares_memory: Whether ranks of one host may share memory; alike on all of them.
        hosts: One item for each rank; the items of ranks on one host are equal.
    """

    incarnation: int = 0
    joins: int = 0
    broken: RankwireError | None = None
    security: str = "local"
    ranks_return: bool = False
    closed: bool = False
    shares_memory = False
    connections: Connections
    inquiries: Inquiries

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        timeout: float | None,
        max_message_nbytes: int,
        clock: Clock,
        peers: dict[int, Peer] | None = None,
        segments: Segments | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.clock = clock
        self.timeout = Deadline(default_timeout() if timeout is None else timeout, clock).limit
        self.max_message_nbytes = max_message_nbytes
        if rank == 0:
            report_unknown()
        self.events = PeerEvents()
        self.roll = RollClient()
        self.hosts: list[object] = [None] * world_size
        self.segments = segments or Segments(0, clock, "ranks of this kind share nothing")
        self.peers: dict[int, Peer] = {} if peers is None else peers
        self.ports = Ports()
        self.lookout = Lookout(clock)
        self.messages = MessagePort(self)
        self.presences = Presences(self.tell_agent, self.lookout.await_event)
        self._close_lock = runtime.RLock()  # a callback of closing may close
        self._losses = Losses()
        guard(self, invalidate)

    # -- what differs ----------------------------------------------------------------------------

    def tell_leaving(self) -> None:
        """Note that this rank leaves in good order; its farewells follow. Here: they will do."""
        return

    @abstractmethod
    def tell_agent(self, says: AgentSays) -> bool:
        """Pass on what an agent of this rank does; False if there is none who would answer."""

    @abstractmethod
    def tell_fall(self, fallen: Fallen) -> None:
        """Tell the others by which error this rank leaves, before they see a connection end."""

    @abstractmethod
    def depart(self) -> None:
        """Leave, when all connections are closed. If a fall was told, that stands."""

    def opening_collective(self) -> None:
        """Note that this rank begins a collective; an exception fails it on all ranks."""
        return

    # -- calls -----------------------------------------------------------------------------------

    def open_calls(self, service: int, ranks: GroupRanks | None = None) -> CallPort:
        """Return the port by which an agent calls and is called.

        There is one port for a service number and rank at a time.

        Args:
            service: Identifies the agent.
            ranks: The ranks of the group that the port numbers ranks by; None for the world.
        """
        port = CallPort(self, service) if ranks is None else GroupCallPort(self, service, ranks)
        try:
            waiting = self.ports.open(port)
        except RankwireError:
            port.close()
            raise
        for connection in waiting:
            port.adopt(connection)
        return port

    def on_agent_answer(self, number: int) -> None:
        """Pass the answer to an agent of this rank on."""
        self.presences.answered(number)

    # -- connections -----------------------------------------------------------------------------

    def open_segment(self, src: int, offer: bytes, rank: int, size: int) -> SharedSegment | None:
        """Open the segment that another rank offers, as ``rank`` of ``size``; None without one."""
        connection = self.peers[src].inbox.connection
        if connection is not None:
            with suppress(OSError):  # closed meanwhile
                return self.segments.open(connection.stream.peer_pid(), offer, rank, size)
        return None

    def admit(self, hello: Hello) -> tuple[Status, int]:
        """Judge an authenticated peer that opens a connection."""
        if self.closed:
            return Status.CLOSED, 0
        peer = self.peers.get(hello.rank)
        is_of_a_rank = hello.purpose in BETWEEN_RANKS
        if peer is None or hello.peer != self.rank or not is_of_a_rank:
            return Status.INVALID_RANK, self.world_size
        if hello.purpose is Purpose.MESSAGES:
            peer.inbox.drop_given_up()
            if peer.inbox.connection is not None:
                return Status.DUPLICATE_RANK, peer.member.pid
        if peer.has_too_many_connections():
            return Status.TOO_MANY_CONNECTIONS, MAX_CONNECTIONS_OF_A_RANK
        if hello.purpose is Purpose.CALLS and self.ports.is_closed(hello.service):
            return Status.CLOSED, 0
        return Status.WELCOME, 0

    def enter(self, hello: Hello, stream: ByteStream, seals: Seals | None) -> None:
        """Take a connection that a peer opened."""
        self.connections.accept(hello, stream, seals)

    # -- the other ranks ---------------------------------------------------------------------------

    def failure_of(self, rank: int) -> RankwireError | None:
        """Return why a peer is gone (``ChannelClosedError`` if it left in good order), or None."""
        return self.peers[rank].failure

    def lost_ranks(self) -> list[int]:
        """Return the ranks that are lost. Those that have left may be among them."""
        return self.events.lost_ranks

    def incarnation_of(self, rank: int) -> int:
        """Return how many times a rank was restarted alone."""
        return self.peers[rank].member.incarnation if rank != self.rank else self.incarnation

    def _replace(self, peer: Peer) -> None:
        """Put a process that was started anew in the place of the one before it.

        All that waited for the old one has ended.
        """
        rank, incarnation = peer.member.rank, peer.member.incarnation
        old, self.peers[rank] = self.peers[rank], peer
        if self.closed:  # which is noted first: either this is seen here, or the new peer there
            peer.mark(ChannelClosedError("this backend is closed"))
        old.retire()
        self._losses.forget(rank)
        self.broken = PeerLostError(
            rank,
            f"its process was started anew (incarnation {incarnation}); {NEW_GROUP}",
            root=rank,
        )
        self.joins += 1
        self.events.joined(rank, incarnation)

    # -- leaving ---------------------------------------------------------------------------------

    def close(self, *, error: BaseException | None = None) -> None:
        """Leave: waiting threads get ``ChannelClosedError``. Idempotent; sets ``closed``.

        Args:
            error: Why, if not in good order. Then the other ranks get ``PeerLostError`` with this
                error's text and traceback; without it they see an orderly end.
        """
        with self._close_lock:
            if self.closed:
                return
            self.closed = True
            self.presences.end()
            ports, waiting = self.ports.end()
            cause = ChannelClosedError("this backend is closed")
            for port in ports:
                port.shut_down(cause)
            patience = Deadline(_FAREWELL_PATIENCE, self.clock)
            fallen = describe_failure(error, rank=self.rank, first_lost=self._losses.first)
            if fallen is None:
                self.tell_leaving()
            else:  # first of all, before anyone sees a connection end
                for peer in list(self.peers.values()):
                    peer.mark(cause)
                self.tell_fall(fallen)
            for peer in list(self.peers.values()):
                peer.close(cause, patience, orderly=fallen is None)
            for connection in waiting:
                connection.close()
            for port in ports:  # whether or not its agent is still there to do it
                port.close()
            self.depart()
