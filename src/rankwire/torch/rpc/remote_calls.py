"""Call functions of other workers: ``rpc_sync``, ``rpc_async``, ``_all_gather``, ``_wait_all``.

A function travels by its name (``naming_rule``), its arguments as values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from rankwire import runtime
from rankwire.errors import DeadlineExceededError, RankwireError
from rankwire.torch.rpc.call_results import CallFuture, translated
from rankwire.torch.rpc.constants import UNSET_RPC_TIMEOUT
from rankwire.torch.rpc.session import NOT_INITIALIZED, Session, current, state
from rankwire.torch.rpc.verbs import APPLY


class _Collected(runtime.local):
    """The futures of ``rpc_async`` in a thread inside ``_wait_all``; outside, no such attribute."""

    future_list: list[CallFuture]


collected = _Collected()


def rpc_sync(
    to: Any,
    func: Callable[..., Any],
    args: Iterable[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Call a function of a worker and return its result.

    Safe from any thread. Tensors are sent without a copy and may be changed when this returns.

    Args:
        to: The worker: a name, a rank or a ``WorkerInfo``.
        func: A function or class that the callee's naming rule allows.
        args: Positional arguments.
        kwargs: Keyword arguments.
        timeout: Seconds; 0 is no limit, -1 the default.

    Raises:
        RuntimeError: The call failed; rankwire's error is the ``__cause__``. An error that the
            function raised has its own class, if that is Python's or the program's.
    """
    session, rank, limit = _addressed(to, timeout)
    try:
        return session.call(rank, *_named(session, func, args, kwargs), limit)
    except RankwireError as error:
        raise translated(error, session, rank, limit) from error


def rpc_async(
    to: Any,
    func: Callable[..., Any],
    args: Iterable[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> CallFuture:
    """Start a call of a function of a worker and return its future.

    Safe from any thread. Arguments are encoded, and large ones sent, before this returns, and may
    be changed afterwards. Otherwise as ``rpc_sync``.

    Raises:
        RuntimeError: An argument cannot be sent, or there is no such worker. All other failures end
            the future.
    """
    session, rank, limit = _addressed(to, timeout)
    try:
        call = session.start(rank, *_named(session, func, args, kwargs), limit)
    except RankwireError as error:
        raise translated(error, session, rank, limit) from error
    future = CallFuture(session, call, rank, limit)
    if hasattr(collected, "future_list"):
        collected.future_list.append(future)
    return future


def _addressed(to: Any, timeout: float) -> tuple[Session, int, float]:
    """Return the session, the rank that is called, and the timeout in seconds."""
    session = state.session
    if session is None:
        raise RuntimeError(NOT_INITIALIZED)
    rank = session.ranks.get(to) if type(to) is str else None
    return session, session.rank_of(to) if rank is None else rank, session.limit(timeout)


def _named(
    session: Session,
    func: Callable[..., Any],
    args: Iterable[Any] | None,
    kwargs: Mapping[str, Any] | None,
) -> tuple[str, Iterable[Any], Mapping[str, Any]]:
    """Return the function's name and its arguments; a pickled function becomes an argument."""
    name = session.names.get(func) or session.named(func)
    if type(name) is str:
        return name, args or (), kwargs or {}
    return APPLY, (name, list(args or ()), dict(kwargs or {})), {}


def all_gather(
    obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Contribute an object and return those of all workers, by name. All of them call it.

    Args:
        obj: This worker's object.
        worker_names: The workers that take part; all if not given.
        timeout: Seconds; 0 is no limit, -1 the default.

    Raises:
        RuntimeError: A worker did not take part in time, or is lost.
    """
    session = current()
    names = tuple(sorted(worker_names or session.ranks))
    if session.me.name not in names:
        raise RuntimeError(f"{session.me.name} is not among the gathering workers: {names}")
    limit = session.limit(timeout)
    leader = session.ranks[names[0]]
    try:
        return session.gatherings.gather(obj, names, limit)
    except DeadlineExceededError as error:
        if session.me.name != names[0]:
            raise translated(error, session, leader, limit) from error
        raise RuntimeError(
            f"Followers {list(names[1:])} timed out in _all_gather after {limit:.2f} seconds. "
            f"The first exception is {error}"
        ) from error
    except RankwireError as error:
        raise translated(error, session, leader, limit) from error


def barrier(worker_names: Iterable[str]) -> None:
    """Return once all these workers have called it."""
    all_gather(None, worker_names)


@contextmanager
def wait_all() -> Iterator[None]:
    """Wait at the end of the block for all calls that this thread started with ``rpc_async``."""
    collected.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(collected.future_list)
        finally:
            del collected.future_list
