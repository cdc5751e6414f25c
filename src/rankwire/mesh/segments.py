"""The segments of one rank: memory that it shares with other ranks of its host, for collectives.

The group agrees on whether to use one (``collectives.slots``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from weakref import WeakKeyDictionary

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.errors import ConfigurationError
from rankwire.transports.shared_memory import CAN_SHARE
from rankwire.transports.shared_segment import SharedSegment

_log = logging.getLogger("rankwire")

# Two slots of 1 MiB for each of 16 ranks; with fewer ranks, up to 2 MiB each. The system allocates
# memory as it is written to: a group that reduces 4 KiB takes a page or two a rank.
DEFAULT_SEGMENT_NBYTES = 32 << 20


class Segments:
    """Makes and opens one rank's segments. Every method is safe from any thread.

    ``nbytes`` is the size of each group's segment; 0 shares nothing.

    Attributes:
        spin: Seconds that a rank polls shared memory before it sleeps; 0 yields between two looks.
    """

    spin = 0.0

    def __init__(self, nbytes: int, clock: Clock, why_not: str = "") -> None:
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
            raise ConfigurationError(f"segment_nbytes is a number of bytes, not {nbytes!r}")
        self._why_not = why_not or ("" if nbytes else "it is turned off by segment_nbytes=0")
        self._nbytes = 0 if why_not else nbytes
        self._clock = clock
        self._lock = runtime.Lock()
        self._segments: WeakKeyDictionary[SharedSegment, None] = WeakKeyDictionary()

    def why_not(self) -> str:
        """Try to make a segment; return why that fails, or nothing."""
        if not CAN_SHARE:
            return "memory is shared on Linux and x86-64 only"
        if self._why_not:
            return self._why_not
        try:
            SharedSegment.make(self._nbytes, 0, 2, spin=0.0, clock=self._clock).keep_private()
        except OSError as error:
            return str(error)
        return ""

    def make(self, rank: int, size: int) -> SharedSegment | None:
        """Make a segment for a group; None if that fails or is turned off."""
        if not self._nbytes:
            return None
        return self._kept(
            lambda: SharedSegment.make(self._nbytes, rank, size, spin=self.spin, clock=self._clock)
        )

    def open(self, pid: int, offer: bytes, rank: int, size: int) -> SharedSegment | None:
        """Open a segment that a process of this host has made; None if that fails."""
        if not self._nbytes or not pid:
            return None
        return self._kept(
            lambda: SharedSegment.open(pid, offer, rank, size, spin=self.spin, clock=self._clock)
        )

    def _kept(self, take: Callable[[], SharedSegment]) -> SharedSegment | None:
        try:
            segment = take()
        except (OSError, ValueError) as error:
            _log.debug("collectives go by sockets, no memory is shared: %s", error)
            return None
        with self._lock:
            self._segments[segment] = None
        return segment

    def disturb(self) -> None:
        """Wake the threads that wait in a segment: a rank is gone, or this one leaves."""
        with self._lock:
            segments = list(self._segments)
        for segment in segments:
            segment.disturb()
