"""Names of torch's module ``rpc.api`` that programs and libraries use, and a view of the agent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from rankwire.torch.rpc.lifecycle import shutdown
from rankwire.torch.rpc.lifecycle import wait_for_all as _wait_for_all
from rankwire.torch.rpc.remote_calls import all_gather as _all_gather
from rankwire.torch.rpc.remote_calls import barrier as _barrier
from rankwire.torch.rpc.remote_calls import collected as _thread_local_var
from rankwire.torch.rpc.remote_calls import rpc_async, rpc_sync
from rankwire.torch.rpc.remote_calls import wait_all as _wait_all
from rankwire.torch.rpc.rref import RRef, remote
from rankwire.torch.rpc.session import NOT_INITIALIZED, Session, WorkerInfo, current, state

P = ParamSpec("P")
R = TypeVar("R")

__all__ = [
    "RRef",
    "WorkerInfo",
    "_all_gather",
    "_barrier",
    "_thread_local_var",
    "_wait_all",
    "get_rpc_timeout",
    "get_worker_info",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]


def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """Return the worker with a name or rank; this worker if none is given."""
    session = current()
    return session.me if worker_name is None else session.workers[session.rank_of(worker_name)]


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
    """Make a function raise if RPC is not initialized. A decorator."""

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if state.session is None:
            raise RuntimeError(NOT_INITIALIZED)
        return func(*args, **kwargs)

    return wrapper


def _wait_all_workers(timeout: float = 0.0) -> None:
    """Return once all workers have called this and no call is in progress anywhere."""
    _wait_for_all(current(), timeout)


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
        """Return statistics as texts, by torch's names."""
        activity = self._session.agent.activity()
        return {
            "agent.thread_pool_size": str(self._session.threads),
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
