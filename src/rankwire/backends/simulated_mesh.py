"""The mesh of a simulated rank: streams in memory instead of sockets.

Dialling is a function call, and the network knows at once which ranks are gone.
``simulated_network`` has the faults of streams and ranks, ``faults`` the fault plans; this module
makes a rank leave, crash or lose a peer. A peer is made when it is first needed, so that a world of
a thousand ranks costs only what it uses.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from rankwire import runtime
from rankwire.backends.simulated_network import Network
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import ChannelClosedError, MessageTooLargeError, PeerLostError, RankwireError
from rankwire.links.connection import Connection
from rankwire.links.inbox import Reply
from rankwire.links.receive_handle import ReceiveHandle
from rankwire.links.send_handle import SendHandle
from rankwire.mesh.call_port import CallPort
from rankwire.mesh.connections import Connections
from rankwire.mesh.group_ranks import GroupRanks
from rankwire.mesh.inquiries import Inquiries
from rankwire.mesh.mesh import Mesh
from rankwire.mesh.message_port import MessagePort
from rankwire.mesh.peers import Peer
from rankwire.mesh.roll_client import RollClient
from rankwire.observe.stacks import places
from rankwire.override import override
from rankwire.transports.memory_stream import MemoryPoller, MemoryStream, MemoryWaiter
from rankwire.wire.control_messages import AgentSays, Answer, Fallen, Member, Question
from rankwire.wire.credit import Credit
from rankwire.wire.frames import Channel, Envelope, Message, Payload
from rankwire.wire.handshake import Hello, Purpose, Status, refusal
from rankwire.wire.receive import Destination, Receive

_log = logging.getLogger("rankwire")

_PID = runtime.getpid()


class _Peers(dict[int, Peer]):
    """Peers by rank, each made on its first use."""

    def __init__(self, meet: Callable[[int], Peer]) -> None:
        super().__init__()
        self._meet = meet

    def __missing__(self, rank: int) -> Peer:
        return self._meet(rank)


class SimulatedMesh(Mesh):
    """One rank of a world in this process; all its ranks share ``network``."""

    def __init__(
        self, rank: int, network: Network, *, timeout: float | None, max_message_nbytes: int
    ) -> None:
        super().__init__(
            rank,
            network.world_size,
            timeout=timeout,
            max_message_nbytes=max_message_nbytes,
            peers=_Peers(self.meet),
            clock=network.clock,
        )
        self.connections = SimulatedConnections(self)
        self.messages = SimulatedMessagePort(self)
        self.network = network
        self.inquiries = _Inquiries(self)
        self.roll = RollClient(partial(network.report, rank))
        self._meeting = runtime.Lock()  # guards the creation of peers
        self._gone: RankwireError | None = None  # why this rank has ended

    @override
    def open_calls(self, service: int, ranks: GroupRanks | None = None) -> CallPort:
        self.check_alive()
        port = super().open_calls(service, ranks)
        if self.network.traffic.fails(self.rank, "call"):
            fail_calls(port, partial(self.network.traffic.begin, self.rank, "call"))
        return port

    @override
    def opening_collective(self) -> None:
        self.network.traffic.begin(self.rank, "collective")

    def check_alive(self) -> None:
        """Raise if this rank has ended."""
        if self._gone is not None:
            raise self._gone.copy()

    def meet(self, rank: int) -> Peer:
        """Return a peer; create it if necessary."""
        with self._meeting:
            peer = self.peers.get(rank)
            if peer is None:
                peer = self.peers[rank] = Peer(
                    Member(rank, _PID, "", 0, "", ""),
                    self.clock,
                    # the network knows it at once
                    await_verdict=lambda peer, patience: self.hear_of(peer.member.rank),
                    on_lost=self._note_loss,
                    explain=self._losses.explain,
                    lookout=self.lookout,
                )
        self.hear_of(rank)
        return peer

    def _note_loss(self, error: PeerLostError) -> None:
        if error.peer != self.rank:  # otherwise this rank is lost to all others
            self.events.lost(error)

    # -- what the network asks ---------------------------------------------------------------------

    @override
    def tell_agent(self, says: AgentSays) -> bool:
        return self.network.hear_agent(self.rank, says)

    def cut(self, peer: int) -> None:
        """Close the streams to a peer immediately."""
        if peer in self.peers:
            for connection in self.peers[peer].connections():
                assert isinstance(connection.stream, MemoryStream)
                connection.stream.abort()

    def die(self) -> None:
        """Simulate a crash: close every stream immediately."""
        told = self.network.verdict(self.rank, self.rank)
        assert told is not None
        self._gone = told[0]
        for rank in list(self.peers):
            self.cut(rank)

    def end(self) -> None:
        """End every wait of this rank after its crash."""
        assert self._gone is not None
        self.presences.end()
        for port in self.ports.all():
            port.shut_down(self._gone)
        for rank in list(self.peers):
            self.hear_of(rank)

    def hear_of(self, peer: int) -> None:
        """Look up the state of a peer, first that of its failure's root; give up lost peers."""
        told = self.network.verdict(self.rank, peer)
        if told is None:
            return
        error, cause = told
        root = None if cause is None else self.network.verdict(self.rank, cause)
        if cause is not None and root is not None and cause not in (self.rank, peer):
            self._take(cause, *root)
        self._take(peer, error, cause)

    def _take(self, rank: int, error: RankwireError, cause: int | None) -> None:
        peer = self.peers.get(rank) or self.peers[rank]
        self.roll.note_gone(rank)
        if peer.failure is not None:
            return
        if isinstance(error, ChannelClosedError):
            peer.leave(error)
        else:
            peer.judge(self._losses.explain(error, cause=cause))

    @override
    def failure_of(self, rank: int) -> RankwireError | None:
        if self.network.verdict(self.rank, rank) is None:
            return None
        self.hear_of(rank)
        return super().failure_of(rank)

    @override
    def lost_ranks(self) -> list[int]:
        self.check_alive()
        return sorted(self.network.gone_for(self.rank))

    # -- leaving -----------------------------------------------------------------------------------

    @override
    def close(self, *, error: BaseException | None = None) -> None:
        super().close(error=error)
        self.network.depart()

    @override
    def tell_leaving(self) -> None:
        self._gone = ChannelClosedError("this backend is closed")
        self.network.leave(self.rank)
        for peer in list(self.peers.values()):
            for connection in peer.connections():
                self._send_rest(connection)

    def _send_rest(self, connection: Connection) -> None:
        """Send the rest of a message that counts as sent: no thread would flush it later."""
        assert isinstance(connection.stream, MemoryStream)
        if connection.queued_nbytes > connection.stream.unsent_nbytes():
            connection.stream.outgoing.lift_limit()
            with suppress(RankwireError):  # it has failed, or another thread does it
                connection.outbox.flush(AT_ONCE)

    @override
    def tell_fall(self, fallen: Fallen) -> None:
        self.network.fall(self.rank, fallen)
        self._gone = ChannelClosedError("this backend is closed")

    @override
    def depart(self) -> None:
        for other in self.network.members:
            if self.rank in other.peers:
                other.hear_of(self.rank)


class SimulatedMessagePort(MessagePort):
    """The messages of a simulated rank, which may have crashed; a plan makes some of them fail."""

    def __init__(self, mesh: SimulatedMesh) -> None:
        super().__init__(mesh)
        self._simulated = mesh

    @override
    def transmit(self, dst: int, envelope: Envelope, message: Message, deadline: Deadline) -> None:
        self._check_sending(envelope, message)
        super().transmit(dst, envelope, message, deadline)

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
        self._check_sending(envelope, message)
        return super().offer(dst, envelope, message, deadline, check=check)

    @override
    def begin(
        self, dst: int, envelope: Envelope, message: Message, deadline: Deadline
    ) -> SendHandle | None:
        self._check_sending(envelope, message)
        return super().begin(dst, envelope, message, deadline)

    @override
    def receive(
        self, src: int, envelope: Envelope, deadline: Deadline, *, nbytes: int | None = None
    ) -> Payload:
        self._simulated.check_alive()
        return super().receive(src, envelope, deadline, nbytes=nbytes)

    @override
    def expect(
        self, src: int, envelope: Envelope, *, nbytes: int | None = None, into: Destination | None
    ) -> ReceiveHandle:
        self._simulated.check_alive()
        return super().expect(src, envelope, nbytes=nbytes, into=into)

    @override
    def expect_any(
        self, sources: Sequence[int], envelope: Envelope, *, nbytes: int | None = None
    ) -> ReceiveHandle:
        self._simulated.check_alive()
        return super().expect_any(sources, envelope, nbytes=nbytes)

    def _check_sending(self, envelope: Envelope, message: Message) -> None:
        mesh = self._simulated
        mesh.check_alive()
        if envelope[1] == Channel.MESSAGE:
            mesh.network.traffic.begin(mesh.rank, "message")
        if message[1] > mesh.max_message_nbytes:
            raise MessageTooLargeError(message[1], mesh.max_message_nbytes)


class SimulatedConnections(Connections):
    """The connections of a simulated rank: pipes in memory."""

    def __init__(self, mesh: SimulatedMesh) -> None:
        super().__init__(mesh, single_copy=False)
        self._simulated = mesh

    @override
    def open_stream(
        self, peer: Peer, purpose: Purpose, service: int, deadline: Deadline
    ) -> tuple[MemoryStream, None]:
        # The other rank takes its end in this thread.
        mesh, rank = self._simulated, peer.member.rank
        mesh.hear_of(rank)
        peer.check()
        hello = Hello(purpose, b"", 0, mesh.world_size, mesh.rank, rank, service)
        other = mesh.network.members[rank]
        other.meet(mesh.rank)
        status, detail = other.admit(hello)
        if status is not Status.WELCOME:
            raise refusal(status, detail, hello)
        near, far = mesh.network.traffic.connect(mesh.rank, rank, purpose, service)
        try:
            other.enter(hello, far, None)
        except BaseException:
            near.shut_down()  # interrupted: the other end sees that this one gave up
            raise
        return near, None

    @override
    def new_poller(self) -> MemoryPoller:
        return MemoryPoller(self._simulated.clock)

    @override
    def new_waiter(self) -> MemoryWaiter:
        return MemoryWaiter(self._simulated.clock)

    @override
    def flush_when_possible(self, connection: Connection) -> None:
        # The thread that reads the other end sends it.
        assert isinstance(connection.stream, MemoryStream)
        connection.stream.outgoing.flush_when_possible(partial(self._flush, connection))

    def _flush(self, connection: Connection) -> None:
        try:
            connection.outbox.flush(AT_ONCE)
        except RankwireError as error:
            _log.debug("frames to rank %d were not sent: %s", connection.peer, error)
            if connection.failure is None and connection.outbox.is_holding:
                self.flush_when_possible(connection)


class _Inquiries(Inquiries):
    """Asks by a function call to the other rank, which no fault of messages affects."""

    _mesh: SimulatedMesh

    @override
    def _put(self, question: Question, deadline: Deadline) -> Answer:
        return self._mesh.network.members[question.rank].inquiries.answer(question)

    @override
    def _places(self) -> list[str]:
        return places(only=[f"rank {self._mesh.rank}"])


def fail_calls(port: CallPort, on_call: Callable[[], None]) -> None:
    """Make a port call ``on_call`` before each call; it raises if the plan fails that call."""
    send = port.call
    waiting: set[int] = set()  # calls that were counted, and wait for room

    def call(
        dst: int,
        request_id: int,
        message: Message,
        deadline: Deadline,
        on_reply: Callable[[Receive], None] | None = None,
        hold: bool = False,
        limit: float = math.inf,
        window: Credit | None = None,
    ) -> Reply | None:
        if limit != math.inf and request_id not in waiting:  # reservations have no limit
            on_call()
            waiting.add(request_id)
        reply = send(dst, request_id, message, deadline, on_reply, hold, limit, window)
        if reply is not None:
            waiting.discard(request_id)
        return reply

    port.call = call  # type: ignore[method-assign]
