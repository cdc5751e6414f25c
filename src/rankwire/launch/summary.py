"""Find the rank that failed first, and the part of its output that explains why. Pure.

Processes do not end in the order in which they failed: a rank that raises leaves the world at once,
and its peers may exit before it does. So the ranks' reports to the coordinator decide which rank
failed by itself; without a report, its traceback does. A rank that timed out is not to blame: the
rank at the end of the chain that it waited for is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rankwire.launch.process import Ending
from rankwire.observe.tracebacks import folded
from rankwire.wire.control_messages import Gone

_LOSS_OF_ANOTHER = re.compile(
    r"(rankwire\.errors\.)?"
    r"(PeerLost|PeerUnresponsive|ChannelClosed|NoConnection|Rendezvous)Error\b"
)
# As ``observe.tracebacks`` prints it.
_FELL_BECAUSE = re.compile(r"failed because of rank \d+: ")
# At the beginning of the line; the quoted traceback of another rank is indented or behind a bar.
_TRACEBACK = re.compile(r"(  \+ Exception Group )?Traceback \(most recent call last\)")
# The last lines to show without a traceback.
_PLAIN_LINES = 10


@dataclass(frozen=True)
class Failure:
    """A rank that failed by itself."""

    rank: int
    ending: Ending
    errors: Sequence[str]  # the last lines of its stderr
    gone: Gone | None = None  # the coordinator's notice, if it was lost

    @property
    def told(self) -> str:
        """The traceback that it sent to the coordinator, or empty."""
        return "" if self.gone is None else self.gone.traceback

    @property
    def reason(self) -> str:
        """The reason that it reported, in one line, or empty."""
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
        """The lines to show: its traceback, else the end of its stderr."""
        return excerpt(self.errors) if self.is_in_its_stderr else folded(self.told.splitlines())


def first_failure(failures: Sequence[Failure]) -> Failure:
    """Return the failure to blame: the first that is not a consequence, else the first."""
    return next((failure for failure in failures if not failure.is_consequence), failures[0])


def blamed(lost: Iterable[Gone]) -> set[int]:
    """Return the ranks that failed first by the ranks' own reports.

    Not those that were declared lost for silence: they do not end by themselves.
    """
    known = list(lost)
    silent = {gone.rank for gone in known if gone.silent}
    fallen = [gone for gone in known if _has_fallen(gone)]
    return {gone.rank if gone.cause is None else gone.cause for gone in fallen} - silent


def in_order_of_loss(failures: Sequence[Failure], lost: Sequence[int]) -> list[Failure]:
    """Return the failures in the order in which the coordinator lost the ranks.

    Ranks that it never knew come last, in their own order.
    """
    place = {rank: index for index, rank in enumerate(lost)}
    return sorted(failures, key=lambda failure: place.get(failure.rank, len(place)))


def waiting_chain(rank: int, waits: Mapping[int, Sequence[int]]) -> list[int]:
    """Return a rank, a rank that it waited for, one that this waited for, and so on.

    Of several, prefer a rank that did not wait itself: it is the one that held up the others. The
    chain ends there, or where ranks wait for each other in a circle.
    """
    found = [rank]
    while others := [other for other in waits.get(found[-1], ()) if other not in found]:
        found.append(next((other for other in others if not waits.get(other)), others[0]))
    return found


def waiting_circle(chain: Sequence[int], certain: Mapping[int, Sequence[int]]) -> list[int]:
    """Return the ranks at the end of a chain that waited for each other; empty if there are none.

    Args:
        chain: Each rank waited for the next.
        certain: The ranks that each rank was blocked on. A chain also follows posted receives and
            background calls.
    """
    for start, rank in enumerate(chain[:-1]):
        circle = [*chain[start:], rank]
        if all(b in certain.get(a, ()) for a, b in pairwise(circle)):
            return circle[:-1]
    return []


def excerpt(errors: Sequence[str]) -> list[str]:
    """Return the lines from the first traceback on, else the last few."""
    begins = (index for index, line in enumerate(errors) if _TRACEBACK.match(line))
    return list(errors[next(begins, -_PLAIN_LINES) :])


def _has_fallen(gone: Gone) -> bool:
    """Whether the rank reported its own failure."""
    return gone.exit_code is not None


def _last_traceback(errors: Sequence[str]) -> Sequence[str]:
    begins = [index for index, line in enumerate(errors) if _TRACEBACK.match(line)]
    return errors[begins[-1] :] if begins else ()
