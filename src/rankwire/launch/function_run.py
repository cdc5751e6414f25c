"""Run one function on several ranks, print their output, and collect the outcome of each.

In a notebook, printed text appears below the cell whose thread prints it. So a thread that waits
for ranks prints their output; if none waits, the thread that reads the output does.

Locks: those of ``Printer`` and of each ``Rank``, held briefly. No callback is called under them.
"""

from __future__ import annotations

import logging
import math
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, cast

from rankwire import runtime
from rankwire.clock import REAL_TIME
from rankwire.deadline import Deadline
from rankwire.errors import ConfigurationError, RankFailedError, RanksStuckError
from rankwire.observe.blame import describe, is_consequence

T = TypeVar("T")
StreamName = Literal["stdout", "stderr"]

_log = logging.getLogger("rankwire")

_OTHERS_PATIENCE = 1.0  # seconds for the other ranks to end after a failure
_INTERRUPT_PATIENCE = 5.0  # seconds for an interrupted function to end
_STACKS_PATIENCE = 2.0  # seconds for a rank to report its stacks


@dataclass(frozen=True, slots=True)
class RankOutcome(Generic[T]):
    """The outcome of a function on one rank.

    Attributes:
        rank: The rank.
        value: The return value, if the function returned.
        error: The exception, if it raised. From a process it is a copy, or a ``RankFailedError`` if
            the exception could not be copied.
        killed: Whether the rank was killed, by a fault plan or its process by a signal.
        reason: How the rank was killed, or how its process ended without a result; else empty.
        remote_traceback: The traceback as text, from a process.
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
        """Return the function's return value.

        Raises:
            RankFailedError: It did not return. The error's cause is the exception that it raised,
                if any.
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
    """Return the outcome to blame, or None if all returned; ``ended`` is in order of arrival.

    Prefer failures that are not consequences of another rank's, and ranks that were not killed.
    """
    failed = [outcome for outcome in ended if not outcome.returned]
    own = [outcome for outcome in failed if not is_consequence(outcome.error)]
    raised = [outcome for outcome in own if not outcome.killed]
    return next(iter([*raised, *own, *failed]), None)


def in_rank_order(outcomes: Iterable[RankOutcome[T]]) -> list[RankOutcome[T]]:
    """Return the outcomes sorted by rank."""
    return sorted(outcomes, key=lambda outcome: outcome.rank)


def values_of(ended: Sequence[RankOutcome[T]]) -> list[T]:
    """Return the values in rank order, or raise the RankFailedError of the rank to blame."""
    outcomes = in_rank_order(ended)
    culprit = culprit_of(ended)
    if culprit is None:
        return [cast(T, outcome.value) for outcome in outcomes]
    failure = culprit.failure()
    failure.outcomes = list(outcomes)
    raise failure from culprit.error


class Printer:
    """Prints texts in order. Thread-safe."""

    def __init__(self) -> None:
        self._changed = runtime.Condition()
        self._texts: deque[tuple[StreamName, str]] = deque()
        self._waiting = 0  # threads in print_until

    def put(self, stream: StreamName, text: str) -> None:
        """Print a text in a waiting thread, or in this one if none waits."""
        with self._changed:
            self._texts.append((stream, text))
            if self._waiting:
                self._changed.notify_all()
                return
        self._print()

    def wake(self) -> None:
        """Make the waiting threads check their conditions again."""
        with self._changed:
            self._changed.notify_all()

    def print_until(self, is_over: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Print until ``is_over()`` or a timeout; return ``is_over()``."""
        deadline = Deadline(seconds, REAL_TIME)
        with self._changed:
            self._waiting += 1
        try:
            while not is_over() and not deadline.expired:
                with self._changed:
                    REAL_TIME.wait_for(
                        self._changed,
                        lambda: bool(self._texts) or is_over(),
                        deadline.sleep_limit(),
                    )
                self._print()
        finally:
            with self._changed:
                self._waiting -= 1
            self._print()
        return is_over()

    def _print(self) -> None:
        while self._texts:
            try:
                stream, text = self._texts.popleft()
            except IndexError:  # another thread took it
                return
            target = sys.stdout if stream == "stdout" else sys.stderr
            try:
                if target is not None:  # None in a program without a console
                    target.write(text)
                    target.flush()
            except (OSError, ValueError) as error:  # stdout or stderr was closed
                _log.debug("output of a rank was not shown: %s", error)


class Rank(ABC):
    """A rank that runs functions, one at a time. Thread-safe."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._lock = runtime.Lock()
        self._number = 0  # of the last function
        self._running: Future[RankOutcome[Any]] | None = None
        self._running_name = ""
        self._ended: RankOutcome[Any] | None = None  # the outcome of all later functions

    @property
    def ended(self) -> str:
        """How the rank ended, as text; "" while it is alive."""
        return "" if self._ended is None else self._ended.reason

    @abstractmethod
    def start(
        self, function: Callable[..., Any], args: tuple[Any, ...], *, leaves: bool = False
    ) -> Future[RankOutcome[Any]]:
        """Start ``function(backend, *args)``; with ``leaves``, leave the world when it ends.

        Raise ConfigurationError if the rank still runs a function, or this one cannot be sent.
        """

    @abstractmethod
    def interrupt(self) -> bool:
        """Interrupt the running function; return whether it can be interrupted."""

    @abstractmethod
    def ask_for_stacks(self) -> Future[str]:
        """Request the stacks of the rank's threads."""

    def _begin(self, name: str) -> Future[RankOutcome[Any]]:
        """Return a future for a new function; it is done if the rank has ended."""
        running: Future[RankOutcome[Any]] = Future()
        with self._lock:
            if self._running is not None:
                raise ConfigurationError(f"rank {self.rank} still runs {self._running_name!r}")
            if self._ended is None:
                self._running, self._running_name = running, name
                self._number += 1
                return running
        running.set_result(self._ended)
        return running

    def _finish(
        self, outcome: RankOutcome[Any], only: Future[RankOutcome[Any]] | None = None
    ) -> None:
        with self._lock:
            running = self._running
            if running is None or only not in (None, running):
                return
            self._running = None
        running.set_result(outcome)


class FunctionRun:
    """Starts a function on some ranks and waits for it. For one thread."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        printer: Printer,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        leaves: bool = False,
    ) -> None:
        self._ranks = ranks
        self._printer = printer
        self.ended: list[RankOutcome[Any]] = []  # in order of arrival
        self._begun = 0
        try:
            for rank in ranks:
                rank.start(function, args, leaves=leaves).add_done_callback(self._note)
                self._begun += 1
        except BaseException:
            self._stop()
            raise

    def finish(self, limit: float, *, together: bool = False) -> list[RankOutcome[Any]]:
        """Wait ``limit`` seconds for all ranks; return the outcomes in order of arrival.

        With ``together``, interrupt the other ranks soon after a failure: they may be waiting for
        the failed rank, which is still in the world. On timeout or Ctrl-C, interrupt all ranks.
        Raise RanksStuckError on timeout.
        """
        deadline = Deadline(limit, REAL_TIME)
        try:
            while not self._is_over():
                self._printer.print_until(
                    lambda: self._is_over() or (together and culprit_of(self.ended) is not None),
                    deadline.sleep_limit(),
                )
                if deadline.expired and not self._is_over():
                    raise self._stuck(limit)
                if together and not self._printer.print_until(self._is_over, _OTHERS_PATIENCE):
                    break
        finally:
            self._stop()
        return list(self.ended)

    def _note(self, future: Future[RankOutcome[Any]]) -> None:
        self.ended.append(future.result())
        self._printer.wake()

    def _is_over(self) -> bool:
        return len(self.ended) == self._begun

    def _stop(self) -> None:
        try:
            if self._interrupt():
                self._printer.print_until(self._is_over, _INTERRUPT_PATIENCE)
        except KeyboardInterrupt:  # a second one ends the wait
            self._interrupt()
            raise

    def _interrupt(self) -> bool:
        return any([rank.interrupt() for rank in self._unfinished()])  # noqa: C419  (all of them)

    def _unfinished(self) -> list[Rank]:
        ended = {outcome.rank for outcome in self.ended}
        return [rank for rank in self._ranks[: self._begun] if rank.rank not in ended]

    def _stuck(self, limit: float) -> RanksStuckError:
        asked = {rank.rank: rank.ask_for_stacks() for rank in self._unfinished()}
        self._printer.print_until(
            lambda: all(each.done() for each in asked.values()), _STACKS_PATIENCE
        )
        silent = "(no reply: its interpreter is not running Python code)"
        stacks = {rank: each.result() if each.done() else silent for rank, each in asked.items()}
        error = RanksStuckError(limit, stacks)
        error.outcomes = list(in_rank_order(self.ended))
        return error
