"""Limit one whole operation by one timeout, passed as a ``Deadline`` to all code that waits."""

from __future__ import annotations

from numbers import Real

from rankwire import runtime
from rankwire.clock import REAL_TIME, Clock
from rankwire.errors import ConfigurationError

# Locks and poll() take a C long of nanoseconds, so longer waits are split into days.
_LONGEST_SLEEP = 86_400.0


class Deadline:
    """A point in monotonic time, ``limit`` seconds from now: 0 polls, ``math.inf`` never expires.

    Raises:
        ConfigurationError: The limit is negative, not a number, or too large for a float.
    """

    # ``_now`` is ``clock.now``: looking it up each time would double the cost.
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
        """Return the deadline for a user's ``timeout=``, where ``None`` means the default."""
        return cls(default if timeout is None else timeout, clock)

    def remaining(self) -> float:
        """Return the seconds left, never negative."""
        now = self._now
        left = self._end - now()
        return left if left > 0.0 else 0.0

    def sleep_limit(self) -> float:
        """Return the seconds left, limited to what lock and poll calls accept."""
        now = self._now
        left = self._end - now()
        if left < 0.0:
            return 0.0
        return left if left < _LONGEST_SLEEP else _LONGEST_SLEEP

    @property
    def expired(self) -> bool:
        """Whether the timeout has expired."""
        now = self._now
        return now() >= self._end

    @property
    def waited(self) -> float:
        """Seconds since the deadline was created."""
        now = self._now
        return now() - self._start

    def sooner(self, limit: float) -> Deadline:
        """Return this deadline, or one ``limit`` seconds from now if that is earlier."""
        now = self._now
        return self if self._end - now() <= limit else Deadline(limit, self.clock)

    def begun(self, seconds: float) -> Deadline:
        """Return a deadline with the same limit that was created ``seconds`` ago."""
        other = Deadline(self.limit, self.clock)
        other._start -= seconds
        other._end -= seconds
        return other

    def take(self, lock: runtime.Lock, grip: list[bool]) -> bool:
        """Acquire a lock in time, and note it in ``grip``; return whether it is acquired.

        Call it inside the ``try`` whose ``finally`` releases the lock ``if grip[-1:] == [True]``.
        It acquires and notes in one step (see ``rankwire.interrupts``).
        """
        grip.extend(map(lock.acquire, (False,)))
        if not grip[-1]:
            grip.extend(map(self.clock.acquire, (lock,), (True,), (self.sleep_limit(),)))
        return grip[-1]

    def __repr__(self) -> str:
        return f"<Deadline {self.remaining():.3f} s of {self.limit:g} s left>"


# For operations that must not wait. Its clock is not a world's, so derive no deadlines from it.
AT_ONCE = Deadline(0.0, REAL_TIME)


def _seconds(limit: object) -> float:
    try:
        if isinstance(limit, Real):
            return float(limit)
        reason = f"of type {type(limit).__name__}"
    except OverflowError:
        reason = "so many; use math.inf for no limit"
    raise ConfigurationError(f"a time limit is a number of seconds, not {reason}")
