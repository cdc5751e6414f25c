"""The ranks of a pool: which of them take tasks, and which are lost, busy or back.

A rank takes tasks once it has answered a *probe*: a call of the pool's function with an empty list
of tasks, or of ``PROBE``, which every agent serves, if tasks call several functions. A rank that
does not answer as it should is probed again after a while, or when its process was restarted, as
long as the pool is open. A serving thread sends the probes, because connecting to a rank may take
long.

For the thread that drives the pool, except ``_probe`` and ``PoolRank.on_answer``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rankwire.backends.base import Backend
from rankwire.deadline import Deadline
from rankwire.errors import (
    ChannelClosedError,
    FunctionNotFoundError,
    PeerLostError,
    RankwireError,
)
from rankwire.rpc.caller import Caller
from rankwire.rpc.future import RpcFuture
from rankwire.services.chunks import name_of_each

if TYPE_CHECKING:
    from rankwire.services.task_pool import Flight

PROBE = "\0probe"  # a request; no function can have this name

_CHECK_EVERY = 0.05  # seconds
_PROBE_AGAIN = 0.25  # seconds
_RETURN_WITHIN = 60.0  # seconds; a launcher waits up to 30 before it restarts a rank
_PROBE_PATIENCE = 3  # times the limit of a probe, while it waits for a worker


class PoolRank:
    """One rank of a pool."""

    __slots__ = (
        "answers",
        "error",
        "flights",
        "incarnation",
        "is_asked",
        "next_probe",
        "probe",
        "rank",
    )

    def __init__(
        self, rank: int, answers: Callable[[PoolRank, RpcFuture[Any]], None], next_probe: Deadline
    ) -> None:
        self.rank = rank
        self.answers = answers
        self.flights: dict[Flight, None] = {}  # the calls that it has, in order
        self.error: RankwireError | None = None  # why it takes no tasks, if it was asked
        self.incarnation = 0  # of the process that was asked last
        self.is_asked = False  # a probe is outstanding
        self.probe: RpcFuture[Any] | None = None
        self.next_probe = next_probe

    def on_answer(self, future: RpcFuture[Any]) -> None:
        """Take in the answer to a probe, in any thread."""
        self.answers(self, future)


class Workers:
    """The ranks of a pool, and their states."""

    def __init__(
        self,
        caller: Caller,
        backend: Backend,
        run_soon: Callable[[Callable[[], None]], None],
        ranks: Sequence[int],
        wake: Callable[[], None],
    ) -> None:
        self._caller = caller
        self._backend = backend
        self._run_soon = run_soon
        self._wake = wake
        self._answers: deque[tuple[PoolRank, RpcFuture[Any]]] = deque()
        now = Deadline(0.0, backend.clock)
        self.all = [PoolRank(rank, self._answered, now) for rank in ranks]
        self.ready: list[PoolRank] = []
        self._next_check = now
        self._alone: Deadline | None = None  # for a rank to return
        self._name: str | None = None
        self._limit = 0.0
        self._closed = False

    def begin(self, name: str | None, limit: float) -> None:
        """Probe all ranks, each within ``limit`` seconds; by the function of that name, if any."""
        self._name, self._limit = name, limit
        for worker in self.all:
            self._ask(worker)

    def least_loaded(self, depth: float, besides: tuple[PoolRank, ...] = ()) -> PoolRank | None:
        """Return the rank with the fewest calls if it has fewer than ``depth``, or None."""
        found, load = None, depth
        for worker in self.ready:
            if len(worker.flights) < load and worker not in besides:
                found, load = worker, len(worker.flights)
        return found

    def put_away(
        self, worker: PoolRank, error: RankwireError, seconds: float = _PROBE_AGAIN
    ) -> None:
        """Give a rank no tasks until it answers a probe, which is sent after some seconds."""
        if worker in self.ready:
            self.ready.remove(worker)
        worker.error = error
        worker.next_probe = Deadline(seconds, self._backend.clock)

    def check(self) -> None:
        """Process the answers of ranks, and probe those whose time has come."""
        while self._answers:
            self._take_answer(*self._answers.popleft())
        if len(self.ready) == len(self.all) or not self._next_check.expired:
            return
        self._next_check = Deadline(_CHECK_EVERY, self._backend.clock)
        for worker in self.all:
            is_out = not worker.is_asked and worker not in self.ready
            if is_out and worker.next_probe.expired and self._failure_of(worker) is None:
                self._ask(worker)

    def _take_answer(self, worker: PoolRank, future: RpcFuture[Any]) -> None:
        if worker.probe is not future:
            return  # the second time
        worker.probe, worker.is_asked = None, False
        error = future.failure
        if error is None:
            worker.error = None
            self.ready.append(worker)
            self._alone = None
        else:
            future.disregard()
            self.put_away(worker, _as_ours(error))

    def despair(self) -> RankwireError | None:
        """Return why no rank will take a task any more, or None while one may."""
        errors = [worker.error for worker in self.all if worker.error is not None]
        if len(errors) < len(self.all):
            self._alone = None
            return None
        if self._alone is None:
            self._alone = Deadline(_RETURN_WITHIN, self._backend.clock)
        if any(map(self._may_return, self.all)) and not self._alone.expired:
            return None
        return errors[-1].copy()

    def _may_return(self, worker: PoolRank) -> bool:
        failure = self._failure_of(worker)
        if failure is not None:
            return self._backend.mesh.ranks_return and not isinstance(failure, ChannelClosedError)
        is_new = self._backend.incarnation_of(worker.rank) > worker.incarnation
        error = worker.error
        if isinstance(error, FunctionNotFoundError):
            return is_new or worker.incarnation > 0  # it registers its functions soon
        if isinstance(error, PeerLostError):
            return is_new or self._backend.mesh.ranks_return
        return is_new or not isinstance(error, ChannelClosedError)

    def _failure_of(self, worker: PoolRank) -> RankwireError | None:
        backend = self._backend
        return None if worker.rank == backend.rank else backend.failure_of(worker.rank)

    # -- probes ------------------------------------------------------------------------------------

    def _ask(self, worker: PoolRank) -> None:
        worker.is_asked = True
        worker.incarnation = self._backend.incarnation_of(worker.rank)
        self._run_soon(partial(self._probe, worker))

    def _probe(self, worker: PoolRank) -> None:
        if self._closed:
            return
        clock, limit = self._backend.clock, self._limit
        deadline, total = Deadline(limit, clock), Deadline(limit * _PROBE_PATIENCE, clock)
        name = PROBE if self._name is None else name_of_each(self._name)
        start = self._caller.start
        future = start(worker.rank, name, deadline, None, ([],), {}, total, worker.on_answer)
        future.name = self._name or "probe"
        worker.probe = future
        if future.done():
            worker.on_answer(future)  # it may have been ignored before ``probe`` was set
        if self._closed:
            future.cancel()

    def _answered(self, worker: PoolRank, future: RpcFuture[Any]) -> None:
        self._answers.append((worker, future))
        self._wake()

    def close(self) -> None:
        """Cancel the outstanding probes. Idempotent."""
        self._closed = True
        for worker in self.all:
            probe = worker.probe
            if probe is not None:
                probe.disregard()
                probe.cancel()


def _as_ours(error: BaseException) -> RankwireError:
    return error if isinstance(error, RankwireError) else RankwireError(str(error))
