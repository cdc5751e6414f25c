"""A thread of the serving pool, and what it does: one job after the other."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rankwire.rpc.pool import Pool


class Paced(Protocol):
    """What a job runs, as far as its pace is known."""

    is_slow: bool  # whether another thread should poll while it runs


class Job(Protocol):
    """One admitted call."""

    depth: int

    @property
    def function(self) -> Paced:
        """What it runs. Asked when the job begins: it may have been slow when the job was read."""

    def run(self, worker: Worker) -> None:
        """Do it, reply included. Must not raise."""

    def refuse(self, reason: str) -> None:
        """Tell the caller that it will not be done. Must not raise."""

    def finished(self, seconds: float) -> None:
        """Learn how long it took."""


class Worker:
    """One thread of a pool. Made by that thread."""

    __slots__ = ("began", "ident", "job", "pool", "wakeup")

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.ident = threading.get_ident()
        self.job: Job | None = None  # what it runs; None while it polls or waits
        self.began = 0.0  # when it began to run that
        self.wakeup = threading.Lock()
        self.wakeup.acquire()

    def wake(self) -> None:
        """Wake it up, once."""
        if self.wakeup.locked():
            self.wakeup.release()
