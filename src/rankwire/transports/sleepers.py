"""Threads that sleep until another one wakes them up, without a lock that both would need.

A sleeper leaves a lock of its own in a list, looks once more whether it has to sleep, and waits
until somebody releases the lock. Lists change in one step, so neither side takes a lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import starmap
from operator import methodcaller
from typing import Protocol

from rankwire import runtime
from rankwire.clock import Clock


class Sleeper(Protocol):
    """What wakes a thread that sleeps: the lock it waits for, or a bell."""

    def release(self) -> None:
        """Wake it up."""


Sleepers = list[Sleeper]

_ONCE = ((),)
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
            deque(map(_release, starmap(sleepers.pop, _ONCE)), 0)
