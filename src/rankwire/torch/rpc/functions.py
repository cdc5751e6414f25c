"""Decorators for functions that other ranks call: ``exposed`` and ``async_execution``.

A served function that returns a ``concurrent.futures.Future`` frees its thread at once; the server
replies when that future is done. torch programs return torch futures, which are converted here.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from types import FunctionType
from typing import Any, TypeVar

import torch

from rankwire.errors import ConfigurationError

T = TypeVar("T")

_exposed: weakref.WeakSet[Any] = weakref.WeakSet()


def exposed(target: T) -> T:
    """Let other ranks call a function, or make and use objects of a class. A decorator.

    With ``init_rpc(..., allow="decorated")`` they can call nothing else of the program. A class is
    exposed with its public methods. Apply it last, above other decorators, but below
    ``@staticmethod`` and ``@classmethod``.

    Returns:
        The function or class itself.

    Raises:
        ConfigurationError: It is neither.
    """
    if not isinstance(target, types.FunctionType | type):
        raise ConfigurationError(f"only a function or a class can be exposed, not {target!r}")
    _exposed.add(target)
    return target


def is_exposed(target: object) -> bool:
    """Tell whether this very function or class was exposed."""
    return isinstance(target, types.FunctionType | type) and target in _exposed


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
