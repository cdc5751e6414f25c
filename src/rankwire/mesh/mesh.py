"""Mesh: connects one rank of a world to the others.

It knows world ranks and group ids; users see ``Backend``, which checks arguments, and translates
ranks and errors. Subclasses open streams to peers and learn which ranks are gone (``tcp_mesh``,
``simulated_mesh``).

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

# Advice for a group with a rank that was restarted since the group was made.
NEW_GROUP = "for collectives, all ranks make a new group: SubBackend(backend, ranks)"

_FAREWELL_PATIENCE = 0.2


class Mesh(ABC):
    """A rank that is connected to its peers. Every method is safe from any thread.

    Args:
        timeout: Default seconds for operations; None uses ``RANKWIRE_TIMEOUT``, or else 60.
        peers: The other ranks, by rank; may be filled later.
        segments: Makes memory that ranks of one host share; None if such ranks share none.

    Attributes:
        peers: The other ranks, by rank. A restarted rank gets a new peer.
        connections: Connects to the peers; set by the subclass, before there are peers.
        inquiries: Reports and asks what ranks are doing; set by the subclass.
        lookout: Reads all connections, for a thread that has waited for a while.
        incarnation: How many times a launcher restarted this rank alone.
        joins: How many times another rank was restarted since this one joined.
        broken: Why the world has no collectives any more: a rank was restarted since it formed.
        security: How connections are protected; see ``Backend``.
        ranks_return: Whether a lost rank may be restarted, and come back.
        events: Calls the user's callbacks when a peer is lost, silent or back.
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
        """Report an orderly end; the farewells follow. The default does nothing."""
        return

    @abstractmethod
    def tell_agent(self, says: AgentSays) -> bool:
        """Report an agent's state to the coordinator; return False if no answer will come."""

    @abstractmethod
    def tell_fall(self, fallen: Fallen) -> None:
        """Report the error by which this rank leaves, before peers see a connection end."""

    @abstractmethod
    def depart(self) -> None:
        """Leave, after all connections are closed; an error reported by ``tell_fall`` stays."""

    def opening_collective(self) -> None:
        """Note that this rank begins a collective; an exception fails it on all ranks."""
        return

    # -- calls -----------------------------------------------------------------------------------

    def open_calls(self, service: int, ranks: GroupRanks | None = None) -> CallPort:
        """Return the port by which an agent calls and is called.

        It uses the ranks of ``ranks``, or world ranks. A service has one open port on a rank at a
        time.
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
        """Take the answer to an agent of this rank."""
        self.presences.answered(number)

    # -- connections -----------------------------------------------------------------------------

    def open_segment(self, src: int, offer: bytes, rank: int, size: int) -> SharedSegment | None:
        """Open the segment that rank ``src`` offers, as ``rank`` of ``size``; None if it cannot."""
        connection = self.peers[src].inbox.connection
        if connection is not None:
            with suppress(OSError):  # closed meanwhile
                return self.segments.open(connection.stream.peer_pid(), offer, rank, size)
        return None

    def admit(self, hello: Hello) -> tuple[Status, int]:
        """Decide whether an authenticated peer may open a connection."""
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
        """Return why a peer is gone (``ChannelClosedError`` after an orderly end), or None."""
        return self.peers[rank].failure

    def lost_ranks(self) -> list[int]:
        """Return the lost ranks. Ranks that have left may be among them."""
        return self.events.lost_ranks

    def incarnation_of(self, rank: int) -> int:
        """Return how many times a rank was restarted alone."""
        return self.peers[rank].member.incarnation if rank != self.rank else self.incarnation

    def _replace(self, peer: Peer) -> None:
        """Replace a peer by its restarted process. Every wait for the old one has ended."""
        rank, incarnation = peer.member.rank, peer.member.incarnation
        old, self.peers[rank] = self.peers[rank], peer
        if self.closed:  # set before the peers are closed: one thread sees the other
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
            error: The error to leave by; None for an orderly end. The other ranks get
                ``PeerLostError`` with its text and traceback.
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
            else:  # before any peer sees a connection end
                for peer in list(self.peers.values()):
                    peer.mark(cause)
                self.tell_fall(fallen)
            for peer in list(self.peers.values()):
                peer.close(cause, patience, orderly=fallen is None)
            for connection in waiting:
                connection.close()
            for port in ports:  # also if its agent does not exist any more
                port.close()
            self.depart()
