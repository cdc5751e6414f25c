"""``rpc.api``: names of torch's module of that name which programs and libraries use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from rankwire.torch.rpc.ending import shutdown
from rankwire.torch.rpc.ending import wait_for_all as _wait_for_all
from rankwire.torch.rpc.gathering import all_gather as _all_gather
from rankwire.torch.rpc.gathering import barrier as _barrier
from rankwire.torch.rpc.gathering import wait_all as _wait_all
from rankwire.torch.rpc.invoking import collected as _thread_local_var
from rankwire.torch.rpc.invoking import rpc_async, rpc_sync
from rankwire.torch.rpc.rref import RRef, remote
from rankwire.torch.rpc.session import NOT_INITIALIZED, current, state
from rankwire.torch.rpc.workers import WorkerInfo

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
    """Return the worker of a name or rank, or this one.

    Raises:
        RuntimeError: There is no such worker, or RPC is not initialized.
    """
    session = current()
    return session.me if worker_name is None else session.workers[session.rank_of(worker_name)]


def get_rpc_timeout() -> float:
    """Return the seconds for calls without a limit of their own; 0 is none."""
    return current().timeout


def _set_rpc_timeout(seconds: float) -> None:
    """Set the limit of calls without one of their own, from the next one on."""
    if not seconds >= 0.0:
        raise ValueError(f"a time limit is 0 or more seconds, not {seconds!r}")
    current().timeout = float(seconds)


def _is_current_rpc_agent_set() -> bool:
    """Tell whether RPC is initialized."""
    return state.session is not None


def _require_initialized(func: Callable[P, R]) -> Callable[P, R]:
    """Have a function raise if RPC is not initialized. A decorator."""

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if state.session is None:
            raise RuntimeError(NOT_INITIALIZED)
        return func(*args, **kwargs)

    return wrapper


def _wait_all_workers(timeout: float = 0.0) -> None:
    """Return once all workers have called this, and no call is under way anywhere."""
    _wait_for_all(current(), timeout)


def _to_worker_info(to: Any) -> WorkerInfo:
    """Return the worker that a name, a rank or a ``WorkerInfo`` means."""
    session = current()
    return session.workers[session.rank_of(to)]
