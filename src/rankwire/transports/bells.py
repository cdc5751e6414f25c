"""Bells: how one thread sleeps at several streams, and is woken by other threads too.

A bell hangs among the locks of threads that sleep (``parked``), and is rung as one of them is
woken. The in-memory twin is ``memory_bell.MemoryBell``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from rankwire import runtime
from rankwire.transports.spin import Spin
from rankwire.transports.stream import Watched
from rankwire.transports.wakeup import Sleeper


class Bell(Sleeper, Protocol):
    """What one thread sleeps by. ``release`` is safe from any thread, the rest for the sleeper."""

    def listen(self, streams: Sequence[Watched], seconds: float) -> None:
        """Sleep until something can be read, the bell was rung, or the time has passed."""

    def close(self) -> None:
        """Give back what the system has lent. Who rings it later does nothing."""


class PollBell:
    """A descriptor beside those of streams.

    Args:
        spin: How long to look before sleeping.

    Lock: ``_lock`` guards the descriptor against being used once closed; its number may be another
    file's by then.
    """

    def __init__(self, spin: Spin) -> None:
        self._spin = spin
        self._lock = runtime.Lock()
        self._is_open = True
        self._number = runtime.eventfd(0, runtime.EFD_NONBLOCK | runtime.EFD_CLOEXEC)

    def release(self) -> None:
        """Have the thread wake up."""
        with self._lock:
            if self._is_open:
                runtime.eventfd_write(self._number, 1)

    def listen(self, streams: Sequence[Watched], seconds: float) -> None:
        """Sleep until something can be read, the bell was rung, or the time has passed."""
        if any(stream.look_away() for stream in streams):
            return
        poller = runtime.poll()
        poller.register(self._number, runtime.POLLIN)
        for stream in streams:
            if (number := stream.fileno()) >= 0:
                poller.register(number, runtime.POLLIN)
        if not self._finds_input(poller):
            poller.poll(int(seconds * 1000.0) + 1)

    def _finds_input(self, poller: runtime.poll) -> bool:
        """Look for a while, if that pays."""
        spin = self._spin
        if spin.budget <= 0.0 and not spin.tries_again():
            return False
        limit = spin.now() + spin.budget
        while not poller.poll(0):
            if spin.yields:
                runtime.sched_yield()
            if spin.now() >= limit:
                spin.wasted()
                return False
        spin.budget = spin.most
        return True

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self._number)
