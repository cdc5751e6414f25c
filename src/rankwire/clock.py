"""Read the time and wait: by a world's ``Clock``, which may be simulated, or by ``REAL_TIME``."""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import attrgetter
from typing import Protocol

from rankwire import runtime


class _Signal(Protocol):
    def wait(self, timeout: float | None = None) -> bool: ...


class _Joinable(Protocol):
    def join(self, timeout: float | None = None) -> None: ...


class Clock:
    """Real time. Every member is safe from any thread.

    A subclass replaces all members but ``wait_for``.

    Attributes:
        now: Returns monotonic seconds; only differences are meaningful.
        sleep: Sleeps for a number of seconds.
        acquire: ``acquire(lock, True, seconds)`` returns whether it acquired the lock in time; -1
            is no limit.

    These are C functions, not methods: they add no cost, and an interrupt (Ctrl-C) cannot come
    between acquiring a lock and returning that.
    """

    __slots__ = ("acquire", "now", "sleep")

    def __init__(self) -> None:
        self.now: Callable[[], float] = time.monotonic
        self.sleep: Callable[[float], None] = time.sleep
        self.acquire: Callable[[runtime.Lock, bool, float], bool] = type(runtime.Lock()).acquire

    def wait(self, signal: _Signal, seconds: float | None = None) -> bool:
        """Wait for an event or on a condition; return False on timeout."""
        return signal.wait(seconds)

    def wait_for(
        self,
        condition: runtime.Condition,
        predicate: Callable[[], bool],
        seconds: float | None = None,
    ) -> bool:
        """Wait on a condition until the predicate holds; return whether it does."""
        end = None if seconds is None else self.now() + seconds
        while not predicate():
            left = None if end is None else end - self.now()
            if left is not None and left <= 0.0:
                return False
            self.wait(condition, left)
        return True

    def join(self, thread: _Joinable, seconds: float | None = None) -> None:
        """Wait until a thread or process ends, or the timeout expires."""
        thread.join(seconds)


REAL_TIME = Clock()


class SafeCondition(runtime.Condition):
    """A condition that an interrupt (Ctrl-C) cannot leave acquired.

    It is entered by one C function. ``Condition.__enter__`` is a Python method: an interrupt in it
    leaves the lock acquired, and other threads wait forever.
    """

    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))
