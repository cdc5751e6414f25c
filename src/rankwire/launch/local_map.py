"""Run a function for each of many tasks on the ranks of a local world, one task a rank at a time.

A rank that ends takes the task that it has with it, and gets no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from rankwire.backends.base import Backend
from rankwire.clock import REAL_TIME
from rankwire.errors import RankFailedError
from rankwire.launch.function_run import Printer, Rank, RankOutcome
from rankwire.progress import Progress
from rankwire.task_outcome import TaskOutcome

T = TypeVar("T")
R = TypeVar("R")

_INTERRUPT_PATIENCE = 5.0  # seconds for interrupted functions to end


class LocalMap:
    """The tasks under way on the ranks of a local world. For one thread.

    Args:
        ranks: The ranks; each runs one task at a time.
        printer: Prints their output while this waits.
        function: Called on a rank with a task.
    """

    def __init__(
        self, ranks: Sequence[Rank], printer: Printer, function: Callable[[Any], Any]
    ) -> None:
        self._printer = printer
        self._function = function
        self._free = deque([rank for rank in ranks if not rank.ended] or ranks)
        self._running: dict[int, tuple[Rank, Any]] = {}  # by the index of the task
        self._ended: deque[tuple[int, RankOutcome[Any]]] = deque()
        self._count = 0
        self._last_failure: RankFailedError | None = None

    def outcomes(self, tasks: Iterable[T], progress: Progress) -> Iterator[TaskOutcome[T, Any]]:
        """Yield the outcome of each task as it comes."""
        remaining = iter(tasks)
        has_more = True
        try:
            while True:
                while has_more and self._free:
                    has_more = self._start_next(remaining)
                if not self._running:
                    break
                self._printer.print_until(lambda: bool(self._ended))
                outcome = self._take_one()
                progress.note(failed=outcome.error is not None)
                yield outcome
            for index, task in enumerate(remaining, self._count):
                progress.note(failed=True)
                yield TaskOutcome(index, task, None, error=self._last_failure)
        finally:
            progress.end()
            self._stop()

    def _start_next(self, tasks: Iterator[Any]) -> bool:
        index = self._count
        for task in tasks:
            rank = self._free.popleft()
            self._count += 1
            self._running[index] = rank, task
            try:
                running = rank.start(run_task, (self._function, task))
            except BaseException as error:  # it cannot be sent
                self._ended.append((index, RankOutcome(rank.rank, error=error)))
                if not isinstance(error, Exception):
                    raise
                return True
            running.add_done_callback(partial(self._note, index))
            return True
        return False

    def _note(self, index: int, running: Future[RankOutcome[Any]]) -> None:
        self._ended.append((index, running.result()))
        self._printer.wake()

    def _take_one(self) -> TaskOutcome[Any, Any]:
        index, outcome = self._ended.popleft()
        rank, task = self._running.pop(index)
        if not rank.ended:
            self._free.append(rank)
        if outcome.returned:
            return TaskOutcome(index, task, rank.rank, outcome.value)
        if outcome.error is None:
            self._last_failure = outcome.failure()
        error = outcome.error or self._last_failure
        return TaskOutcome(index, task, rank.rank, error=error)

    def _stop(self) -> None:
        running = [rank for rank, _ in self._running.values()]
        if any([rank.interrupt() for rank in running]):  # noqa: C419  (all of them)
            have_ended = partial(self._have_ended, len(running))
            self._printer.print_until(have_ended, _INTERRUPT_PATIENCE)

    def _have_ended(self, count: int) -> bool:
        return len(self._ended) >= count


def run_task(backend: Backend, function: Callable[[T], R], task: T) -> R:
    """Run a task; called on its rank."""
    return function(task)


def map_tasks(
    ranks: Sequence[Rank],
    printer: Printer,
    function: Callable[[T], R],
    tasks: Iterable[T],
    progress: bool | Callable[[int, int | None], object],
) -> Iterator[TaskOutcome[T, R]]:
    """Return the outcomes of tasks on these ranks, as they come."""
    name = getattr(function, "__name__", repr(function))
    shown = Progress(progress, tasks, name, REAL_TIME)
    return LocalMap(ranks, printer, function).outcomes(tasks, shown)
