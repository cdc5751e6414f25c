"""Worlds of ranks in one process for tests, and how to run a function as every rank.

``check_backend`` and ``run_ranks`` accept a *world maker*: a function of a number of ranks and
options of the backend. It returns a context manager that yields the backends in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal, TypeVar, cast, overload

from rankwire import runtime
from rankwire.backends.base import Backend
from rankwire.backends.simulated import SimulatedBackend
from rankwire.backends.sub import SubBackend
from rankwire.backends.tcp import TcpBackend
from rankwire.clock import REAL_TIME
from rankwire.deadline import Deadline
from rankwire.errors import ConfigurationError, InvalidWorldSizeError, RanksStuckError
from rankwire.launch.function_run import (
    FunctionRun,
    Printer,
    Rank,
    RankOutcome,
    culprit_of,
    in_rank_order,
    values_of,
)
from rankwire.launch.local_world import RankThread
from rankwire.launch.process_world import ProcessWorld
from rankwire.mesh.tcp_connections import Transport
from rankwire.observe.stacks import stacks

T = TypeVar("T")
MakeWorld = Callable[..., AbstractContextManager[list[Backend]]]

_BACKENDS = ("simulated", "tcp", "unix", "auto")
_TIMEOUT = 30.0  # seconds
_BEYOND_OPERATIONS = 20.0  # seconds, so that an operation that hangs fails before its test does


@overload
def run_ranks(
    world_size: int,
    function: Callable[..., T],
    *args: Any,
    backend: str | Callable[..., Any] | None = ...,
    processes: bool = ...,
    timeout: float = ...,
    limit: float | None = ...,
    outcomes: Literal[False] = ...,
    **options: Any,
) -> list[T]: ...
@overload
def run_ranks(
    world_size: int,
    function: Callable[..., T],
    *args: Any,
    backend: str | Callable[..., Any] | None = ...,
    processes: bool = ...,
    timeout: float = ...,
    limit: float | None = ...,
    outcomes: Literal[True],
    **options: Any,
) -> list[RankOutcome[T]]: ...
def run_ranks(
    world_size: int,
    function: Callable[..., T],
    *args: Any,
    backend: str | Callable[..., Any] | None = None,
    processes: bool = False,
    timeout: float = _TIMEOUT,
    limit: float | None = None,
    outcomes: bool = False,
    **options: Any,
) -> list[T] | list[RankOutcome[T]]:
    """Run ``function(backend, *args)`` as every rank of a world; return the results in rank order.

    A rank whose function returns leaves the world. A rank whose function raises fails, and its
    backend is closed. This does not wait for a rank that is killed.

    Args:
        world_size: The number of ranks.
        function: What each rank runs. For processes, it and its result are copied; it may be
            defined in a notebook or in ``__main__``.
        *args: Further arguments, the same for every rank.
        backend: ``"simulated"``, ``"auto"``, ``"tcp"``, ``"unix"``, or a world maker. The default
            is ``"simulated"``, and ``"auto"`` for processes.
        processes: Whether to use real processes instead of threads; not for the simulated backend.
        timeout: Seconds for each operation without its own timeout.
        limit: Seconds for the whole run; the default is ``timeout`` + 20.
        outcomes: Whether to return a ``RankOutcome`` for each rank: what it returned or raised, or
            that it was killed.
        **options: For the backend, such as ``faults=``.

    Raises:
        Exception: The first failing rank's error, with a note that names the rank; not with
            ``outcomes``.
        RankFailedError: The same from processes, and for a rank that was killed.
        RanksStuckError: Some ranks did not end within the limit; it shows their stacks. It is a
            ``TimeoutError``.
    """
    limit = timeout + _BEYOND_OPERATIONS if limit is None else limit
    if processes:
        transport = _transport(backend)
        launched = ProcessWorld(world_size, {"transport": transport, "timeout": timeout, **options})
        try:
            ended = _run(launched.ranks, launched.printer, function, args, limit)
        except BaseException:
            launched.close(patience=0.0)
            raise
        launched.close()
        return list(in_rank_order(ended)) if outcomes else values_of(ended)
    with _world_maker(backend)(world_size, timeout=timeout, **options) as world:
        ranks = [RankThread(mine) for mine in world]
        ended = _run(ranks, Printer(), function, args, limit)
        for rank in ranks:
            rank.let_go()
    return list(in_rank_order(ended)) if outcomes else _values(ended)


def in_parallel(functions: Sequence[Callable[[], T]], *, timeout: float = 60.0) -> list[T]:
    """Run each function in its own thread, as one rank; return their results in order.

    Raises:
        Exception: The first error, with a note that names the rank.
        RanksStuckError: Some did not finish; it shows their stacks.
    """
    ended: list[RankOutcome[T]] = []

    def run(rank: int, function: Callable[[], T]) -> None:
        try:
            ended.append(RankOutcome(rank, function()))
        except BaseException as error:
            ended.append(RankOutcome(rank, error=error))

    threads = [
        runtime.Thread(target=run, args=(rank, function), name=f"rank {rank}", daemon=True)
        for rank, function in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
    deadline = Deadline(timeout, REAL_TIME)
    for thread in threads:
        REAL_TIME.join(thread, deadline.sleep_limit())
    finished = {outcome.rank for outcome in ended}
    late = {rank: thread for rank, thread in enumerate(threads) if rank not in finished}
    if late and not any(outcome.error for outcome in ended):
        shown = {rank: stacks(only=[thread.ident or 0]) for rank, thread in late.items()}
        raise RanksStuckError(timeout, shown)
    return _values(ended)


def _run(
    ranks: Sequence[Rank],
    printer: Printer,
    function: Callable[..., T],
    args: tuple[Any, ...],
    limit: float,
) -> list[RankOutcome[T]]:
    """Run a function on all ranks; if one fails and others are stuck, the failure counts."""
    run = FunctionRun(ranks, printer, function, args, leaves=True)
    try:
        return run.finish(limit)
    except RanksStuckError as stuck:
        culprit = culprit_of(run.ended)
        if culprit is None or culprit.error is None or culprit.rank in stuck.ranks:
            raise
        culprit.error.add_note(str(stuck))
        return [outcome for outcome in run.ended if outcome.rank not in stuck.ranks]


def _values(ended: Sequence[RankOutcome[T]]) -> list[T]:
    """Return the results of threads in rank order, or raise the error of a rank."""
    culprit = culprit_of(ended)
    if culprit is not None and culprit.error is not None:
        culprit.error.add_note(f"raised by rank {culprit.rank}")
        raise culprit.error
    return values_of(ended)


def _transport(backend: object) -> Transport:
    if backend is None:
        return "auto"
    if backend not in _BACKENDS[1:]:
        raise ConfigurationError(f"processes need one of {_BACKENDS[1:]}, not {backend!r}")
    return cast(Transport, backend)


def _world_maker(backend: str | Callable[..., Any] | None) -> Callable[..., Any]:
    if callable(backend):
        return backend
    if backend is not None and backend not in _BACKENDS:
        raise ConfigurationError(f"backend is one of {_BACKENDS} or a world maker, not {backend!r}")
    if backend is None or backend == "simulated":
        return simulated_world
    return partial(tcp_world, transport=cast(Transport, backend))


@contextmanager
def simulated_world(world_size: int, **options: Any) -> Iterator[list[Backend]]:
    """Make ranks of the simulated backend."""
    with _closed_at_the_end(SimulatedBackend.create_group(world_size, **options)) as world:
        yield world


@contextmanager
def tcp_world(
    world_size: int, *, transport: Transport = "auto", **options: Any
) -> Iterator[list[Backend]]:
    """Make ranks of the TCP backend over loopback, each with its own sockets."""
    if world_size < 1:
        raise InvalidWorldSizeError(world_size)
    listener = runtime.create_server(("127.0.0.1", 0), backlog=128)
    address = f"127.0.0.1:{listener.getsockname()[1]}"

    def join(rank: int) -> Backend:
        mine = listener if rank == 0 else None
        return TcpBackend(rank, world_size, address, transport=transport, listener=mine, **options)

    ranks = in_parallel([partial(join, rank) for rank in range(world_size)])
    with _closed_at_the_end(ranks) as world:
        yield world


def sub_world(make_parent: MakeWorld) -> MakeWorld:
    """Return a maker of worlds that are groups of all ranks of a larger world except rank 0."""

    @contextmanager
    def make(world_size: int, **options: Any) -> Iterator[list[Backend]]:
        with make_parent(world_size + 1, **options) as parents:
            if world_size < 1:
                SubBackend(parents[0], [])
            members = range(1, world_size + 1)
            ranks = in_parallel(
                [partial(SubBackend, parents[rank], list(members)) for rank in members]
            )
            with _closed_at_the_end(ranks) as world:
                yield world

    return make


@contextmanager
def _closed_at_the_end(ranks: Iterable[Backend]) -> Iterator[list[Backend]]:
    world = list(ranks)
    try:
        yield world
    finally:
        for backend in world:
            backend.close()
