"""Mesh: what a rank does with its peers, whatever connects them.

Any two ranks talk directly. Whoever sends or calls first dials, in its own thread: one connection
for messages (one way) and one for each agent's calls (requests out, replies back). Peers, inboxes,
call ports and the way a rank ends are here; how a stream to a peer is opened, and who tells that a
rank is gone, is the business of the backends built on this (``tcp``, ``simulated``).

Locks, in order: ``_close_lock``, a peer's ``dial_lock``, then those inside ports, peers, inboxes
and connections. ``docs/thread-model.md`` has the whole table.

Size: as for its class.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from rankwire import runtime
from rankwire.backends.base import Backend
from rankwire.clock import Clock
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.environment import report_unknown
from rankwire.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    PeerLostError,
    RankwireError,
)
from rankwire.links.connection import Connection
from rankwire.links.first_receive import FirstReceive
from rankwire.links.inbox import Inbox
from rankwire.links.receive_handle import PeerReceive, ReceiveHandle
from rankwire.links.send_handle import SendHandle, offer, post
from rankwire.mesh.call_port import MeshCallPort
from rankwire.mesh.calls import Serving
from rankwire.mesh.inquiries import answer, describe, inquire
from rankwire.mesh.lookout import Link, Lookout
from rankwire.mesh.peers import MAX_CONNECTIONS_OF_A_RANK, Peer
from rankwire.mesh.ports import Ports
from rankwire.mesh.presence import Presence, Presences
from rankwire.mesh.transport import NEW_GROUP
from rankwire.observe.blame import Losses, describe_failure
from rankwire.observe.stacks import methods_entered, places
from rankwire.observe.status import PeerStatus
from rankwire.transports.poller import Poller, PollWaiter, Waiter
from rankwire.transports.spin import Spin
from rankwire.wire.control_messages import AgentSays, Fallen
from rankwire.wire.frames import Channel, Envelope, Message, Payload
from rankwire.wire.handshake import BETWEEN_RANKS, Hello, Purpose, Status
from rankwire.wire.receive import Destination, Receive
from rankwire.wire.seals import Seals

if TYPE_CHECKING:
    from rankwire.transports.byte_stream import ByteStream

_FAREWELL_PATIENCE = 0.2
_LOOK_EVERY = 0.05  # of a thread that waits where it sees no message
_RECEIVING = (Inbox.take.__code__, Inbox.drive.__code__)  # what a thread that waits is in


class Mesh(Backend):
    """A rank that is connected to its peers by streams.

    Size: it has all of ``Transport``, and names in one place what its backends differ in.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        timeout: Seconds for every operation without its own timeout; None is
            ``RANKWIRE_TIMEOUT``, or else 60.
        max_message_nbytes: Largest message sent or accepted.
        peers: The other ranks, by rank; may be filled later.
        clock: By which everything in its world waits.
        single_copy: Whether memory of ranks on this host may be read.

    Attributes:
        lookout: What a thread of this rank reads that has waited for a while.
    """

    spin = 0.0  # seconds that a waiting thread looks before it sleeps
    shares_cores = False  # whether there are more ranks on this host than cores

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        timeout: float | None,
        max_message_nbytes: int,
        peers: dict[int, Peer],
        clock: Clock,
        single_copy: bool = True,
    ) -> None:
        super().__init__(
            rank, world_size, timeout=timeout, max_message_nbytes=max_message_nbytes, clock=clock
        )
        if rank == 0:
            report_unknown()
        self._single_copy = single_copy
        self._close_lock = runtime.RLock()  # a callback of closing may close
        self._ports = Ports()
        self._presences = Presences(self.tell_agent, self._await_event)
        self._peers = peers
        self._losses = Losses()
        self._asking: dict[object, int] = {}  # whom threads ask why they waited in vain
        self.lookout = Lookout(self.clock)
        self._looking: Spin | None = None  # of receives from any rank

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

    def transmit(self, dst: int, envelope: Envelope, message: Message, deadline: Deadline) -> None:
        """Send one message under an envelope. The buffers are free again on return."""
        peer = self._peers[dst]
        connection = peer.messages or self._dial_messages(peer, deadline)
        connection.send(envelope, message, deadline, meanwhile=self.lookout)

    def offer(
        self,
        dst: int,
        envelope: Envelope,
        message: Message,
        deadline: Deadline,
        *,
        check: Callable[[], None] | None = None,
    ) -> SendHandle | None:
        """Send one message, but do not wait for a peer that reads it out of this rank's memory."""
        peer = self._peers[dst]
        connection = peer.messages or self._dial_messages(peer, deadline)
        return offer(
            connection,
            envelope,
            message,
            deadline,
            self.lookout,
            while_sending=None if check is None else self.lookout.checking(check),
        )

    def begin(
        self, dst: int, envelope: Envelope, message: Message, deadline: Deadline
    ) -> SendHandle | None:
        """Send one message without waiting for the peer to take it."""
        peer = self._peers[dst]
        connection = peer.messages or self._dial_messages(peer, deadline)
        return post(connection, envelope, message, self.lookout)

    def receive(
        self, src: int, envelope: Envelope, deadline: Deadline, *, nbytes: int | None = None
    ) -> Payload:
        """Return the next message under an envelope; the caller owns it."""
        return self._peers[src].inbox.take(Receive(envelope, nbytes=nbytes), deadline)

    def expect(
        self, src: int, envelope: Envelope, *, nbytes: int | None = None, into: Destination | None
    ) -> ReceiveHandle:
        """Return the next message under an envelope before it has come."""
        return PeerReceive(self._peers[src].inbox, envelope, nbytes, into)

    def expect_any(
        self, sources: Sequence[int], envelope: Envelope, *, nbytes: int | None = None
    ) -> ReceiveHandle:
        """Return the next message under an envelope from one of several ranks."""
        inboxes = [self._peers[src].inbox for src in sources]
        return FirstReceive(
            inboxes, envelope, nbytes, self.new_waiter, self._successor_of, self.lookout
        )

    def _successor_of(self, inbox: Inbox) -> Inbox:
        """Return the inbox of the rank that another one was of: the same unless it is back."""
        return self._peers[inbox.peer].inbox

    def new_waiter(self) -> Waiter:
        """Return what a thread sleeps by that waits for several streams."""
        if self._looking is None:
            self._looking = self.new_spin()
        return PollWaiter(self._looking)

    def new_spin(self) -> Spin:
        """Return how a thread looks before it sleeps."""
        return Spin(self.spin, self.clock, yields=self.shares_cores)

    @property
    def spin_in_segments(self) -> float:
        """How long a rank looks into shared memory before it sleeps; 0 yields between two looks."""
        return 0.0 if self.shares_cores else self.spin

    def has_arrived(self, src: int, envelope: Envelope) -> bool:
        """Whether a message lies here, read and not taken."""
        return self._peers[src].inbox.has_arrived(envelope)

    def has_posted(self) -> bool:
        """Whether this rank has posted receives that are not done."""
        return self.lookout.has_posted()

    def read_others(self) -> None:
        """Read what ranks have sent, without waiting, so that what was posted moves on."""
        self.lookout.read()

    def _await_event(self, event: runtime.Event) -> None:
        """Wait for an event that the acceptor sets; meanwhile, what was posted moves on."""
        while not self.clock.wait(event, _LOOK_EVERY):
            self.read_others()

    def abandon(self, group: int, cause: RankwireError) -> None:
        """End all receives of one group on this rank, because it has left the group."""
        for peer in list(self._peers.values()):
            peer.inbox.abandon(group, cause)

    def refuse(self, envelope: Envelope) -> None:
        """Drop the messages of an envelope's family, now and when they come."""
        for peer in list(self._peers.values()):
            peer.inbox.refuse(envelope)

    def _dial_messages(self, peer: Peer, deadline: Deadline) -> Connection:
        grip: list[bool] = []
        try:
            if not deadline.take(peer.dial_lock, grip):
                raise DeadlineExceededError(
                    deadline.limit,
                    waiting_for=[peer.member.rank],
                    detail="another thread is still connecting to it",
                )
            if peer.messages is not None:
                return peer.messages
            return self.dial(peer, Purpose.MESSAGES, 0, deadline, peer.send_on)
        finally:
            if grip[-1:] == [True]:
                peer.dial_lock.release()

    # -- calls -----------------------------------------------------------------------------------

    def open_calls(self, service: int) -> MeshCallPort:
        """Return the port by which an agent calls and is called."""
        port = self.new_port(service)
        try:
            waiting = self._ports.open(port)
        except RankwireError:
            port.close()
            raise
        for connection in waiting:
            port.adopt(connection)
        return port

    def new_port(self, service: int) -> MeshCallPort:
        """Return a port that nobody knows yet."""
        return MeshCallPort(self, service)

    def new_presence(self, service: int) -> Presence:
        """Return how an agent tells the others of its name what it does."""
        return self._presences.of(service)

    def on_agent_answer(self, number: int) -> None:
        """Hear the answer to what an agent of this rank has said."""
        self._presences.answered(number)

    def forget_port(self, port: MeshCallPort) -> None:
        """Let go of a port that is closed."""
        self._ports.forget(port)

    # -- connections -----------------------------------------------------------------------------

    def peer(self, rank: int) -> Peer:
        """Return who is another rank now; a process that is started anew is another peer."""
        return self._peers[rank]

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
            if (connection.frames_sent or is_kept) and connection.failure is None:
                keep(connection)
            else:
                self.release(connection)
            raise

    def link_to(self, rank: int, timeout: float | None = None) -> Link:
        """Return how messages to a rank travel; connects if that has not happened yet."""
        deadline = Deadline.of(timeout, self.timeout, self.clock)
        try:
            peer = self._peers[self._check_peer(rank)]
            connection = peer.messages or self._dial_messages(peer, deadline)
        except RankwireError as error:
            raise self.explained(error, "link_to", deadline, rank) from error.__cause__
        can_lend, is_local = bool(connection.can_lend), connection.transport == "unix"
        shares = is_local and not self.why_nothing_shared()
        incarnation = peer.member.incarnation
        return Link(connection.transport, can_lend, connection.why_not_lend, shares, incarnation)

    def why_nothing_shared(self) -> str:
        """Return why collectives do not meet in shared memory; empty if they can, from here."""
        return "ranks of this kind share nothing"

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
        self._peers[connection.peer].remove(connection)

    # -- connections that peers open ---------------------------------------------------------------

    def admit(self, hello: Hello) -> tuple[Status, int]:
        """Judge an authenticated peer that opens a connection."""
        if self._closed:
            return Status.CLOSED, 0
        peer = self._peers.get(hello.rank)
        is_of_a_rank = hello.purpose in BETWEEN_RANKS
        if peer is None or hello.peer != self.rank or not is_of_a_rank:
            return Status.INVALID_RANK, self.world_size
        if hello.purpose is Purpose.MESSAGES:
            peer.inbox.drop_given_up()
            if peer.inbox.connection is not None:
                return Status.DUPLICATE_RANK, peer.member.pid
        if peer.has_too_many_connections():
            return Status.TOO_MANY_CONNECTIONS, MAX_CONNECTIONS_OF_A_RANK
        if hello.purpose is Purpose.CALLS and self._ports.is_closed(hello.service):
            return Status.CLOSED, 0
        return Status.WELCOME, 0

    def enter(self, hello: Hello, stream: runtime.Socket | ByteStream, seals: Seals | None) -> None:
        """Take a connection that a peer opened."""
        if hello.purpose is Purpose.INQUIRY:
            waits = hello.rank in self.blocked_on()
            text = describe(self.places(), self._serving(), waits)
            answer(self, hello.rank, stream, seals, text)
            return
        peer = self._peers[hello.rank]
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
        port, surplus = self._ports.find(hello.service, connection)
        if port is not None:
            port.adopt(connection)
        elif surplus is not None:
            if surplus is connection:  # the service has closed since it was let in
                connection.farewell(AT_ONCE)
            self.release(surplus)

    # -- the other ranks ---------------------------------------------------------------------------

    def failure_of(self, rank: int) -> RankwireError | None:
        """Return why a peer is gone, or None."""
        return self._peers[self._check_peer(rank)].failure

    def lost_ranks(self) -> list[int]:
        """Return the ranks that are lost."""
        return self._events.lost_ranks

    def incarnation_of(self, rank: int) -> int:
        """Return how many times the process of a rank was started anew alone."""
        return self._peers[rank].member.incarnation if rank != self.rank else self.incarnation

    def _replace(self, peer: Peer) -> None:
        """Put a process that was started anew in the place of the one before it.

        All that waited for the old one has ended. Nothing of it is taken for the new one's: that
        has connections, an inbox and a failure of its own.
        """
        rank, incarnation = peer.member.rank, peer.member.incarnation
        old, self._peers[rank] = self._peers[rank], peer
        if self._closed:  # which is noted first: either this is seen here, or the new peer there
            peer.mark(ChannelClosedError("this backend is closed"))
        old.retire()
        self._losses.forget(rank)
        self.agreement.forget(rank)
        self.broken = PeerLostError(
            rank,
            f"its process was started anew (incarnation {incarnation}); {NEW_GROUP}",
            root=rank,
        )
        self.joins += 1
        self._events.joined(rank, incarnation)

    def status_of(self, rank: int) -> PeerStatus:
        """Return what is known about a peer."""
        rank = self._check_peer(rank)
        calls = sum(len(port.calls_to(rank)) for port in self._ports.all())
        calls_of = [call for call in self._serving() if call.src == rank]
        serving = tuple(call.name for call in calls_of if not call.workers)
        return replace(self._peers[rank].status(), in_flight=calls, serving=serving)

    def doing_of(self, rank: int, deadline: Deadline) -> str | None:
        """Ask a rank what it is doing."""
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
            for rank, peer in list(self._peers.items())
            if rank in asking or any(each is peer.inbox for each in inboxes)
        ]

    def unreceived(self, src: int, group: int) -> dict[int, int]:
        """Return how many messages of a rank lie here, read and not received, by tag."""
        arrived = self._peers[src].inbox.unreceived()
        message = int(Channel.MESSAGE)
        return {
            tag: n for (g, channel, tag), n in arrived.items() if (g, channel) == (group, message)
        }

    def places(self) -> list[str]:
        """Return where the threads of this rank are in the user's program."""
        return places()

    def _serving(self) -> list[Serving]:
        """Return the calls that this rank serves."""
        return [call for port in self._ports.all() for call in port.serving()]

    # -- leaving ---------------------------------------------------------------------------------

    def close(self, *, error: BaseException | None = None) -> None:
        """Leave: threads that wait get ``ChannelClosedError``, agents are ended too."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
            self._presences.end()
            ports, waiting = self._ports.end()
            cause = ChannelClosedError("this backend is closed")
            for port in ports:
                port.shut_down(cause)
            patience = Deadline(_FAREWELL_PATIENCE, self.clock)
            fallen = describe_failure(error, rank=self.rank, first_lost=self._losses.first)
            if fallen is None:
                self.tell_leaving()
            else:  # first of all, before anyone sees a connection end
                for peer in list(self._peers.values()):
                    peer.mark(cause)
                self.tell_fall(fallen)
            for peer in list(self._peers.values()):
                peer.close(cause, patience, orderly=fallen is None)
            for connection in waiting:
                connection.close()
            for port in ports:  # whether or not its agent is still there to do it
                port.close()
            if self.operations is not None:
                self.operations.release()
            self.depart()
