"""Run the work of finalizers in a thread, and close open objects when the interpreter exits.

The garbage collector runs finalizers in any thread that allocates memory, also under a lock that
they need. So finalizers of this package take no lock, not even those of logging: they call
``hand_over``, and a thread does the rest. It starts with the first work and ends when idle.
``_idle`` holds one item while there is no thread; ``deque.pop`` gives it to one caller.

At exit, open agents and backends are closed in reverse order of creation. Peers then get a
farewell, or the traceback of an uncaught error; after ``os._exit`` or a signal, they report the
process as lost. Daemon threads that are still in a call get its error, which is not printed.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import starmap
from typing import Any, Protocol, TypeVar, overload
from weakref import WeakKeyDictionary

from rankwire import runtime
from rankwire.clock import REAL_TIME
from rankwire.errors import ChannelClosedError
from rankwire.interrupts import ONCE

_log = logging.getLogger("rankwire")

_LINGER = 0.5  # seconds; starting the thread for each finalizer would cost 0.1 ms
_EXIT_PATIENCE = 1.0

_due: runtime.SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]]] = runtime.SimpleQueue()
_idle: deque[tuple[Callable[[], None], tuple[()]]] = deque()


def hand_over(work: Callable[..., object], *args: Any) -> None:
    """Let a thread call ``work(*args)`` soon. For finalizers: takes no lock and does not wait.

    Calls run one at a time, in order, and their errors are logged. Pending calls also run when the
    interpreter exits, but not calls that are handed over after that.
    """
    if sys.is_finalizing():
        return
    _due.put((work, args))  # safe even if the collector interrupted another put
    try:
        # One C call: an interrupt (Ctrl-C) cannot remove the item without starting a thread.
        deque(starmap(runtime.start_new_thread, starmap(_idle.pop, ONCE)), 0)
    except IndexError:  # the thread is already running
        return
    except RuntimeError:  # no thread can start now: the next call tries, or ``_finish`` does it
        _idle.append(_START)


def _start() -> None:
    """Start the thread, from a new thread that holds no locks."""
    # ``threading`` takes locks when it starts a thread. Logging in a thread that ``threading`` did
    # not start adds an entry there that is never removed.
    try:
        runtime.Thread(target=_run, name="rankwire finalizers", daemon=True).start()
    except RuntimeError:  # the interpreter exits, or the system has no more threads
        _idle.append(_START)


_START = (_start, ())
_idle.append(_START)


def _run() -> None:
    while True:
        with suppress(runtime.Empty):
            while True:
                _do(*_due.get(timeout=_LINGER))
        _idle.append(_START)
        if _due.empty():
            return
        try:
            _idle.pop()  # more work arrived: continue
        except IndexError:  # another thread was started
            return


def _do(work: Callable[..., object], args: tuple[Any, ...]) -> None:
    try:
        work(*args)
    except Exception:  # no caller could receive it
        _log.exception("%r failed after its object was dropped", work)


def _finish() -> None:
    """Run the remaining work at exit, when threads can no longer be started."""
    if not _idle:  # let the thread finish its work
        done = runtime.Event()
        _due.put((done.set, ()))
        REAL_TIME.wait(done, _EXIT_PATIENCE)
    with suppress(runtime.Empty):
        while True:
            _do(*_due.get_nowait())


class Leaving(Protocol):
    """An object that is closed when the interpreter exits."""

    def leave_at_exit(self, error: BaseException | None) -> None:
        """Close quickly, with the uncaught error that ends the program, if any. Idempotent."""


T = TypeVar("T")
Leave = Callable[[T, BaseException | None], None]

_leaving: WeakKeyDictionary[Any, Leave[Any]] = WeakKeyDictionary()  # in order of creation


def _leave(thing: Leaving, error: BaseException | None) -> None:
    thing.leave_at_exit(error)


@overload
def close_at_exit(thing: Leaving) -> None: ...
@overload
def close_at_exit(thing: T, leave: Leave[T]) -> None: ...
def close_at_exit(thing: Any, leave: Leave[Any] = _leave) -> None:
    """Close an object at exit if it still exists; ``leave`` replaces its ``leave_at_exit``."""
    _leaving[thing] = leave


def _close_at_exit() -> None:
    runtime.wrap_thread_excepthook(_without_farewells)
    error = _uncaught()
    for thing, leave in reversed(list(_leaving.items())):
        try:
            leave(thing, error)
        except Exception as trouble:  # still close the others
            _log.warning("something went wrong while leaving: %s", trouble)
    _finish()


def _uncaught() -> BaseException | None:
    """Return the error that ends the program. At a prompt, the user has already seen it."""
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return None
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None


def _without_farewells(hook: runtime.ThreadHook) -> runtime.ThreadHook:
    """Return a hook for uncaught errors of threads that ignores errors caused by closing."""

    def report(args: runtime.ExceptHookArgs) -> None:
        is_daemon = args.thread is not None and args.thread.daemon
        if not (is_daemon and isinstance(args.exc_value, ChannelClosedError)):
            hook(args)

    return report


def _renew() -> None:
    """Reset the state in a forked child: objects, thread and work belong to the parent."""
    global _due
    _due = runtime.SimpleQueue()
    _idle.clear()
    _idle.append(_START)
    _leaving.clear()


atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_renew)
