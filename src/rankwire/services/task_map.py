"""``TaskMap``: the outcomes of tasks that ranks run, as they come.

The thread that iterates does all the work: it reads tasks, sends them and takes results in. The
``MapRun`` does not know the ``TaskMap``, so that one that is dropped is closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Generic, Self, TypeVar

from rankwire.finalizers import hand_over
from rankwire.progress import Progress
from rankwire.public_dir import PublicDir
from rankwire.services.task_pool import PoolJob, PoolTask, Result, TaskPool
from rankwire.task_outcome import TaskOutcome

T = TypeVar("T")
R = TypeVar("R")


class MapRun(Generic[T, R]):
    """Reads tasks, has a pool run them, and yields their outcomes. For one thread at a time.

    Attributes:
        pool: Runs them.
        job: What each task runs.
        count: How many outcomes were taken.
        closed: Whether no more outcomes come.
    """

    def __init__(
        self,
        pool: TaskPool,
        job: PoolJob,
        tasks: Iterable[T],
        *,
        chunk: int,
        ordered: bool,
        progress: Progress,
    ) -> None:
        self.pool = pool
        self.job = job
        self.count = 0
        self.closed = False
        self._tasks: Iterator[T] | None = iter(tasks)  # None when all were read
        self._read = 0
        self._chunk = chunk
        self._window = pool.terms.depth * len(pool.workers.all) * chunk
        self._early: dict[int, Result] | None = {} if ordered else None  # by index
        self._progress = progress

    def outcomes(self) -> Iterator[TaskOutcome[T, R]]:
        """Yield the outcomes as they come."""
        pool = self.pool
        while True:
            pool.take_in()
            if (result := self._next_result()) is not None:
                yield from self._outcomes_of(result)
                continue
            pool.give_out(self._take)
            if not pool.results:
                if self._tasks is None and pool.is_idle:
                    return
                pool.wait()

    def _next_result(self) -> Result | None:
        results, early = self.pool.results, self._early
        if early is None:
            return results.popleft() if results else None
        while results:
            result = results.popleft()
            early[result.task.index] = result
        return early.pop(self.count, None)

    def _outcomes_of(self, result: Result) -> Iterator[TaskOutcome[T, R]]:
        task, rank, value, error, errors = result
        note = self._progress.note if self._progress.is_shown else None
        items, last = (task.args[0], task.count) if task.count else (task.args, 1)
        values = [value] if not task.count else [None] * last if error is not None else value
        index = task.index
        left = last
        for item, one in zip(items, values, strict=True):
            failure = errors.get(last - left) if errors else error
            left -= 1
            self.count += 1
            if note is not None:
                note(failed=failure is not None)
            if not left:
                self.pool.give_out(self._take)  # before the program works on the outcome
            yield TaskOutcome(index, item, rank, one, failure)
            index += 1

    def _take(self) -> PoolTask | None:
        """Return the task of the next call; None if there is none, or too many are ahead."""
        if self._tasks is None or self._window - (self._read - self.count) < self._chunk:
            return None
        found, first = list(islice(self._tasks, self._chunk)), self._read
        self._read += len(found)
        if len(found) < self._chunk:
            self._tasks = None
        if len(found) > 1:
            return PoolTask(first, self.job, (found,), {}, len(found))
        return PoolTask(first, self.job, (found[0],), {}) if found else None

    def close(self) -> None:
        """Cancel what is under way. Idempotent."""
        self.closed = True
        self._tasks = None
        self.pool.close()
        self._progress.end()


class TaskMap(PublicDir, Generic[T, R]):
    """The outcomes of the tasks of ``agent.map``: iterate over it.

    Leaving the loop early cancels the tasks that ranks have once this object is dropped; ``close``,
    or using it in a ``with`` block, does so at once. For one thread at a time.
    """

    _SHOWN = ("close", "closed", "count")

    def __init__(self, run: MapRun[T, R]) -> None:
        self._run = run
        self._outcomes = run.outcomes()

    @property
    def count(self) -> int:
        """How many outcomes were taken."""
        return self._run.count

    @property
    def closed(self) -> bool:
        """Whether it has ended: no more outcomes come."""
        return self._run.closed

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TaskOutcome[T, R]:
        try:
            return next(self._outcomes)
        except BaseException:  # its end, an error of ``tasks``, or an interrupt
            try:
                self.close()
            finally:
                self.close()  # a second interrupt may have ended the first
            raise

    def close(self) -> None:
        """Cancel the tasks that ranks have; no more outcomes come. Idempotent."""
        self._run.close()
        self._outcomes = iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        try:
            run = self._run
        except AttributeError:  # an interrupt ended its making
            return
        if not run.closed:
            hand_over(run.close)

    def __repr__(self) -> str:
        run, pool = self._run, self._run.pool
        state = "ended" if run.closed else f"{pool.count} calls under way"
        ranks = f"{len(pool.workers.ready)} of {len(pool.workers.all)} ranks take tasks"
        return f"<TaskMap of {run.job.name!r}: {run.count} outcomes taken, {state}, {ranks}>"
