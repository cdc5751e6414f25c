"""Transport: what a backend holds, and the layers above build on.

A transport knows world ranks and the ids of groups. A message is sent under an envelope (group,
channel, tag) and received under the same. ``Mesh`` is the transport of this package; users see
``Backend``, which checks arguments, and translates ranks and errors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from rankwire.clock import REAL_TIME, Clock
from rankwire.deadline import Deadline
from rankwire.environment import default_timeout
from rankwire.errors import RankwireError
from rankwire.links.receive_handle import ReceiveHandle
from rankwire.links.send_handle import SendHandle
from rankwire.mesh.calls import CallPort
from rankwire.mesh.events import PeerEvents
from rankwire.mesh.group_ranks import GroupRanks
from rankwire.mesh.roll_client import RollClient
from rankwire.mesh.segments import Segments
from rankwire.observe.status import PeerStatus, state_of
from rankwire.override import override
from rankwire.transports.shared_segment import SharedSegment
from rankwire.wire.frames import DEFAULT_MAX_MESSAGE_NBYTES, Envelope, Message, Payload
from rankwire.wire.receive import Destination

# What to do about a group with a rank that was restarted since the group was made.
NEW_GROUP = "for collectives, all ranks make a new group: SubBackend(backend, ranks)"


class Transport(ABC):
    """How one rank of a world reaches the others. Every method is safe from any thread.

    Args:
        rank: This process's index, from 0.
        world_size: The number of ranks.
        timeout: Seconds for operations without a timeout; None is ``RANKWIRE_TIMEOUT``, or else 60.
        max_message_nbytes: Largest message sent or accepted.
        clock: The clock of the world.

    Attributes:
        incarnation: How many times a launcher restarted this rank alone.
        joins: How many times another rank was restarted, since this one is in the world.
        broken: Why the world has no collectives any more: a rank was restarted since it formed.
        security: How connections are protected; see ``Backend``.
        ranks_return: Whether a lost rank may be restarted, and come back.
        events: Calls back when a peer is lost, silent or back.
        roll: Reports collectives to the coordinator.
        segments: Makes memory that ranks of one host share; None if this transport has none.
        shares_memory: Whether ranks of one host may share memory; alike on all of them.
        hosts: One item for each rank; the items of ranks on one host are equal.
    """

    incarnation: int = 0
    joins: int = 0
    broken: RankwireError | None = None
    security: str = "local"
    ranks_return: bool = False
    closed: bool = False
    segments: Segments | None = None
    shares_memory = False

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        timeout: float | None = None,
        max_message_nbytes: int = DEFAULT_MAX_MESSAGE_NBYTES,
        clock: Clock = REAL_TIME,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.clock = clock
        self.timeout = Deadline(default_timeout() if timeout is None else timeout, clock).limit
        self.max_message_nbytes = max_message_nbytes
        self.events = PeerEvents()
        self.roll = RollClient()
        self.hosts: Sequence[object] = [None] * world_size

    @abstractmethod
    def transmit(self, dst: int, envelope: Envelope, message: Message, deadline: Deadline) -> None:
        """Send one message under an envelope. The buffers may change again on return."""

    def offer(
        self,
        dst: int,
        envelope: Envelope,
        message: Message,
        deadline: Deadline,
        *,
        check: Callable[[], None] | None = None,
    ) -> SendHandle | None:
        """Send one message, but do not wait for a peer that reads it out of this rank's memory.

        Args:
            dst: The rank to send to.
            envelope: The envelope of the message.
            message: The buffers to send.
            deadline: For sending it.
            check: Called now and then if the peer does not take it; its exception ends the wait.

        Returns:
            What to settle before the buffers may change; None if they may change already.
        """
        self.transmit(dst, envelope, message, deadline)
        return None

    def begin(
        self, dst: int, envelope: Envelope, message: Message, deadline: Deadline
    ) -> SendHandle | None:
        """Send one message without waiting for the peer to take it.

        It leaves before later messages to the same rank. The deadline is for connecting. The result
        is that of ``offer``.
        """
        self.transmit(dst, envelope, message, deadline)
        return None

    @abstractmethod
    def receive(
        self, src: int, envelope: Envelope, deadline: Deadline, *, nbytes: int | None = None
    ) -> Payload:
        """Return the next message under an envelope; the caller owns it.

        A large one may still be in the sender's memory; then it must be read and given back.

        Raises:
            SizeMismatchError: The message does not have ``nbytes`` bytes; it stays receivable.
        """

    def expect(
        self, src: int, envelope: Envelope, *, nbytes: int | None = None, into: Destination | None
    ) -> ReceiveHandle:
        """Return the next message under an envelope before it has arrived.

        Args:
            src: The rank that sends it.
            envelope: The envelope of the message.
            nbytes: Its size, if that is fixed; otherwise as for ``receive``.
            into: Where it should arrive. It may arrive elsewhere: if it is small, is still in the
                sender's memory, or arrived before it was asked for.
        """
        return _Received(self, src, envelope, nbytes)

    @abstractmethod
    def expect_any(
        self, sources: Sequence[int], envelope: Envelope, *, nbytes: int | None = None
    ) -> ReceiveHandle:
        """Return the next message under an envelope from one of several ranks.

        It is expected while one of them is there. If several have sent one, the first rank of
        ``sources`` wins.
        """

    def has_arrived(self, src: int, envelope: Envelope) -> bool:
        """Return whether a message was read and not received. Neither reads nor waits."""
        return False

    def has_posted(self) -> bool:
        """Return whether this rank has posted receives that are not done."""
        return False

    def read_others(self) -> None:
        """Read what ranks have sent, without waiting, so that posted receives make progress."""
        return

    @abstractmethod
    def abandon(self, group: int, cause: RankwireError) -> None:
        """End all receives of one group on this rank, because it has left the group."""

    @abstractmethod
    def refuse(self, envelope: Envelope) -> None:
        """Drop the messages of an envelope, and of those whose tag differs in the lower 16 bits.

        Now and when they arrive: this rank will not receive them any more.
        """

    def opening_collective(self) -> None:
        """Note that this rank begins a collective; an exception fails it on all ranks."""
        return

    @abstractmethod
    def open_calls(self, service: int, ranks: GroupRanks | None = None) -> CallPort:
        """Return the port by which an agent calls and is called.

        There is one port for a service number and rank at a time.

        Args:
            service: Identifies the agent.
            ranks: The ranks of the group that the port numbers ranks by; None for the world.
        """

    def incarnation_of(self, rank: int) -> int:
        """Return how many times a rank was restarted alone."""
        return 0

    def failure_of(self, rank: int) -> RankwireError | None:
        """Return why a peer is gone (``ChannelClosedError`` if it left in good order), or None."""
        return None

    def lost_ranks(self) -> list[int]:
        """Return the ranks that are lost. Those that have left may be among them."""
        others = (rank for rank in range(self.world_size) if rank != self.rank)
        return [rank for rank in others if self.failure_of(rank) is not None]

    def doing_of(self, rank: int, deadline: Deadline) -> str | None:
        """Ask a rank what it is doing; return None if no rank can be asked."""
        return None

    def silences(self) -> dict[int, float]:
        """Return the ranks that missed a heartbeat, with the seconds of their silence."""
        return {}

    def unreceived(self, src: int, group: int) -> dict[int, int]:
        """Return how many messages of a rank were read and not received, by tag."""
        return {}

    def status_of(self, rank: int) -> PeerStatus:
        """Return what is known about a peer."""
        return PeerStatus(rank, state_of(self.failure_of(rank), is_suspected=False))

    def open_segment(self, src: int, offer: bytes, rank: int, size: int) -> SharedSegment | None:
        """Open the segment that another rank offers, as ``rank`` of ``size``; None without one."""
        return None

    @abstractmethod
    def close(self, *, error: BaseException | None = None) -> None:
        """Leave: waiting threads get ``ChannelClosedError``. Idempotent; sets ``closed``.

        Args:
            error: Why, if not in good order. Then the other ranks get ``PeerLostError`` with this
                error's text and traceback; without it they see an orderly end.
        """


class _Received(ReceiveHandle):
    """A message that is received when it is waited for, through ``Transport.receive``."""

    def __init__(self, ranks: Transport, src: int, envelope: Envelope, nbytes: int | None) -> None:
        super().__init__()
        self._receive = partial(ranks.receive, src, envelope, nbytes=nbytes)

    @override
    def post(self) -> None:
        pass

    @override
    def _wait(self, deadline: Deadline) -> Payload:
        return self._receive(deadline)

    @override
    def give_up(self) -> None:
        pass


class Operations(Protocol):
    """What a backend knows of the collectives of its group, which are a layer above.

    Attributes:
        turn: The number of the next operation.
        epoch: The number after the last operation that failed here.
    """

    turn: int
    epoch: int

    def call(self, name: str, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the next operation, and return its result."""

    def now(self) -> str:
        """Return the description of the running operation; empty if none runs."""
        ...

    def release(self) -> None:
        """Release what the ranks share: the group is closed."""
