"""SimulatedBackend: all ranks of a world in one process, with faults on demand.

It is the same mesh as that of processes (``mesh``: connections, inboxes, call ports), over streams
in memory instead of sockets, so that a program can be tested without processes; each rank is an
object, usually used by a thread of its own. Dialling is a call of a function, and who is gone is
known to the network at once. Time is that of the clock that the world was given, one for all
ranks.

What befalls streams and ranks is in ``simulated_network``, fault plans are in ``faults``. This
module knows what a rank is, and what it means to it to leave, to die and to lose a peer. A peer is
met when it is first needed: a world of a thousand ranks costs what it uses.

Size: as for its class.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Self

from rankwire import runtime
from rankwire.backends.arguments import check_world
from rankwire.backends.faults import FaultPlan
from rankwire.backends.mesh import Mesh
from rankwire.backends.simulated_calls import FailingCallPort
from rankwire.backends.simulated_network import Network
from rankwire.clock import REAL_TIME, Clock
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import (
    ChannelClosedError,
    ConfigurationError,
    MessageTooLargeError,
    PeerLostError,
    RankwireError,
)
from rankwire.links.connection import Connection
from rankwire.links.receive_handle import ReceiveHandle
from rankwire.links.send_handle import SendHandle
from rankwire.mesh.call_port import MeshCallPort
from rankwire.mesh.peers import Peer
from rankwire.mesh.roll_client import RollClient
from rankwire.observe.stacks import places
from rankwire.transports.memory_stream import MemoryPoller, MemoryStream, MemoryWaiter
from rankwire.wire.control_messages import AgentSays, Fallen, Member
from rankwire.wire.frames import (
    DEFAULT_MAX_MESSAGE_NBYTES,
    Channel,
    Envelope,
    Message,
    Payload,
)
from rankwire.wire.handshake import Hello, Purpose, Status, refusal
from rankwire.wire.receive import Destination

_log = logging.getLogger("rankwire")

DEFAULT_QUEUE_NBYTES = 64 << 20  # NATS lets a slow consumer keep as much pending
_PID = runtime.getpid()


class _Peers(dict[int, Peer]):
    """Peers by rank, each made when it is first asked for."""

    def __init__(self, meet: Callable[[int], Peer]) -> None:
        super().__init__()
        self._meet = meet

    def __missing__(self, rank: int) -> Peer:
        return self._meet(rank)


class SimulatedBackend(Mesh):
    """One rank of a world in this process, made by ``create_group``.

    Every method is safe from any thread. Data is copied when it is sent, so the sender may change
    its buffers on return; the receiver owns what it receives.

    Size: it is a mesh, and what the network asks of a member.

    Attributes:
        network: Shared by all ranks of the world; ``network.kill(rank)`` and
            ``network.break_link(a, b)`` make faults.
    """

    _SHOWN = ("create_group", "network")

    def __init__(
        self,
        rank: int,
        network: Network,
        *,
        timeout: float | None,
        max_message_nbytes: int,
    ) -> None:
        super().__init__(
            rank,
            network.world_size,
            timeout=timeout,
            max_message_nbytes=max_message_nbytes,
            peers=_Peers(self._meet),
            clock=network.clock,
            single_copy=False,
        )
        self.network = network
        self.roll = RollClient(partial(network.report, rank))
        self._meeting = runtime.Lock()  # guards the making of peers
        self._gone: RankwireError | None = None  # why this rank can do nothing more

    @classmethod
    def create_group(
        cls,
        world_size: int,
        *,
        timeout: float | None = None,
        max_message_nbytes: int = DEFAULT_MAX_MESSAGE_NBYTES,
        queue_nbytes: int = DEFAULT_QUEUE_NBYTES,
        faults: FaultPlan | None = None,
        clock: Clock = REAL_TIME,
    ) -> list[Self]:
        """Return the ranks of a new world; the index is the rank.

        Args:
            world_size: The number of ranks, at least 1.
            timeout: Seconds for every operation without its own timeout; None is
                ``RANKWIRE_TIMEOUT``, or else 60.
            max_message_nbytes: Largest message sent or accepted.
            queue_nbytes: Bytes on the way from one rank to another that it has not read, above
                which the sender waits. One message larger than that may be sent when there is no
                other. Calls have queues of their own. A rank that waits for a message reads those
                before it and keeps them, as on a network.
            faults: The faults to inject; their times count from now. The world takes a copy.
            clock: The clock that all ranks and faults use.

        Raises:
            InvalidWorldSizeError: Less than one rank.
            ConfigurationError: Another argument is invalid, such as a fault for a rank that does
                not exist.
        """
        check_world(0, world_size)
        if queue_nbytes < 1:
            raise ConfigurationError(f"a queue holds at least 1 byte, not {queue_nbytes!r}")
        faults = FaultPlan() if faults is None else faults
        faults.check(world_size)
        network = Network(world_size, queue_nbytes=queue_nbytes, faults=faults, clock=clock)
        world = [
            cls(rank, network, timeout=timeout, max_message_nbytes=max_message_nbytes)
            for rank in range(world_size)
        ]
        network.start(tuple(world))
        return world

    # -- messages ----------------------------------------------------------------------------------

    def transmit(self, dst: int, envelope: Envelope, message: Message, deadline: Deadline) -> None:
        """Send one message under an envelope. Its bytes are copied."""
        self._check_sending(envelope, message)
        super().transmit(dst, envelope, message, deadline)

    def offer(
        self,
        dst: int,
        envelope: Envelope,
        message: Message,
        deadline: Deadline,
        *,
        check: Callable[[], None] | None = None,
    ) -> SendHandle | None:
        """Send one message: nothing is lent within a process."""
        self._check_sending(envelope, message)
        return super().offer(dst, envelope, message, deadline, check=check)

    def begin(
        self, dst: int, envelope: Envelope, message: Message, deadline: Deadline
    ) -> SendHandle | None:
        """Send one message without waiting. What cannot leave now is not copied before it does."""
        self._check_sending(envelope, message)
        return super().begin(dst, envelope, message, deadline)

    def receive(
        self, src: int, envelope: Envelope, deadline: Deadline, *, nbytes: int | None = None
    ) -> Payload:
        """Return the next message under an envelope. A rank that is dead receives nothing more."""
        self._check_alive()
        return super().receive(src, envelope, deadline, nbytes=nbytes)

    def expect(
        self, src: int, envelope: Envelope, *, nbytes: int | None = None, into: Destination | None
    ) -> ReceiveHandle:
        """Return the next message under an envelope before it has come."""
        self._check_alive()
        return super().expect(src, envelope, nbytes=nbytes, into=into)

    def expect_any(
        self, sources: Sequence[int], envelope: Envelope, *, nbytes: int | None = None
    ) -> ReceiveHandle:
        """Return the next message under an envelope from one of several ranks."""
        self._check_alive()
        return super().expect_any(sources, envelope, nbytes=nbytes)

    def open_calls(self, service: int) -> MeshCallPort:
        """Return the port by which an agent calls and is called, unless this rank is dead."""
        self._check_alive()
        return super().open_calls(service)

    def new_port(self, service: int) -> MeshCallPort:
        """Return a port, one that fails calls if the fault plan does."""
        if not self.network.fails(self.rank, "call"):
            return super().new_port(service)
        return FailingCallPort(self, service, partial(self.network.begin, self.rank, "call"))

    def opening_collective(self) -> None:
        """Let the fault plan fail the collective that begins."""
        self.network.begin(self.rank, "collective")

    def _check_sending(self, envelope: Envelope, message: Message) -> None:
        self._check_alive()
        if envelope[1] == Channel.MESSAGE:
            self.network.begin(self.rank, "message")
        if message[1] > self.max_message_nbytes:
            raise MessageTooLargeError(message[1], self.max_message_nbytes)

    def _check_alive(self) -> None:
        if self._gone is not None:
            raise self._gone.copy()

    # -- connections -------------------------------------------------------------------------------

    def open_stream(
        self, peer: Peer, purpose: Purpose, service: int, deadline: Deadline
    ) -> tuple[MemoryStream, None]:
        """Return a stream to a peer. The other rank takes its end in this thread."""
        rank = peer.member.rank
        self.hear_of(rank)
        peer.check()
        hello = Hello(purpose, b"", 0, self.world_size, self.rank, rank, service)
        other = self.network.members[rank]
        other._meet(self.rank)
        status, detail = other.admit(hello)
        if status is not Status.WELCOME:
            raise refusal(status, detail, hello)
        near, far = self.network.connect(self.rank, rank, purpose, service)
        try:
            other.enter(hello, far, None)
        except BaseException:
            near.shut_down()  # interrupted: to the other end, this one gave up
            raise
        return near, None

    def places(self) -> list[str]:
        """Return where the thread of this rank is: that of its name, as others are of all ranks."""
        return places(only=[f"rank {self.rank}"])

    def new_poller(self) -> MemoryPoller:
        """Return a poller of streams in memory."""
        return MemoryPoller(self.clock)

    def new_waiter(self) -> MemoryWaiter:
        """Return what wakes a thread that sleeps at streams in memory."""
        return MemoryWaiter(self.clock)

    def flush_when_possible(self, connection: Connection) -> None:
        """Have whoever reads at the other end send what a connection holds back."""
        assert isinstance(connection.stream, MemoryStream)
        connection.stream.outgoing.flush_when_possible(partial(self._flush, connection))

    def _flush(self, connection: Connection) -> None:
        try:
            connection.flush(AT_ONCE)
        except RankwireError as error:
            _log.debug("frames to rank %d were not sent: %s", connection.peer, error)
            if connection.failure is None and connection.is_holding:
                self.flush_when_possible(connection)

    def _meet(self, rank: int) -> Peer:
        self._check_peer(rank)
        with self._meeting:
            peer = self._peers.get(rank)
            if peer is None:
                peer = self._peers[rank] = Peer(
                    Member(rank, _PID, "", 0, "", ""),
                    self.clock,
                    await_verdict=self._await_verdict,
                    on_lost=self._note_loss,
                    explain=self._losses.explain,
                    lookout=self.lookout,
                )
        self.hear_of(rank)
        return peer

    def _await_verdict(self, peer: Peer, patience: float) -> None:
        self.hear_of(peer.member.rank)  # the network knows it at once

    def _note_loss(self, error: PeerLostError) -> None:
        if error.peer != self.rank:  # else it is this rank that is lost to all others
            self._events.lost(error)

    # -- what the network asks ---------------------------------------------------------------------

    def tell_agent(self, says: AgentSays) -> bool:
        """Tell the network what an agent of this rank does."""
        return self.network.hear_agent(self.rank, says)

    def cut(self, peer: int) -> None:
        """End the streams to a peer, at this moment."""
        if peer in self._peers:
            for connection in self._peers[peer].connections():
                assert isinstance(connection.stream, MemoryStream)
                connection.stream.abort()

    def die(self) -> None:
        """Be dead: end all streams, at this moment."""
        told = self.network.verdict(self.rank, self.rank)
        assert told is not None
        self._gone = told[0]
        for rank in list(self._peers):
            self.cut(rank)

    def end(self) -> None:
        """End everything that this rank waits for, because it is dead."""
        assert self._gone is not None
        self._presences.end()
        for port in self._ports.all():
            port.shut_down(self._gone)
        for rank in list(self._peers):
            self.hear_of(rank)

    def hear_of(self, peer: int) -> None:
        """Ask what has become of a peer, first of the root of its failure; give up who is gone."""
        told = self.network.verdict(self.rank, peer)
        if told is None:
            return
        error, cause = told
        root = None if cause is None else self.network.verdict(self.rank, cause)
        if cause is not None and root is not None and cause not in (self.rank, peer):
            self._take(cause, *root)
        self._take(peer, error, cause)

    def _take(self, rank: int, error: RankwireError, cause: int | None) -> None:
        peer = self._peers.get(rank) or self._peers[rank]
        self.roll.note_gone(rank)
        if peer.failure is not None:
            return
        if isinstance(error, ChannelClosedError):
            peer.leave(error)
        else:
            peer.judge(self._losses.explain(error, cause=cause))

    def failure_of(self, rank: int) -> RankwireError | None:
        """Return why a peer is gone, or None."""
        if self.network.verdict(self.rank, self._check_peer(rank)) is None:
            return None
        self.hear_of(rank)
        return super().failure_of(rank)

    def lost_ranks(self) -> list[int]:
        """Return the ranks that are lost or have left; raise if this one is dead."""
        self._check_alive()
        return sorted(self.network.gone_for(self.rank))

    # -- leaving -----------------------------------------------------------------------------------

    def close(self, *, error: BaseException | None = None) -> None:
        """Leave: threads that wait get ``ChannelClosedError``, call ports are closed too.

        What this rank has sent can still be received. The last rank to close also waits for the
        threads that some fault plans need.
        """
        super().close(error=error)
        self.network.depart()

    def tell_leaving(self) -> None:
        """Note it first: whoever sees a stream end from now on knows why."""
        self._gone = ChannelClosedError("this backend is closed")
        self.network.leave(self.rank)
        for peer in list(self._peers.values()):
            for connection in peer.connections():
                self._send_rest(connection)

    def _send_rest(self, connection: Connection) -> None:
        """Send the rest of a message that counts as sent: nobody would flush it any more."""
        assert isinstance(connection.stream, MemoryStream)
        if connection.queued_nbytes > connection.stream.unsent_nbytes():
            connection.stream.outgoing.lift_limit()
            with suppress(RankwireError):  # it has failed, or another thread is about to do it
                connection.flush(AT_ONCE)

    def tell_fall(self, fallen: Fallen) -> None:
        """Tell the others by which error this rank leaves."""
        self.network.fall(self.rank, fallen)
        self._gone = ChannelClosedError("this backend is closed")

    def depart(self) -> None:
        """Tell those that know this rank that it has left."""
        for other in self.network.members:
            if self.rank in other._peers:
                other.hear_of(self.rank)
