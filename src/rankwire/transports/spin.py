"""Spin: how long a reader polls before it sleeps.

Waking a sleeping thread costs 30-60 us, a poll of the socket 1 us, so a reader polls for a short
while first. A reader that has polled in vain sleeps at once the next time.

Two ranks that answer each other quickly must not both end up asleep: each then finds the other too
slow to poll for, because it has to be woken, which may take longer than a whole budget. So while
waits follow each other closely, a few are polled for with a larger budget, which spans the waking
of the other rank; then one now and then, after a varying number of waits, so that both try at once.

    the last wait               this one follows          budget
    polled, found                  -                      whole
    polled, for nothing         closely, up to 4 times    double
    polled or slept             closely, after that       none; now and then double
    polled or slept             later                     none; now and then whole
"""

from __future__ import annotations

import os
from collections.abc import Callable

from rankwire import runtime
from rankwire.clock import Clock

DEFAULT_SPIN = 200e-6
_CLOSELY = 1e-3  # seconds between the ends of two waits, or from the end of one to the next
_PATIENCE = 4
_LONGER = 2.0  # times the whole budget
_LEAST_SKIPS, _MORE_SKIPS = 8, 17  # between two tries
# How many times a thread looks before it asks for the time, and asks the socket beside a ring. If
# ranks share cores, it yields after each look.
_RARELY, _YIELDING = range(16), range(1)


class Spin:
    """A budget in seconds that adapts to whether spinning pays. Races only blur it.

    Attributes:
        budget: How long to poll now.
        most: The full budget.
        yields: Whether ranks share cores, and a thread yields between two looks.
    """

    __slots__ = ("_misses", "_seen", "_skips", "budget", "most", "now", "yields")

    def __init__(self, most: float, clock: Clock, *, yields: bool = False) -> None:
        self.most = most
        self.yields = yields
        self.now = clock.now
        self._misses = 0  # one after the other
        self._skips = 0  # still to come before the next try
        self._seen = 0.0  # when a thread was last about to sleep
        self.budget = most

    def finds(
        self,
        ask: Callable[[], object],
        idle: object,
        begin: Callable[[], object] = bool,
        rarely: Callable[[], object] | None = None,
        rarely_idle: object = None,
    ) -> object | None:
        """Poll until there is an answer, or the budget is spent. The one loop that polls.

        Calls ``begin``, and then ``ask`` until it returns anything but ``idle``, which is not None;
        one time in 16 also ``rarely``, until it returns anything but ``rarely_idle``. Returns
        the answer, or an ``OSError`` or ``ValueError`` that was raised, or None.
        """
        if self.budget <= 0.0 and not self.tries_again():
            return None
        now, looks = self.now, _YIELDING if self.yields else _RARELY
        limit = now() + self.budget
        begin()
        try:
            while True:
                # Asking for the time takes 0.1 us, so it is not done at each look.
                for _ in looks:
                    if (found := ask()) != idle:
                        self.budget = self.most
                        return found
                if self.yields:
                    runtime.sched_yield()
                if rarely is not None and (found := rarely()) != rarely_idle:
                    self.budget = self.most
                    return found
                if now() >= limit:
                    self.wasted()
                    return None
        except (OSError, ValueError) as error:
            return error  # it was closed, which its next use reports

    def wasted(self) -> None:
        """Note that the budget was spent without an answer."""
        self._misses = 1 if self.budget == self.most else self._misses + 1
        self._seen = self.now()
        self._skips = _LEAST_SKIPS + int(self._seen * 1e7) % _MORE_SKIPS
        self.budget = 0.0

    def tries_again(self) -> bool:
        """Whether to poll although the last time was useless; then there is a budget."""
        now = self.now()
        is_close, self._seen = now - self._seen < _CLOSELY, now
        if not is_close or self._misses > _PATIENCE:
            self._skips -= 1
            if self._skips > 0:
                return False
        self.budget = self.most * _LONGER if is_close else self.most
        return self.budget > 0.0


def share_cores(ranks_on_this_host: int) -> bool:
    """Whether so many ranks have to share cores: polling would then take the peer's core."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return ranks_on_this_host > cores
