"""Gathering among workers by name: ``_all_gather``, ``_barrier``; and ``_wait_all``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rankwire.errors import DeadlineExceededError, RankwireError
from rankwire.torch.rpc.constants import UNSET_RPC_TIMEOUT
from rankwire.torch.rpc.invoking import collected
from rankwire.torch.rpc.session import current
from rankwire.torch.rpc.torch_errors import translated


def all_gather(
    obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Give an object and return what each worker gave, by name. All of them call it.

    Args:
        obj: What this worker gives.
        worker_names: Who takes part; all workers if not given.
        timeout: Seconds; 0 is no limit; -1 is the default one.

    Raises:
        RuntimeError: They did not all come in time, or one is lost.
    """
    session = current()
    names = tuple(sorted(worker_names or session.ranks))
    if session.me.name not in names:
        raise RuntimeError(f"{session.me.name} is not one of those who gather: {names}")
    limit = session.limit(timeout)
    leader = session.ranks[names[0]]
    try:
        return session.meetings.gather(obj, names, limit)
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
    """Wait at the end for all that this thread has started with ``rpc_async`` meanwhile."""
    collected.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(collected.future_list)
        finally:
            del collected.future_list
