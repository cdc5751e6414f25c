"""Progress bars where nothing can be redrawn: one line every few seconds. Pure.

A pipe, a file or a notebook gets the state of a bar at first, then every few seconds, and at its
end. Training prints for days, and tqdm redraws ten times a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

PROGRESS_EVERY = 5.0  # seconds


class ProgressLines:
    """The rows that one stream redraws, as lines now and then. One thread."""

    def __init__(self) -> None:
        self._next_at = -math.inf
        self._printed: list[bytes] = []

    def due(self, rows: Sequence[bytes], now: float) -> list[bytes]:
        """Return the rows to print now: those that have changed, if it is time for them."""
        if not rows or now < self._next_at:
            return []
        new = [row for row in rows if row not in self._printed]
        if new:
            self._printed = list(rows)
            self._next_at = now + PROGRESS_EVERY
        return new

    def unprinted(self, lines: list[bytes]) -> list[bytes]:
        """Return the lines without rows that were printed and are now complete, unchanged."""
        if not lines or not self._printed:
            return lines
        printed, self._printed = self._printed, []
        count = len(printed)
        return [line for line in lines[:count] if line not in printed] + lines[count:]
