"""The ranks of a group and the world ranks that they are: how numbers and errors are translated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rankwire.errors import DeadlineExceededError, RankwireError


class GroupRanks:
    """The members of a group by world rank; the index is the rank in the group.

    Args:
        world: The world ranks of the members.
        own: The rank of this process in the group.
    """

    def __init__(self, world: Sequence[int], own: int) -> None:
        self.world = list(world)
        self._own = own
        self._rank_of = {rank: index for index, rank in enumerate(self.world)}

    def find(self, world_rank: int | None) -> int | None:
        """Return the rank in the group of a world rank; None if it is not a member."""
        return None if world_rank is None else self._rank_of.get(world_rank)

    def adopt(self, peer: int | None, error: RankwireError) -> None:
        """Replace the world ranks in an error by ranks of the group, and add a note.

        Args:
            peer: The rank of the group that the error is about, if it is about one.
            error: With world ranks.
        """
        if error.rank == self.world[self._own]:
            error.rank = self._own
        if error.peer is not None:
            error.peer = self._rank_of.get(error.peer, error.peer)
        if isinstance(error, DeadlineExceededError):
            ranks = map(self.find, error.waiting_for)
            error.waiting_for = [rank for rank in ranks if rank is not None]
        about = error.peer if peer is None else peer
        if about is not None:
            self.note(error, [about])

    def note(self, error: RankwireError, ranks: Iterable[int]) -> None:
        """Add to an error which world ranks some ranks of the group are, once."""
        for rank in ranks:
            note = f"rank {rank} of the group {self.world} is rank {self.world[rank]} of the world"
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
