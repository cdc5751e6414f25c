"""Running one function on several ranks, and waiting for what becomes of it.

Ranks are processes or threads: what a ``Rank`` can do is all that is known of them here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from rankwire.clock import REAL_TIME
from rankwire.deadline import Deadline
from rankwire.errors import RanksStuckError
from rankwire.local_world.outcomes import RankOutcome, culprit_of, in_rank_order
from rankwire.local_world.printing import Printing

_OTHERS_PATIENCE = 1.0  # seconds for the other ranks to end after one has failed
_INTERRUPT_PATIENCE = 5.0  # seconds for a function that was interrupted to end
_STACKS_PATIENCE = 2.0  # seconds for a rank to say what it is doing


class Rank(Protocol):
    """A rank that runs functions, one at a time."""

    rank: int

    @property
    def ended(self) -> str:
        """How it has ended, in words; empty while it lives."""

    def start(
        self, function: Callable[..., Any], args: tuple[Any, ...], *, leaves: bool = False
    ) -> Future[RankOutcome[Any]]:
        """Have it run ``function(backend, *args)``, and leave the world afterwards."""

    def interrupt(self) -> bool:
        """Interrupt what it runs; return whether there was something, and it can be."""

    def ask_for_stacks(self) -> Future[str]:
        """Ask what all its threads are doing."""


class Run:
    """A function that runs on some ranks. For one thread.

    Args:
        ranks: Where.
        printing: Prints what they print while this thread waits.
        function: What.
        args: Its arguments after the backend.
        leaves: Whether a rank leaves its world when it is done.

    Attributes:
        ended: The outcomes so far, in the order in which they came.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        printing: Printing,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        leaves: bool = False,
    ) -> None:
        self._ranks = ranks
        self._printing = printing
        self.ended: list[RankOutcome[Any]] = []
        self._begun = 0
        try:
            for rank in ranks:
                rank.start(function, args, leaves=leaves).add_done_callback(self._note)
                self._begun += 1
        except BaseException:
            self._stop()
            raise

    def finish(self, limit: float, *, together: bool = False) -> list[RankOutcome[Any]]:
        """Wait for all ranks; return the outcomes in the order in which they came.

        Args:
            limit: Seconds for all of it.
            together: Whether the others are interrupted soon after one has failed. They may be
                waiting for it, and since it has not left its world nobody else tells them.

        Raises:
            RanksStuckError: Some did not end in time; it has their stacks. They are interrupted.
            KeyboardInterrupt: So was what they run.
        """
        deadline = Deadline(limit, REAL_TIME)
        try:
            while not self._is_over():
                self._printing.print_until(
                    lambda: self._is_over() or (together and self._has_failed()),
                    deadline.sleep_limit(),
                )
                if deadline.expired and not self._is_over():
                    raise self._stuck(limit)
                if together and not self._printing.print_until(self._is_over, _OTHERS_PATIENCE):
                    break
        finally:
            self._stop()
        return list(self.ended)

    def _note(self, future: Future[RankOutcome[Any]]) -> None:
        self.ended.append(future.result())
        self._printing.wake()

    def _is_over(self) -> bool:
        return len(self.ended) == self._begun

    def _has_failed(self) -> bool:
        return culprit_of(self.ended) is not None

    def _stop(self) -> None:
        """Interrupt what still runs, and wait a little for its end."""
        try:
            if self._interrupt():
                self._printing.print_until(self._is_over, _INTERRUPT_PATIENCE)
        except KeyboardInterrupt:  # another one: that ends the waiting
            self._interrupt()
            raise

    def _interrupt(self) -> bool:
        return any([rank.interrupt() for rank in self._unfinished()])  # noqa: C419  (all of them)

    def _unfinished(self) -> list[Rank]:
        ended = {outcome.rank for outcome in self.ended}
        return [rank for rank in self._ranks[: self._begun] if rank.rank not in ended]

    def _stuck(self, limit: float) -> RanksStuckError:
        asked = {rank.rank: rank.ask_for_stacks() for rank in self._unfinished()}
        self._printing.print_until(
            lambda: all(each.done() for each in asked.values()), _STACKS_PATIENCE
        )
        silent = "(it does not say: its interpreter does not run)"
        stacks = {rank: each.result() if each.done() else silent for rank, each in asked.items()}
        error = RanksStuckError(limit, stacks)
        error.outcomes = list(in_rank_order(self.ended))
        return error
