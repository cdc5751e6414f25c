"""Decide what to do when a rank of a job fails, and which rank to blame.

Processes do not exit in the order in which they failed: a rank that raises leaves the world at
once, and its peers may exit before it does. So the ranks' reports to the coordinator, or else their
tracebacks, decide which rank failed by itself. If a rank timed out, blame the rank at the end of
the chain that it waited for.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rankwire.clock import REAL_TIME
from rankwire.launch.nodes import Parts
from rankwire.launch.process import Ending
from rankwire.observe.tracebacks import folded
from rankwire.wire.control_messages import Answer, Gone, Suspected

_LOSS_OF_ANOTHER = re.compile(
    r"(rankwire\.errors\.)?"
    r"(PeerLost|PeerUnresponsive|ChannelClosed|NoConnection|Rendezvous)Error\b"
)
_FELL_BECAUSE = re.compile(r"failed because of rank \d+: ")
# At the start of a line; the quoted traceback of another rank is indented or behind a bar.
_TRACEBACK = re.compile(r"(  \+ Exception Group )?Traceback \(most recent call last\)")
_PLAIN_LINES = 10
# Seconds to wait for other failures, one of which may be to blame: longer than an exit takes.
_SETTLE = 0.3
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0  # seconds before a restart


@dataclass(frozen=True)
class Failure:
    """A rank that failed by itself."""

    rank: int
    ending: Ending
    errors: Sequence[str]  # the last lines of its stderr
    gone: Gone | None = None  # the coordinator's notice, if the rank was lost

    @property
    def told(self) -> str:
        """The traceback that it sent to the coordinator, or ""."""
        return "" if self.gone is None else self.gone.traceback

    @property
    def reason(self) -> str:
        """The reason that it reported, in one line, or ""."""
        return self.gone.reason if self.gone is not None and _has_fallen(self.gone) else ""

    @property
    def is_consequence(self) -> bool:
        """Whether it failed because it lost another rank."""
        if self.ending.signal is not None:
            return False
        if self.gone is not None and _has_fallen(self.gone):
            return self.gone.cause is not None
        if any(_FELL_BECAUSE.match(line) for line in self.errors[-1:]):
            return True
        return any(_LOSS_OF_ANOTHER.match(line) for line in _last_traceback(self.errors))

    @property
    def is_in_its_stderr(self) -> bool:
        """Whether its stderr explains the failure as well as its report."""
        return not self.told or bool(_last_traceback(self.errors))

    @property
    def excerpt(self) -> list[str]:
        """The lines to show: its traceback, or else the end of its stderr."""
        return excerpt(self.errors) if self.is_in_its_stderr else folded(self.told.splitlines())


def first_failure(failures: Sequence[Failure]) -> Failure:
    """Return the failure to blame: the first that is not a consequence, or else the first."""
    return next((failure for failure in failures if not failure.is_consequence), failures[0])


def blamed(lost: Iterable[Gone]) -> set[int]:
    """Return the ranks that failed first according to the reports, without silent ranks."""
    known = list(lost)
    silent = {gone.rank for gone in known if gone.silent}
    fallen = [gone for gone in known if _has_fallen(gone)]
    return {gone.rank if gone.cause is None else gone.cause for gone in fallen} - silent


def in_order_of_loss(failures: Sequence[Failure], lost: Sequence[int]) -> list[Failure]:
    """Sort failures as the coordinator lost the ranks; unknown ranks come last."""
    place = {rank: index for index, rank in enumerate(lost)}
    return sorted(failures, key=lambda failure: place.get(failure.rank, len(place)))


def waiting_chain(rank: int, waits: Mapping[int, Sequence[int]]) -> list[int]:
    """Return a rank, a rank that it waited for, and so on; prefer a rank that did not wait."""
    found = [rank]
    while others := [other for other in waits.get(found[-1], ()) if other not in found]:
        found.append(next((other for other in others if not waits.get(other)), others[0]))
    return found


def waiting_circle(chain: Sequence[int], certain: Mapping[int, Sequence[int]]) -> list[int]:
    """Return the ranks at the end of a chain that waited for each other, if any.

    ``certain`` has the ranks that each was blocked on; the chain also follows background calls.
    """
    for start, rank in enumerate(chain[:-1]):
        circle = [*chain[start:], rank]
        if all(b in certain.get(a, ()) for a, b in pairwise(circle)):
            return circle[:-1]
    return []


def excerpt(errors: Sequence[str]) -> list[str]:
    """Return the lines from the first traceback on, or else the last lines."""
    begins = (index for index, line in enumerate(errors) if _TRACEBACK.match(line))
    return list(errors[next(begins, -_PLAIN_LINES) :])


def _has_fallen(gone: Gone) -> bool:
    return gone.exit_code is not None


def _last_traceback(errors: Sequence[str]) -> Sequence[str]:
    begins = [index for index, line in enumerate(errors) if _TRACEBACK.match(line)]
    return errors[begins[-1] :] if begins else ()


class Restarts:
    """Schedules restarts of single ranks, each at most ``limit`` times. For one thread."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.counts: Counter[int] = Counter()  # past and scheduled restarts of each rank
        self.due: dict[int, float] = {}  # when each rank is restarted

    def plan(self, rank: int, now: float) -> float | None:
        """Schedule a restart of a failed rank; return the delay, or None if out of restarts."""
        if self.counts[rank] >= self.limit:
            return None
        pause: float = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** self.counts[rank])
        self.counts[rank] += 1
        self.due[rank] = now + pause
        return pause

    @property
    def next_at(self) -> float:
        """The time of the next restart."""
        return min(self.due.values(), default=math.inf)

    def take_due(self, now: float) -> list[int]:
        """Return the ranks to restart now, and remove them from the schedule."""
        due = [rank for rank, at in self.due.items() if at <= now]
        for rank in due:
            del self.due[rank]
        return due


class Attempt:
    """The state of one start of the ranks. For one thread."""

    def __init__(self) -> None:
        self.ended: dict[int, tuple[Ending, bool]] = {}  # and whether by itself
        self.present: set[int] = set()  # members of the formed world
        self.suspected: set[int] = set()  # members that have been silent for a while
        self.began = ""  # a cause of failures other than a rank's failure
        self.is_stopping = False  # ranks were asked to end
        self.has_said_left = False  # that only unresponsive ranks are left
        self.doing: dict[int, Answer] = {}  # of ranks that others waited for
        self._lost: dict[int, Gone] = {}
        self._fell: set[int] = set()  # failed by themselves, before any was asked to end
        self._stop_at = math.inf

    def stop_soon(self) -> None:
        """Stop the ranks after a short wait for other failures."""
        self._stop_at = min(self._stop_at, REAL_TIME.now() + _SETTLE)

    def rank_restarts(self, rank: int) -> None:
        """Drop the old process of a rank that is restarted alone."""
        del self.ended[rank]
        self._lost.pop(rank, None)
        self._fell.discard(rank)

    def rank_joined(self, rank: int) -> None:
        """Record that a restarted rank has joined the world."""
        self.present.add(rank)
        self._lost.pop(rank, None)

    def hold_up(self, failures: list[Failure]) -> list[int]:
        """Return the chain of waiting ranks from the first failed rank to the culprit."""
        waits = {rank: doing.waits_for for rank, doing in self.doing.items()}
        return waiting_chain(first_failure(failures).rank, waits | self._waited_in_vain())

    def circle(self, chain: list[int]) -> list[int]:
        """Return the ranks of a chain that waited for each other, if any."""
        blocked = {rank: doing.blocked_on for rank, doing in self.doing.items()}
        return waiting_circle(chain, blocked | self._waited_in_vain())

    def _waited_in_vain(self) -> dict[int, list[int]]:
        return {gone.rank: gone.waited_for for gone in self._lost.values() if gone.waited_for}

    def formed(self, world_size: int) -> None:
        """Record that all ranks have joined."""
        self.present = set(range(world_size))
        self._lost, self._fell = {}, set()  # those of an earlier world of the same processes

    def rank_gone(self, gone: Gone) -> None:
        """Record that a member left or was lost."""
        self.present.discard(gone.rank)
        self.suspected.discard(gone.rank)
        if not gone.orderly:
            self._lost.setdefault(gone.rank, gone)
            if gone.exit_code is not None and gone.cause is None and not self.is_stopping:
                self._fell.add(gone.rank)

    def rank_suspected(self, suspected: Suspected) -> None:
        """Record that a member is silent, or responds again."""
        if suspected.seconds:
            self.suspected.add(suspected.rank)
        else:
            self.suspected.discard(suspected.rank)

    def stop(self) -> None:
        """Record that the ranks were asked to end."""
        self.is_stopping = True
        self._stop_at = math.inf

    def stop_due(self, alive: list[int], grace: float) -> float:
        """Return when to stop the others after a failure; the rank to blame gets time to exit."""
        if self._stop_at == math.inf:
            return math.inf
        is_ending = not blamed(self._lost.values()).isdisjoint(alive)
        return self._stop_at + (grace if is_ending else 0.0)

    @property
    def silent(self) -> set[int]:
        """The ranks that were declared lost because they were silent."""
        return {gone.rank for gone in self._lost.values() if gone.silent}

    def failures(self, parts: Parts) -> list[Failure]:
        """Return the ranks that failed by themselves, in the order in which they were lost."""
        found = []
        for rank, (ending, by_itself) in self.ended.items():
            if ending.is_failure and (by_itself or rank in self._fell):
                gone = self._lost.get(rank)
                if not by_itself and ending.signal is not None and gone is not None:
                    # We stopped it: use the exit code that it announced, but never success.
                    ending = Ending(code=(gone.exit_code or 0) & 0xFF or 1)
                found.append(Failure(rank, ending, parts.part_of(rank).errors_of(rank), gone))
        return in_order_of_loss(found, list(self._lost))

    def is_because_of_began(self, failures: list[Failure]) -> bool:
        """Return whether ``began`` made the ranks fail, rather than another rank's failure."""
        return bool(self.began and failures and first_failure(failures).is_consequence)
