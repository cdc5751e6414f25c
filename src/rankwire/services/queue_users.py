"""The users of a queue: which of them are producers, what each asked for, and when. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

_MOST_WAITING = 1024  # puts and gets of one rank
_MOST_WAITING_NBYTES = 256 << 20  # of the puts; one of any size may always wait
_MOST_DELIVERIES = 1024  # to one rank, not acknowledged or confirmed
_MOST_REMEMBERED = 256  # last requests of one user, for those that ask what became of one
MOST_USERS = 256  # of one rank
_MOST_NAMED = 4  # ranks in a text

User = tuple[int, int, int]  # rank, incarnation, agent


class Ticket(NamedTuple):
    """Identifies a request."""

    user: User
    number: int


class QueueOutcome(IntEnum):
    """How a request ended."""

    DONE = 0
    FULL = 1
    ENDED = 2
    PRODUCER_GONE = 3
    NO_SLOT = 4
    TOO_MANY = 5
    UNWANTED = 6  # its user has given it up, or is lost
    UNKNOWN = 7  # there is no such queue
    CLOSED = 8


@dataclass(slots=True, eq=False)
class RankLoad:
    """What the queue holds for one rank: an agent chooses its own number, but not its rank."""

    waiting: int = 0
    waiting_nbytes: int = 0
    deliveries: int = 0


@dataclass(slots=True, eq=False)
class QueueUser:
    """What the queue remembers of one agent."""

    load: RankLoad
    has_put: bool = False
    # By number: how many items of a put were accepted. A request that was given up is here too.
    answered: OrderedDict[int, int] = field(default_factory=OrderedDict)
    forgotten: int = -1  # the highest number that is no longer in ``answered``

    def remember(self, number: int, accepted: int) -> None:
        """Note what became of a request."""
        self.answered[number] = accepted
        if len(self.answered) > _MOST_REMEMBERED:
            self.forgotten = max(self.forgotten, self.answered.popitem(last=False)[0])

    def accepted(self, number: int) -> int:
        """Return how many items of a put were accepted, or -1 if that is not known any more."""
        return self.answered.get(number, -1 if number <= self.forgotten else 0)

    def refusal(self, number: int, nbytes: int) -> QueueOutcome | None:
        """Return why a request is refused, or None."""
        if number in self.answered:
            return QueueOutcome.UNWANTED
        load = self.load
        is_large = load.waiting_nbytes and load.waiting_nbytes + nbytes > _MOST_WAITING_NBYTES
        if is_large or load.waiting >= _MOST_WAITING or load.deliveries >= _MOST_DELIVERIES:
            return QueueOutcome.TOO_MANY
        return None


class Producers:
    """Whether the queue has ended: all declared producers have, or another rank has ended it."""

    def __init__(self, declared: Sequence[int]) -> None:
        self._open = dict.fromkeys(declared)  # they have not ended; their values mean nothing
        self._gone: dict[int, None] = {}  # of the open ones
        self._is_declared = bool(declared)
        self._is_over = False

    @property
    def has_ended(self) -> bool:
        """Whether nothing more can be put."""
        if self._is_over or not self._is_declared:
            return self._is_over
        return len(self._gone) == len(self._open)

    @property
    def missing(self) -> int | None:
        """The lowest rank that was lost or has left before it ended its part, or None."""
        return None if self._is_over else min(self._gone, default=None)

    def end(self, rank: int) -> None:
        """End the part of a declared producer; any other rank ends the queue."""
        if rank in self._open:
            del self._open[rank]
            self._gone.pop(rank, None)
        elif not self._is_declared or self._open:
            self._is_over = True

    def gone(self, rank: int) -> None:
        """Note that a rank is lost or has left."""
        if rank in self._open:
            self._gone[rank] = None

    def returned(self, rank: int) -> None:
        """Note that a rank puts, perhaps after it was restarted."""
        self._gone.pop(rank, None)


class QueueActivity:
    """When each rank has last put and got something."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._puts: dict[int, float] = {}
        self._gets: dict[int, float] = {}

    def note_put(self, rank: int) -> None:
        """Note a put of a rank."""
        self._puts[rank] = self._now()

    def note_get(self, rank: int) -> None:
        """Note a get of a rank."""
        self._gets[rank] = self._now()

    def describe_producers(self) -> str:
        """Return since when the ranks that put have been silent."""
        return self._describe("producers", self._puts)

    def describe_consumers(self) -> str:
        """Return since when the ranks that get have been silent."""
        return self._describe("consumers", self._gets)

    def _describe(self, what: str, times: dict[int, float]) -> str:
        if not times:
            return f"no {what} yet"
        now = self._now()
        longest = sorted(times.items(), key=lambda each: each[1])
        named = [f"rank {rank} silent for {now - time:.3g} s" for rank, time in longest]
        more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        return f"{what}: {', '.join(named[:_MOST_NAMED])}{more}"
