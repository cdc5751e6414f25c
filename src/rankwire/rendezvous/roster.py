"""Keep the coordinator's records of a world: members, keys, losses, ranks that rejoin."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from rankwire import runtime
from rankwire.deadline import Deadline
from rankwire.wire.control_messages import Gone, Joined, Member, Patience, World
from rankwire.wire.keys import KEY_NBYTES, SALT_NBYTES, pair_key, pair_keys, wrap


class FormedWorld:
    """The members and keys of a formed world. For one thread.

    ``members`` are all ranks in order. ``gone`` has the reports of ranks that have not rejoined.
    """

    def __init__(
        self,
        members: list[Member],
        patience: Patience,
        coordinator: int,
        key_of: Callable[[int], bytes],
        *,
        are_restarted: bool = False,
    ) -> None:
        self._world = World(
            runtime.randbits(32) or 1,
            members,
            patience,
            coordinator,
            are_restarted=are_restarted,
        )
        self._world_key = runtime.token_bytes(KEY_NBYTES)
        self._key_of = key_of
        self.gone: dict[int, Gone] = {}

    @property
    def without_keys(self) -> World:
        """The world without secrets."""
        return self._world

    @property
    def _incarnations(self) -> list[int]:
        return [member.incarnation for member in self._world.members]

    def as_told_to(self, rank: int) -> World:
        """Return the world with the pair keys of a rank, encrypted for that rank."""
        keys = pair_keys(self._world_key, rank, self._incarnations)
        return replace(self._world, keys=self._wrapped(rank, keys))

    def take_back(self, member: Member) -> None:
        """Replace the entry of a rank that was restarted."""
        self.gone.pop(member.rank, None)
        members = list(self._world.members)
        members[member.rank] = member
        late = sorted({*self._world.late, member.rank})
        self._world = replace(self._world, members=members, late=late)

    def joined_as_told_to(self, rank: int, member: Member) -> Joined:
        """Return the message to ``rank`` with a restarted member's address and their key."""
        key = pair_key(self._world_key, rank, member.rank, self._incarnations)
        return Joined(member, self._wrapped(rank, key))

    def _wrapped(self, rank: int, keys: bytes) -> bytes:
        return wrap(self._key_of(rank), keys, runtime.token_bytes(SALT_NBYTES))


def is_last_moment(deadline: Deadline) -> bool:
    """Return whether the deadline is so near that other ranks are giving up too."""
    return deadline.remaining() < min(0.25, deadline.limit / 4)


class Roster:
    """Records which ranks have joined a forming world. The coordinator's lock guards it."""

    def __init__(self, world_size: int, me: Member | None) -> None:
        self.world_size = world_size
        self.coordinator = -1 if me is None else me.rank
        self.members: dict[int, Member] = {} if me is None else {me.rank: me}
        self.unreached: dict[int, str] = {}  # why other ranks cannot reach them
        self.absent: dict[int, str] = {}  # why ranks will never join
        self.deadline: Deadline | None = None
        self.has_changed = False  # since ranks were notified of the missing ones
        self.is_hopeless = False  # whether ranks were notified that another will never join
        self._gave_up: set[int] = set()

    def enter(self, member: Member) -> None:
        """Add a rank that has joined."""
        self.members[member.rank] = member
        self.unreached.pop(member.rank, None)

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have joined."""
        return len(self.members) == self.world_size

    def missing(self) -> list[int]:
        """Return the ranks that have not joined, without those that gave up at the deadline."""
        present = self.members.keys() | self._gave_up
        return [rank for rank in range(self.world_size) if rank not in present]

    def never_to_come(self) -> list[int]:
        """Return the ranks that will never join."""
        return [rank for rank in self.absent if rank not in self.members]

    def strike(self, rank: int) -> None:
        """Remove a rank that disconnected; it may join again."""
        self.members.pop(rank, None)
        if self.deadline is not None and is_last_moment(self.deadline):
            self._gave_up.add(rank)


class Rejoins:
    """Tracks restarted ranks that rejoin their world. For one thread.

    The states of one rank::

        EXPECTED   its old process has ended, and a new one was started      -> ENTERED
        ENTERED    it is authenticated, and has not sent its address         -> QUEUED, EXPECTED
        QUEUED     another rank rejoins before it                            -> ANNOUNCED, EXPECTED
        ANNOUNCED  some members have not acknowledged it                     -> a member, EXPECTED

    One rank is announced at a time. All members acknowledge it before it gets the world, so they
    know its new keys when it dials them. If its connection ends, it may begin again.
    """

    def __init__(self) -> None:
        self._expected: set[int] = set()
        self._entered: set[int] = set()
        self._queue: list[Member] = []
        self._announced: Member | None = None
        self._witnesses: set[int] = set()  # members that have not acknowledged it

    def expect(self, rank: int) -> None:
        """Allow a restarted rank to rejoin."""
        self._expected.add(rank)

    def is_expected(self, rank: int) -> bool:
        """Return whether a rank may rejoin."""
        return rank in self._expected

    def is_under_way(self, rank: int) -> bool:
        """Return whether a rank is connected, but not yet in the world."""
        return rank in self._entered

    def enter(self, rank: int) -> None:
        """Record that the control connection of a rank is established."""
        self._entered.add(rank)

    def queue(self, member: Member) -> None:
        """Queue a rank that sent a reachable address."""
        self._queue.append(member)

    def announce(self, members: Iterable[int]) -> Member | None:
        """Return the next rank to announce to these members, if any."""
        if self._announced is not None or not self._queue:
            return None
        self._announced = self._queue.pop(0)
        self._witnesses = set(members)
        return self._announced

    def know(self, witness: int, rank: int, incarnation: int) -> None:
        """Record that a member acknowledged the announced rank."""
        announced = self._announced
        if announced is not None and (announced.rank, announced.incarnation) == (rank, incarnation):
            self._witnesses.discard(witness)

    def complete(self) -> Member | None:
        """Return the announced rank once, when all members have acknowledged it."""
        member = self._announced
        if member is None or self._witnesses:
            return None
        self._announced = None
        self._entered.discard(member.rank)
        self._expected.discard(member.rank)
        return member

    def excuse(self, rank: int) -> None:
        """Stop waiting for a lost member's acknowledgement."""
        self._witnesses.discard(rank)

    def fall_back(self, rank: int) -> bool:
        """Reset a rank that disconnected while rejoining; return whether it was announced."""
        self._entered.discard(rank)
        self._queue = [member for member in self._queue if member.rank != rank]
        if self._announced is None or self._announced.rank != rank:
            return False
        self._announced = None
        return True
