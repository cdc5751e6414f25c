"""SubBackend: some of the ranks of a backend, as a backend of their own.

A group is its members and its id over the mesh of its world. The group's id in the envelope
separates its messages from those of other groups.

A group consists of certain processes. If a launcher restarts a member (``joins``), the group keeps
it as lost, and the program makes another group.

All members construct a group together: each sends every other its list of members (``agreement``).

Lock: one, held for moments, guards a group's call ports and the groups made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar
from weakref import ref

from rankwire import runtime
from rankwire.backends.agreement import group_id, service_of_group
from rankwire.backends.arguments import check_members, check_rank
from rankwire.backends.base import Backend
from rankwire.deadline import Deadline
from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    DeadlineExceededError,
    PeerLostError,
    RankwireError,
)
from rankwire.mesh.call_port import CallPort
from rankwire.mesh.events import OnJoined, OnLost, OnSuspected
from rankwire.mesh.group_ranks import GroupRanks
from rankwire.mesh.mesh import NEW_GROUP
from rankwire.override import override

E = TypeVar("E", bound=RankwireError)


class SubBackend(Backend):
    """A group of a parent's ranks, numbered from 0 in the parent's order, or in a given one.

    Every method is safe from any thread.

    All members make it at about the same time, and several groups with common members in the same
    order; the constructor returns when all have confirmed. After a ``DeadlineExceededError`` the
    program may make it again with the same members.

    Errors name ranks of this group; a note on each says which rank of the parent that is. Texts
    that other ranks have reported use the parent's numbers.

    Args:
        parent: The backend whose ranks these are. It is not closed with the group, and must stay
            open.
        members: Parent ranks, in any order; repeated ones count once.
        keep_order: Whether rank i of the group is ``members[i]``; then ``members`` must not repeat
            a rank, and all members must give the same order. Other orders make other groups.
        timeout: Seconds for the agreement, and default timeout of operations; None is the parent's.

    Raises:
        InvalidWorldSizeError: The list of members is empty.
        InvalidRankError: A member is not a rank of the parent, or the parent's own rank is not a
            member.
        ConfigurationError: ``keep_order`` is set, and a member is repeated.
        MembershipError: Another member has a different list, or another order of it.
        DeadlineExceededError: ``waiting_for`` has the parent ranks that did not confirm in time.
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
        mesh, world = parent.mesh, [parent.world[member] for member in chosen]
        deadline = Deadline(parent.timeout if timeout is None else timeout, parent.clock)
        self.parent = parent
        self._members = chosen
        self._lock = runtime.Lock()
        self._ports: list[CallPort] = []
        self._groups: list[ref[SubBackend]] = []  # made of this one
        self._closed = False
        self._joins = mesh.joins
        self._incarnations = [mesh.incarnation_of(rank) for rank in world]
        self._replaced: dict[int, PeerLostError] = {}  # ranks that were restarted since
        try:
            parent.check_member(None)
            ordinal = parent.agreement.reach(parent, chosen, deadline)
        except RankwireError as error:
            raise parent.failed(error, "SubBackend", deadline) from error.__cause__
        group = group_id(parent.group, chosen, ordinal)
        super().__init__(mesh, members=world, group=group, timeout=deadline.limit)
        self.roles = parent.roles.of_group(chosen)
        self.ranks = GroupRanks(world, self.rank, self.check_member)
        if self.broken is not None:  # the old process may have agreed
            raise parent.explained(self.broken.copy(), "SubBackend", deadline)
        if isinstance(parent, SubBackend):
            parent._adopt_group(self)

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

    # -- ranks that were restarted -----------------------------------------------------------------

    @property
    @override
    def broken(self) -> RankwireError | None:
        return next(iter(self._replaced_ranks().values()), None)

    def _replaced_ranks(self) -> dict[int, PeerLostError]:
        joins = self.mesh.joins
        if joins == self._joins:
            return self._replaced
        for rank, before in enumerate(self._incarnations):
            incarnation = self.incarnation_of(rank)
            if incarnation != before and rank not in self._replaced:
                reason = f"its process was started anew (incarnation {incarnation}); {NEW_GROUP}"
                error = PeerLostError(rank, reason, root=self.world[rank])
                error.is_local = True
                self._replaced = {**self._replaced, rank: error}
        self._joins = joins
        return self._replaced

    @override
    def check_member(self, rank: int | None) -> None:
        if self._closed:
            raise ChannelClosedError("this group is closed")
        if rank is not None and check_rank(rank, self.world_size) in self._replaced_ranks():
            raise self._replaced[rank].copy()

    @override
    def _check_peer(self, peer: int) -> int:
        rank = super()._check_peer(peer)
        self.check_member(rank)
        return rank

    # -- the other ranks ---------------------------------------------------------------------------

    @override
    def failure_of(self, rank: int) -> RankwireError | None:
        try:
            rank = self._check_peer(rank)
        except (ChannelClosedError, PeerLostError) as error:
            return error
        failure = self.mesh.failure_of(self.world[rank])
        return None if failure is None else self.ranks.adopted(rank, failure.copy())

    @override
    def lost_ranks(self) -> list[int]:
        found = map(self.ranks.find, self.mesh.lost_ranks())
        return [rank for rank in found if rank is not None]

    @override
    def on_peer_lost(self, callback: OnLost) -> Callable[[], None]:

        def lost(error: PeerLostError) -> None:
            rank = self.ranks.find(error.peer)
            if rank is not None:
                callback(self.ranks.adopted(rank, error))

        return super().on_peer_lost(lost)

    def on_peer_joined(self, callback: OnJoined) -> Callable[[], None]:
        """Call ``callback(rank, incarnation)`` when a member was restarted; this ends the group."""

        def joined(world_rank: int, incarnation: int) -> None:
            rank = self.ranks.find(world_rank)
            if rank is not None and incarnation != self._incarnations[rank]:
                callback(rank, incarnation)

        return super().on_peer_joined(joined)

    @override
    def on_peer_suspected(self, callback: OnSuspected) -> Callable[[], None]:

        def suspected(world_rank: int, seconds: float) -> None:
            rank = self.ranks.find(world_rank)
            if rank is not None:
                callback(rank, seconds)

        return super().on_peer_suspected(suspected)

    # -- errors ------------------------------------------------------------------------------------

    @override
    def adopted(self, peer: int | None, error: E) -> E:
        is_rank = type(peer) is int and 0 <= peer < self.world_size
        return self.ranks.adopted(peer if is_rank else None, error)

    @override
    def explained(self, error: RankwireError, *context: Any) -> RankwireError:
        if isinstance(error, DeadlineExceededError | CollectiveAbortedError):
            self.ranks.note(error, error.waiting_for)  # a collective finds the missing ranks here
        return super().explained(error, *context)

    # -- ending ------------------------------------------------------------------------------------

    def open_calls(self, service: int) -> CallPort:
        """Return a port for calls. The same number in another group is another service."""
        self.check_member(None)
        port = self.mesh.open_calls(service_of_group(self.group, service), self.ranks)
        with self._lock:
            self._ports.append(port)
        if self._closed:  # meanwhile, and close() may have missed it
            port.close()
        return port

    def _adopt_group(self, group: SubBackend) -> None:
        with self._lock:
            living = [each for each in self._groups if each() is not None]
            self._groups = [*living, ref(group)]
        if self._closed:  # meanwhile, and close() may have missed it
            group.close()

    @property
    @override
    def closed(self) -> bool:
        return self._closed

    @override
    def close(self, *, error: BaseException | None = None) -> None:
        """Close the group and its call ports, not the parent. Idempotent.

        Waiting receives and barriers, also those of groups made of this one, and all later
        operations raise ``ChannelClosedError``. A send that waits for room goes on.
        """
        with self._lock:
            self._closed = True
            ports, groups = self._ports, [each() for each in self._groups]
        for group in groups:
            if group is not None:
                group.close()
        if self.operations is not None:
            self.operations.release()
        for port in ports:
            port.close()
        # Receives are posted before they check whether the group is closed: none is missed.
        self.messages.abandon(self.group, ChannelClosedError("this group is closed"))
        self._ports, self._groups = [], []  # last: after an interrupt, the next close repeats it
