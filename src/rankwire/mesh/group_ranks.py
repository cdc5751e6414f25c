"""The ranks of a group: translates ranks and errors between the group and the world."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError, RankwireError
from rankwire.links.connection import Connection
from rankwire.links.inbox import Reply
from rankwire.mesh.call_port import CallPort
from rankwire.mesh.calls import IncomingCall, PortEvent
from rankwire.override import override
from rankwire.wire.credit import Credit
from rankwire.wire.frames import Channel, Message
from rankwire.wire.receive import Receive

if TYPE_CHECKING:
    from rankwire.mesh.mesh import Mesh

E = TypeVar("E", bound=RankwireError)


class GroupRanks:
    """The members of a group by world rank; the index is the rank in the group.

    Attributes:
        world: The world ranks of the members.
        own: The rank of this process in the group.
        check_member: Raises if the group is closed, or if the given rank was restarted since.
    """

    def __init__(
        self, world: Sequence[int], own: int, check_member: Callable[[int | None], None]
    ) -> None:
        self.world = list(world)
        self.own = own
        self.check_member = check_member
        self._rank_of = {rank: index for index, rank in enumerate(self.world)}

    def find(self, world_rank: int | None) -> int | None:
        """Return the group rank of a world rank, or None if it is not a member."""
        return None if world_rank is None else self._rank_of.get(world_rank)

    def adopted(self, peer: int | None, error: E) -> E:
        """Replace the world ranks in an error by group ranks, once; add a note and return it."""
        if error.is_local:
            return error
        error.is_local = True
        if error.rank == self.world[self.own]:
            error.rank = self.own
        if error.peer is not None:
            error.peer = self._rank_of.get(error.peer, error.peer)
        if isinstance(error, DeadlineExceededError):
            ranks = map(self.find, error.waiting_for)
            error.waiting_for = [rank for rank in ranks if rank is not None]
        about = error.peer if peer is None else peer
        if about is not None:
            self.note(error, [about])
        return error

    def note(self, error: RankwireError, ranks: Iterable[int]) -> None:
        """Add to an error the world ranks of some group ranks, once each."""
        for rank in ranks:
            note = f"rank {rank} of the group {self.world} is rank {self.world[rank]} of the world"
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)


class GroupCallPort(CallPort):
    """A call port that uses group ranks."""

    def __init__(self, mesh: Mesh, service: int, ranks: GroupRanks) -> None:
        super().__init__(mesh, service, own_rank=ranks.own)
        self._ranks = ranks

    @override
    def call(
        self,
        dst: int,
        request_id: int,
        message: Message,
        deadline: Deadline,
        on_reply: Callable[[Receive], None] | None = None,
        hold: bool = False,
        limit: float = float("inf"),
        window: Credit | None = None,
    ) -> Reply | None:
        ranks = self._ranks
        ranks.check_member(dst)
        rank = ranks.world[dst]
        try:
            reply = super().call(rank, request_id, message, deadline, on_reply, hold, limit, window)
        except RankwireError as error:
            raise ranks.adopted(dst, error) from error.__cause__
        if reply is not None:
            reply.translate = partial(ranks.adopted, dst)
        return reply

    @override
    def cancel(self, dst: int, request_id: int, *, expired: bool = False) -> None:
        super().cancel(self._ranks.world[dst], request_id, expired=expired)

    @override
    def wait_for_room(self, dst: int, limit: int, deadline: Deadline) -> bool:
        try:
            self._ranks.check_member(dst)
            return super().wait_for_room(self._ranks.world[dst], limit, deadline)
        except RankwireError as error:
            raise self._ranks.adopted(dst, error) from error.__cause__

    @override
    def calls_to(self, dst: int) -> list[int]:
        return super().calls_to(self._ranks.world[dst])

    @override
    def in_own_ranks(self, dst: int, error: RankwireError) -> RankwireError:
        return self._ranks.adopted(dst, error)

    @override
    def attend_to(self, dst: int, reply: Reply) -> None:
        super().attend_to(self._ranks.world[dst], reply)

    @override
    def poll(self, deadline: Deadline | None = None) -> list[PortEvent]:
        try:
            self._ranks.check_member(None)
            return super().poll(deadline)
        except RankwireError as error:
            raise self._ranks.adopted(self._ranks.own, error) from error.__cause__

    @override
    def reply(
        self,
        call: IncomingCall,
        message: Message,
        deadline: Deadline,
        hold: bool = False,
        channel: int = int(Channel.REPLY),
    ) -> None:
        try:
            self._ranks.check_member(call.src)
            super().reply(call, message, deadline, hold, channel)
        except RankwireError as error:
            raise self._ranks.adopted(call.src, error) from error.__cause__

    @override
    def _rank_of(self, connection: Connection) -> int:
        rank = self._ranks.find(connection.peer)
        assert rank is not None  # only members know the service number
        return rank
