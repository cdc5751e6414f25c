"""One time limit for one whole operation.

A ``Deadline`` is made once, where the user's call enters the library, and handed down through every
lock, connect, handshake, send and receive, so that the parts together cannot take longer than the
whole. It looks at the clock that its world was given, and lends it to whoever waits until then.
Monotonic time only: a change of the wall clock moves nothing.
"""

from __future__ import annotations

import threading
from numbers import Real

from rankwire.clock import REAL_TIME, Clock
from rankwire.errors import ConfigurationError

# Locks and poll() take a C long of nanoseconds; a day is "for ever" in slices.
_LONGEST_SLEEP = 86_400.0


class Deadline:
    """A point in monotonic time.

    Args:
        limit: Seconds from now, any real number. 0 polls, ``math.inf`` never expires.
        clock: Whose time counts: the world's.

    Raises:
        ConfigurationError: It is negative, no number, or too large for one.
    """

    # ``_now`` is the clock's: looking it up there at each look would cost as much as the look.
    __slots__ = ("_end", "_now", "_start", "clock", "limit")

    def __init__(self, limit: float, clock: Clock) -> None:
        if type(limit) is not float:
            limit = _seconds(limit)
        if not limit >= 0.0:  # also refuses NaN
            raise ConfigurationError(f"a time limit is 0 or more seconds, not {limit!r}")
        self.limit = limit
        self.clock = clock
        self._now = now = clock.now
        self._start = start = now()
        self._end = start + limit

    @classmethod
    def of(cls, timeout: float | None, default: float, clock: Clock) -> Deadline:
        """Return the deadline of a user's ``timeout=``: ``None`` means the default."""
        return cls(default if timeout is None else timeout, clock)

    def remaining(self) -> float:
        """Return the seconds left, never negative."""
        now = self._now
        left = self._end - now()
        return left if left > 0.0 else 0.0

    def sleep_limit(self) -> float:
        """Return the seconds left, bounded to what lock and poll calls accept."""
        now = self._now
        left = self._end - now()
        if left < 0.0:
            return 0.0
        return left if left < _LONGEST_SLEEP else _LONGEST_SLEEP

    @property
    def expired(self) -> bool:
        """Whether the time is over."""
        now = self._now
        return now() >= self._end

    @property
    def waited(self) -> float:
        """Seconds since the operation began."""
        now = self._now
        return now() - self._start

    def sooner(self, limit: float) -> Deadline:
        """Return this deadline, or one ``limit`` seconds from now if that comes first."""
        return self if self.remaining() <= limit else Deadline(limit, self.clock)

    def take(self, lock: threading.Lock, grip: list[bool]) -> bool:
        """Take a lock in time, and note it in ``grip``; return whether it is taken.

        To be called within the ``try`` whose ``finally`` gives the lock back ``if grip[-1:] ==
        [True]``. The lock is taken and noted by one call of a C function, so that no interrupt
        (Ctrl-C) falls between the two and leaves it taken for ever.
        """
        grip.extend(map(lock.acquire, (False,)))
        if not grip[-1]:
            grip.extend(map(self.clock.acquire, (lock,), (True,), (self.sleep_limit(),)))
        return grip[-1]

    def __repr__(self) -> str:
        return f"<Deadline {self.remaining():.3f} s of {self.limit:g} s left>"


# For what must not wait. It is over on any clock, so no world has to make its own; but no other
# deadline may be derived from its clock, which is no world's.
AT_ONCE = Deadline(0.0, REAL_TIME)


def _seconds(limit: object) -> float:
    try:
        if isinstance(limit, Real):
            return float(limit)
        reason = f"of type {type(limit).__name__}"
    except OverflowError:
        reason = "so many; math.inf is for no limit"
    raise ConfigurationError(f"a time limit is a number of seconds, not {reason}")
