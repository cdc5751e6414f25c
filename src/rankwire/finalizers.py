"""Finalizing: a thread does what is left to do for an object that is garbage.

The garbage collector calls ``__del__`` and ``weakref.finalize`` in whichever thread allocates
memory, between any two steps of it, also while that thread holds a lock. A finalizer that takes a
lock can wait for its own thread, and then no time limit ends the wait. So finalizers of this
package take no lock, also not those of logging: they call ``hand_over``, and a thread does the
rest. ``tests/test_finalizers.py`` reads the source and lists the exceptions.

The thread starts with the first thing to do and ends after a moment without. No lock guards that:
``_idle`` holds one item while there is no thread, and ``deque.pop`` gives it to one caller.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import starmap
from sys import is_finalizing
from typing import Any

from rankwire.clock import REAL_TIME

_log = logging.getLogger("rankwire")

_LINGER = 0.5  # seconds; to start the thread costs 0.1 ms, which a row of finalizers should not pay
_EXIT_PATIENCE = 1.0

_due: queue.SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]]] = queue.SimpleQueue()
_idle: deque[tuple[Callable[[], None], tuple[()]]] = deque()


def hand_over(work: Callable[..., object], *args: Any) -> None:
    """Have a thread call ``work(*args)`` soon. For finalizers: takes no lock and does not wait.

    Calls happen one after the other, in order. What they raise is logged. At the end of the
    interpreter, what is left is done too, but nothing that is handed over after that.
    """
    if is_finalizing():
        return
    _due.put((work, args))  # safe also if the collector has interrupted another put
    try:
        # One call of a C function, so that an interrupt (Ctrl-C) cannot leave neither the item in
        # ``_idle`` nor a thread.
        deque(starmap(start_new_thread, starmap(_idle.pop, ((),))), 0)
    except IndexError:  # there is a thread
        return
    except RuntimeError:  # no thread can be started now: the next caller tries, or the exit does it
        _idle.append(_START)


def _start() -> None:
    """Start the thread, from one that is not in the middle of anything."""
    # ``threading`` takes locks when it starts a thread. A thread that it has not started gets a
    # name there that is never removed, once something is logged in it.
    try:
        threading.Thread(target=_run, name="rankwire finalizers", daemon=True).start()
    except RuntimeError:  # the interpreter ends, or the system has no more threads
        _idle.append(_START)


_START = (_start, ())
_idle.append(_START)


def _run() -> None:
    while True:
        with suppress(queue.Empty):
            while True:
                _do(*_due.get(timeout=_LINGER))
        _idle.append(_START)
        if _due.empty() or not _take_role():
            return


def _take_role() -> bool:
    """Go on as the thread; False if another one was started."""
    try:
        _idle.pop()
    except IndexError:
        return False
    return True


def _do(work: Callable[..., object], args: tuple[Any, ...]) -> None:
    try:
        work(*args)
    except Exception:  # the object is gone, and with it the caller that could be told
        _log.exception("%r failed after its object was dropped", work)


def finish() -> None:
    """Do what is left at the end of the interpreter, when no thread may start any more."""
    if not _idle:  # the thread is there: let it end what it does
        done = threading.Event()
        _due.put((done.set, ()))
        REAL_TIME.wait(done, _EXIT_PATIENCE)
    with suppress(queue.Empty):
        while True:
            _do(*_due.get_nowait())


def _renew() -> None:
    """Begin anew in a forked child: the thread is not there, and what it was given is not ours."""
    global _due
    _due = queue.SimpleQueue()
    _idle.clear()
    _idle.append(_START)


os.register_at_fork(after_in_child=_renew)
