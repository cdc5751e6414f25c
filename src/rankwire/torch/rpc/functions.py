"""Functions that answer later: ``async_execution``, and how their futures become replies.

A served function that returns a ``concurrent.futures.Future`` frees its worker at once, and is
answered when that future is done. torch's programs return torch's futures; here one is made of the
other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from types import FunctionType
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "_wrapped_async_rpc_function"


def async_execution(fn: F) -> F:
    """Have the caller of a function wait for the future that it returns. A decorator.

    The function returns a ``torch.futures.Future``, and its worker is free at once. Below
    ``@staticmethod`` and ``@classmethod``.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    setattr(wrapper, _MARK, fn)
    return wrapper  # type: ignore[return-value]


def is_async(function: Callable[..., Any]) -> bool:
    """Tell whether a function, or a bound method, answers later."""
    return hasattr(function, _MARK)


def answer_later(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for a server to run in place of one that answers later.

    For a function it is the same one each time, of which the server learns whether it is slow. For
    a bound method it is a new one: its object must not be kept.
    """
    return _lasting(function) if isinstance(function, FunctionType) else _answering(function)


def _answering(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Future[Any]:
        return reply_of(function(*args, **kwargs))

    return run


_lasting = functools.lru_cache(maxsize=1024)(_answering)


def reply_of(promise: Any) -> Future[Any]:
    """Return the future that a server waits for in place of a future of torch.

    Raises:
        RuntimeError: It is none.
    """
    if not isinstance(promise, torch._C.Future):
        raise RuntimeError(
            "Functions decorated with @rpc.async_function must return a torch.futures.Future "
            f"object, not {type(promise).__name__}"
        )
    call = getattr(promise, "call", None)
    if isinstance(call, Future):  # the future of another call: its error travels on as it is
        return call
    reply: Future[Any] = Future()

    def end(done: torch.futures.Future[Any]) -> None:
        try:
            value = done.value()
        except Exception as error:
            reply.set_exception(error)
        else:
            reply.set_result(value)

    promise.add_done_callback(end)
    return reply
