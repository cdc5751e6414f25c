"""SimulatedBackend: all ranks of a world in one process, with faults on demand.

It keeps the contract of the TCP backend (bounded queues, deadlines, tags, orderly leave, sudden
death, calls), so that a program can be tested without processes and sockets; each rank is an
object, usually used by a thread of its own. Time is real.

How messages travel and fail is in ``simulated_network``, calls are in ``simulated_calls``, fault
plans in ``faults``. This module knows what a rank is: its inboxes, and what it means to it to
leave, to die and to lose a peer. It knows no socket and no other backend.

Lock: the network's; *lock held* means inside ``Network.changing()``. There is no other, save that
``Backend.barrier`` holds its own around several operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Self

from rankwire.backends.base import DEFAULT_TIMEOUT, Backend, check_world
from rankwire.backends.exit_report import fall_by
from rankwire.backends.faults import FaultPlan
from rankwire.backends.simulated_calls import SimulatedCallPort, Switchboard
from rankwire.backends.simulated_lanes import Inbox, Wanted
from rankwire.backends.simulated_network import Network
from rankwire.backends.status import PeerStatus, describe_wanted, state_of
from rankwire.deadline import Deadline
from rankwire.errors import (
    ChannelClosedError,
    ConfigurationError,
    MessageTooLargeError,
    PeerLostError,
    RankwireError,
)
from rankwire.wire.frames import DEFAULT_MAX_MESSAGE_NBYTES, Envelope, Message, Payload
from rankwire.wire.mailbox import Mailbox

__all__ = ["DEFAULT_QUEUE_NBYTES", "SimulatedBackend"]

DEFAULT_QUEUE_NBYTES = 64 << 20  # NATS lets a slow consumer keep as much pending

_MESSAGES = "messages"


class SimulatedBackend(Backend):
    """One rank of a world in this process, made by ``create_group``.

    Every method is safe from any thread. What is sent is copied, so the sender's buffers are free
    on return; what is received belongs to the receiver.

    Attributes:
        network: Shared by all ranks of the world; ``network.kill(rank)`` and
            ``network.break_link(a, b)`` make faults.
    """

    def __init__(
        self,
        rank: int,
        network: Network,
        switchboard: Switchboard,
        world: Sequence[SimulatedBackend],
        *,
        timeout: float,
        max_message_nbytes: int,
    ) -> None:
        super().__init__(
            rank, network.world_size, timeout=timeout, max_message_nbytes=max_message_nbytes
        )
        self.network = network
        self._switchboard = switchboard
        self._world = world
        self._inboxes: dict[int, Inbox] = {}
        self._closed = False

    @classmethod
    def create_group(
        cls,
        world_size: int,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        max_message_nbytes: int = DEFAULT_MAX_MESSAGE_NBYTES,
        queue_nbytes: int = DEFAULT_QUEUE_NBYTES,
        faults: FaultPlan | None = None,
    ) -> list[Self]:
        """Return the ranks of a new world; the index is the rank.

        Args:
            world_size: How many, at least 1.
            timeout: Seconds for every operation without a limit of its own.
            max_message_nbytes: Largest message sent or accepted.
            queue_nbytes: Bytes from one rank to another that nobody has received, above which the
                sender waits. One message larger than that may be sent when there is no other. Calls
                have queues of their own.
            faults: What goes wrong, and when; time begins now. The world takes a copy.

        Raises:
            InvalidWorldSizeError: Less than one rank.
            ConfigurationError: Another argument cannot work, such as a fault of a rank that is not
                there.
        """
        check_world(0, world_size)
        if queue_nbytes < 1:
            raise ConfigurationError(f"a queue holds at least 1 byte, not {queue_nbytes!r}")
        faults = FaultPlan() if faults is None else faults
        faults.check(world_size)
        network = Network(world_size, queue_nbytes=queue_nbytes, faults=faults)
        switchboard = Switchboard(network, max_message_nbytes=max_message_nbytes)
        world: list[Self] = []
        for rank in range(world_size):
            world.append(
                cls(
                    rank,
                    network,
                    switchboard,
                    world,
                    timeout=timeout,
                    max_message_nbytes=max_message_nbytes,
                )
            )
        network.start(world)
        return list(world)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    # -- messages ----------------------------------------------------------------------------------

    def transmit(
        self,
        dst: int,
        envelope: Envelope,
        message: Message,
        deadline: Deadline,
    ) -> None:
        """See ``Backend.transmit``. The bytes are copied."""
        self._check_peer(dst)
        buffers, nbytes = message
        if nbytes > self.max_message_nbytes:
            raise MessageTooLargeError(nbytes, self.max_message_nbytes)
        payload = bytearray().join(buffers)
        with self.network.changing():
            self._raise_if_gone()
            lane = self.network.lane(self.rank, dst, _MESSAGES)
            self.network.wait_for_room(lane, nbytes, deadline)
            inbox = self._world[dst].inbox_from(self.rank)
            landing = partial(inbox.land, envelope, payload)
            self.network.dispatch(lane, nbytes, landing)

    def receive(
        self,
        src: int,
        envelope: Envelope,
        deadline: Deadline,
        *,
        nbytes: int | None = None,
    ) -> Payload:
        """See ``Backend.receive``."""
        self._check_peer(src)
        wanted = Wanted(envelope, nbytes=nbytes)
        with self.network.changing():
            self._raise_if_gone()
            inbox = self.inbox_from(src)
            inbox.post(wanted)
            return inbox.wait(wanted, deadline)

    def has_arrived(self, src: int, envelope: Envelope) -> bool:
        """See ``Backend.has_arrived``."""
        inbox = self._inboxes.get(src)
        return inbox is not None and inbox.has_arrived(envelope)

    def sources(self, envelope: Envelope) -> list[int]:
        """See ``Backend.sources``: exactly those. In one process, asking all is what costs."""
        with self.network.changing():
            if self.network.why_lost(self.rank, self.rank) is not None:
                return super().sources(envelope)
            found = {src for src, inbox in self._inboxes.items() if inbox.has_arrived(envelope)}
            return sorted(found | self.network.gone_for(self.rank))

    def abandon(self, group: int, cause: RankwireError) -> None:
        """See ``Backend.abandon``."""
        with self.network.changing():
            for inbox in self._inboxes.values():
                inbox.abandon(group, cause)

    def refuse(self, envelope: Envelope) -> None:
        """See ``Backend.refuse``."""
        with self.network.changing():
            for inbox in self._inboxes.values():
                inbox.refuse(envelope)

    # -- calls -------------------------------------------------------------------------------------

    def open_calls(self, service: int) -> SimulatedCallPort:
        """See ``Backend.open_calls``.

        Raises:
            ConfigurationError: This rank has an open port for the service already.
            ChannelClosedError: This backend is closed.
        """
        with self.network.changing():
            self._raise_if_gone()
            return self._switchboard.open(self.rank, service)

    # -- ending ------------------------------------------------------------------------------------

    def close(self, *, error: BaseException | None = None) -> None:
        """See ``Backend.close``. Call ports of this rank are closed too.

        What this rank has sent can still be received. The last rank to close also waits for the
        thread that some fault plans need.
        """
        with self.network.changing():
            if not self._closed:
                self._closed = True
                fall = fall_by(error, first_lost=self.network.losses.first)
                if fall is None:
                    self._leave()
                else:
                    self.network.fall(self.rank, fall)
                    self.end(ChannelClosedError("this backend is closed"))
        self.network.settle()

    def _leave(self) -> None:
        self.network.leave(self.rank)
        self._switchboard.leave(self.rank)
        for peer in self._world:
            inbox = peer._inboxes.get(self.rank)
            if inbox is not None:
                left = ChannelClosedError(f"rank {self.rank} has left").during(peer=self.rank)
                self.network.farewell(inbox.lane, partial(inbox.fail, left))
        self.end(ChannelClosedError("this backend is closed"))

    # -- what the network tells and other ranks ask, lock held -------------------------------------

    def inbox_from(self, src: int) -> Inbox:
        """Return where the messages of a rank land, new if need be."""
        inbox = self._inboxes.get(src)
        if inbox is None:
            lane = self.network.lane(src, self.rank, _MESSAGES)
            inbox = self._inboxes[src] = Inbox(self.network, lane, Mailbox())
            loss = self.network.why_lost(self.rank, src)
            if loss is not None:
                inbox.fail(loss)
        return inbox

    def end(self, error: RankwireError) -> None:
        """End everything this rank waits for, because it has left or died."""
        self._switchboard.end(self.rank, error)
        for inbox in self._inboxes.values():
            inbox.fail(error)
        self._inboxes.clear()

    def lose(self, peer: int, error: RankwireError) -> None:
        """End everything that is wanted of a peer that is out of reach."""
        if peer in self._inboxes:
            self._inboxes[peer].fail(error)
        self._switchboard.lose(self.rank, peer, error)
        if isinstance(error, PeerLostError):
            self._events.lost(error)

    # -- the other ranks ---------------------------------------------------------------------------

    def failure_of(self, rank: int) -> RankwireError | None:
        """See ``Backend.failure_of``."""
        with self.network.changing():
            return self.network.why_lost(self.rank, rank)

    def status_of(self, rank: int) -> PeerStatus:
        """See ``Backend.status_of``."""
        with self.network.changing():
            failure = self.network.why_lost(self.rank, rank)
            inbox = self._inboxes.get(rank)
            return PeerStatus(
                rank,
                state_of(failure, is_suspected=False),
                reason="" if failure is None else failure.message,
                queued_nbytes=self.network.lane(self.rank, rank, _MESSAGES).load_nbytes,
                in_flight=self._switchboard.in_flight(self.rank, rank),
                waiting_for=describe_wanted(inbox.wanted()) if inbox is not None else (),
            )

    def _raise_if_gone(self) -> None:
        loss = self.network.why_lost(self.rank, self.rank)
        if loss is not None:
            raise loss
