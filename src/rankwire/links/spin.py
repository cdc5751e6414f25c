"""Spin: how long a reader polls before it sleeps.

Waking a sleeping thread costs 30-60 us, a poll of the socket 1 us (a blocking round trip against a
polling one), so a reader polls for a short while first. That pays only if the answer comes soon and
a core is free: the budget is halved whenever it was spent for nothing, down to none, restored as
soon as polling finds data, and tried anew now and then. Where ranks share cores, a reader yields
between two looks, so that the one it waits for can run.
"""

from __future__ import annotations

import os
from fcntl import ioctl
from termios import FIONREAD

from rankwire.clock import Clock
from rankwire.wire.ring import AWAKE, READ, WRITTEN, RingReader

DEFAULT_SPIN = 100e-6
# Below this a budget is not worth the system calls; one reader in _RETRY_EVERY tries again with the
# full one.
_SMALLEST = 10e-6
_RETRY_EVERY = 16
NOTHING_TO_READ = bytes(4)  # what FIONREAD writes
_LOOKS_AT_SOCKET = 8  # beside a ring, one look in so many


class Spin:
    """A budget in seconds that adapts to whether spinning pays.

    Races between readers only blur it.

    Args:
        most: The full one.
        clock: By which it is spent.
        yields: Whether ranks share cores.

    Attributes:
        budget: How long to look now. Whoever finds something sets it to ``most`` again.
        most: The full one.
        yields: Whether to let others run between two looks.
        now: The clock's.
    """

    __slots__ = ("_skips", "_waiting", "budget", "most", "now", "yields")

    def __init__(self, most: float, clock: Clock, *, yields: bool = False) -> None:
        self.most = most
        self.yields = yields
        self.now = clock.now
        self._skips = 0
        self._waiting = bytearray(4)
        self.budget = most

    def finds_input(self, descriptor: int) -> bool:
        """Look at a socket until something can be read, or the budget is spent.

        By asking how many bytes are there: a read that fails costs an exception, 0.9 us more, and
        that is how late the byte is noticed which comes meanwhile. For one thread at a time. The
        end of the stream is not seen here.
        """
        if self.budget <= 0.0:
            self.skipped()
            return False
        waiting, now, yields = self._waiting, self.now, self.yields
        limit = now() + self.budget
        try:
            while True:
                if yields:
                    os.sched_yield()
                ioctl(descriptor, FIONREAD, waiting)
                if waiting != NOTHING_TO_READ:
                    self.budget = self.most
                    return True
                if now() >= limit:
                    break
        except (OSError, ValueError):
            return True  # it was closed, which the next read says
        self.wasted()
        return False

    def finds_record(self, ring: RingReader, descriptor: int) -> bool:
        """Look at a ring, and now and then at the socket beside it, as ``finds_input`` does."""
        if self.budget <= 0.0:
            self.skipped()
            return False
        waiting, words, looks = self._waiting, ring.words, 0
        now, yields = self.now, self.yields
        limit = now() + self.budget
        words[AWAKE] = 1
        try:
            while words[WRITTEN] == words[READ]:
                looks += 1
                if yields:
                    os.sched_yield()
                if not looks % _LOOKS_AT_SOCKET:
                    ioctl(descriptor, FIONREAD, waiting)
                    if waiting != NOTHING_TO_READ:
                        break
                if now() >= limit:
                    self.wasted()
                    return False
        except (OSError, ValueError):
            return True  # as above
        self.budget = self.most
        return True

    def wasted(self) -> None:
        """The budget was spent and nothing came."""
        self.budget = self.budget / 2 if self.budget >= 2 * _SMALLEST else 0.0

    def skipped(self) -> None:
        """A reader did not poll because the budget is gone: now and then, try again."""
        self._skips += 1
        if self._skips >= _RETRY_EVERY:
            self._skips = 0
            self.budget = self.most


def share_cores(ranks_on_this_host: int) -> bool:
    """Whether so many ranks have to share cores: polling would then take the peer's core."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return ranks_on_this_host > cores
