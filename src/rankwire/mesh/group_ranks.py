"""The ranks of a group and the world ranks that they are: how numbers and errors are translated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from rankwire.errors import DeadlineExceededError, RankwireError

E = TypeVar("E", bound=RankwireError)


class GroupRanks:
    """The members of a group by world rank; the index is the rank in the group.

    Args:
        world: The world ranks of the members.
        own: The rank of this process in the group.
        check: Raises if the group is closed, or if a rank of the group was restarted since.

    Attributes:
        world: The same.
        own: The same.
        check_member: The same as ``check``.
    """

    def __init__(self, world: Sequence[int], own: int, check: Callable[[int | None], None]) -> None:
        self.world = list(world)
        self.own = own
        self.check_member = check
        self._rank_of = {rank: index for index, rank in enumerate(self.world)}

    def find(self, world_rank: int | None) -> int | None:
        """Return the rank in the group of a world rank; None if it is not a member."""
        return None if world_rank is None else self._rank_of.get(world_rank)

    def adopted(self, peer: int | None, error: E) -> E:
        """Replace the world ranks in an error by ranks of the group, once, and add a note.

        Args:
            peer: The rank of the group that the error is about, if it is about one.
            error: The error, which is returned.
        """
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
        """Add to an error which world ranks some ranks of the group are, once."""
        for rank in ranks:
            note = f"rank {rank} of the group {self.world} is rank {self.world[rank]} of the world"
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
