"""A world that has formed, as its coordinator knows it: who is in it, its keys, and who is gone.

It says what each rank is told of it. Nothing here is sent, and who may return is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from rankwire import runtime
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
