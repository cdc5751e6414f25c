"""One start of the ranks of a job: who has joined, ended, fallen or been lost, and who is to blame.

Told by the job what it hears; says nothing and stops nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from enum import StrEnum

from rankwire.clock import REAL_TIME
from rankwire.launch.child import Ending
from rankwire.launch.nodes import Parts
from rankwire.launch.summary import (
    Failure,
    blamed,
    first_failure,
    in_order_of_loss,
    waiting_chain,
    waiting_circle,
)
from rankwire.wire.control_messages import Doing, Gone, Suspected

# After the first failure, others that fail by themselves are waited for: the one to blame may be
# among them (see summary.py). Above the time between a raise and the end of an interpreter.
_SETTLE = 0.3


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


class Attempt:
    """What is known of one start of the ranks. One thread.

    Attributes:
        ended: How ranks have ended, and whether by themselves.
        present: The members of a world that has formed.
        suspected: Those of them that have not been heard for a while.
        began: What ranks may fall by besides the failure of one.
        is_stopping: Whether ranks were asked to end.
        has_said_left: Whether it was said that only those are left that were given up.
        doing: What ranks did for which others waited in vain, as they said.
    """

    def __init__(self) -> None:
        self.ended: dict[int, tuple[Ending, bool]] = {}
        self.present: set[int] = set()
        self.suspected: set[int] = set()
        self.began = ""
        self.is_stopping = False
        self.has_said_left = False
        self.doing: dict[int, Doing] = {}
        self._lost: dict[int, Gone] = {}
        self._fell: set[int] = set()  # by errors of their own, before anyone was asked to end
        self._stop_at = math.inf

    def rank_ended(self, rank: int, ending: Ending, by_itself: bool) -> None:
        """Take in that the process of a rank has ended."""
        self.ended[rank] = ending, by_itself

    def stop_soon(self) -> None:
        """Take in that a failure ends it, once it is known who else has failed."""
        self._stop_at = min(self._stop_at, REAL_TIME.now() + _SETTLE)

    def rank_restarts(self, rank: int) -> None:
        """Take in that a rank is started anew alone: what became of its old process is over."""
        del self.ended[rank]
        self._lost.pop(rank, None)
        self._fell.discard(rank)

    def rank_joined(self, rank: int) -> None:
        """Take in that a rank which was started anew is back in the world."""
        self.present.add(rank)
        self._lost.pop(rank, None)

    def rank_does(self, rank: int, doing: Doing) -> None:
        """Take in what a rank does for which others have waited in vain."""
        self.doing[rank] = doing

    def hold_up(self, failures: list[Failure]) -> list[int]:
        """Return who waited for whom, from the rank to blame for the failures to the last one.

        The last one has held all of them up; it is the first if that waited for nobody.
        """
        waits = {rank: doing.waits_for for rank, doing in self.doing.items()}
        return waiting_chain(first_failure(failures).rank, waits | self._waited_in_vain())

    def circle(self, chain: list[int]) -> list[int]:
        """Return the ranks of a chain that waited for each other; empty if none did."""
        blocked = {rank: doing.blocked_on for rank, doing in self.doing.items()}
        return waiting_circle(chain, blocked | self._waited_in_vain())

    def _waited_in_vain(self) -> dict[int, list[int]]:
        return {gone.rank: gone.waited_for for gone in self._lost.values() if gone.waited_for}

    def formed(self, world_size: int) -> None:
        """Take in that all ranks have joined."""
        self.present = set(range(world_size))
        self._lost, self._fell = {}, set()  # of an earlier world of the same processes

    def rank_gone(self, gone: Gone) -> None:
        """Take in that a member has left or was lost."""
        self.present.discard(gone.rank)
        self.suspected.discard(gone.rank)
        if not gone.orderly:
            self._lost.setdefault(gone.rank, gone)
            if gone.exit_code is not None and gone.cause is None and not self.is_stopping:
                self._fell.add(gone.rank)

    def rank_suspected(self, suspected: Suspected) -> None:
        """Take in that a member is silent, or is heard again."""
        if suspected.seconds:
            self.suspected.add(suspected.rank)
        else:
            self.suspected.discard(suspected.rank)

    def stop(self) -> None:
        """Take in that ranks are asked to end."""
        self.is_stopping = True
        self._stop_at = math.inf

    def stop_due(self, alive: list[int], grace: float) -> float:
        """Return when to stop the others after a failure: not while who began it is ending."""
        if self._stop_at == math.inf:
            return math.inf
        is_ending = not blamed(self._lost.values()).isdisjoint(alive)
        return self._stop_at + (grace if is_ending else 0.0)

    @property
    def silent(self) -> set[int]:
        """The ranks that were given up for their silence."""
        return {gone.rank for gone in self._lost.values() if gone.silent}

    def failures(self, parts: Parts) -> list[Failure]:
        """Return the ranks that have failed by themselves, in the order in which they were lost."""
        found = []
        for rank, (ending, by_itself) in self.ended.items():
            if ending.is_failure and (by_itself or rank in self._fell):
                gone = self._lost.get(rank)
                if not by_itself and ending.signal is not None and gone is not None:
                    # But for us it would have ended as it said; never well, whatever it said.
                    ending = Ending(code=(gone.exit_code or 0) & 0xFF or 1)
                found.append(Failure(rank, ending, parts.errors_of(rank), gone))
        return in_order_of_loss(found, list(self._lost))

    def is_because_of_began(self, failures: list[Failure]) -> bool:
        """Whether ranks fell by what was said already, and not by the failure of one."""
        return bool(self.began and failures and first_failure(failures).is_consequence)
