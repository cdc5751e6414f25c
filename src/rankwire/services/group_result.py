"""The result of a group call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from rankwire.errors import GroupCallError, RankwireError
from rankwire.public_dir import PublicDir
from rankwire.texts import name_ranks

R = TypeVar("R")


class GroupResult(PublicDir, Generic[R]):
    """What the ranks of a group call returned. Iterating gives the values in the order of ranks.

    Attributes:
        name: The function.
        ranks: The ranks that were called, in the given order.
        values: The values, by rank, in that order; without those that ``reduce`` has combined.
        errors: The errors of the ranks that failed, by rank.
        missing: The ranks without an outcome: they did not answer in time, or were not needed.
        value: What ``reduce`` made of the values; None without it, or without any value.
    """

    _SHOWN = ("errors", "missing", "name", "ranks", "value", "values")

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.name = name
        self.ranks = list(ranks)
        self.values: dict[int, R] = {}
        self.errors: dict[int, RankwireError] = {}
        self.missing: list[int] = []
        self.value: Any = None

    def __getitem__(self, rank: int) -> R:
        """Return the value of a rank, or raise its error.

        Raises:
            KeyError: The rank was not called, or has no value here.
        """
        if rank in self.errors:
            raise self.errors[rank]
        return self.values[rank]

    def __iter__(self) -> Iterator[R]:
        return iter(self.values.values())

    def __len__(self) -> int:
        return len(self.values)

    def in_order(self) -> None:
        """Sort all of it by the order of the ranks."""
        self.missing = [rank for rank in self.ranks if rank in self.missing]
        self.values = {rank: self.values[rank] for rank in self.ranks if rank in self.values}
        self.errors = {rank: self.errors[rank] for rank in self.ranks if rank in self.errors}

    def failure(self) -> GroupCallError:
        """Return the error that says which ranks failed or did not answer."""
        error = GroupCallError(self.name, self.values, self.errors, self.missing)
        error.__cause__ = next(iter(self.errors.values()), None)
        return error

    def __repr__(self) -> str:
        parts = [f"{len(self.values)} values of {len(self.ranks)} ranks"]
        if self.value is not None:
            parts.append("combined")
        if self.errors:
            parts.append(f"errors of {name_ranks([*self.errors])}")
        if self.missing:
            parts.append(f"{name_ranks(self.missing)} missing")
        return f"<GroupResult of {self.name!r}: {', '.join(parts)}>"
