"""The roster of a world that forms: who has joined, who is missing, who will never come. Pure."""

from __future__ import annotations

from rankwire.deadline import Deadline
from rankwire.wire.control_messages import Member


def is_last_moment(deadline: Deadline) -> bool:
    """Whether a rank that gives up now does so because time is over for it too."""
    return deadline.remaining() < min(0.25, deadline.limit / 4)


class Roster:
    """Who is there, and who is not. Used under the coordinator's lock where threads share it.

    Args:
        world_size: How many ranks there will be.
        me: The coordinator's own entry, if it is a rank.

    Attributes:
        coordinator: The coordinator's rank, or -1.
        members: Who has joined, by rank.
        unreached: Why ranks that would join cannot be reached by others.
        absent: Why ranks will never come.
        deadline: Until when ranks may join; None while it is not known.
    """

    def __init__(self, world_size: int, me: Member | None) -> None:
        self.world_size = world_size
        self.coordinator = -1 if me is None else me.rank
        self.members: dict[int, Member] = {} if me is None else {me.rank: me}
        self.unreached: dict[int, str] = {}
        self.absent: dict[int, str] = {}
        self.deadline: Deadline | None = None
        self._gave_up: set[int] = set()

    def enter(self, member: Member) -> None:
        """Take in a rank that has joined."""
        self.members[member.rank] = member
        self.unreached.pop(member.rank, None)

    @property
    def is_complete(self) -> bool:
        """Whether all have joined."""
        return len(self.members) == self.world_size

    def missing(self) -> list[int]:
        """Return the ranks to name when time is over: not those who gave up for that reason."""
        present = self.members.keys() | self._gave_up
        return [rank for rank in range(self.world_size) if rank not in present]

    def never_to_come(self) -> list[int]:
        """Return the ranks of which it is known that they will not join any more."""
        return [rank for rank in self.absent if rank not in self.members]

    def strike(self, rank: int) -> None:
        """Take out a rank that has hung up; it may come again."""
        self.members.pop(rank, None)
        if self.deadline is not None and is_last_moment(self.deadline):
            self._gave_up.add(rank)
