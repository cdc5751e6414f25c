"""Transport: what an implementation of ``Backend`` provides, and the layers above build on.

A message is sent under a whole envelope (group, channel, tag) and received under the same. Users do
not see this: ``Backend`` has what they call.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from rankwire.deadline import Deadline
from rankwire.errors import RankwireError
from rankwire.links.receive_handle import ReceiveHandle
from rankwire.links.send_handle import SendHandle
from rankwire.mesh.calls import CallPort
from rankwire.observe.status import PeerStatus, state_of
from rankwire.override import override
from rankwire.public_dir import PublicDir
from rankwire.transports.shared_segment import SharedSegment
from rankwire.wire.frames import WORLD_GROUP, Envelope, Message, Payload
from rankwire.wire.receive import Destination

# What to do about a group of which a rank is not the process any more that it was made with.
NEW_GROUP = "for collectives, all ranks make a new group: SubBackend(backend, ranks)"


class Transport(PublicDir):
    """One rank of a group, and how it reaches the others. Every method is safe from any thread.

    Attributes:
        rank: This process's index, from 0.
        world_size: The number of ranks.
        group: The id by which this group's traffic is told from others'; the same on all members.
        incarnation: How many times a launcher has restarted this rank alone.
        joins: How many times another rank's was, since this one is in the world.
        broken: Why there are no barriers and collectives in this group any more: they count on
            what all ranks did before, and one of them was started anew since it was made.
    """

    rank: int
    world_size: int
    group: int = WORLD_GROUP
    incarnation: int = 0
    joins: int = 0
    broken: RankwireError | None = None
    _closed = False

    @abstractmethod
    def transmit(self, dst: int, envelope: Envelope, message: Message, deadline: Deadline) -> None:
        """Send one message under an envelope. The buffers are free again on return."""

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
            envelope: Under which it is received.
            message: What to send.
            deadline: For handing it over.
            check: Called now and then if the peer does not take it; what it raises ends the wait.

        Returns:
            What to settle before the buffers may change; None if they are free already.
        """
        self.transmit(dst, envelope, message, deadline)
        return None

    def begin(
        self, dst: int, envelope: Envelope, message: Message, deadline: Deadline
    ) -> SendHandle | None:
        """Send one message without waiting for the peer to take it.

        It leaves before what is sent to the same rank later, as soon as the peer takes it.

        Args:
            dst: The rank to send to.
            envelope: Under which it is received.
            message: What to send; it must not change before the offer is over.
            deadline: For connecting, if that is necessary.

        Returns:
            What to settle before the buffers may change; None if they are free already.
        """
        self.transmit(dst, envelope, message, deadline)
        return None

    @property
    def hosts(self) -> Sequence[object]:
        """One item a rank; those of ranks on one host are equal."""
        return [None] * self.world_size

    shares_memory = False  # whether ranks of one host may be able to; alike on all of them

    def new_segment(self, rank: int, size: int) -> SharedSegment | None:
        """Make memory for the ranks of a group on this host to meet in.

        Args:
            rank: This rank, in the group.
            size: Of the group.

        Returns:
            This rank's end of it; None if that cannot be, or is not wanted.
        """
        return None

    def open_segment(self, src: int, offer: bytes, rank: int, size: int) -> SharedSegment | None:
        """Open what another rank has made, and has told this one of; None if that cannot be."""
        return None

    @abstractmethod
    def receive(
        self, src: int, envelope: Envelope, deadline: Deadline, *, nbytes: int | None = None
    ) -> Payload:
        """Return the next message under an envelope; the caller owns it.

        A large one may still lie with the sender; then it is a parcel, to be read and given back.

        Raises:
            SizeMismatchError: ``nbytes`` is given and the message has another size; it stays
                receivable.
        """

    def expect(
        self, src: int, envelope: Envelope, *, nbytes: int | None = None, into: Destination | None
    ) -> ReceiveHandle:
        """Return the next message under an envelope before it has come.

        Args:
            src: Who sends it.
            envelope: What it is sent under.
            nbytes: Its size, if that is fixed; otherwise as for ``receive``.
            into: Where it is to come, if that matters. It may come elsewhere: if it is small, or
                still lies with its sender, or has come before it was asked for.
        """
        return _Received(self, src, envelope, nbytes)

    @abstractmethod
    def expect_any(
        self, sources: Sequence[int], envelope: Envelope, *, nbytes: int | None = None
    ) -> ReceiveHandle:
        """Return the next message under an envelope from one of several ranks, before it has come.

        It goes on while one of them is there. If several have sent one, the first of them is taken.

        Args:
            sources: Who may send it, those first whose turn it is.
            envelope: What it is sent under.
            nbytes: Its size, if that is fixed; one of another size ends it, and stays receivable.
        """

    def has_arrived(self, src: int, envelope: Envelope) -> bool:
        """Whether a message lies here, read and not taken. A look: it neither reads nor waits."""
        return False

    def has_posted(self) -> bool:
        """Whether this rank has posted receives that are not done."""
        return False

    def read_others(self) -> None:
        """Read what ranks have sent, without waiting, so that what was posted moves on.

        Called now and then by a thread that waits where it sees no message.
        """

    @abstractmethod
    def abandon(self, group: int, cause: RankwireError) -> None:
        """End all receives of one group on this rank, because it has left the group."""

    @abstractmethod
    def refuse(self, envelope: Envelope) -> None:
        """Drop the messages of an envelope, and of those whose tag differs in the lower 16 bits.

        Now and when they come: this rank will not ask for them any more.
        """

    def opening_collective(self) -> None:
        """Hear that this rank begins a collective; what this raises fails it on all ranks."""

    @abstractmethod
    def open_calls(self, service: int) -> CallPort:
        """Return the port by which an agent calls and is called.

        There is one port a service number and rank at a time.
        """

    def world_rank_of(self, rank: int) -> int:
        """Return the rank in the whole world of a rank of this group."""
        return rank

    def incarnation_of(self, rank: int) -> int:
        """Return how many times the process of a rank was started anew alone."""
        return 0

    def failure_of(self, rank: int) -> RankwireError | None:
        """Return why a peer is gone (``ChannelClosedError`` if it left in good order), or None."""
        return None

    def lost_ranks(self) -> list[int]:
        """Return the ranks that are lost. Those that have left may be among them."""
        return [
            rank
            for rank in range(self.world_size)
            if rank != self.rank and self.failure_of(rank) is not None
        ]

    def doing_of(self, rank: int, deadline: Deadline) -> str | None:
        """Ask a rank what it is doing; None if there is nobody to ask. Here: nobody answers."""
        return None

    def unreceived(self, src: int, group: int) -> dict[int, int]:
        """Return how many messages of a rank lie here, read and not received, by tag."""
        return {}

    def status_of(self, rank: int) -> PeerStatus:
        """Return what is known about a peer."""
        return PeerStatus(rank, state_of(self.failure_of(rank), is_suspected=False))

    @abstractmethod
    def close(self, *, error: BaseException | None = None) -> None:
        """Leave the world; waiting threads get ``ChannelClosedError``. Idempotent.

        Args:
            error: The error that ends this rank, if any. Then the other ranks get ``PeerLostError``
                with this error's text and traceback; without it they see an orderly end.
        """

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed


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
