"""The clock: every look at the time, and every wait that time may end.

A world is given one ``Clock`` where the user enters, and hands it down to whatever waits in it:
backend, mesh, connections, streams in memory, agents, collectives. So one object decides what time
it is for a world and how its threads sleep, and a simulated world can run in another time than the
real one. What belongs to no world, such as a launcher, uses ``REAL_TIME``.

Not here: the operating system's own waits for sockets and processes, which only real worlds have.
Nothing is known here of what is waited for, nor of limits: those are ``deadline``'s.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Protocol


class _Signal(Protocol):
    """An event, or a condition whose lock is held."""

    def wait(self, timeout: float | None = None) -> bool: ...


class _Joinable(Protocol):
    """A thread or a process."""

    def join(self, timeout: float | None = None) -> None: ...


class Clock:
    """Real time. Every member is safe from any thread.

    Another clock derives from this one and replaces all members but ``wait_for``.

    Attributes:
        now: Returns the time in seconds: it never goes back, nor below 0, and only differences mean
            something.
        sleep: Sleeps for so many seconds.
        acquire: Takes a lock: ``acquire(lock, True, seconds)`` returns whether it did in time, -1
            is without a limit.

    These three are C functions here, not methods: a look at the time costs what it costs without a
    clock, and an interrupt (Ctrl-C) cannot fall between taking a lock and saying so.
    """

    __slots__ = ("acquire", "now", "sleep")

    def __init__(self) -> None:
        self.now: Callable[[], float] = time.monotonic
        self.sleep: Callable[[float], None] = time.sleep
        self.acquire: Callable[[threading.Lock, bool, float], bool] = type(threading.Lock()).acquire

    def wait(self, signal: _Signal, seconds: float | None = None) -> bool:
        """Wait for an event, or on a condition; False if the time passes first."""
        return signal.wait(seconds)

    def wait_for(
        self,
        condition: threading.Condition,
        predicate: Callable[[], bool],
        seconds: float | None = None,
    ) -> bool:
        """Wait on a condition until something holds; return whether it does."""
        end = None if seconds is None else self.now() + seconds
        while not predicate():
            left = None if end is None else end - self.now()
            if left is not None and left <= 0.0:
                return False
            self.wait(condition, left)
        return True

    def join(self, thread: _Joinable, seconds: float | None = None) -> None:
        """Wait for the end of a thread or a process, or until the time has passed."""
        thread.join(seconds)


REAL_TIME = Clock()


class SafeCondition(threading.Condition):
    """One that is entered and left as its lock is, by one call of a C function.

    The methods of ``Condition`` are in Python: an interrupt (Ctrl-C) that falls behind the lock's
    own ``__enter__`` leaves it taken, and whoever looks at it then waits for ever.
    """

    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))
