"""Futures and errors of calls, as torch programs expect them.

A remote error has its own class if the naming rule allows that; every other failure is a
``RuntimeError`` with torch's wording. rankwire's error is the ``__cause__``.

The traceback of a raised error holds frames. If one of them held the future, the cycle through C++
would never be collected and would keep the caller's locals alive. So none of our frames holds it.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from rankwire.errors import (
    DeadlineExceededError,
    RankwireError,
    RemoteError,
    UnsupportedTypeError,
)
from rankwire.override import override
from rankwire.rpc.future import RpcFuture
from rankwire.torch.rpc.naming_rule import NameRefusedError, NamingRule

if TYPE_CHECKING:
    from rankwire.torch.rpc.session import Session


# The interpreter gives these a meaning, so other ranks must not raise them.
_NOT_RAISED = frozenset(("StopIteration", "StopAsyncIteration", "GeneratorExit"))


class UnsendableError(RuntimeError, TypeError):
    """An argument or result has a type that cannot be sent."""


@cache
def _builtin_errors() -> dict[str, type[Exception]]:
    return {
        name: cls
        for name, cls in vars(builtins).items()
        if isinstance(cls, type) and issubclass(cls, Exception) and name not in _NOT_RAISED
    }


def translated(error: Exception, session: Session, rank: int, limit: float) -> Exception:
    """Return the error that a torch program gets in place of rankwire's."""
    if isinstance(error, RemoteError):
        made = _remade(error, session, rank)
    elif isinstance(error, DeadlineExceededError):
        made = RuntimeError(
            f"RPC ran for more than set timeout ({round(limit * 1000)} ms) and will now be marked "
            f"with an error: {error}"
        )
    elif isinstance(error, UnsupportedTypeError | NameRefusedError):
        made = UnsendableError(str(error))
    elif isinstance(error, RankwireError):
        made = RuntimeError(f"{session.workers[rank]}: {error}")
    else:
        return error
    made.__cause__ = error
    return made


def _remade(error: RemoteError, session: Session, rank: int) -> Exception:
    """Return the remote error as one of its own class, if the naming rule allows that."""
    text = (
        f"On {session.workers[rank]}:\n{error.remote_type}: {error.remote_message}\n"
        f"{error.remote_traceback}"
    )
    cls = _class_of(error.remote_type, session.rule)
    if cls is None:
        return RuntimeError(text)
    try:
        return cls(text)
    except Exception as failure:
        return RuntimeError(
            f"Failed to create original exception type. Error msg was {failure}. "
            f"Original exception on remote side was {text}"
        )


def _class_of(name: str, rule: NamingRule) -> type[Exception] | None:
    if name in _builtin_errors():
        return _builtin_errors()[name]
    module, dot, qualname = name.rpartition(".")
    found: Any = None
    if dot:
        try:
            found = rule.find(f"{module}:{qualname}")
        except NameRefusedError:
            return None
    return found if isinstance(found, type) and issubclass(found, Exception) else None


class CallFuture(torch.futures.Future[Any]):  # type: ignore[misc]
    """The result of ``rpc_async``. Safe from any thread."""

    def __init__(self, session: Session, call: RpcFuture[Any], rank: int, limit: float) -> None:
        super().__init__()
        self.call = call
        self._session = session
        self._rank = rank
        self._limit = limit
        self._unfinished = [True]  # the thread that pops it ends this future
        call.when_ended(self._finish)
        session.watcher.watch(call)

    @override
    def wait(self) -> Any:
        if self._unfinished:
            watcher = self._session.watcher
            try:
                watcher.begin_reading(self._rank)
                self.call.result()
            except Exception as error:  # raised below, translated
                error.__traceback__ = None
            finally:
                try:
                    watcher.end_reading()
                except BaseException:
                    watcher.end_reading()  # an interrupt hit the first one
                    raise
            self._finish(self.call)
        try:
            return super(torch.futures.Future, self).wait()  # C++: it has no frame
        finally:
            del self

    @override
    def done(self) -> bool:
        self._attend()
        return super().done()  # type: ignore[no-any-return]

    @override
    def then(self, callback: Callable[[Any], Any]) -> Any:
        self._attend()
        return super().then(callback)

    @override
    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._attend()
        super().add_done_callback(callback)

    def _attend(self) -> None:
        """Have the reply read although no thread waits for it."""
        if self._unfinished:
            self.call.attend()

    def _finish(self, call: RpcFuture[Any]) -> None:
        """End with the result of the call; only the first of several calls does so."""
        try:
            self._unfinished.pop()
        except IndexError:
            return
        try:
            value = call.result()
        except Exception as error:
            error.__traceback__ = None
            self.set_exception(translated(error, self._session, self._rank, self._limit))
        else:
            self.set_result(value)
