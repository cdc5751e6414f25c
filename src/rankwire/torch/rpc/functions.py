"""Decorators for functions that other ranks call: ``exposed`` and ``async_execution``."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from types import FunctionType
from typing import Any, TypeVar

import torch

from rankwire.errors import ConfigurationError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_MARK = "_wrapped_async_rpc_function"
# By identity, not by an attribute: decorators copy attributes to what they make.
_exposed: weakref.WeakSet[Any] = weakref.WeakSet()


def exposed(target: T) -> T:
    """Let other ranks call a function, or create and use objects of a class. A decorator.

    With ``init_rpc(..., allow="decorated")`` they can call nothing else of the program. A class is
    exposed with its public methods. Place it above other decorators, but below ``@staticmethod``
    and ``@classmethod``. Raises ``ConfigurationError`` for other objects.
    """
    if not isinstance(target, types.FunctionType | type):
        raise ConfigurationError(f"only a function or a class can be exposed, not {target!r}")
    _exposed.add(target)
    return target


def is_exposed(target: object) -> bool:
    """Return whether this function or class itself was exposed."""
    return isinstance(target, types.FunctionType | type) and target in _exposed


def async_execution(fn: F) -> F:
    """Let callers get the result of the ``torch.futures.Future`` that a function returns.

    A decorator, below ``@staticmethod`` and ``@classmethod``. The worker thread does not wait for
    the future.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    setattr(wrapper, _MARK, fn)
    return wrapper  # type: ignore[return-value]


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a function or bound method was decorated with ``async_execution``."""
    return hasattr(function, _MARK)


def answer_later(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the wrapper that the server runs for an async function.

    Each function has one wrapper, because the server learns whether it is slow. A bound method gets
    a new one each time, so that its object is not kept alive.
    """
    return _lasting(function) if isinstance(function, FunctionType) else _answering(function)


def _answering(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Future[Any]:
        return _reply_of(function(*args, **kwargs))

    return run


_lasting = functools.lru_cache(maxsize=1024)(_answering)


def _reply_of(promise: Any) -> Future[Any]:
    if not isinstance(promise, torch._C.Future):
        raise RuntimeError(
            "Functions decorated with @rpc.async_function must return a torch.futures.Future "
            f"object, not {type(promise).__name__}"
        )
    call = getattr(promise, "call", None)
    if isinstance(call, Future):  # of another call: its error is passed on unchanged
        return call
    reply: Future[Any] = Future()
    promise.add_done_callback(lambda done: settle(reply, done.value))
    return reply


def settle(future: Future[Any], outcome: Callable[[], Any]) -> None:
    """Complete a future with a function's result or error, unless it was cancelled."""
    with suppress(InvalidStateError):
        try:
            value = outcome()
        except BaseException as error:
            future.set_exception(error)
            del future, outcome  # the error's traceback has this frame
        else:
            future.set_result(value)
