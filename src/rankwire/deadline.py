"""One time limit for one whole operation.

A ``Deadline`` is made once, where the user's call enters the library, and handed down through every
lock, connect, handshake, send and receive, so that the parts together cannot take longer than the
whole. Monotonic time only: a change of the wall clock moves nothing.
"""

from __future__ import annotations

import math
import threading
from numbers import Real
from time import monotonic

from rankwire.errors import ConfigurationError

__all__ = ["Deadline"]

# Locks and poll() take a C long of nanoseconds; a day is "for ever" in slices.
_LONGEST_SLEEP = 86_400.0


class Deadline:
    """A point in monotonic time.

    Args:
        limit: Seconds from now, any real number. 0 polls, ``math.inf`` never expires.

    Raises:
        ConfigurationError: It is negative, no number, or too large for one.
    """

    __slots__ = ("_end", "_start", "limit")

    def __init__(self, limit: float) -> None:
        if type(limit) is not float:
            limit = _seconds(limit)
        if not limit >= 0:  # also refuses NaN
            raise ConfigurationError(f"a time limit is 0 or more seconds, not {limit!r}")
        self.limit = limit
        self._start = monotonic()
        self._end = self._start + limit

    @classmethod
    def of(cls, timeout: float | None, default: float) -> Deadline:
        """Return the deadline of a user's ``timeout=``: ``None`` means the default."""
        return cls(default if timeout is None else timeout)

    @classmethod
    def never(cls) -> Deadline:
        """Return a deadline that does not expire."""
        return cls(math.inf)

    def remaining(self) -> float:
        """Return the seconds left, never negative."""
        left = self._end - monotonic()
        return left if left > 0.0 else 0.0

    def sleep_limit(self) -> float:
        """Return the seconds left, bounded to what lock and poll calls accept."""
        left = self._end - monotonic()
        return 0.0 if left < 0.0 else min(left, _LONGEST_SLEEP)

    @property
    def expired(self) -> bool:
        """Whether the time is over."""
        return monotonic() >= self._end

    @property
    def waited(self) -> float:
        """Seconds since the operation began."""
        return monotonic() - self._start

    def sooner(self, limit: float) -> Deadline:
        """Return this deadline, or one ``limit`` seconds from now if that comes first."""
        return self if self.remaining() <= limit else Deadline(limit)

    def take(self, lock: threading.Lock, grip: list[bool]) -> bool:
        """Take a lock in time, and note it in ``grip``; return whether it is taken.

        To be called within the ``try`` whose ``finally`` gives the lock back ``if grip[-1:] ==
        [True]``. The lock is taken and noted by one call of a C function, so that no interrupt
        (Ctrl-C) falls between the two and leaves it taken for ever.
        """
        grip.extend(map(lock.acquire, (False,)))
        if not grip[-1]:
            grip.extend(map(lock.acquire, (True,), (self.sleep_limit(),)))
        return grip[-1]

    def __repr__(self) -> str:
        return f"<Deadline {self.remaining():.3f} s of {self.limit:g} s left>"


def _seconds(limit: object) -> float:
    try:
        if isinstance(limit, Real):
            return float(limit)
        reason = f"of type {type(limit).__name__}"
    except OverflowError:
        reason = "so many; math.inf is for no limit"
    raise ConfigurationError(f"a time limit is a number of seconds, not {reason}")
