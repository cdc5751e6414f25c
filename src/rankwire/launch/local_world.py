"""Start a world from a notebook, script or prompt, and run functions on it: ``rankwire.local``.

Ranks are processes, or threads of a simulated world, which cannot be interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, Self, TypeVar

from rankwire import runtime
from rankwire.backends.arguments import check_rank
from rankwire.backends.base import Backend
from rankwire.backends.simulated import SimulatedBackend
from rankwire.clock import REAL_TIME
from rankwire.environment import default_timeout
from rankwire.errors import ChannelClosedError, RankFailedError
from rankwire.finalizers import close_at_exit
from rankwire.fork import guard, invalidate
from rankwire.launch.function_run import FunctionRun, Printer, Rank, RankOutcome, values_of
from rankwire.launch.local_map import map_tasks
from rankwire.launch.process_world import LEAVE_PATIENCE, ProcessWorld
from rankwire.observe.stacks import stacks
from rankwire.override import override
from rankwire.progress import OnProgress
from rankwire.public_dir import PublicDir
from rankwire.task_outcome import TaskOutcome

A = TypeVar("A")
T = TypeVar("T")

_EXIT_PATIENCE = 1.0  # seconds for processes to leave when the interpreter exits
_LET_GO_PATIENCE = 0.2  # seconds for the thread of a killed rank to notice


class RankThread(Rank):
    """Runs functions in threads of this process. The caller owns the backend."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend.rank)
        self._thread: runtime.Thread | None = None  # of the current or last function
        self._backend = backend
        self._network = backend.network if isinstance(backend, SimulatedBackend) else None
        if self._network is not None:
            self._network.on_kill(self._end_if_killed)

    @override
    def start(
        self, function: Callable[..., Any], args: tuple[Any, ...], *, leaves: bool = False
    ) -> Future[RankOutcome[Any]]:
        running = self._begin(getattr(function, "__name__", repr(function)))
        if not self._ended:
            self._thread = runtime.Thread(
                target=self._run,
                args=(running, function, args, leaves),
                name=f"rank {self.rank}",
                daemon=True,
            )
            self._thread.start()
        return running

    @override
    def ask_for_stacks(self) -> Future[str]:
        said: Future[str] = Future()
        ident = None if self._thread is None else self._thread.ident
        said.set_result("" if ident is None else stacks(only=[ident]))
        return said

    @override
    def interrupt(self) -> bool:
        return False

    def let_go(self) -> None:
        """Give the thread of a killed rank a moment to end."""
        if self._ended and self._thread is not None:
            REAL_TIME.join(self._thread, _LET_GO_PATIENCE)

    def _run(
        self,
        running: Future[RankOutcome[Any]],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        leaves: bool,
    ) -> None:
        try:
            with self._backend if leaves else nullcontext():
                outcome = RankOutcome(self.rank, function(self._backend, *args))
        except BaseException as error:  # reported to the caller
            outcome = RankOutcome(self.rank, error=error)
        network = self._network
        if network is not None and network.was_killed(self.rank):  # seen before the callback came
            self._end_if_killed(self.rank)
        self._finish(outcome, running)

    def _end_if_killed(self, rank: int) -> None:
        if rank == self.rank:
            self._ended = RankOutcome(rank, killed=True, reason="it was killed")
            self._finish(self._ended)


def local(
    world_size: int, *, simulated: bool = False, timeout: float | None = None, **options: Any
) -> LocalWorld:
    """Start a world of processes on this machine, and return a handle to run functions on it.

    For notebooks, prompts and scripts. The processes run until the world is closed or this process
    ends, and keep what functions store in their globals.

    Args:
        world_size: The number of ranks.
        simulated: Use threads of this process and the simulated backend instead of processes.
        timeout: Seconds for every operation without its own timeout; None means
            ``RANKWIRE_TIMEOUT``, or 60 if that is not set.
        **options: Passed to ``TcpBackend``, or to ``SimulatedBackend.create_group``.

    Raises:
        RankFailedError: The world did not form.
        ConfigurationError: An argument is invalid.

    Example:
        >>> with rankwire.local(4) as world:
        ...     world.run(lambda backend: backend.rank)
        [0, 1, 2, 3]
    """
    limit = default_timeout() if timeout is None else timeout
    return LocalWorld(world_size, simulated=simulated, timeout=limit, **options)


class LocalWorld(PublicDir):
    """A world that this process started with ``rankwire.local``.

    Every method is thread-safe. A rank runs one function at a time, in the main thread of its
    process. This process prints what ranks print, each line with its rank.

    Functions, arguments and results are copied by value, including functions of a notebook or of
    ``__main__`` with the globals that they name. Such a function uses the rank's own ``__main__``
    as its globals, which persist from run to run.

    Attributes:
        world_size: The number of ranks.
    """

    _SHOWN = ("close", "closed", "map", "on", "run", "world_size")

    def __init__(self, world_size: int, *, simulated: bool, timeout: float, **options: Any) -> None:
        self._backends: Sequence[Backend] = ()
        self._processes: ProcessWorld | None = None
        self._printer = Printer()
        self._ranks: Sequence[Rank]
        self._closed = False
        if simulated:
            world = SimulatedBackend.create_group(world_size, timeout=timeout, **options)
            self._backends = world
            self._ranks = [RankThread(backend) for backend in world]
        else:
            self._processes = ProcessWorld(world_size, {"timeout": timeout, **options})
            self._printer = self._processes.printer
            self._ranks = self._processes.ranks
        self.world_size = len(self._ranks)
        guard(self)
        close_at_exit(self)

    def run(self, function: Callable[..., T], *args: Any, limit: float = math.inf) -> list[T]:
        """Run ``function(backend, *args)`` on all ranks; return the results in rank order.

        If a rank fails, the others are interrupted a second later. Ctrl-C interrupts all ranks. The
        world stays open in both cases.

        Args:
            function: Called on each rank with the rank's backend as its first argument.
            *args: Further arguments, the same on all ranks.
            limit: Seconds for the whole run; no limit by default.

        Raises:
            RankFailedError: A rank raised or died; see its ``rank``, ``remote_traceback`` and
                ``outcomes``. Its cause is the exception that the rank raised.
            RanksStuckError: Ranks did not finish within the limit. The error has their stacks, and
                they are interrupted.
            ConfigurationError: A rank is still running a function, or this function cannot be sent.
        """
        return self._run(self._ranks, function, args, limit)

    def map(
        self,
        function: Callable[[A], T],
        tasks: Iterable[A],
        *,
        progress: bool | OnProgress = False,
    ) -> Iterator[TaskOutcome[A, T]]:
        """Run ``function(task)`` for each task on some rank; yield the outcomes as they come.

        Each rank runs one task at a time. An exception is the ``error`` of that task's outcome; if
        the rank dies, that is a ``RankFailedError``, and the other ranks go on. Leaving the loop
        early interrupts the ranks.

        Args:
            function: Sent to the ranks as by ``run``, without the backend as first argument.
            tasks: Any iterable, read as ranks become free.
            progress: As for ``RpcAgent.map``.
        """
        self._check_open()
        return map_tasks(self._ranks, self._printer, function, tasks, progress)

    def on(self, rank: int) -> LocalRank:
        """Return a handle to run functions on one rank only."""
        return LocalRank(self, check_rank(rank, self.world_size))

    def close(self) -> None:
        """Interrupt all ranks and let them leave; kill those that do not. Idempotent."""
        self._close(LEAVE_PATIENCE)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def _run(
        self, ranks: Sequence[Rank], function: Callable[..., T], args: tuple[Any, ...], limit: float
    ) -> list[T]:
        self._check_open()
        run = FunctionRun(ranks, self._printer, function, args)
        return values_of(run.finish(limit, together=True))

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosedError("this world is closed; start a new one with rankwire.local()")

    def _close(self, patience: float) -> None:
        self._closed = True
        if self._processes is not None:
            self._processes.close(patience=patience)
        for backend in self._backends:
            backend.close()

    def leave_at_exit(self, error: BaseException | None) -> None:
        """Close when the interpreter exits."""
        self._close(_EXIT_PATIENCE)

    def close_in_child(self) -> None:
        """Refuse further use in a forked child: the processes belong to its parent."""
        invalidate(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close()

    def __repr__(self) -> str:
        kind = "processes" if self._processes is not None else "simulated ranks"
        ends = [f"rank {rank.rank}: {rank.ended}" for rank in self._ranks if rank.ended]
        state = ["closed"] if self._closed else ends
        return f"<LocalWorld of {', '.join([f'{self.world_size} {kind}', *state])}>"


class LocalRank:
    """One rank of a local world, from ``LocalWorld.on``.

    Attributes:
        rank: Its number.
    """

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self._world = world
        self.rank = rank

    def run(self, function: Callable[..., T], *args: Any, limit: float = math.inf) -> T:
        """Run ``function(backend, *args)`` on this rank and return its result.

        Arguments and errors are those of ``LocalWorld.run``.
        """
        ranks = [self._world._ranks[self.rank]]
        return self._world._run(ranks, function, args, limit)[0]

    def start(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Start ``function(backend, *args)`` on this rank and return a future for its result.

        The future raises ``RankFailedError`` if the function does not return.
        """
        self._world._check_open()
        result: Future[T] = Future()
        result.set_running_or_notify_cancel()  # the rank started it: it cannot be cancelled

        def settle(ended: Future[RankOutcome[T]]) -> None:
            try:
                result.set_result(ended.result().result())
            except RankFailedError as failure:
                result.set_exception(failure)

        self._world._ranks[self.rank].start(function, args).add_done_callback(settle)
        return result

    def __repr__(self) -> str:
        return f"<LocalRank {self.rank} of {self._world!r}>"
