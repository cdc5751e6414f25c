"""Give tasks to the ranks of a pool, and take in their results.

A *flight* is one call with one or more tasks. Its end is noted in any thread (``landed``); one
thread drives the pool, and takes ended flights in when it comes by. ``_wakeup`` is a lock that this
thread waits for, and that is free when there is something to take in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from rankwire import runtime
from rankwire.backends.base import Backend
from rankwire.deadline import Deadline
from rankwire.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    FunctionNotFoundError,
    OverloadedError,
    PeerLostError,
    RankwireError,
)
from rankwire.rpc.argument_streams import is_iterator
from rankwire.rpc.call import Call
from rankwire.rpc.caller import Caller
from rankwire.rpc.future import RpcFuture
from rankwire.services.chunks import name_of_each, outcomes_of
from rankwire.services.workers import PoolRank, Workers

E = TypeVar("E", bound=BaseException)

_LOOK_EVERY = 0.1  # seconds, to notice ranks that are back, and the end of this agent
# Errors of a call that are about the rank, which then takes no tasks for a while.
_OF_THE_RANK = (
    PeerLostError,
    ChannelClosedError,
    DeadlineExceededError,
    FunctionNotFoundError,
    OverloadedError,
)


class Terms(NamedTuple):
    """How a pool treats its tasks.

    ``op`` names the operation in errors. ``name`` is the function's, or None if tasks differ in it.
    ``limit`` is in seconds for one task. ``call`` is the call being served by the function that
    uses the pool, if any.
    """

    op: str
    name: str | None
    limit: float
    depth: int
    retries: int
    hedge_after: float | None
    call: Call | None


class PoolJob(NamedTuple):
    """What a task runs."""

    name: str
    is_idempotent: bool


class PoolTask:
    """One call to be made, by some rank; with ``count``, for each of the list ``args[0]``."""

    __slots__ = ("args", "attempts", "count", "index", "job", "kwargs", "lacking")

    def __init__(
        self,
        index: int,
        job: PoolJob,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        count: int = 0,
    ) -> None:
        self.index = index
        self.job = job
        self.args = args
        self.kwargs = kwargs
        self.count = count
        self.lacking: tuple[PoolRank, ...] = ()  # those without the function
        self.attempts = 0  # that may have run, or were refused

    @property
    def has_iterator(self) -> bool:
        """Whether its arguments can be sent only once."""
        return any(map(is_iterator, (*self.args, *self.kwargs.values())))

    def parts(self) -> list[PoolTask]:
        """Return a task for each of the list."""
        return [
            PoolTask(index, self.job, (each,), {})
            for index, each in enumerate(self.args[0], self.index)
        ]


class Result(NamedTuple):
    """The end of a task: its value, or an error.

    With ``task.count``, ``value`` is a list, and ``errors`` are those of the list, by their places.
    """

    task: PoolTask
    rank: int | None
    value: Any = None
    error: BaseException | None = None
    errors: dict[int, RankwireError] | None = None


class Flight:
    """A task that a rank has, as one call."""

    __slots__ = ("began", "future", "is_over", "pool", "task", "twin", "worker")

    def __init__(self, pool: TaskPool, worker: PoolRank, task: PoolTask, began: float) -> None:
        self.pool = pool
        self.worker = worker
        self.task = task
        self.began = began
        self.future: RpcFuture[Any] | None = None
        self.twin: Flight | None = None  # the same task on another rank
        self.is_over = False

    def on_end(self, future: RpcFuture[Any]) -> None:
        """Note the end of the call, in any thread; perhaps twice."""
        self.pool.landed.append((self, future))
        self.pool.wake()


class TaskPool:
    """Runs tasks on ranks. Driven by one thread at a time; ``wake`` is safe from any.

    Attributes:
        results: The tasks that have ended, for the user of the pool to take.
        landed: The flights that have ended and were not taken in yet.
        again: Tasks that must run again, before new ones.
        count: The number of flights.
        workers: The ranks.
        terms: How tasks are treated.
    """

    def __init__(
        self,
        caller: Caller,
        backend: Backend,
        run_soon: Callable[[Callable[[], None]], None],
        ranks: list[int],
        terms: Terms,
    ) -> None:
        self._caller = caller
        self._backend = backend
        self._clock = backend.clock
        self._wakeup = runtime.Lock()
        self._wakeup.acquire()
        self.terms = terms
        self.workers = Workers(caller, backend, run_soon, ranks, self.wake)
        self.landed: deque[tuple[Flight, RpcFuture[Any]]] = deque()
        self.results: deque[Result] = deque()
        self.again: deque[PoolTask] = deque()
        self.count = 0

    # -- for the thread that drives ----------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no task is under way or has to run again."""
        return not self.again and not self.count and not self.landed

    def take_in(self) -> None:
        """Process what has come: results of tasks, and ranks that are back."""
        while self.landed:
            flight, future = self.landed.popleft()
            if not flight.is_over:
                self._land(flight, future)
        self.workers.check()

    def give_out(self, take: Callable[[], PoolTask | None]) -> None:
        """Give tasks to ranks: those that must run again, then what ``take`` returns.

        Raises:
            ChannelClosedError: This agent is closed.
        """
        depth = self.terms.depth
        while (worker := self.workers.least_loaded(depth)) is not None:
            task = self.again.popleft() if self.again else take()
            if task is None:
                if self.terms.hedge_after is not None:
                    self._hedge(self.terms.hedge_after)
                return
            self._send(worker, task)
        if self.workers.ready:
            return
        self._check_open()
        if (reason := self.workers.despair()) is not None:
            while task := self.again.popleft() if self.again else take():
                self.results.append(Result(task, None, error=self._named(reason.copy())))

    def wait(self) -> None:
        """Wait until there is something to take in, or for a moment.

        Raises:
            ChannelClosedError: This agent is closed.
        """
        if self.terms.call is not None:
            self._caller.before_waiting(self.terms.call)
        self._check_open()
        if not self.landed:
            patience = min(_LOOK_EVERY, self.terms.hedge_after or _LOOK_EVERY)
            self._clock.acquire(self._wakeup, True, patience)
            self._backend.mesh.lookout.read()

    def _check_open(self) -> None:
        if self._caller.closed or self._caller.ended or self._backend.closed:
            raise self._named(ChannelClosedError("this agent is closed"))

    def wake(self) -> None:
        """End a wait, or the next one."""
        if self._wakeup.locked():
            with suppress(RuntimeError):  # another thread was faster
                self._wakeup.release()

    def close(self) -> None:
        """Cancel what is under way. Idempotent."""
        self.workers.close()
        self.again.clear()
        for worker in self.workers.all:
            while worker.flights:
                self._cancel(next(iter(worker.flights)))

    # -- sending -----------------------------------------------------------------------------------

    def _send(self, worker: PoolRank, task: PoolTask, twin: Flight | None = None) -> None:
        terms, clock = self.terms, self._clock
        name, limit = task.job.name, terms.limit
        flight = Flight(self, worker, task, clock.now())
        worker.flights[flight] = None  # first: ``close`` must find it
        self.count += 1
        if task.count:
            name, limit = name_of_each(name), limit * task.count
        deadline, total = Deadline(limit, clock), Deadline(limit * (terms.depth + 1), clock)
        if terms.call is not None:
            total = terms.call.deadline_of_nested(total)
        start = self._caller.start
        try:
            flight.future = start(
                *(worker.rank, name, deadline, terms.call, task.args, task.kwargs),
                total=total,
                on_end=flight.on_end,
            )
        except Exception as error:  # a task that cannot be sent; its own class may raise anything
            self._remove(flight)
            if twin is None:
                self._refuse(task, error)
            return
        flight.future.name = task.job.name  # for errors
        if twin is not None:
            flight.twin, twin.twin = twin, flight

    def _refuse(self, task: PoolTask, error: Exception) -> None:
        if task.count:
            self.again.extend(task.parts())  # only one of them may be the cause
        else:
            self.results.append(Result(task, None, error=self._named(error)))

    def _hedge(self, seconds: float) -> None:
        """Give the flight that is late longest to an idle rank too."""
        idle = self.workers.least_loaded(1)
        if idle is None:
            return
        late = [
            flight
            for worker in self.workers.all
            for flight in worker.flights
            if flight.twin is None
            and flight.task.job.is_idempotent
            and not flight.task.has_iterator
        ]
        oldest = min(late, key=lambda flight: flight.began, default=None)
        if oldest is not None and oldest.worker is not idle:
            if self._clock.now() - oldest.began >= seconds:
                self._send(idle, oldest.task, twin=oldest)

    def _cancel(self, flight: Flight) -> None:
        if flight.future is not None:
            flight.future.disregard()
            flight.future.cancel()
        else:  # an interrupt came just when it was sent
            self._caller.futures.cancel_of(flight.on_end)
        self._remove(flight)

    def _remove(self, flight: Flight) -> None:
        self.count -= not flight.is_over
        flight.is_over = True
        flight.worker.flights.pop(flight, None)

    # -- results -----------------------------------------------------------------------------------

    def _land(self, flight: Flight, future: RpcFuture[Any]) -> None:
        self._remove(flight)
        twin, error = flight.twin, future.failure
        if twin is not None:
            if not twin.is_over and isinstance(error, _OF_THE_RANK):
                twin.twin = None
                self.workers.put_away(flight.worker, error)
                future.disregard()
                return
            if not twin.is_over:
                self._cancel(twin)
        if error is None:
            self._succeed(flight, future)
        else:
            future.disregard()
            self._fail(flight, error)

    def _succeed(self, flight: Flight, future: RpcFuture[Any]) -> None:
        rank, task, value = flight.worker.rank, flight.task, future.result()
        if not task.count:
            self.results.append(Result(task, rank, value))
            return
        values, failures = outcomes_of(value, task.count, rank)
        errors = {place: self._explained(error, future) for place, error in failures.items()}
        self.results.append(Result(task, rank, values, errors=errors))

    def _fail(self, flight: Flight, error: BaseException) -> None:
        rank, task = flight.worker.rank, flight.task
        is_of_rank = isinstance(error, _OF_THE_RANK)
        if isinstance(error, FunctionNotFoundError) and self.terms.name is None:
            task.lacking += (flight.worker,)  # which has other functions
            other = self.workers.least_loaded(math.inf, besides=task.lacking)
            if other is not None and self._may_repeat(task, False, False):
                task.attempts += 1
                self._send(other, task)
                return
            is_of_rank = False
        elif isinstance(error, _OF_THE_RANK):
            # A rank with a task beyond its limit may be busy with it: a probe finds out.
            seconds = (0.0,) if isinstance(error, DeadlineExceededError) else ()
            self.workers.put_away(flight.worker, error, *seconds)
        is_lost = isinstance(error, (PeerLostError, ChannelClosedError))
        did_run = getattr(error, "may_have_run", True) and not isinstance(
            error, (FunctionNotFoundError, OverloadedError)
        )
        if is_lost and not did_run and not task.has_iterator:
            self.again.append(task)
        elif is_of_rank and self._may_repeat(task, is_lost, did_run):
            task.attempts += 1
            self.again.append(task)
        else:
            self.results.append(Result(task, rank, error=self._final(error, task, did_run)))

    def _may_repeat(self, task: PoolTask, is_lost: bool, did_run: bool) -> bool:
        is_harmless = not did_run or (is_lost and task.job.is_idempotent)
        return is_harmless and not task.has_iterator and task.attempts < self.terms.retries

    def _final(self, error: BaseException, task: PoolTask, did_run: bool) -> BaseException:
        """Return the error of a task that is not given to another rank, and say why."""
        if not isinstance(error, RankwireError):
            return error
        error = self._named(error.copy())
        is_lost = isinstance(error, (PeerLostError, ChannelClosedError))
        if is_lost and (did_run or task.has_iterator):
            name = task.job.name
            if task.has_iterator:
                why = "an iterator among its arguments can be sent only once"
            elif not task.job.is_idempotent:
                why = f"it may have run there, and {name!r} is not registered here as idempotent"
            else:
                why = f"it has been on {task.attempts + 1} ranks that were lost"
            error.message += f"; task {task.index} is not given to another rank: {why}"
            error.args = (error.message,)
        return error

    def _explained(self, error: RankwireError, future: RpcFuture[Any]) -> RankwireError:
        name, dst, deadline = future.name, future.dst, future.deadline
        return self._named(self._caller.explained(error, "map", name, dst, deadline, None))

    def _named(self, error: E) -> E:
        if isinstance(error, RankwireError):
            error.op = self.terms.op
            error.during(rank=self._backend.rank)
        return error
