"""``TaskOutcome``: what became of one task of a pool."""

from __future__ import annotations

from reprlib import repr as short_repr
from typing import Generic, TypeVar, cast

import msgspec

T = TypeVar("T")
R = TypeVar("R")


class TaskOutcome(msgspec.Struct, Generic[T, R], eq=False):
    """What became of one task.

    Attributes:
        index: The place of the task among the tasks, from 0.
        task: The task.
        rank: The rank that had it last; None if no rank had it.
        error: Why it has no value, or None.
    """

    # A Struct is made in C, in a quarter of the time: a map makes one for each task.
    index: int
    task: T
    rank: int | None
    _value: R | None = None
    error: BaseException | None = None

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
