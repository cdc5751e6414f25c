"""Roles: the names of the ranks of a world. Pure.

A role is a program of the job, such as ``rollout``. Its ranks are named ``rollout/0``,
``rollout/1`` and so on, in rank order. ``RANKWIRE_ROLES`` lists the roles of a world in rank order,
each with its number of ranks: ``trainer:1,rollout:2``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from rankwire.errors import ConfigurationError, InvalidRankError
from rankwire.public_dir import PublicDir
from rankwire.texts import one_line

LONGEST_ROLE = 64
_ROLE = re.compile(rf"[\w.-]{{1,{LONGEST_ROLE}}}")


class Roles(PublicDir, Mapping[str, tuple[int, ...]]):
    """The ranks of each role, and their names; empty if the ranks have no roles.

    ``backend.roles["rollout"]`` is a tuple of ranks such as ``(1, 2)``. These are named
    ``"rollout/0"`` and ``"rollout/1"``. In a group, ranks keep the names that they have in the
    world.
    """

    _SHOWN = ("name_of", "rank_of", "ranks_of")

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = tuple(names)  # by rank
        self._by_name = {name: rank for rank, name in enumerate(self._names)}
        ranks: dict[str, list[int]] = {}
        for rank, name in enumerate(self._names):
            ranks.setdefault(name.rpartition("/")[0], []).append(rank)
        self._by_role = {role: tuple(each) for role, each in ranks.items()}

    def __getitem__(self, role: str) -> tuple[int, ...]:
        return self._by_role[role]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_role)

    def __len__(self) -> int:
        return len(self._by_role)

    def name_of(self, rank: int) -> str:
        """Return the name of a rank, such as ``"rollout/0"``, or "" if it has none."""
        return self._names[rank] if 0 <= rank < len(self._names) else ""

    def rank_of(self, name: str) -> int:
        """Return the rank of that name; the name of a role with one rank is enough.

        Raises:
            InvalidRankError: No rank has that name, or several ranks have that role.
        """
        ranks = self.ranks_of(name)
        if len(ranks) > 1:
            text = f"{name!r} is the role of {len(ranks)} ranks; name one of them: {self._list()}"
            raise InvalidRankError(name, len(self._names), why=text)
        return ranks[0]

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """Return the ranks of a role, or the one rank of that name; or raise InvalidRankError."""
        if name in self._by_name:
            return (self._by_name[name],)
        if name in self._by_role:
            return self._by_role[name]
        there_are = f"there are {self._list()}" if self._names else "these ranks have no names"
        text = f"{name!r} is not the name of a rank or role; {there_are}"
        raise InvalidRankError(name, len(self._names), why=text)

    def of_group(self, members: Iterable[int]) -> Roles:
        """Return the roles of a group, whose ranks keep their names."""
        return Roles([self._names[member] for member in members] if self._names else ())

    def _list(self) -> str:
        ends = [(self._names[ranks[0]], self._names[ranks[-1]]) for ranks in self.values()]
        return one_line(", ".join(a if a == b else f"{a} to {b}" for a, b in ends))

    def __repr__(self) -> str:
        return f"<Roles {self._by_role}>"


def roles_of_world(roles: Sequence[str] | None, world_size: int) -> Roles:
    """Return the roles of a world, given that of each rank; None means that there are none."""
    if not roles:
        return Roles()
    if isinstance(roles, str) or len(roles) != world_size:
        raise ConfigurationError(
            f"roles has the role of each of the {world_size} ranks, in rank order, not {roles!r}"
        )
    counts: dict[str, int] = {}
    names = []
    for role in map(check_role, roles):
        names.append(f"{role}/{counts.setdefault(role, 0)}")
        counts[role] += 1
    return Roles(names)


def check_role(role: str) -> str:
    """Return the name of a role, or raise ConfigurationError."""
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise ConfigurationError(
            f"the name of a role has 1 to {LONGEST_ROLE} letters, digits, '_', '-' and '.', not"
            f" {role!r}"
        )
    return role


def parse_roles(text: str) -> list[str]:
    """Return the role of each rank from the text of ``RANKWIRE_ROLES``."""
    roles: list[str] = []
    for piece in text.split(","):
        role, _, count = piece.strip().rpartition(":")
        if not count.isdecimal() or int(count) < 1:
            raise ConfigurationError(
                f"RANKWIRE_ROLES is {text!r}: list the roles in rank order, each with its number of"
                " ranks, such as trainer:1,rollout:2"
            )
        roles += [check_role(role)] * int(count)
    return roles


def format_roles(roles: Sequence[str]) -> str:
    """Return the text of ``RANKWIRE_ROLES``."""
    return ",".join(f"{role}:{len([*ranks])}" for role, ranks in groupby(roles))
