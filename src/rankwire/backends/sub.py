"""SubBackend: some of the ranks of a backend, as a backend of their own.

A group is its members and its id over the mesh of its world. Below this module there are only world
ranks: a group translates ranks where an operation enters, and errors where it leaves. The group's
id in the envelope keeps its messages apart from those of other groups.

A group consists of certain processes. If a launcher starts a member anew (``joins``), the group
keeps it as lost, and the program makes another group.

All members construct a group together: each tells every other who it thinks the members are
(``agreement``). So a disagreement is found at once, and all members know the same group id.

Lock: one, held for moments, guards a group's call ports, its receives under way and the groups made
of it.

Size: it has a method for each of ``Transport``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

from rankwire import runtime
from rankwire.backends.agreement import group_id, service_of_group
from rankwire.backends.arguments import check_members, check_rank
from rankwire.backends.base import Backend
from rankwire.backends.events import OnJoined, OnLost, OnSuspected
from rankwire.backends.group_ranks import GroupRanks
from rankwire.backends.sub_calls import SubCallPort
from rankwire.deadline import Deadline
from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    DeadlineExceededError,
    PeerLostError,
    RankwireError,
)
from rankwire.links.receive_handle import ReceiveHandle
from rankwire.links.send_handle import SendHandle
from rankwire.mesh.calls import CallPort
from rankwire.mesh.transport import NEW_GROUP
from rankwire.observe.status import PeerStatus
from rankwire.override import override
from rankwire.transports.shared_segment import SharedSegment
from rankwire.wire.frames import Envelope, Message, Payload
from rankwire.wire.receive import Destination

_CLOSE_PATIENCE = 1.0  # seconds for receives under way: their readers look up every 0.1 s


class SubBackend(Backend):
    """A group of a parent's ranks, numbered from 0 in the parent's order, or in a given one.

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
        timeout: Seconds for the agreement, and for every operation without its own timeout; None is
            the parent's.

    Raises:
        InvalidWorldSizeError: The list of members is empty.
        InvalidRankError: A member is not a rank of the parent, or the parent's own rank is not a
            member.
        ConfigurationError: ``keep_order`` is set, and a member is repeated.
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
        self._mesh = parent.mesh
        self._world = [parent.world_rank_of(member) for member in chosen]
        self.ranks = GroupRanks(self._world, self.rank)
        self._lock = runtime.Lock()
        self._ports: list[SubCallPort] = []
        self._groups: list[ref[SubBackend]] = []  # those made of this one
        self._waiting: list[int] = []  # the group of each receive under way
        self._has_closed = False
        self._joins = self._mesh.joins
        self._incarnations = [self._mesh.incarnation_of(rank) for rank in self._world]
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
        if isinstance(parent, SubBackend):
            living = [each for each in parent._groups if each() is not None]
            parent._groups = [*living, ref(self)]

    @property
    @override
    def mesh(self) -> Backend:
        return self._mesh

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

    @override
    def world_rank_of(self, rank: int) -> int:
        return self._world[check_rank(rank, self.world_size)]

    # -- ranks that were started anew --------------------------------------------------------------

    @property
    @override
    def joins(self) -> int:  # type: ignore[override]
        return self._mesh.joins

    @property
    @override
    def incarnation(self) -> int:  # type: ignore[override]
        return self._mesh.incarnation

    @override
    def incarnation_of(self, rank: int) -> int:
        return self._mesh.incarnation_of(self._world[rank])

    @property
    def broken(self) -> RankwireError | None:  # type: ignore[override]
        """Why this group is over: a member was started anew since it was made."""
        if self._mesh.joins != self._joins:
            self._look_for_replaced()
        return next(iter(self._replaced.values())) if self._replaced else None

    def _look_for_replaced(self) -> None:
        joins = self._mesh.joins
        for rank, before in enumerate(self._incarnations):
            incarnation = self.incarnation_of(rank)
            if incarnation != before and rank not in self._replaced:
                reason = f"its process was started anew (incarnation {incarnation}); {NEW_GROUP}"
                error = PeerLostError(rank, reason, root=self.world_rank_of(rank))
                self._replaced = {**self._replaced, rank: error}
        self._joins = joins

    def _raise_if_replaced(self, rank: int | None) -> None:
        """Raise if a member is not the process any more that it was when this group was made."""
        if self._mesh.joins != self._joins:
            self._look_for_replaced()
        if rank in self._replaced:
            raise self._replaced[rank].copy()

    @override
    def opening_collective(self) -> None:
        self._mesh.opening_collective()

    # -- messages ----------------------------------------------------------------------------------

    @override
    def transmit(self, dst: int, envelope: Envelope, message: Message, deadline: Deadline) -> None:
        with self.translating(dst) as rank:
            self._mesh.transmit(rank, envelope, message, deadline)

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
        send = partial(self._mesh.offer, check=check)
        return self._send_by(send, dst, envelope, message, deadline)

    @override
    def begin(
        self, dst: int, envelope: Envelope, message: Message, deadline: Deadline
    ) -> SendHandle | None:
        return self._send_by(self._mesh.begin, dst, envelope, message, deadline)

    def _send_by(
        self,
        send: Callable[[int, Envelope, Message, Deadline], SendHandle | None],
        dst: int,
        *message: Any,
    ) -> SendHandle | None:
        sent: SendHandle | None = None
        try:
            with self.translating(dst) as rank:
                sent = send(rank, *message)
            if sent is not None:
                sent.explain = partial(self._translated, dst)
            return sent
        except BaseException:
            if sent is not None:
                sent.revoke()  # interrupted: no other object knows of it
            raise

    @property
    @override
    def hosts(self) -> Sequence[object]:
        return [self._mesh.hosts[rank] for rank in self._world]

    @property
    @override
    def shares_memory(self) -> bool:  # type: ignore[override]
        return self._mesh.shares_memory

    @override
    def new_segment(self, rank: int, size: int) -> SharedSegment | None:
        return self._mesh.new_segment(rank, size)

    @override
    def open_segment(self, src: int, offer: bytes, rank: int, size: int) -> SharedSegment | None:
        return self._mesh.open_segment(self._world[src], offer, rank, size)

    @override
    def receive(
        self, src: int, envelope: Envelope, deadline: Deadline, *, nbytes: int | None = None
    ) -> Payload:
        take = partial(self._mesh.receive, self.world_rank_of(src), envelope, nbytes=nbytes)
        return self.take(src, envelope, deadline, take)

    @override
    def expect(
        self, src: int, envelope: Envelope, *, nbytes: int | None = None, into: Destination | None
    ) -> ReceiveHandle:
        with self.translating(src) as rank:
            expected = self._mesh.expect(rank, envelope, nbytes=nbytes, into=into)
        expected.explain = partial(self._translated, src)
        return expected

    @override
    def expect_any(
        self, sources: Sequence[int], envelope: Envelope, *, nbytes: int | None = None
    ) -> ReceiveHandle:
        with self.translating(None):
            ranks = [self._world[src] for src in sources]
            expected = self._mesh.expect_any(ranks, envelope, nbytes=nbytes)
        expected.explain = partial(self._translated, None)
        return expected

    def take(
        self,
        src: int | None,
        envelope: Envelope,
        deadline: Deadline,
        take: Callable[[Deadline], Payload],
    ) -> Payload:
        """Wait for a message of a rank of this group, or of any; errors name ranks of it."""
        with self._receiving(envelope[0]), self.translating(src):
            payload = take(deadline)
        if not isinstance(payload, bytearray):  # read later, when its sender may be gone
            payload.translate = partial(self.ranks.adopt, None)
        return payload

    @override
    def has_arrived(self, src: int, envelope: Envelope) -> bool:
        return self._mesh.has_arrived(self._world[src], envelope)

    @override
    def has_posted(self) -> bool:
        return self._mesh.has_posted()

    @override
    def read_others(self) -> None:
        self._mesh.read_others()

    @override
    def abandon(self, group: int, cause: RankwireError) -> None:
        self._mesh.abandon(group, cause)

    @override
    def refuse(self, envelope: Envelope) -> None:
        self._mesh.refuse(envelope)

    # -- calls -------------------------------------------------------------------------------------

    def open_calls(self, service: int) -> CallPort:
        """Return a port for calls. The same number in another group is another service."""
        self._raise_if_closed()
        port = SubCallPort(self, self._mesh.open_calls(service_of_group(self.group, service)))
        with self._lock:
            self._ports.append(port)
        if self._closed:  # meanwhile: then close() may have missed it
            port.close()
        return port

    def forget_port(self, port: SubCallPort) -> None:
        """Called by a port that is closed."""
        with self._lock:
            self._ports = [each for each in self._ports if each is not port]

    # -- ending ------------------------------------------------------------------------------------

    @override
    def failure_of(self, rank: int) -> RankwireError | None:
        if self._is_closed():
            return ChannelClosedError("this group is closed")
        if self.broken is not None and rank in self._replaced:
            return self._replaced[rank]
        failure = self._mesh.failure_of(self.world_rank_of(rank))
        if failure is not None:
            failure = failure.copy()
            self.ranks.adopt(rank, failure)
        return failure

    @override
    def lost_ranks(self) -> list[int]:
        found = map(self.ranks.find, self._mesh.lost_ranks())
        return [rank for rank in found if rank is not None]

    @override
    def doing_of(self, rank: int, deadline: Deadline) -> str | None:
        return self._mesh.doing_of(self.world_rank_of(rank), deadline)

    @override
    def unreceived(self, src: int, group: int) -> dict[int, int]:
        return self._mesh.unreceived(self.world_rank_of(src), group)

    @override
    def silences(self) -> dict[int, float]:
        found = self._mesh.silences()
        return {n: found[rank] for n, rank in enumerate(self._world) if rank in found}

    @override
    def status_of(self, rank: int) -> PeerStatus:
        return replace(self._mesh.status_of(self.world_rank_of(rank)), rank=rank)

    @override
    def on_peer_lost(self, callback: OnLost) -> Callable[[], None]:

        def lost(error: PeerLostError) -> None:
            rank = self.ranks.find(error.peer)
            if rank is not None:
                self.ranks.adopt(rank, error)
                callback(error)

        return self._mesh.on_peer_lost(lost)

    def on_peer_joined(self, callback: OnJoined) -> Callable[[], None]:
        """Have a function called when a member was started anew, which ends this group."""

        def joined(world_rank: int, incarnation: int) -> None:
            rank = self.ranks.find(world_rank)
            if rank is not None and incarnation != self._incarnations[rank]:
                callback(rank, incarnation)

        return self._mesh.on_peer_joined(joined)

    @override
    def on_peer_suspected(self, callback: OnSuspected) -> Callable[[], None]:

        def suspected(world_rank: int, seconds: float) -> None:
            rank = self.ranks.find(world_rank)
            if rank is not None:
                callback(rank, seconds)

        return self._mesh.on_peer_suspected(suspected)

    def close(self, *, error: BaseException | None = None) -> None:
        """End the view and its call ports, not the parent. Idempotent.

        Receives and barriers that wait, also those of groups made of this one, and all later
        operations get ``ChannelClosedError``. A send that waits for room goes on.
        """
        if self._has_closed:
            return
        with self._lock:
            self._closed = True
            ports, groups = list(self._ports), [each() for each in self._groups]
        for group in groups:
            if group is not None:
                group.close()
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
            self._mesh.abandon(group, ChannelClosedError("this group is closed"))

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
        """Give the world rank of a rank; errors that pass get this group's ranks and a note.

        Without a rank, that of this process.
        """
        self._raise_if_closed()
        world_rank = self.world_rank_of(self.rank if rank is None else rank)
        try:
            self._raise_if_replaced(rank)
            yield world_rank
        except RankwireError as error:
            self.ranks.adopt(rank, error)
            raise

    def _translated(self, rank: int | None, error: RankwireError) -> RankwireError:
        """Return the error to raise for one of the mesh about a rank of this group, or any."""
        if self._is_closed():
            return ChannelClosedError("this group is closed")
        if self.broken is not None and rank in self._replaced:
            return self._replaced[rank].copy()
        self.ranks.adopt(rank, error)
        return error

    def explained(self, error: RankwireError, *context: Any) -> RankwireError:
        """Add what was being done, and which ranks of the world are missing."""
        if isinstance(error, DeadlineExceededError | CollectiveAbortedError):
            self.ranks.note(error, error.waiting_for)  # a collective finds out who is missing here
        return super().explained(error, *context)

    def _is_closed(self) -> bool:
        parent = self.parent
        return self._closed or (isinstance(parent, SubBackend) and parent._is_closed())

    def _raise_if_closed(self) -> None:
        if self._is_closed():
            raise ChannelClosedError("this group is closed")
