"""Threads that sleep until their receive is done, or until one of them has to read.

Everything needs the owner's mutex held, but for the sleep itself.
"""

from __future__ import annotations

from rankwire import runtime
from rankwire.transports.sleepers import Sleeper, Sleepers, wake
from rankwire.wire.receive import Receive


class ParkedThreads:
    """Who sleeps, by what it waits for.

    Attributes:
        asleep: The locks on which threads sleep, by receive. To be looked at, not changed.
    """

    def __init__(self) -> None:
        self.asleep: dict[Receive, Sleepers] = {}

    def park(self, receive: Receive) -> runtime.Lock:
        """Return what to sleep on; it is free already if there is nothing to wait for."""
        lock = runtime.Lock()
        if not receive.done and receive.posted:
            lock.acquire()
            self.asleep.setdefault(receive, []).append(lock)
        return lock

    def hang(self, receive: Receive, bell: Sleeper) -> None:
        """Have a bell rung as if a thread slept here, if there is something to wait for."""
        if not receive.done and receive.posted:
            self.asleep.setdefault(receive, []).append(bell)

    def leave(self, receive: Receive, lock: Sleeper) -> None:
        """Forget a thread that goes on without having been woken."""
        locks = self.asleep.get(receive)
        if locks is not None and lock in locks:
            locks.remove(lock)
            if not locks:
                del self.asleep[receive]

    def wake(self, receive: Receive) -> bool:
        """Wake all who wait for a receive; return whether there was anyone.

        There is none if a thread was interrupted after it had woken them.
        """
        locks = self.asleep.get(receive, [])
        woken = bool(locks)
        wake(locks)
        self.asleep.pop(receive, None)
        return woken

    def wake_one(self) -> None:
        """Wake those of one receive: they find it not done, and one of them reads."""
        while self.asleep:
            if self.wake(next(iter(self.asleep))):
                return

    def wake_all(self) -> None:
        """Wake everyone."""
        for receive in list(self.asleep):
            self.wake(receive)
