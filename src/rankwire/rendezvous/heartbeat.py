"""Judge silent ranks by their heartbeats; the caller passes the time.

The states of a rank::

    HEARD      silent for suspect_after seconds  -> SUSPECTED
    SUSPECTED  heard again                       -> HEARD
    SUSPECTED  silent for fail_after seconds     -> FAILED

Time in which this process did not run does not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from rankwire.wire.control_messages import Gone, Patience, Suspected

# A judge that is this many beats late was not running.
_LATE_BEATS = 3.0


class Silence:
    """Measures how long ranks are silent. For one thread. ``now`` is the monotonic time."""

    def __init__(self, patience: Patience, subjects: Iterable[int], now: float) -> None:
        self._patience = patience
        self._heard = dict.fromkeys(subjects, now)
        self._suspected: set[int] = set()
        self._judged = now
        self._returned = -math.inf  # when the judge ran again after a long absence

    def heard(self, rank: int, now: float) -> None:
        """Record a sign of life from a rank."""
        if rank in self._heard:
            self._heard[rank] = now

    def watch(self, rank: int, now: float) -> None:
        """Start watching a rank."""
        self._heard[rank] = now

    def forget(self, rank: int) -> None:
        """Stop watching a rank."""
        self._heard.pop(rank, None)
        self._suspected.discard(rank)

    def lengths(self, now: float) -> dict[int, float]:
        """Return the seconds of silence of the ranks that missed a beat. Safe from any thread."""
        limit = 2 * self._patience.beat
        return {rank: now - at for rank, at in list(self._heard.items()) if now - at > limit}

    def was_absent(self, now: float) -> bool:
        """Return whether this process was stopped so long that ranks may have given it up."""
        # Half: they count from the last beat received, this process from the last one sent.
        limit = self._patience.fail_after
        return now - self._judged > limit / 2 or now - self._returned < limit

    def judge(self, now: float) -> list[Suspected | Gone]:
        """Return the changes since the last call. Call it every beat."""
        self._pardon(now)
        changes: list[Suspected | Gone] = []
        for rank, at in list(self._heard.items()):
            seconds = now - at
            if seconds >= self._patience.fail_after:
                self.forget(rank)
                reason = (
                    f"its process has been silent for {seconds:.3g} s although its connection "
                    "stands: stopped, out of memory, or busy in native code with the interpreter "
                    "lock held"
                )
                changes.append(Gone(rank, reason, silent=True))
            elif seconds >= self._patience.suspect_after:
                if rank not in self._suspected:
                    self._suspected.add(rank)
                    changes.append(Suspected(rank, seconds))
            elif rank in self._suspected:
                self._suspected.discard(rank)
                changes.append(Suspected(rank, 0.0))
        return changes

    def _pardon(self, now: float) -> None:
        if now - self._judged > self._patience.fail_after / 2:
            self._returned = now
        missed = now - self._judged - self._patience.beat
        self._judged = now
        if missed > _LATE_BEATS * self._patience.beat:
            for rank, at in self._heard.items():
                self._heard[rank] = min(now, at + missed)
