"""Call functions of other workers, with the names of torch's module ``rpc.api``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

from rankwire import runtime
from rankwire.errors import DeadlineExceededError, RankwireError
from rankwire.torch.rpc.call_results import CallFuture, translated
from rankwire.torch.rpc.options import UNSET_RPC_TIMEOUT
from rankwire.torch.rpc.rref import RRef, remote
from rankwire.torch.rpc.session import NOT_INITIALIZED, Session, WorkerInfo, current, state
from rankwire.torch.rpc.termination import shutdown, wait_for_all
from rankwire.torch.rpc.verbs import APPLY

P = ParamSpec("P")
R = TypeVar("R")

__all__ = [
    "RRef",
    "WorkerInfo",
    "_all_gather",
    "_barrier",
    "_is_current_rpc_agent_set",
    "_require_initialized",
    "_set_rpc_timeout",
    "_thread_local_var",
    "_to_worker_info",
    "_wait_all",
    "_wait_all_workers",
    "get_rpc_timeout",
    "get_worker_info",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]


class _Collected(runtime.local):
    future_list: list[CallFuture]  # only set in a thread inside ``_wait_all``


_thread_local_var = _Collected()  # torch's name


def rpc_sync(
    to: Any,
    func: Callable[..., Any],
    args: Iterable[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Call a function of a worker and return its result.

    Safe from any thread. Tensors are sent without a copy and may be changed after this returns.

    Args:
        to: The worker: a name, a rank or a ``WorkerInfo``.
        func: A function or class that the callee's naming rule allows.
        args: Positional arguments.
        kwargs: Keyword arguments.
        timeout: Seconds; 0 is no limit, -1 the default.

    Raises:
        RuntimeError: The call failed; rankwire's error is the ``__cause__``. An error that the
            function raised keeps its class if that is Python's or the program's.
    """
    session, rank, limit = _addressed(to, timeout)
    return session.call(rank, *_named(session, func, args, kwargs), limit)


def rpc_async(
    to: Any,
    func: Callable[..., Any],
    args: Iterable[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> CallFuture:
    """Start a call like ``rpc_sync``, and return its future.

    Arguments may be changed after this returns.

    Raises:
        RuntimeError: An argument cannot be sent, or there is no such worker. The future raises all
            other errors.
    """
    session, rank, limit = _addressed(to, timeout)
    call = session.start(rank, *_named(session, func, args, kwargs), limit)
    future = CallFuture(session, call, rank, limit)
    if hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.append(future)
    return future


def _addressed(to: Any, timeout: float) -> tuple[Session, int, float]:
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
    name = session.names.get(func) or session.named(func)
    if type(name) is str:
        return name, args or (), kwargs or {}
    return APPLY, (name, list(args or ()), dict(kwargs or {})), {}


def _all_gather(
    obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Contribute an object, and return the objects of all named workers, which all must call it."""
    session = current()
    names = tuple(sorted(worker_names or session.ranks))
    if session.me.name not in names:
        raise RuntimeError(f"{session.me.name} is not among the gathering workers: {names}")
    limit = session.limit(timeout)
    leader = session.ranks[names[0]]
    try:
        return session.gatherer.gather(obj, names, limit)
    except RankwireError as error:
        if session.me.id != leader or not isinstance(error, DeadlineExceededError):
            raise translated(error, session, leader, limit) from error
        raise RuntimeError(
            f"Followers {list(names[1:])} timed out in _all_gather after {limit:.2f} seconds. "
            f"The first exception is {error}"
        ) from error


def _barrier(worker_names: Iterable[str]) -> None:
    _all_gather(None, worker_names)


@contextmanager
def _wait_all() -> Iterator[None]:
    """Wait at the end of the block for all calls that this thread started with ``rpc_async``."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """Return the worker with a name or rank; this worker if none is given."""
    return current_agent().get_worker_info(worker_name)


def get_rpc_timeout() -> float:
    """Return the default timeout of calls in seconds; 0 means no limit."""
    return current().timeout


def _set_rpc_timeout(seconds: float) -> None:
    if not seconds >= 0.0:
        raise ValueError(f"a timeout is 0 or more seconds, not {seconds!r}")
    current().timeout = float(seconds)


def _is_current_rpc_agent_set() -> bool:
    return state.session is not None


def _require_initialized(func: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        current()
        return func(*args, **kwargs)

    return wrapper


def _wait_all_workers(timeout: float = 0.0) -> None:
    wait_for_all(current(), timeout)


def _to_worker_info(to: Any) -> WorkerInfo:
    session = current()
    return session.workers[session.rank_of(to)]


class AgentView:
    """This process's agent, with the methods of torch's agent that programs and tests use."""

    is_static_group = True

    def __init__(self, session: Session) -> None:
        self._session = session

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        """Return the worker with a name or rank; this worker if none is given."""
        session = self._session
        return session.me if worker is None else session.workers[session.rank_of(worker)]

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Return all workers, ordered by rank."""
        return list(self._session.workers)

    def get_debug_info(self) -> dict[str, str]:
        """Return statistics as text, by torch's names."""
        activity = self._session.agent.activity()
        return {
            "agent.thread_pool_size": str(self._session.object_server.threads.most),
            "agent.num_pending_requests": str(activity.in_flight),
            "agent.client_active_calls": str(activity.in_flight),
            "agent.server_active_calls": str(activity.in_service),
        }


def current_agent() -> AgentView:
    """Return a view of this process's agent."""
    return AgentView(current())


def rref_debug_info() -> dict[str, str]:
    """Return the numbers of shared objects, handles and calls in progress, by torch's names."""
    session = current()
    objects, handles = session.owned.count()
    return {
        "num_owner_rrefs": str(objects),
        "num_forks": str(handles),
        "num_pending_futures": str(session.agent.activity().in_flight),
        "num_pending_users": "0" if session.updates.is_quiet else "1",
    }
