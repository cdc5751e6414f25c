"""Threads that sleep until another one wakes them up, without a lock that both would need.

A sleeper leaves a lock of its own in a list, looks once more whether it has to sleep, and waits
until somebody releases the lock. Lists change in one step, so neither side takes a lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import starmap
from operator import methodcaller

from rankwire.clock import Clock

Sleepers = list[threading.Lock]

_ONCE = ((),)
_release = methodcaller("release")


class Sleep:
    """A thread that is about to sleep in one or several lists, where it can be woken up.

    Within the block it looks once more and then sleeps; a wake-up between the two is not lost.
    """

    def __init__(self, clock: Clock, *places: Sleepers) -> None:
        self._clock = clock
        self._places = places
        self._lock = threading.Lock()
        self._lock.acquire()

    def __enter__(self) -> Callable[[float], None]:
        for place in self._places:
            place.append(self._lock)
        return self._sleep

    def _sleep(self, seconds: float) -> None:
        self._clock.acquire(self._lock, True, seconds)

    def __exit__(self, *_: object) -> None:
        for place in self._places:
            with suppress(ValueError):
                place.remove(self._lock)


def wake(sleepers: Sleepers) -> None:
    """Wake all who sleep.

    Taking one from the list and waking it are one call of a C function: an interrupt cannot fall
    between the two.
    """
    while sleepers:
        with suppress(IndexError, RuntimeError):  # another thread was faster, in any of its places
            deque(map(_release, starmap(sleepers.pop, _ONCE)), 0)
