"""``agent.map`` and ``agent.executor``: run tasks on many ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

from rankwire.backends.arguments import Ranks, as_index, check_ranks
from rankwire.deadline import Deadline
from rankwire.errors import ConfigurationError
from rankwire.progress import OnProgress, Progress
from rankwire.rpc.agent_calls import AgentCalls
from rankwire.rpc.call import serving
from rankwire.rpc.proxies import Later
from rankwire.rpc.server import Server
from rankwire.services.executor import RankExecutor
from rankwire.services.task_map import MapRun, TaskMap
from rankwire.services.task_pool import PoolJob, TaskPool, Terms

T = TypeVar("T")
R = TypeVar("R")

_DEPTH = 2
_RETRIES = 2


class AgentPool(AgentCalls):
    """The methods of ``RpcAgent`` that run tasks on many ranks. Safe from any thread."""

    _server: Server

    @overload
    def map(
        self,
        function: str,
        tasks: Iterable[T],
        *,
        ranks: Ranks = None,
        depth: int = _DEPTH,
        chunk: int = 1,
        ordered: bool = False,
        timeout: float | None = None,
        retries: int = _RETRIES,
        idempotent: bool | None = None,
        hedge_after: float | None = None,
        progress: bool | OnProgress = False,
    ) -> TaskMap[T, Any]: ...
    @overload
    def map(
        self,
        function: Callable[[T], Later[R]],
        tasks: Iterable[T],
        *,
        ranks: Ranks = None,
        depth: int = _DEPTH,
        chunk: int = 1,
        ordered: bool = False,
        timeout: float | None = None,
        retries: int = _RETRIES,
        idempotent: bool | None = None,
        hedge_after: float | None = None,
        progress: bool | OnProgress = False,
    ) -> TaskMap[T, R]: ...
    @overload
    def map(
        self,
        function: Callable[[T], R],
        tasks: Iterable[T],
        *,
        ranks: Ranks = None,
        depth: int = _DEPTH,
        chunk: int = 1,
        ordered: bool = False,
        timeout: float | None = None,
        retries: int = _RETRIES,
        idempotent: bool | None = None,
        hedge_after: float | None = None,
        progress: bool | OnProgress = False,
    ) -> TaskMap[T, R]: ...
    def map(
        self,
        function: Any,
        tasks: Iterable[Any],
        *,
        ranks: Ranks = None,
        depth: int = _DEPTH,
        chunk: int = 1,
        ordered: bool = False,
        timeout: float | None = None,
        retries: int = _RETRIES,
        idempotent: bool | None = None,
        hedge_after: float | None = None,
        progress: bool | OnProgress = False,
    ) -> TaskMap[Any, Any]:
        """Call a function for each task on some rank, and return the outcomes as they come.

        Each outcome has ``index``, ``task``, ``rank`` and ``value``; if the task failed, ``error``
        is its error, and ``value`` raises that. The rank with the fewest calls gets the next task.
        A rank that is lost gets no more tasks until its process was restarted.

        Args:
            function: A name registered on the ranks, or a function registered here under the same
                name. It is called with the task as its only argument.
            tasks: Any iterable. It is read in this thread, while you iterate, and at most ``depth``
                tasks (times ``chunk``) for each rank ahead of the outcomes that you have taken.
            ranks: The ranks that work, or names; None is all others, or this one if it is alone.
            depth: How many calls a rank has at once: with two, the next task is there when one
                ends. The rank's agent runs up to ``workers`` of them at once.
            chunk: Tasks for each call. They run one after the other, and each has its own outcome.
            ordered: Whether outcomes come in the order of the tasks.
            timeout: Seconds for each task, from when a worker of the rank's agent takes it; None is
                the agent's timeout. A call with more tasks has so many times that. A task that has
                not begun after ``depth`` times that fails too.
            retries: To how many more ranks a task is given when one that had it is lost.
            idempotent: Whether a task may run again on another rank if the one that had it is lost,
                and may have run it. None is what ``register(idempotent=...)`` says here. If it may
                not, the task ends with the ``PeerLostError``.
            hedge_after: Give an idle rank a copy of a task that has no result after so many
                seconds, when no tasks are left. The first result counts, and the other call is
                cancelled. Only for idempotent functions.
            progress: True shows a bar on stderr, on a terminal, or else a line every five seconds.
                Or a function, called with the numbers of tasks that are done and of all tasks (None
                if ``tasks`` has no length).

        Returns:
            An iterator; ``close()`` or the end of a ``with`` block cancels what is under way.

        Raises:
            ConfigurationError: An argument is invalid.
            InvalidRankError: So is a rank.
            ChannelClosedError: While iterating: this agent is closed.
        """
        job = self._job_of(function, idempotent)
        chunk = _check_count("chunk", chunk)
        pool = self._pool(
            f"map {job.name!r}", job.name, ranks, depth, retries, timeout, hedge_after
        )
        if hedge_after is not None and not job.is_idempotent:
            raise ConfigurationError(
                f"hedge_after= runs tasks twice, and {job.name!r} is not registered here as"
                " idempotent; pass idempotent=True if it is"
            )
        shown = Progress(progress, tasks, job.name, self._clock)
        pool.workers.begin(job.name, pool.terms.limit)
        run: MapRun[Any, Any] = MapRun(
            pool, job, tasks, chunk=chunk, ordered=ordered, progress=shown
        )
        return TaskMap(run)

    def executor(
        self,
        ranks: Ranks = None,
        *,
        depth: int = _DEPTH,
        timeout: float | None = None,
        retries: int = _RETRIES,
        idempotent: bool | None = None,
    ) -> RankExecutor:
        """Return a ``concurrent.futures.Executor`` that calls served functions on ranks.

        Calls of one rank that is lost are treated as in ``map``. A call of a function that a rank
        does not know goes to other ranks, up to ``retries`` times. Futures raise what ``rpc_sync``
        raises.

        Args:
            ranks: As for ``map``, like all other arguments.
            depth: How many calls a rank has at once.
            timeout: Seconds for each call, from when a worker of the rank's agent takes it.
            retries: To how many more ranks a call is given when one that had it is lost.
            idempotent: Whether calls may run again; None is what ``register`` says of each.
        """
        pool = self._pool("submit", None, ranks, depth, retries, timeout, None)
        return RankExecutor(pool, self._clock, lambda function: self._job_of(function, idempotent))

    def _job_of(self, function: Any, idempotent: bool | None) -> PoolJob:
        name = self._registry.name_of(function)
        return PoolJob(
            name, self._registry.is_idempotent(name) if idempotent is None else idempotent
        )

    def _pool(
        self,
        op: str,
        name: str | None,
        ranks: Ranks,
        depth: int,
        retries: int,
        timeout: float | None,
        hedge_after: float | None,
    ) -> TaskPool:
        world_size, me = self.backend.world_size, self.backend.rank
        if ranks is None:
            ranks = [rank for rank in range(world_size) if rank != me] or [me]
        limit = self.timeout if timeout is None else Deadline(timeout, self._clock).limit
        if hedge_after is not None:
            hedge_after = Deadline(hedge_after, self._clock).limit
        depth, retries = _check_count("depth", depth), _check_count("retries", retries, least=0)
        call = None if name is None else serving.get()  # an executor may outlast the call
        terms = Terms(op, name, limit, depth, retries, hedge_after, call)
        run_soon = self._server.run_soon
        chosen = check_ranks(ranks, world_size, self.backend.roles)
        return TaskPool(self._caller, self.backend, run_soon, chosen, terms)


def _check_count(name: str, value: int, *, least: int = 1) -> int:
    count = as_index(value)
    if count is None or count < least:
        raise ConfigurationError(f"{name} is a number of at least {least}, not {value!r}")
    return count
