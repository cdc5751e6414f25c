"""Futures and errors of calls, as torch programs expect them, and the thread that reads replies.

A remote error keeps its class if the naming rule allows that; every other failure is a
``RuntimeError`` with torch's wording. rankwire's error is the ``__cause__``.

None of our frames in the traceback of an error may reference its future: the cycle through C++
would never be collected, and would keep the caller's locals alive.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.errors import DeadlineExceededError, RankwireError, RemoteError, UnsupportedTypeError
from rankwire.override import override
from rankwire.rpc.future import RpcFuture
from rankwire.torch.rpc.naming_rule import NameRefusedError, NamingRule

if TYPE_CHECKING:
    from rankwire.torch.rpc.session import Session


# The interpreter gives these a meaning, so other ranks must not raise them.
_NOT_RAISED = frozenset(("StopIteration", "StopAsyncIteration", "GeneratorExit"))

_MOMENT = 0.0002  # seconds
_MOST_MOMENTS = 10  # after which it looks, even while calls are being made
_FEW_ASIDE = 64  # above this, ended calls are dropped occasionally


class UnsendableError(RuntimeError, TypeError):
    """An argument or result has a type that cannot be sent."""


def translated(error: Exception, session: Session, rank: int, limit: float) -> Exception:
    """Return torch's error for one of rankwire."""
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
    module, dot, qualname = name.rpartition(".")
    try:
        found = rule.find(f"{module}:{qualname}") if dot else vars(builtins).get(name)
    except NameRefusedError:
        return None
    if name in _NOT_RAISED:
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
        self._unfinished = [True]  # the thread that pops it completes this future
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
        if self._unfinished:
            self.call.attend()

    def _finish(self, call: RpcFuture[Any]) -> None:
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


class ReplyWatcher:
    """Reads replies for futures that a thread awaits in C++ (``torch.futures.wait_all``).

    Reading every reply at once would compete with callers that read their own. So its thread waits
    for a pause between calls, then reads the missing replies. It puts calls to a rank aside while
    another thread reads that rank's replies in Python.

    Safe from any thread. No callback runs under ``_lock``.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # None makes the thread check the calls put aside, and whether it is closed.
        self._calls: runtime.SimpleQueue[RpcFuture[Any] | None] = runtime.SimpleQueue()
        self._lock = runtime.Lock()
        self._readers: dict[int, int] = {}  # the rank whose replies each thread reads
        self._aside: dict[int, list[RpcFuture[Any]]] = {}  # by rank
        self._most_aside: dict[int, int] = {}  # by rank; above it, ended calls are dropped
        self._is_closed = False
        self._start_lock = runtime.Lock()
        self._thread: runtime.Thread | None = None

    def watch(self, call: RpcFuture[Any]) -> None:
        """Read the reply of a call soon, unless a thread has read it by then."""
        if self._thread is None:
            self._start()
        self._calls.put(call)

    def begin_reading(self, rank: int) -> None:
        """Note that this thread reads the replies of a rank, until ``end_reading``."""
        with self._lock:
            self._readers[runtime.get_ident()] = rank

    def end_reading(self) -> None:
        """Note that this thread has stopped reading. Idempotent."""
        with self._lock:
            rank = self._readers.pop(runtime.get_ident(), None)
            is_left = rank in self._aside and rank not in self._readers.values()
        if is_left:
            self._calls.put(None)

    def close(self) -> None:
        """Stop watching."""
        self._is_closed = True
        self._calls.put(None)

    def _start(self) -> None:
        with self._start_lock:
            if self._thread is None:
                self._thread = runtime.Thread(
                    target=self._run, name="rankwire reply watcher", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while not self._is_closed:
            self._look([self._calls.get()])

    def _look(self, calls: list[RpcFuture[Any] | None]) -> None:
        """Look at these calls and at later ones. It must not keep a call when it returns."""
        self._wait_for_a_pause()
        with suppress(runtime.Empty):
            while True:
                calls.append(self._calls.get_nowait())
        for call in self._unread(calls):
            call.attend()

    def _wait_for_a_pause(self) -> None:
        for _ in range(_MOST_MOMENTS):
            count = self._calls.qsize()
            self._clock.sleep(_MOMENT)
            if self._calls.qsize() == count:
                return

    def _unread(self, calls: list[RpcFuture[Any] | None]) -> list[RpcFuture[Any]]:
        found = []
        with self._lock:
            read = set(self._readers.values())
            for rank in self._aside.keys() - read:
                calls += self._aside.pop(rank)
                self._most_aside.pop(rank, None)
            for call in calls:
                if call is None or call.done():
                    continue
                if call.dst in read:
                    self._put_aside(call)
                else:
                    found.append(call)
        return found

    def _put_aside(self, call: RpcFuture[Any]) -> None:
        aside = self._aside.setdefault(call.dst, [])
        aside.append(call)
        if len(aside) >= self._most_aside.get(call.dst, _FEW_ASIDE):
            aside[:] = [each for each in aside if not each.done()]
            self._most_aside[call.dst] = 2 * len(aside) + _FEW_ASIDE
