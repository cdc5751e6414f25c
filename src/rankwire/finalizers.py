"""Finalizers: a thread does the work for objects that were garbage-collected.

The garbage collector calls ``__del__`` and ``weakref.finalize`` in any thread that allocates
memory, also while that thread holds a lock. A finalizer that takes a lock can wait for its own
thread, without a timeout. So finalizers of this package take no lock, not even those of logging:
they call ``hand_over``, and a thread does the rest.

The thread starts with the first work and ends after a moment without. No lock guards that:
``_idle`` holds one item while there is no thread, and ``deque.pop`` gives it to one caller.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import starmap
from sys import is_finalizing
from typing import Any

from rankwire import runtime
from rankwire.clock import REAL_TIME
from rankwire.interrupts import ONCE

_log = logging.getLogger("rankwire")

_LINGER = 0.5  # seconds; starting the thread for each finalizer would cost 0.1 ms
_EXIT_PATIENCE = 1.0

_due: runtime.SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]]] = runtime.SimpleQueue()
_idle: deque[tuple[Callable[[], None], tuple[()]]] = deque()


def hand_over(work: Callable[..., object], *args: Any) -> None:
    """Let a thread call ``work(*args)`` soon. For finalizers: takes no lock and does not wait.

    Calls run one after the other, in order; what they raise is logged. When the interpreter exits,
    pending calls run too, but none that is handed over after that.
    """
    if is_finalizing():
        return
    _due.put((work, args))  # safe also if the collector has interrupted another put
    try:
        # One call of a C function, so that an interrupt (Ctrl-C) cannot leave neither the item in
        # ``_idle`` nor a thread.
        deque(starmap(runtime.start_new_thread, starmap(_idle.pop, ONCE)), 0)
    except IndexError:  # there is a thread
        return
    except RuntimeError:  # no thread can start now: the next caller tries, or ``finish`` does it
        _idle.append(_START)


def _start() -> None:
    """Start the thread, from a new thread that holds no locks."""
    # ``threading`` takes locks when it starts a thread. Logging in a thread that it did not start
    # adds an entry there that is never removed.
    try:
        runtime.Thread(target=_run, name="rankwire finalizers", daemon=True).start()
    except RuntimeError:  # the interpreter ends, or the system has no more threads
        _idle.append(_START)


_START = (_start, ())
_idle.append(_START)


def _run() -> None:
    while True:
        with suppress(runtime.Empty):
            while True:
                _do(*_due.get(timeout=_LINGER))
        _idle.append(_START)
        if _due.empty() or not _take_role():
            return


def _take_role() -> bool:
    """Continue as the thread; return False if another one was started."""
    try:
        _idle.pop()
    except IndexError:
        return False
    return True


def _do(work: Callable[..., object], args: tuple[Any, ...]) -> None:
    try:
        work(*args)
    except Exception:  # there is no caller to raise it to
        _log.exception("%r failed after its object was dropped", work)


def finish() -> None:
    """Run what is left when the interpreter exits, where no thread may start any more."""
    if not _idle:  # let the thread finish its work
        done = runtime.Event()
        _due.put((done.set, ()))
        REAL_TIME.wait(done, _EXIT_PATIENCE)
    with suppress(runtime.Empty):
        while True:
            _do(*_due.get_nowait())


def _renew() -> None:
    """Begin anew in a forked child: the thread and its work belong to the parent."""
    global _due
    _due = runtime.SimpleQueue()
    _idle.clear()
    _idle.append(_START)


os.register_at_fork(after_in_child=_renew)
