"""Spin: how long a reader polls before it sleeps.

Waking a sleeping thread costs 30-60 us, a poll of the socket 1 us (a blocking round trip against a
polling one), so a reader polls for a short while first. That pays only if the answer comes soon and
a core is free: the budget is halved whenever it was spent for nothing, down to none, restored as
soon as polling finds data, and tried anew now and then.
"""

from __future__ import annotations

import os

__all__ = ["DEFAULT_SPIN", "Spin", "default_spin"]

DEFAULT_SPIN = 100e-6
# Below this a budget is not worth the system calls; one reader in _RETRY_EVERY tries again with the
# full one.
_SMALLEST = 10e-6
_RETRY_EVERY = 16


class Spin:
    """A budget in seconds that adapts to whether spinning pays.

    Races between readers only blur it.
    """

    __slots__ = ("_most", "_skips", "budget")

    def __init__(self, most: float) -> None:
        self._most = most
        self._skips = 0
        self.budget = most

    def paid(self) -> None:
        """Data came while polling."""
        self.budget = self._most

    def wasted(self) -> None:
        """The budget was spent and nothing came."""
        self.budget = self.budget / 2 if self.budget >= 2 * _SMALLEST else 0.0

    def skipped(self) -> None:
        """A reader did not poll because the budget is gone: now and then, try again."""
        self._skips += 1
        if self._skips >= _RETRY_EVERY:
            self._skips = 0
            self.budget = self._most


def default_spin(ranks_on_this_host: int) -> float:
    """Return the budget for a host: none when its ranks have to share cores.

    Polling would then take the peer's core.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return DEFAULT_SPIN if ranks_on_this_host <= cores else 0.0
