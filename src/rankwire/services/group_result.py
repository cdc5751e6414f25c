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

    def __repr__(self) -> str:
        parts = [f"{len(self.values)} values of {len(self.ranks)} ranks"]
        if self.value is not None:
            parts.append("combined")
        if self.errors:
            parts.append(f"errors of {name_ranks([*self.errors])}")
        if self.missing:
            parts.append(f"{name_ranks(self.missing)} missing")
        return f"<GroupResult of {self.name!r}: {', '.join(parts)}>"


def put_in_order(result: GroupResult[Any]) -> None:
    """Sort all of a result by the order of the ranks."""
    ranks, values, errors = result.ranks, result.values, result.errors
    result.values = {rank: values[rank] for rank in ranks if rank in values}
    result.errors = {rank: errors[rank] for rank in ranks if rank in errors}
    result.missing = [rank for rank in ranks if rank in result.missing]


def failure_of(result: GroupResult[Any]) -> GroupCallError:
    """Return the error that says which ranks failed or did not answer."""
    error = GroupCallError(result.name, result.values, result.errors, result.missing)
    error.__cause__ = next(iter(result.errors.values()), None)
    return error
