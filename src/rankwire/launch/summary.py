"""Which rank failed first, and what of its output tells why. Pure.

The order in which processes end is not the order in which they failed. A rank that raises leaves
the world first, while the exception passes its ``with`` block; its peers lose it at that moment and
may be gone before its interpreter is. So what the ranks themselves told the coordinator counts: who
fell by an error of its own, and who because of whom. Of a rank that told nothing, such as one that
never joined, the text of its traceback is looked at. A rank whose time was up fell by itself, but
is not to blame: the one that it waited for is, or the one that this one waited for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rankwire.launch.child import Ending
from rankwire.observe.tracebacks import folded
from rankwire.wire.control_messages import Gone

_LOSS_OF_ANOTHER = re.compile(
    r"(rankwire\.errors\.)?"
    r"(PeerLost|PeerUnresponsive|ChannelClosed|NoConnection|Rendezvous)Error\b"
)
# As ``tracebacks`` prints it.
_FELL_BECAUSE = re.compile(r"fell because of rank \d+: ")
# At the beginning of the line: a quoted one, of another rank, is indented or behind a bar.
_TRACEBACK = re.compile(r"(  \+ Exception Group )?Traceback \(most recent call last\)")
# Without a traceback, the end of what it said.
_PLAIN_LINES = 10


@dataclass(frozen=True)
class Failure:
    """A rank that failed by itself.

    Attributes:
        rank: Its index.
        ending: How it ended.
        errors: The last lines of its stderr.
        gone: What the coordinator told of its end, if it was lost.
    """

    rank: int
    ending: Ending
    errors: Sequence[str]
    gone: Gone | None = None

    @property
    def told(self) -> str:
        """The traceback that it told the coordinator before it left, if it did."""
        return "" if self.gone is None else self.gone.traceback

    @property
    def reason(self) -> str:
        """What it said that it fell by, in one line, if it did."""
        return self.gone.reason if self.gone is not None and _has_fallen(self.gone) else ""

    @property
    def is_consequence(self) -> bool:
        """Whether it ended because it lost another rank."""
        if self.ending.signal is not None:
            return False
        if self.gone is not None and _has_fallen(self.gone):
            return self.gone.cause is not None
        if any(_FELL_BECAUSE.match(line) for line in self.errors[-1:]):
            return True
        return any(_LOSS_OF_ANOTHER.match(line) for line in _last_traceback(self.errors))

    @property
    def is_in_its_stderr(self) -> bool:
        """Whether its stderr has all that is known of it."""
        return not self.told or bool(_last_traceback(self.errors))

    @property
    def excerpt(self) -> list[str]:
        """The lines worth showing: its traceback if there is one, else the end of its stderr."""
        return excerpt(self.errors) if self.is_in_its_stderr else folded(self.told.splitlines())


def first_failure(failures: Sequence[Failure]) -> Failure:
    """Return the one to blame: the first seen that is no consequence, else the first seen."""
    return next((failure for failure in failures if not failure.is_consequence), failures[0])


def blamed(lost: Iterable[Gone]) -> set[int]:
    """Return the ranks that began it, by what ranks said when they fell.

    A rank that was given up for its silence is not among them: it does not end by itself.
    """
    known = list(lost)
    silent = {gone.rank for gone in known if gone.silent}
    fallen = [gone for gone in known if _has_fallen(gone)]
    return {gone.rank if gone.cause is None else gone.cause for gone in fallen} - silent


def in_order_of_loss(failures: Sequence[Failure], lost: Sequence[int]) -> list[Failure]:
    """Return the failures in the order in which the coordinator lost the ranks.

    That is nearer to the truth than the order in which their processes ended. Ranks that it never
    knew come last, in their own order.
    """
    place = {rank: index for index, rank in enumerate(lost)}
    return sorted(failures, key=lambda failure: place.get(failure.rank, len(place)))


def waiting_chain(rank: int, waits: Mapping[int, Sequence[int]]) -> list[int]:
    """Return a rank, one that it waited for, one that this one waited for, and so on.

    Of several, one is followed of which nothing is known but that it was waited for: those who
    wait themselves hold nobody up by their own doing. It ends there, or where ranks wait for each
    other in a circle.
    """
    found = [rank]
    while others := [other for other in waits.get(found[-1], ()) if other not in found]:
        found.append(next((other for other in others if not waits.get(other)), others[0]))
    return found


def waiting_circle(chain: Sequence[int], certain: Mapping[int, Sequence[int]]) -> list[int]:
    """Return the ranks at the end of a chain that waited for each other; empty if none did.

    Args:
        chain: Who waited for whom.
        certain: The ranks that each rank did nothing but wait for. A chain also follows receives
            that were posted, and calls in the background.
    """
    for start, rank in enumerate(chain[:-1]):
        circle = [*chain[start:], rank]
        if all(b in certain.get(a, ()) for a, b in pairwise(circle)):
            return circle[:-1]
    return []


def excerpt(errors: Sequence[str]) -> list[str]:
    """Return the lines worth showing: from the first traceback on, else the last few."""
    begins = (index for index, line in enumerate(errors) if _TRACEBACK.match(line))
    return list(errors[next(begins, -_PLAIN_LINES) :])


def _has_fallen(gone: Gone) -> bool:
    """Whether it said itself why it leaves."""
    return gone.exit_code is not None


def _last_traceback(errors: Sequence[str]) -> Sequence[str]:
    begins = [index for index, line in enumerate(errors) if _TRACEBACK.match(line)]
    return errors[begins[-1] :] if begins else ()
