"""Errors as torch's programs expect them.

What a function raised on another worker arrives as an error of the same class, if the naming rule
lets that class be named: one of Python's, or of the program's. Every other failure is a
``RuntimeError``, with torch's words where programs look for them. Rankwire's own error is the
``__cause__`` of each.

The future of a call, as torch's programs know futures.

It is a ``torch.futures.Future``, so callbacks, ``collect_all`` and ``wait_all`` work, and it ends
when the future of rankwire's call does. A thread that waits in ``wait()`` reads the connection
itself, as that one does.

An error that is raised belongs to the future, and its traceback has the frames that it came
through. If one of these had the future, that would be a circle through C++, which no collector
sees, and all that the frames of the caller hold would be kept. So none of ours has.
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
from rankwire.rpc.future import RpcFuture
from rankwire.torch.rpc.naming_rule import NameRefusedError, NamingRule

if TYPE_CHECKING:
    from rankwire.torch.rpc.session import Session


# These mean something to the interpreter, so they are not for others to raise.
_NOT_RAISED = frozenset(("StopIteration", "StopAsyncIteration", "GeneratorExit"))


class UnsendableError(RuntimeError, TypeError):
    """An argument or a result that is not carried."""


@cache
def _builtin_errors() -> dict[str, type[Exception]]:
    return {
        name: cls
        for name, cls in vars(builtins).items()
        if isinstance(cls, type) and issubclass(cls, Exception) and name not in _NOT_RAISED
    }


def translated(error: Exception, session: Session, rank: int, limit: float) -> Exception:
    """Return the error that a torch program gets in place of rankwire's.

    Args:
        error: What a call ended with.
        session: Knows the workers and the rule for names.
        rank: Who was called.
        limit: The seconds that the call had.
    """
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
    """Return the error that a function raised there, as one of its class if that may be."""
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
    """Return the class of an error by what the other side calls it; None if it is not for us."""
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
    """The result of ``rpc_async``. Safe from any thread.

    Args:
        session: Knows how errors are told.
        call: The future of the call.
        rank: Who was called.
        limit: The seconds that the call has.

    Attributes:
        call: As given.
    """

    def __init__(self, session: Session, call: RpcFuture[Any], rank: int, limit: float) -> None:
        super().__init__()
        self.call = call
        self._session = session
        self._rank = rank
        self._limit = limit
        self._unfinished = [True]  # who pops it ends this future
        call.when_ended(self._finish)
        session.watcher.watch(call)

    def wait(self) -> Any:
        """Return the value, or raise the call's error."""
        if self._unfinished:
            watcher = self._session.watcher
            try:
                watcher.begin_reading(self._rank)
                self.call.result()
            except Exception as error:  # it is told in the words of torch, below
                error.__traceback__ = None
            finally:
                try:
                    watcher.end_reading()
                except BaseException:
                    watcher.end_reading()  # an interrupt has fallen into the first
                    raise
            self._finish(self.call)
        try:
            return super(torch.futures.Future, self).wait()  # of which there is no frame
        finally:
            del self

    def done(self) -> bool:
        """Whether there is a value or an error."""
        self._attend()
        return super().done()  # type: ignore[no-any-return]

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """Return a future of what ``callback(self)`` returns when this one is done."""
        self._attend()
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback(self)`` when this is done, in whatever thread that happens."""
        self._attend()
        super().add_done_callback(callback)

    def _attend(self) -> None:
        """Have the reply read although no thread waits for it."""
        if self._unfinished:
            self.call.attend()

    def _finish(self, call: RpcFuture[Any]) -> None:
        """End with what the call has ended with; whoever comes second leaves it to the first."""
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
