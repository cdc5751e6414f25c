"""Running a function as every rank of a world, in threads or in real processes."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from rankwire.backends.base import Backend
from rankwire.backends.tcp import TcpBackend
from rankwire.backends.tcp_dialing import Transport
from rankwire.clock import REAL_TIME
from rankwire.deadline import Deadline
from rankwire.errors import ConfigurationError, RankwireError
from rankwire.rendezvous.runtime_dir import sweep_socket_files

T = TypeVar("T")
_BACKENDS = ("simulated", "tcp", "unix", "auto")


class RankFailedError(RankwireError, AssertionError):
    """A rank's process raised, died or did not finish.

    ``rank`` says which, the text has its traceback.
    """


def run_ranks(
    world_size: int,
    function: Callable[..., T],
    *args: Any,
    backend: str | Callable[..., Any] = "simulated",
    processes: bool = False,
    timeout: float = 60.0,
    **options: Any,
) -> list[T]:
    """Run ``function(backend, *args)`` as every rank of a world; return the results in rank order.

    Args:
        world_size: The number of ranks.
        function: What each rank runs. For processes it must be importable, and its result must
            pickle.
        *args: Further arguments, the same for every rank.
        backend: ``"simulated"``, ``"auto"``, ``"tcp"``, ``"unix"``, or a world maker (see
            ``worlds``).
        processes: Real processes instead of threads; not for the simulated backend.
        timeout: Seconds for all of it.
        **options: For the backend.

    Raises:
        The first failing rank's error, with a note that names the rank; from processes a
        ``RankFailedError`` that has its traceback. ``TimeoutError`` names the ranks that did not
        finish.
    """
    if processes:
        if backend not in _BACKENDS[1:]:
            raise ConfigurationError(f"processes need one of {_BACKENDS[1:]}, not {backend!r}")
        transport = cast(Transport, backend)
        join = partial(TcpBackend, world_size=world_size, transport=transport, **options)
        return _run_processes(world_size, join, function, args, timeout)
    with _world_maker(backend)(world_size, **options) as world:
        return in_parallel([partial(function, mine, *args) for mine in world], timeout=timeout)


def in_parallel(functions: Sequence[Callable[[], T]], *, timeout: float = 60.0) -> list[T]:
    """Run functions in threads of their own, one a rank; return their results in order.

    Raises:
        The first error, with a note that names the rank. ``TimeoutError`` names those that did not
        finish.
    """
    outcomes: dict[int, T] = {}
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int, function: Callable[[], T]) -> None:
        try:
            outcomes[rank] = function()
        except BaseException as error:
            errors.append((rank, error))

    threads = [
        threading.Thread(target=run, args=(rank, function), name=f"rank {rank}", daemon=True)
        for rank, function in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
    deadline = Deadline(timeout, REAL_TIME)
    for thread in threads:
        REAL_TIME.join(thread, deadline.sleep_limit())
    if errors:
        rank, error = errors[0]
        error.add_note(f"raised by rank {rank}")
        raise error
    if late := [rank for rank in range(len(threads)) if rank not in outcomes]:
        raise TimeoutError(f"ranks {late} did not finish within {timeout:g} s")
    return [outcomes[rank] for rank in range(len(threads))]


def _world_maker(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    from rankwire.testing import worlds  # it imports this module

    if callable(backend):
        return backend
    if backend not in _BACKENDS:
        raise ConfigurationError(f"backend is one of {_BACKENDS} or a world maker, not {backend!r}")
    if backend == "simulated":
        return worlds.simulated_world
    return partial(worlds.tcp_world, transport=cast(Transport, backend))


def _run_processes(
    world_size: int,
    join: Callable[..., Backend],
    function: Callable[..., T],
    args: tuple[Any, ...],
    timeout: float,
) -> list[T]:
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes, pipes = [], {}
    for rank in range(world_size):
        reading, writing = context.Pipe(duplex=False)
        join_as_rank = partial(join, rank, address=address)
        process = context.Process(
            target=_be_rank, args=(join_as_rank, function, args, writing), daemon=True
        )
        process.start()
        writing.close()
        processes.append(process)
        pipes[reading] = rank
    deadline = Deadline(timeout, REAL_TIME)
    try:
        results = _collect(pipes, deadline)
        for process in processes:
            REAL_TIME.join(process, deadline.sleep_limit())  # they close their backends
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        for reading in pipes:
            reading.close()
        sweep_socket_files()  # those that were killed


def _collect(pipes: dict[Any, int], deadline: Deadline) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for pipe, rank in pipes.items() if rank not in results]
        ready = multiprocessing.connection.wait(waiting, deadline.sleep_limit())
        if not ready:
            late = sorted(pipes[pipe] for pipe in waiting)
            raise TimeoutError(f"ranks {late} did not finish within {deadline.limit:g} s")
        for pipe in ready:
            rank = pipes[pipe]
            results[rank] = _outcome(rank, pipe)
    return [results[rank] for rank in range(len(pipes))]


def _outcome(rank: int, pipe: Any) -> Any:
    try:
        value, error = pipe.recv()
    except EOFError:
        error = "its process died"
    if error is not None:
        failure = RankFailedError(f"rank {rank} failed: {error}")
        failure.rank = rank
        raise failure
    return value


def _be_rank(
    join: Callable[[], Backend], function: Callable[..., Any], args: tuple[Any, ...], outcome: Any
) -> None:
    try:
        with join() as backend:
            outcome.send((function(backend, *args), None))
    except BaseException:
        outcome.send((None, traceback.format_exc()))
