"""SubBackend: some of the ranks of a backend, as a backend of their own.

A view, not a connection: every operation goes to the parent with the rank translated and the
group's own id in the envelope, so that a group, its parent and other groups never take each other's
messages. Any backend can be the parent, also another ``SubBackend``; "parent rank" below always
means the parent's numbering.

A group is of certain processes. A member that is started anew alone (``joins``) is none of them:
for the group it stays lost, and those who want it back make another group.

Size: as for its class.

Construction is a collective of the members: each tells every other who it thinks the members are.
So a disagreement is found at once, by name, and all members know the same group id. The module
knows the ``Backend`` and ``CallPort`` interfaces and nothing of what is behind them.

Locks: one, held for moments, guards a group's call ports and counters. Those of forming a group are
in ``agreement``.

Size: as for its class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from rankwire import runtime
from rankwire.backends.agreement import group_id, service_of_group
from rankwire.backends.arguments import check_members, check_rank
from rankwire.backends.base import Backend
from rankwire.backends.events import OnJoined, OnLost, OnSuspected
from rankwire.backends.sub_calls import SubCallPort
from rankwire.backends.sub_messages import SubExpected, SubExpectedFromAny, SubOffer
from rankwire.deadline import Deadline
from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    DeadlineExceededError,
    PeerLostError,
    RankwireError,
)
from rankwire.links.borrower import Borrowed
from rankwire.mesh.calls import CallPort
from rankwire.mesh.transport import NEW_GROUP, Expected, ExpectedFromAny, Offer
from rankwire.observe.status import PeerStatus
from rankwire.transports.shared_segment import SharedSegment
from rankwire.wire.frames import Envelope, Message, Payload
from rankwire.wire.receive import Destination

# A parent need not wake a thread that reads a connection for others too; that one looks up this
# often. A receive that is taken back and posted again loses nothing.
_LOOK_UP_EVERY = 0.25
_CLOSE_PATIENCE = 4 * _LOOK_UP_EVERY


class SubBackend(Backend):
    """Some of the ranks of a parent, numbered from 0 in the parent's order, or in a given one.

    Every method is safe from any thread. Buffers pass to the parent untouched.

    All members make it at about the same time, and several groups with common members in the same
    order; the constructor returns when all have confirmed. After a ``DeadlineExceededError`` it may
    be made again with the same members.

    Errors name ranks of this group; a note on each says which rank of the parent that is, and texts
    from below use the parent's numbers.

    Args:
        parent: The backend whose ranks these are. It is not closed with the group, and must stay
            open.
        members: Parent ranks, in any order; repeated ones count once.
        keep_order: Whether rank i of the group is ``members[i]``; then none may be repeated. All
            members must give the same order. Groups of other orders are other groups.
        timeout: Seconds for the agreement, and for every operation without a limit of its own; None
            is the parent's.

    Raises:
        InvalidWorldSizeError: There are no members.
        InvalidRankError: A member is not a rank of the parent, or the parent's own rank is not a
            member.
        ConfigurationError: A member is repeated, and the order is to be kept.
        MembershipError: Another member has a different list, or another order of it.
        DeadlineExceededError: ``waiting_for`` has the parent ranks that did not confirm in time.

    Size: it has a method for each of ``Transport``'s, which translates and forwards.
    """

    _SHOWN = ("members", "parent", "to_global", "to_local")

    def __init__(
        self,
        parent: Backend,
        members: Iterable[int],
        *,
        keep_order: bool = False,
        timeout: float | None = None,
    ) -> None:
        chosen = check_members(parent.rank, parent.world_size, members, keep_order=keep_order)
        super().__init__(
            chosen.index(parent.rank),
            len(chosen),
            timeout=parent.timeout if timeout is None else timeout,
            max_message_nbytes=parent.max_message_nbytes,
            clock=parent.clock,
        )
        self.parent = parent
        self.roll = parent.roll
        self.security = parent.security
        self.ranks_return = parent.ranks_return
        self._members = chosen
        self._lock = runtime.Lock()
        self._ports: set[SubCallPort] = set()
        self._waiting: list[int] = []  # the group of each receive under way
        self._has_closed = False
        self._joins = parent.joins
        self._incarnations = [parent.incarnation_of(member) for member in chosen]
        self._replaced: dict[int, PeerLostError] = {}  # ranks of this group that are others by now
        deadline = Deadline(self.timeout, self.clock)
        try:
            ordinal = parent.agreement.reach(parent, chosen, deadline)
        except RankwireError as error:
            raise parent.explained(error, "SubBackend", deadline) from error.__cause__
        self.group = group_id(parent.group, chosen, ordinal)
        if self.broken is not None:  # it may have been the old process that agreed
            raise parent.explained(self.broken.copy(), "SubBackend", deadline)
        self.roll.add(self)

    @property
    def members(self) -> list[int]:
        """The parent ranks of this group; the index is the rank here."""
        return list(self._members)

    def to_global(self, local: int) -> int:
        """Return the parent rank of a rank of this group; ``InvalidRankError`` if it is not one."""
        return self._members[check_rank(local, self.world_size)]

    def to_local(self, parent_rank: int) -> int | None:
        """Return the rank in this group of a parent rank, or None if it is not a member."""
        return self._members.index(parent_rank) if parent_rank in self._members else None

    def world_rank_of(self, rank: int) -> int:
        """Return the rank in the whole world of a rank of this group."""
        return self.parent.world_rank_of(self.to_global(rank))

    # -- ranks that were started anew --------------------------------------------------------------

    @property
    def joins(self) -> int:  # type: ignore[override]
        """How many times a rank of the whole world was started anew."""
        return self.parent.joins

    @property
    def incarnation(self) -> int:  # type: ignore[override]
        """How many times this rank's process was started anew alone."""
        return self.parent.incarnation

    def incarnation_of(self, rank: int) -> int:
        """Return how many times the process of a rank was started anew alone."""
        return self.parent.incarnation_of(self._members[rank])

    @property
    def broken(self) -> RankwireError | None:  # type: ignore[override]
        """Why this group is over: a member was started anew since it was made."""
        if self.parent.joins != self._joins:
            self._look_for_replaced()
        return next(iter(self._replaced.values())) if self._replaced else None

    def _look_for_replaced(self) -> None:
        joins = self.parent.joins
        for rank, before in enumerate(self._incarnations):
            incarnation = self.incarnation_of(rank)
            if incarnation != before and rank not in self._replaced:
                reason = f"its process was started anew (incarnation {incarnation}); {NEW_GROUP}"
                error = PeerLostError(rank, reason, root=self.world_rank_of(rank))
                self._replaced = {**self._replaced, rank: error}
        self._joins = joins

    def _raise_if_replaced(self, rank: int | None) -> None:
        """Raise if a member is not the process any more that it was when this group was made."""
        if self.parent.joins != self._joins:
            self._look_for_replaced()
        if rank in self._replaced:
            raise self._replaced[rank].copy()

    def opening_collective(self) -> None:
        """Tell the parent that its rank begins a collective."""
        self.parent.opening_collective()

    # -- messages ----------------------------------------------------------------------------------

    def transmit(self, dst: int, envelope: Envelope, message: Message, deadline: Deadline) -> None:
        """Send one message to a rank of this group."""
        with self.translating(dst) as parent_rank:
            self.parent.transmit(parent_rank, envelope, message, deadline)

    def offer(
        self,
        dst: int,
        envelope: Envelope,
        message: Message,
        deadline: Deadline,
        *,
        check: Callable[[], None] | None = None,
    ) -> Offer | None:
        """Send one message, but do not wait for a rank that reads it out of this one's memory."""
        send = partial(self.parent.offer, check=check)
        return self._offer_by(send, dst, envelope, message, deadline)

    def begin(
        self, dst: int, envelope: Envelope, message: Message, deadline: Deadline
    ) -> Offer | None:
        """Send one message without waiting for the rank to take it."""
        return self._offer_by(self.parent.begin, dst, envelope, message, deadline)

    def _offer_by(
        self,
        send: Callable[[int, Envelope, Message, Deadline], Offer | None],
        dst: int,
        *message: Any,
    ) -> Offer | None:
        offer: Offer | None = None
        try:
            with self.translating(dst) as parent_rank:
                offer = send(parent_rank, *message)
            return None if offer is None else SubOffer(self, dst, offer)
        except BaseException:
            if offer is not None:
                offer.revoke()  # interrupted: nobody else knows of it
            raise

    @property
    def hosts(self) -> Sequence[object]:
        """One item a rank; those of ranks on one host are equal."""
        return [self.parent.hosts[member] for member in self._members]

    @property
    def shares_memory(self) -> bool:  # type: ignore[override]
        """Whether ranks of one host may be able to share memory."""
        return self.parent.shares_memory

    def new_segment(self, rank: int, size: int) -> SharedSegment | None:
        """Make memory for the ranks of a group on this host to meet in."""
        return self.parent.new_segment(rank, size)

    def open_segment(self, src: int, offer: bytes, rank: int, size: int) -> SharedSegment | None:
        """Open what another rank has made."""
        return self.parent.open_segment(self._members[src], offer, rank, size)

    def receive(
        self, src: int, envelope: Envelope, deadline: Deadline, *, nbytes: int | None = None
    ) -> Payload:
        """Return the next message of a rank of this group."""
        take = partial(self.parent.receive, self.to_global(src), envelope, nbytes=nbytes)
        return self.take_patiently(src, envelope, deadline, take)

    def expect(
        self, src: int, envelope: Envelope, *, nbytes: int | None = None, into: Destination | None
    ) -> Expected:
        """Return the next message under an envelope before it has come."""
        with self.translating(src) as parent_rank:
            expected = self.parent.expect(parent_rank, envelope, nbytes=nbytes, into=into)
        return SubExpected(self, src, envelope, expected)

    def expect_any(
        self, sources: Sequence[int], envelope: Envelope, *, nbytes: int | None = None
    ) -> ExpectedFromAny:
        """Return the next message under an envelope from one of several ranks of this group."""
        with self.translating(None):
            members = [self._members[src] for src in sources]
            expected = self.parent.expect_any(members, envelope, nbytes=nbytes)
        return SubExpectedFromAny(self, envelope, expected)

    def take_patiently(
        self,
        src: int | None,
        envelope: Envelope,
        deadline: Deadline,
        take: Callable[[Deadline], Payload],
    ) -> Payload:
        """Wait for a message of a rank of this group, or of any; errors name ranks of it."""
        with self._receiving(envelope[0]), self.translating(src):
            while True:
                patience = deadline.sooner(_LOOK_UP_EVERY)
                try:
                    payload = take(patience)
                    break
                except DeadlineExceededError:
                    if patience is deadline:
                        raise
                    self._raise_if_closed()
        if isinstance(payload, Borrowed):  # read later, when its sender may be gone
            payload.translate = self._adopt_from_world
        return payload

    def has_arrived(self, src: int, envelope: Envelope) -> bool:
        """Whether a message lies here, read and not taken."""
        return self.parent.has_arrived(self._members[src], envelope)

    def has_posted(self) -> bool:
        """Whether this rank has posted receives that are not done, in any group."""
        return self.parent.has_posted()

    def read_others(self) -> None:
        """Read what ranks have sent, without waiting, so that what was posted moves on."""
        self.parent.read_others()

    def abandon(self, group: int, cause: RankwireError) -> None:
        """End all receives of one group on this rank."""
        self.parent.abandon(group, cause)

    def refuse(self, envelope: Envelope) -> None:
        """Drop the messages of a family of tags, now and later."""
        self.parent.refuse(envelope)

    # -- calls -------------------------------------------------------------------------------------

    def open_calls(self, service: int) -> CallPort:
        """Return a port for calls. The same number in another group is another service."""
        self._raise_if_closed()
        port = SubCallPort(self, self.parent.open_calls(service_of_group(self.group, service)))
        with self._lock:
            self._ports.add(port)
        if self._closed:  # meanwhile: then close() may have missed it
            port.close()
        return port

    def forget_port(self, port: SubCallPort) -> None:
        """Called by a port that is closed."""
        with self._lock:
            self._ports.discard(port)

    # -- ending ------------------------------------------------------------------------------------

    def failure_of(self, rank: int) -> RankwireError | None:
        """Return why a peer is gone, or None; also if this view of it is."""
        if self.closed:
            return ChannelClosedError("this group is closed")
        if self.broken is not None and rank in self._replaced:
            return self._replaced[rank]
        failure = self.parent.failure_of(self.to_global(rank))
        if failure is not None:
            failure = failure.copy()
            self.adopt(rank, None, failure)
        return failure

    def lost_ranks(self) -> list[int]:
        """Return the ranks of this group that are lost."""
        found = (self.to_local(rank) for rank in self.parent.lost_ranks())
        return [rank for rank in found if rank is not None]

    def doing_of(self, rank: int, deadline: Deadline) -> str | None:
        """Ask a rank what it is doing."""
        return self.parent.doing_of(self.to_global(rank), deadline)

    def unreceived(self, src: int, group: int) -> dict[int, int]:
        """Return how many messages of a rank lie here, read and not received, by tag."""
        return self.parent.unreceived(self.to_global(src), group)

    def silences(self) -> dict[int, float]:
        """Return the members that were not heard lately, with the seconds since."""
        found = self.parent.silences()
        return {n: found[rank] for n, rank in enumerate(self._members) if rank in found}

    def status_of(self, rank: int) -> PeerStatus:
        """Return what is known about a peer, also beyond this group."""
        return replace(self.parent.status_of(self.to_global(rank)), rank=rank)

    def on_peer_lost(self, callback: OnLost) -> Callable[[], None]:
        """Have a function called when a member of this group is lost."""

        def lost(error: PeerLostError) -> None:
            rank = self.to_local(error.peer) if error.peer is not None else None
            if rank is not None:
                self.adopt(rank, None, error)
                callback(error)

        return self.parent.on_peer_lost(lost)

    def on_peer_joined(self, callback: OnJoined) -> Callable[[], None]:
        """Have a function called when a member was started anew, which ends this group."""

        def joined(parent_rank: int, incarnation: int) -> None:
            rank = self.to_local(parent_rank)
            if rank is not None and incarnation != self._incarnations[rank]:
                callback(rank, incarnation)

        return self.parent.on_peer_joined(joined)

    def on_peer_suspected(self, callback: OnSuspected) -> Callable[[], None]:
        """Have a function called when a member of this group becomes silent, or is heard again."""

        def suspected(parent_rank: int, seconds: float) -> None:
            rank = self.to_local(parent_rank)
            if rank is not None:
                callback(rank, seconds)

        return self.parent.on_peer_suspected(suspected)

    def close(self, *, error: BaseException | None = None) -> None:
        """End the view and its call ports, not the parent. Idempotent.

        Receives and barriers that wait, also those of groups made of this one, and all later
        operations get ``ChannelClosedError``. A send that waits for room goes on.
        """
        if self._has_closed:
            return
        with self._lock:
            self._closed = True
            ports = list(self._ports)
        if self.operations is not None:
            self.operations.release()
        for port in ports:
            port.close()
        patience = Deadline(_CLOSE_PATIENCE, self.clock)
        self._abandon_waiting()
        while self._waiting and not patience.expired:
            self.clock.sleep(0.001)  # one had not reached the parent yet, or sleeps
            self._abandon_waiting()
        self._has_closed = True  # last: what an interrupt has left is done by the next close

    def _abandon_waiting(self) -> None:
        with self._lock:
            groups = {self.group, *self._waiting}
        for group in groups:
            self.parent.abandon(group, ChannelClosedError("this group is closed"))

    @contextmanager
    def _receiving(self, group: int) -> Iterator[None]:
        with self._lock:
            self._waiting.append(group)
        try:
            yield
        finally:
            with self._lock:
                self._waiting.remove(group)

    # -- translation -------------------------------------------------------------------------------

    @contextmanager
    def translating(self, rank: int | None) -> Iterator[int]:
        """Give the parent rank of a rank; errors that pass get this group's ranks and a note.

        Without a rank, that of this process.
        """
        self._raise_if_closed()
        parent_rank = self.to_global(self.rank if rank is None else rank)
        try:
            self._raise_if_replaced(rank)
            yield parent_rank
        except RankwireError as error:
            self.adopt(rank, None, error)
            raise

    def adopt(
        self, peer: int | None, first: Callable[[RankwireError], None] | None, error: RankwireError
    ) -> None:
        """Give an error this group's ranks, and a note.

        Args:
            peer: The rank of this group that it is about, if it is about one.
            first: What puts it into the terms of the parent, if that is a group too.
            error: With ranks of the parent.
        """
        if first is not None:
            first(error)
        if error.rank == self.parent.rank:
            error.rank = self.rank
        if error.peer in self._members:
            error.peer = self._members.index(error.peer)
        if isinstance(error, DeadlineExceededError):
            ranks = map(self.to_local, error.waiting_for)
            error.waiting_for = [rank for rank in ranks if rank is not None]
        about = error.peer if peer is None else peer
        if about is not None:
            self._note(error, [about])

    def _adopt_from_world(self, error: RankwireError) -> None:
        if isinstance(self.parent, SubBackend):
            self.parent._adopt_from_world(error)
        self.adopt(None, None, error)

    def explained(self, error: RankwireError, *context: Any) -> RankwireError:
        """Add what was being done, and which ranks of the parent are missing."""
        if isinstance(error, DeadlineExceededError | CollectiveAbortedError):
            self._note(error, error.waiting_for)  # a collective finds out who is missing here
        return super().explained(error, *context)

    def _note(self, error: RankwireError, ranks: Iterable[int]) -> None:
        for rank in ranks:
            parent_rank = self._members[rank]
            note = f"rank {rank} of the group {self._members} is rank {parent_rank} of its parent"
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise ChannelClosedError("this group is closed")
