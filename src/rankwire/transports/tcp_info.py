"""Whether the other host still answers, which the kernel knows and does not tell by itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rankwire.clock import Clock
from rankwire.deadline import Deadline

if TYPE_CHECKING:
    from rankwire.transports.stream import Stream

_ACK_TOLERANCE = 0.05  # seconds: the kernel counts milliseconds, and rounds


class Unanswered:
    """For how long the other host has acknowledged nothing although there is something to.

    A process that does not read is told from a host that is gone: a full window is acknowledged.
    Neither keepalive (not while data is under way) nor the user timeout (which counts a full window
    too) tells this. One thread asks, again and again.
    """

    __slots__ = ("_acknowledged", "_clock", "_since")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: Deadline | None = None
        self._acknowledged = 0.0

    def look(self, stream: Stream) -> Deadline | None:
        """Return what was begun when the silence was first seen; None if there is none."""
        info = stream.tcp_info()
        if info is None:
            return None
        under_way, last_ms = info
        acknowledged = self._clock.now() - last_ms / 1000
        if not under_way:
            self._since = None
        elif self._since is None or acknowledged > self._acknowledged + _ACK_TOLERANCE:
            self._since = Deadline(math.inf, self._clock)
            self._acknowledged = acknowledged
        return self._since
