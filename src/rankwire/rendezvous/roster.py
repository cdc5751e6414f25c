"""What the coordinator knows of a world: the roster while it forms, then members, keys and losses.

Pure: nothing is sent here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from rankwire import runtime
from rankwire.deadline import Deadline
from rankwire.wire.control_messages import Gone, Joined, Member, Patience, World
from rankwire.wire.keys import KEY_NBYTES, SALT_NBYTES, pair_key, pair_keys, wrap


class FormedWorld:
    """Who is in a world, and by which keys. One thread.

    Args:
        members: All ranks, in order.
        patience: How long each may be silent.
        coordinator: The rank that coordinates, or -1.
        key_of: Returns the key of a rank, by which it has joined.

    Attributes:
        gone: What was told of the ranks that have died or left, and have not come back.
    """

    def __init__(
        self,
        members: list[Member],
        patience: Patience,
        coordinator: int,
        key_of: Callable[[int], bytes],
    ) -> None:
        self._world = World(runtime.randbits(32) or 1, members, patience, coordinator)
        self._world_key = runtime.token_bytes(KEY_NBYTES)
        self._key_of = key_of
        self.gone: dict[int, Gone] = {}

    @property
    def without_keys(self) -> World:
        """The world as everyone may know it."""
        return self._world

    @property
    def _incarnations(self) -> list[int]:
        return [member.incarnation for member in self._world.members]

    def as_told_to(self, rank: int) -> World:
        """Return it with the keys of a rank with every other, in a form that only it can read."""
        keys = pair_keys(self._world_key, rank, self._incarnations)
        return replace(self._world, keys=self._wrapped(rank, keys))

    def take_back(self, member: Member) -> None:
        """Put a rank that was started anew in the place of its old process."""
        self.gone.pop(member.rank, None)
        members = list(self._world.members)
        members[member.rank] = member
        late = sorted({*self._world.late, member.rank})
        self._world = replace(self._world, members=members, late=late)

    def joined_as_told_to(self, rank: int, member: Member) -> Joined:
        """Return what a rank is told of one that is back: where it is, and the key of the two."""
        key = pair_key(self._world_key, rank, member.rank, self._incarnations)
        return Joined(member, self._wrapped(rank, key))

    def _wrapped(self, rank: int, keys: bytes) -> bytes:
        return wrap(self._key_of(rank), keys, runtime.token_bytes(SALT_NBYTES))


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


class Rejoins:
    """Who may come back, and how far they are. One thread."""

    def __init__(self) -> None:
        self._expected: set[int] = set()
        self._entered: set[int] = set()
        self._queue: list[Member] = []
        self._announced: Member | None = None
        self._witnesses: set[int] = set()  # members that have not said that they know it

    def expect(self, rank: int) -> None:
        """A new process of a rank was started: it may come."""
        self._expected.add(rank)

    def is_expected(self, rank: int) -> bool:
        """Whether a rank may come in."""
        return rank in self._expected

    def is_under_way(self, rank: int) -> bool:
        """Whether a rank has come in, and does not know the world yet."""
        return rank in self._entered

    def enter(self, rank: int) -> None:
        """Its control connection stands."""
        self._entered.add(rank)

    def queue(self, member: Member) -> None:
        """It has said where it listens, and can be reached there."""
        self._queue.append(member)

    def announce(self, members: Iterable[int]) -> Member | None:
        """Return the next one to tell these members of; None if there is none, or it is early."""
        if self._announced is not None or not self._queue:
            return None
        self._announced = self._queue.pop(0)
        self._witnesses = set(members)
        return self._announced

    def know(self, witness: int, rank: int, incarnation: int) -> None:
        """A member says that it knows a rank that was announced."""
        announced = self._announced
        if announced is not None and (announced.rank, announced.incarnation) == (rank, incarnation):
            self._witnesses.discard(witness)

    def complete(self) -> Member | None:
        """Return the one that all members know, once: from now on it is one of them."""
        member = self._announced
        if member is None or self._witnesses:
            return None
        self._announced = None
        self._entered.discard(member.rank)
        self._expected.discard(member.rank)
        return member

    def excuse(self, rank: int) -> None:
        """A member is lost: nobody waits for its word."""
        self._witnesses.discard(rank)

    def fall_back(self, rank: int) -> bool:
        """A rank has gone on its way back; return whether members were told of it."""
        self._entered.discard(rank)
        self._queue = [member for member in self._queue if member.rank != rank]
        if self._announced is None or self._announced.rank != rank:
            return False
        self._announced = None
        return True
