"""Wake a thread that serves a selector (``Wakeup``), or threads that sleep on locks (``Sleepers``).

A sleeper puts a lock of its own into a list, checks once more whether it has to sleep, and waits
until another thread releases the lock. Lists change in one step, so neither side takes a lock.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import starmap
from operator import methodcaller
from typing import Protocol

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.interrupts import ONCE

Action = Callable[[], None]


class Wakeup:
    """Actions posted by any thread, run by the thread that serves the selector.

    Lock: ``_lock`` guards the descriptor against being used once closed; its number may be another
    file's by then.

    Args:
        selector: Where it is registered.
        handle: Runs an action.
    """

    def __init__(
        self, selector: runtime.BaseSelector, handle: Callable[[Action], None] = lambda act: act()
    ) -> None:
        self._selector = selector
        self._handle = handle
        self._actions: deque[Action] = deque()
        self._lock = runtime.Lock()
        self._is_open = True
        self._number = runtime.eventfd(0, runtime.EFD_NONBLOCK | runtime.EFD_CLOEXEC)
        selector.register(self, runtime.EVENT_READ, self._run)

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._number

    def post(self, action: Action) -> None:
        """Have ``action`` run soon. Safe from any thread; ignored once closed."""
        self._actions.append(action)
        self.wake()

    def wake(self) -> None:
        """Have the selector return. Safe from any thread."""
        with self._lock:
            if self._is_open:
                runtime.eventfd_write(self._number, 1)

    def _run(self) -> None:
        runtime.eventfd_read(self._number)
        while self._actions and self._is_open:
            self._handle(self._actions.popleft())

    def close(self) -> None:
        """Take no more; what was posted and not run is dropped. Idempotent."""
        with self._lock:
            if self._is_open:
                self._selector.unregister(self)
                self._end()

    def close_in_child(self) -> None:
        """Close this child's copies of what the parent has, see ``fork``."""
        self._lock = runtime.Lock()
        if self._is_open:
            self._end()

    def _end(self) -> None:
        self._is_open = False
        os.close(self._number)


class Sleeper(Protocol):
    """What wakes a thread that sleeps: the lock it waits for, or a bell."""

    def release(self) -> None:
        """Wake it up."""


Sleepers = list[Sleeper]

_release = methodcaller("release")


@contextmanager
def sleeper(clock: Clock, *places: Sleepers) -> Iterator[Callable[[float], object]]:
    """Be about to sleep in one or several lists, where this thread can be woken up.

    Within the block it looks once more and then sleeps by what this yields; a wake-up between the
    two is not lost.
    """
    lock = runtime.Lock()
    lock.acquire()
    try:
        for place in places:
            place.append(lock)
        yield partial(clock.acquire, lock, True)
    finally:
        for place in places:
            with suppress(ValueError):
                place.remove(lock)


def wake(sleepers: Sleepers) -> None:
    """Wake all who sleep.

    Taking one from the list and waking it are one call of a C function: an interrupt cannot fall
    between the two.
    """
    while sleepers:
        with suppress(IndexError, RuntimeError):  # another thread was faster, in any of its places
            deque(map(_release, starmap(sleepers.pop, ONCE)), 0)
