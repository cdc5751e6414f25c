"""``TaskOutcome``: what became of one task of a pool."""

from __future__ import annotations

from reprlib import repr as short_repr
from typing import Generic, TypeVar, cast

T = TypeVar("T")
R = TypeVar("R")


class TaskOutcome(Generic[T, R]):
    """What became of one task.

    Attributes:
        index: The place of the task among the tasks, from 0.
        task: The task.
        rank: The rank that had it last; None if no rank had it.
        error: Why it has no value, or None.
    """

    __slots__ = ("_value", "error", "index", "rank", "task")

    def __init__(
        self,
        index: int,
        task: T,
        rank: int | None,
        value: R | None = None,
        error: BaseException | None = None,
    ) -> None:
        self.index = index
        self.task = task
        self.rank = rank
        self._value = value
        self.error = error

    @property
    def value(self) -> R:
        """What the function returned for the task; raises ``error`` if there is one."""
        if self.error is not None:
            raise self.error
        return cast(R, self._value)

    def __repr__(self) -> str:
        where = "" if self.rank is None else f" on rank {self.rank}"
        if self.error is None:
            end = short_repr(self._value)
        else:
            end = f"{type(self.error).__name__}: {self.error}".partition("\n")[0]
        return f"<TaskOutcome {self.index}{where}: {end}>"
