"""Mesh: all connections of a rank to its peers.

Any two ranks talk directly. The rank that sends or calls first dials, in the calling thread: one
connection for messages (one way) and one for each agent's calls (requests out, replies back).
Subclasses open streams and learn which ranks are gone (``tcp_mesh``, ``simulated_mesh``).

Locks, in order: ``_close_lock``, a peer's ``dial_lock``, then those inside ports, peers, inboxes
and connections. ``docs/thread-model.md`` has the whole table.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.environment import report_unknown
from rankwire.errors import (
    ChannelClosedError,
    PeerLostError,
    RankwireError,
)
from rankwire.fork import guard, invalidate
from rankwire.links.connection import Connection
from rankwire.links.inbox import Inbox
from rankwire.links.receive_handle import FirstReceive, PeerReceive, ReceiveHandle
from rankwire.links.send_handle import SendHandle, offer, post
from rankwire.mesh.call_port import GroupCallPort, MeshCallPort
from rankwire.mesh.calls import Serving
from rankwire.mesh.group_ranks import GroupRanks
from rankwire.mesh.inquiries import answer, describe, inquire
from rankwire.mesh.lookout import Link, Lookout
from rankwire.mesh.peers import MAX_CONNECTIONS_OF_A_RANK, Peer, dial_alone
from rankwire.mesh.ports import Ports
from rankwire.mesh.presence import Presences
from rankwire.mesh.transport import NEW_GROUP, Transport
from rankwire.observe.blame import Losses, describe_failure
from rankwire.observe.stacks import methods_entered, places
from rankwire.observe.status import PeerStatus
from rankwire.override import override
from rankwire.transports.poller import Poller, PollWaiter, Waiter
from rankwire.transports.shared_segment import SharedSegment
from rankwire.transports.spin import Spin
from rankwire.wire.control_messages import AgentSays, Fallen
from rankwire.wire.frames import Channel, Envelope, Message, Payload
from rankwire.wire.handshake import BETWEEN_RANKS, Hello, Purpose, Status
from rankwire.wire.receive import Destination, Receive
from rankwire.wire.seals import Seals

if TYPE_CHECKING:
    from rankwire.transports.byte_stream import ByteStream

_FAREWELL_PATIENCE = 0.2
_LOOK_EVERY = 0.05  # seconds between two reads of a thread that waits for an event
_RECEIVING = (Inbox.take.__code__, Inbox.drive.__code__)  # a thread that waits is in one of these


class Mesh(Transport):
    """A rank that is connected to its peers by streams.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        timeout: As for ``Transport``, like the next ones.
        max_message_nbytes: Largest message sent or accepted.
        clock: The clock of the world.
        peers: The other ranks, by rank; may be filled later.
        single_copy: Whether memory of ranks on this host may be read.

    Attributes:
        peers: The other ranks, by rank. A restarted rank is another peer.
        ports: The call ports of this rank.
        presences: What agents of this rank tell the others.
        lookout: Reads all connections, for a thread that has waited for a while.
    """

    spin = 0.0  # seconds that a waiting thread polls before it sleeps
    shares_cores = False  # whether there are more ranks on this host than cores

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        timeout: float | None,
        max_message_nbytes: int,
        clock: Clock,
        peers: dict[int, Peer],
        single_copy: bool = True,
    ) -> None:
        super().__init__(
            rank, world_size, timeout=timeout, max_message_nbytes=max_message_nbytes, clock=clock
        )
        if rank == 0:
            report_unknown()
        self._single_copy = single_copy
        self._close_lock = runtime.RLock()  # a callback of closing may close
        self.ports = Ports()
        self.presences = Presences(self.tell_agent, self._await_event)
        self.peers = peers
        self._losses = Losses()
        self._asking: dict[object, int] = {}  # the ranks that threads ask why they waited in vain
        self.lookout = Lookout(self.clock)
        self._looking: Spin | None = None  # of receives from any rank
        guard(self, invalidate)

    # -- what differs ----------------------------------------------------------------------------

    @abstractmethod
    def open_stream(
        self, peer: Peer, purpose: Purpose, service: int, deadline: Deadline
    ) -> tuple[runtime.Socket | ByteStream, Seals | None]:
        """Return a stream to a peer that has let it in, and what its frames are sealed with.

        Raises:
            PeerLostError: The peer has gone.
            ChannelClosedError: It has left, or this backend is closed.
            DeadlineExceededError: No answer in time.
        """

    @abstractmethod
    def new_poller(self) -> Poller:
        """Return what a port waits with for calls."""

    @abstractmethod
    def flush_when_possible(self, connection: Connection) -> None:
        """Have what a connection holds back sent as soon as its peer takes more. From any thread.

        The connection's send lock is held.
        """

    def tell_leaving(self) -> None:
        """Note that this rank leaves in good order; its farewells follow. Here: they will do."""

    @abstractmethod
    def tell_agent(self, says: AgentSays) -> bool:
        """Pass on what an agent of this rank does; False if there is none who would answer."""

    @abstractmethod
    def tell_fall(self, fallen: Fallen) -> None:
        """Tell the others by which error this rank leaves, before they see a connection end."""

    @abstractmethod
    def depart(self) -> None:
        """Leave, when all connections are closed. If a fall was told, that stands."""

    # -- messages --------------------------------------------------------------------------------

    @override
    def transmit(self, dst: int, envelope: Envelope, message: Message, deadline: Deadline) -> None:
        peer = self.peers[dst]
        connection = peer.messages or self._dial_messages(peer, deadline)
        connection.send(envelope, message, deadline, meanwhile=self.lookout)

    @override
    def offer(
        self,
        dst: int,
        envelope: Envelope,
        message: Message,
        deadline: Deadline,
        *,
        check: Callable[[], None] | None = None,
    ) -> SendHandle | None:
        peer = self.peers[dst]
        connection = peer.messages or self._dial_messages(peer, deadline)
        return offer(
            connection,
            envelope,
            message,
            deadline,
            self.lookout,
            while_sending=None if check is None else self.lookout.checking(check),
        )

    @override
    def begin(
        self, dst: int, envelope: Envelope, message: Message, deadline: Deadline
    ) -> SendHandle | None:
        peer = self.peers[dst]
        connection = peer.messages or self._dial_messages(peer, deadline)
        return post(connection, envelope, message, self.lookout)

    @override
    def receive(
        self, src: int, envelope: Envelope, deadline: Deadline, *, nbytes: int | None = None
    ) -> Payload:
        return self.peers[src].inbox.take(Receive(envelope, nbytes=nbytes), deadline)

    @override
    def expect(
        self, src: int, envelope: Envelope, *, nbytes: int | None = None, into: Destination | None
    ) -> ReceiveHandle:
        return PeerReceive(self.peers[src].inbox, envelope, nbytes, into)

    @override
    def expect_any(
        self, sources: Sequence[int], envelope: Envelope, *, nbytes: int | None = None
    ) -> ReceiveHandle:
        inboxes = [self.peers[src].inbox for src in sources]
        return FirstReceive(
            inboxes, envelope, nbytes, self.new_waiter, self._successor_of, self.lookout
        )

    def _successor_of(self, inbox: Inbox) -> Inbox:
        """Return the inbox of the rank that another one was of: the same unless it is back."""
        return self.peers[inbox.peer].inbox

    def new_waiter(self) -> Waiter:
        """Return what a thread sleeps by that waits for several streams."""
        if self._looking is None:
            self._looking = self.new_spin()
        return PollWaiter(self._looking)

    def new_spin(self) -> Spin:
        """Return how a thread looks before it sleeps."""
        return Spin(self.spin, self.clock, yields=self.shares_cores)

    @override
    def has_arrived(self, src: int, envelope: Envelope) -> bool:
        return self.peers[src].inbox.has_arrived(envelope)

    @override
    def has_posted(self) -> bool:
        return self.lookout.has_posted()

    @override
    def read_others(self) -> None:
        self.lookout.read()

    def _await_event(self, event: runtime.Event) -> None:
        """Wait for an event that the acceptor sets; meanwhile, what was posted moves on."""
        while not self.clock.wait(event, _LOOK_EVERY):
            self.read_others()

    @override
    def abandon(self, group: int, cause: RankwireError) -> None:
        for peer in list(self.peers.values()):
            peer.inbox.abandon(group, cause)

    @override
    def refuse(self, envelope: Envelope) -> None:
        for peer in list(self.peers.values()):
            peer.inbox.refuse(envelope)

    def _dial_messages(self, peer: Peer, deadline: Deadline) -> Connection:
        def dial() -> Connection:
            if peer.messages is not None:
                return peer.messages
            return self.dial(peer, Purpose.MESSAGES, 0, deadline, peer.send_on)

        return dial_alone(peer.dial_lock, peer.member.rank, deadline, dial)

    # -- calls -----------------------------------------------------------------------------------

    @override
    def open_calls(self, service: int, ranks: GroupRanks | None = None) -> MeshCallPort:
        port = self.new_port(service, ranks)
        try:
            waiting = self.ports.open(port)
        except RankwireError:
            port.close()
            raise
        for connection in waiting:
            port.adopt(connection)
        return port

    def new_port(self, service: int, ranks: GroupRanks | None) -> MeshCallPort:
        """Return a port that is not open yet."""
        if ranks is None:
            return MeshCallPort(self, service)
        return GroupCallPort(self, service, ranks)

    def on_agent_answer(self, number: int) -> None:
        """Pass the answer to an agent of this rank on."""
        self.presences.answered(number)

    # -- connections -----------------------------------------------------------------------------

    def dial(
        self,
        peer: Peer,
        purpose: Purpose,
        service: int,
        deadline: Deadline,
        keep: Callable[[Connection], None],
    ) -> Connection:
        """Open a connection of our own to a peer.

        Args:
            peer: To whom.
            purpose: What the connection is for.
            service: Which agent it is for.
            deadline: For all of it.
            keep: Called with the connection once the peer takes an end of it for a death, also if
                the caller is interrupted at that moment; perhaps twice.

        Raises:
            PeerLostError: The peer has gone.
            ChannelClosedError: It has left, or this backend is closed.
            DeadlineExceededError: No answer in time.
        """
        stream, seals = self.open_stream(peer, purpose, service, deadline)
        try:
            connection = self._wrap(peer, stream, seals)
        except BaseException:
            stream.close()
            raise
        is_kept = False
        try:
            peer.add(connection)
            connection.await_introduction(deadline, peer.check)
            if connection.failure is not None:  # the peer went, or this backend, at this moment
                peer.check()
                raise connection.failure.copy()
            # From now on the peer takes an end for a death. On a connection for messages nothing
            # but a farewell comes back.
            connection.introduce(is_read=purpose is Purpose.CALLS)
            is_kept = True
            keep(connection)
            return connection
        except BaseException:
            if (connection.outbox.frames_sent or is_kept) and connection.failure is None:
                keep(connection)
            else:
                self.release(connection)
            raise

    def link_to(self, rank: int, deadline: Deadline) -> Link:
        """Return how messages to a rank travel; connects if that has not happened yet."""
        peer = self.peers[rank]
        connection = peer.messages or self._dial_messages(peer, deadline)
        can_lend, is_local = bool(connection.can_lend), connection.transport == "unix"
        shares = is_local and not self.why_nothing_shared()
        incarnation = peer.member.incarnation
        return Link(connection.transport, can_lend, connection.why_not_lend, shares, incarnation)

    def why_nothing_shared(self) -> str:
        """Return why collectives do not use shared memory; empty if they can, from here."""
        if self.segments is None:
            return "ranks of this kind share nothing"
        return self.segments.why_not()

    @override
    def open_segment(self, src: int, offer: bytes, rank: int, size: int) -> SharedSegment | None:
        connection = self.peers[src].inbox.connection
        if self.segments is None or connection is None:
            return None
        with suppress(OSError):  # closed meanwhile
            return self.segments.open(connection.stream.peer_pid(), offer, rank, size)
        return None

    def _wrap(
        self,
        peer: Peer,
        stream: runtime.Socket | ByteStream,
        seals: Seals | None,
        *,
        incoming: bool = False,
    ) -> Connection:
        return Connection(
            stream,
            peer=peer.member.rank,
            max_nbytes=self.max_message_nbytes,
            clock=self.clock,
            spin=self.new_spin(),
            on_lost=peer.fail,
            on_left=peer.explain_farewell,
            on_rest=self.flush_when_possible,
            incoming=incoming,
            single_copy=self._single_copy,
            seals=seals,
        )

    def release(self, connection: Connection) -> None:
        """Close a connection, if that has not happened yet, and forget it."""
        connection.close()
        self.peers[connection.peer].remove(connection)

    # -- connections that peers open ---------------------------------------------------------------

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

    def enter(self, hello: Hello, stream: runtime.Socket | ByteStream, seals: Seals | None) -> None:
        """Take a connection that a peer opened."""
        if hello.purpose is Purpose.INQUIRY:
            waits = hello.rank in self.blocked_on()
            text = describe(self.places(), self._serving(), waits)
            answer(self, hello.rank, stream, seals, text)
            return
        peer = self.peers[hello.rank]
        connection = self._wrap(peer, stream, seals, incoming=True)
        peer.add(connection, incoming=True)
        with suppress(RankwireError):  # the connection has failed, then
            connection.introduce()
        if connection.failure is not None:
            self.release(connection)
            return
        if hello.purpose is Purpose.MESSAGES:
            if peer.inbox.attach(connection):
                self.lookout.add(peer.inbox)
            else:
                self.release(connection)
            return
        port, surplus = self.ports.find(hello.service, connection)
        if port is not None:
            port.adopt(connection)
        elif surplus is not None:
            if surplus is connection:  # the service has closed since it was let in
                connection.farewell(AT_ONCE)
            self.release(surplus)

    # -- the other ranks ---------------------------------------------------------------------------

    @override
    def failure_of(self, rank: int) -> RankwireError | None:
        return self.peers[rank].failure

    @override
    def lost_ranks(self) -> list[int]:
        return self.events.lost_ranks

    @override
    def incarnation_of(self, rank: int) -> int:
        return self.peers[rank].member.incarnation if rank != self.rank else self.incarnation

    def _replace(self, peer: Peer) -> None:
        """Put a process that was started anew in the place of the one before it.

        All that waited for the old one has ended. Nothing of it is taken for the new one's: that
        has connections, an inbox and a failure of its own.
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

    @override
    def status_of(self, rank: int) -> PeerStatus:
        calls = sum(len(port.calls_to_world_rank(rank)) for port in self.ports.all())
        calls_of = [call for call in self._serving() if call.src == rank]
        serving = tuple(call.name for call in calls_of if not call.workers)
        return replace(self.peers[rank].status(), in_flight=calls, serving=serving)

    @override
    def doing_of(self, rank: int, deadline: Deadline) -> str | None:
        if rank == self.rank:
            return None
        visit = object()
        try:
            self._asking[visit] = rank
            return inquire(self, rank, deadline)
        finally:
            self._asking.pop(visit, None)

    def blocked_on(self) -> list[int]:
        """Return the ranks for whose messages a thread of this rank waits, or has just waited.

        A receive that was posted, and that no thread waits for, does not count.
        """
        inboxes = methods_entered(_RECEIVING)
        asking = list(self._asking.values())
        return [
            rank
            for rank, peer in list(self.peers.items())
            if rank in asking or any(each is peer.inbox for each in inboxes)
        ]

    @override
    def unreceived(self, src: int, group: int) -> dict[int, int]:
        arrived = self.peers[src].inbox.unreceived()
        message = int(Channel.MESSAGE)
        return {
            tag: n for (g, channel, tag), n in arrived.items() if (g, channel) == (group, message)
        }

    def waiting_on(self) -> list[int]:
        """Return the ranks that this rank expects messages or replies from."""
        found = (self.status_of(rank) for rank in list(self.peers))
        return [peer.rank for peer in found if peer.waiting_for or peer.in_flight]

    def places(self) -> list[str]:
        """Return where the threads of this rank are in the user's program."""
        return places()

    def _serving(self) -> list[Serving]:
        """Return the calls that this rank serves."""
        return [call for port in self.ports.all() for call in port.serving()]

    # -- leaving ---------------------------------------------------------------------------------

    @override
    def close(self, *, error: BaseException | None = None) -> None:
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
