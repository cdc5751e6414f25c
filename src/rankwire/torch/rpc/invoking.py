"""Calling: ``rpc_sync`` and ``rpc_async``, from a function and its arguments to the agent's call.

The function travels by its name (``naming``), and the arguments as values. Nothing is waited for
here but the reply.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rankwire.errors import RankwireError
from rankwire.torch.rpc.constants import UNSET_RPC_TIMEOUT
from rankwire.torch.rpc.session import NOT_INITIALIZED, Session, state
from rankwire.torch.rpc.torch_errors import translated
from rankwire.torch.rpc.torch_future import CallFuture
from rankwire.torch.rpc.verbs import APPLY


class _Collected(threading.local):
    """The futures of ``rpc_async`` in a thread that is in ``_wait_all``; else no such attribute."""

    future_list: list[CallFuture]


collected = _Collected()


def rpc_sync(
    to: Any,
    func: Callable[..., Any],
    args: Iterable[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Call a function of another worker, or of this one, and return its result.

    Safe from any thread. Tensors are sent from where they are, uncopied; they may be changed when
    this returns.

    Args:
        to: The worker: a name, a rank or a ``WorkerInfo``.
        func: A function or class that the callee's naming rule lets others reach.
        args: Positional arguments.
        kwargs: Keyword arguments.
        timeout: Seconds; 0 is no limit; -1 is the default one.

    Raises:
        RuntimeError: It failed; rankwire's error is the ``__cause__``. What the function raised is
            raised as an error of the same class, if that is Python's or the program's.
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
    """Start a call of a function of another worker, and return its future.

    Safe from any thread. Arguments are encoded, and large ones sent, before this returns: they may
    be changed afterwards. Otherwise as ``rpc_sync``.

    Raises:
        RuntimeError: An argument cannot be sent, or there is no such worker; what the network or
            the callee does ends the future.
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
    """Return the session, the rank that is meant, and the seconds that the call has."""
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
    """Return a function by its name, and its arguments; one that is pickled is one of them."""
    name = session.names.get(func) or session.named(func)
    if type(name) is str:
        return name, args or (), kwargs or {}
    return APPLY, (name, list(args or ()), dict(kwargs or {})), {}
