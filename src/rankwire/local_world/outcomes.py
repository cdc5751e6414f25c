"""Outcomes: what became of a function on each rank that ran it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from rankwire.errors import RankFailedError
from rankwire.observe.blame import is_consequence
from rankwire.observe.exit_report import describe

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankOutcome(Generic[T]):
    """What became of a function on one rank.

    Attributes:
        rank: Which.
        value: What it returned, if it did.
        error: What it raised, if it did. From a process it is a copy, or a ``RankFailedError`` in
            its place if it could not be copied.
        killed: Whether the rank was killed: by a fault plan, or its process by a signal.
        reason: How it was killed, or how its process ended that said nothing; else empty.
        remote_traceback: The traceback of the error as text, from a process.
    """

    rank: int
    value: T | None = None
    error: BaseException | None = None
    killed: bool = False
    reason: str = ""
    remote_traceback: str = ""

    @property
    def returned(self) -> bool:
        """Whether the function returned."""
        return self.error is None and not self.killed and not self.reason

    def result(self) -> T:
        """Return what the function returned.

        Raises:
            RankFailedError: It did not return. Its cause is what was raised, if anything was.
        """
        if self.returned:
            return cast(T, self.value)
        raise self.failure() from self.error

    def failure(self) -> RankFailedError:
        """Return the error to raise for a function that did not return."""
        if isinstance(self.error, RankFailedError):
            return self.error
        reason = self.reason if self.error is None else describe(self.error)
        return RankFailedError(
            self.rank, reason, remote_traceback=self.remote_traceback, killed=self.killed
        )

    def __str__(self) -> str:
        if self.returned:
            return f"rank {self.rank} returned {self.value!r}"
        if self.error is not None:
            return f"rank {self.rank} raised {describe(self.error)}"
        return f"rank {self.rank}: {self.reason}"


def culprit_of(ended: Iterable[RankOutcome[T]]) -> RankOutcome[T] | None:
    """Return the outcome because of which not all returned; None if they did.

    Args:
        ended: The outcomes in the order in which they came. The first that is no consequence of
            another rank's counts; a rank that was killed only if nothing else went wrong.
    """
    failed = [outcome for outcome in ended if not outcome.returned]
    own = [outcome for outcome in failed if not is_consequence(outcome.error)]
    raised = [outcome for outcome in own if not outcome.killed]
    return next(iter([*raised, *own, *failed]), None)


def in_rank_order(outcomes: Iterable[RankOutcome[T]]) -> list[RankOutcome[T]]:
    """Return outcomes sorted by rank."""
    return sorted(outcomes, key=lambda outcome: outcome.rank)


def values_of(ended: Sequence[RankOutcome[T]]) -> list[T]:
    """Return what all ranks returned, in rank order.

    Args:
        ended: The outcomes, in the order in which they came.

    Raises:
        RankFailedError: A rank did not return; it has all outcomes.
    """
    outcomes = in_rank_order(ended)
    culprit = culprit_of(ended)
    if culprit is None:
        return [cast(T, outcome.value) for outcome in outcomes]
    failure = culprit.failure()
    failure.outcomes = list(outcomes)
    raise failure from culprit.error
