"""Wakes a thread that serves a selector (``Wakeup``), or threads that sleep on locks.

A sleeper puts a lock of its own into a list (``Sleepers``), checks once more whether it has to
sleep, and waits until another thread releases the lock. Lists change in one step, so neither side
takes a lock.
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
from rankwire.override import override

Action = Callable[[], None]


class EventDescriptor:
    """A descriptor that becomes readable when another thread calls ``release``.

    Lock: ``_lock`` guards it against use after ``close``, when another file may have its number.
    """

    def __init__(self) -> None:
        self._lock = runtime.Lock()
        self._is_open = True
        self._number = runtime.eventfd(0, runtime.EFD_NONBLOCK | runtime.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._number

    def release(self) -> None:
        """Wake the waiting thread. Safe from any thread."""
        with self._lock:
            if self._is_open:
                runtime.eventfd_write(self._number, 1)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self._number)


class Wakeup(EventDescriptor):
    """Actions posted by any thread, run by the thread that serves the selector."""

    def __init__(
        self, selector: runtime.BaseSelector, handle: Callable[[Action], None] = lambda act: act()
    ) -> None:
        super().__init__()
        self._selector = selector
        self._handle = handle
        self._actions: deque[Action] = deque()
        selector.register(self, runtime.EVENT_READ, self._run)

    def post(self, action: Action) -> None:
        """Run ``action`` soon. Safe from any thread; ignored once closed."""
        self._actions.append(action)
        self.release()

    def _run(self) -> None:
        runtime.eventfd_read(self._number)
        while self._actions and self._is_open:
            self._handle(self._actions.popleft())

    @override
    def close(self) -> None:
        if self._is_open:
            self._selector.unregister(self)
        super().close()

    def close_in_child(self) -> None:
        """Close this child's copies of the parent's resources, see ``fork``."""
        self._lock = runtime.Lock()
        super().close()


class Sleeper(Protocol):
    """Wakes a sleeping thread: the lock it waits for, or a waiter."""

    def release(self) -> None:
        """Wake it up."""


Sleepers = list[Sleeper]

_release = methodcaller("release")


@contextmanager
def sleeper(clock: Clock, *places: Sleepers) -> Iterator[Callable[[float], object]]:
    """Put a lock for this thread into lists of sleepers; yield the function that sleeps.

    Within the block the thread checks once more before it sleeps.
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
    """Wake all sleepers: one call of a C function takes a lock from the list and releases it."""
    while sleepers:
        with suppress(IndexError, RuntimeError):  # another thread took it first, from any list
            deque(map(_release, starmap(sleepers.pop, ONCE)), 0)
