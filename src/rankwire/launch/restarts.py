"""What a launcher does when a rank fails, and when a rank is started anew. Pure: time is handed in.

A rank that fails again and again is started less and less often: after the first failure it waits a
quarter of a second, then twice as long each time. After so many restarts of one rank there is no
more, and its failure is the job's.
"""

from __future__ import annotations

import math
from collections import Counter
from enum import StrEnum

DEFAULT_MAX_RESTARTS = 3
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0  # seconds


class OnFailure(StrEnum):
    """What becomes of the other ranks when one fails."""

    STOP = "stop"  # they are stopped
    CONTINUE = "continue"  # they go on without it
    RESTART = "restart"  # they go on, and it alone is started anew


class Restarts:
    """Which ranks are to be started anew, and when. One thread.

    Args:
        limit: How many times each rank may be.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._counts: Counter[int] = Counter()
        self._due: dict[int, float] = {}

    def plan(self, rank: int, now: float) -> float | None:
        """Have a rank that has failed started anew; return in how many seconds, None if not."""
        if self._counts[rank] >= self.limit:
            return None
        pause: float = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** self._counts[rank])
        self._counts[rank] += 1
        self._due[rank] = now + pause
        return pause

    def count(self, rank: int) -> int:
        """Return how many times a rank was started anew, or is about to be: its incarnation."""
        return self._counts[rank]

    @property
    def are_pending(self) -> bool:
        """Whether ranks are still to be started."""
        return bool(self._due)

    @property
    def next_at(self) -> float:
        """When the next one is due."""
        return min(self._due.values(), default=math.inf)

    def take_due(self, now: float) -> list[int]:
        """Return the ranks to start now; they are pending no more."""
        due = [rank for rank, at in self._due.items() if at <= now]
        for rank in due:
            del self._due[rank]
        return due

    def cancel(self) -> None:
        """Start none of those that are pending: the job ends."""
        self._due.clear()
