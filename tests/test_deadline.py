"""A deadline is one point in monotonic time for a whole operation."""

import math
import threading
import time
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from rankwire.clock import REAL_TIME, Clock
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import ConfigurationError


class StandingClock(Clock):
    """A clock that stands still until it is moved."""

    def __init__(self):
        super().__init__()
        self.time = 1000.0
        self.now = lambda: self.time


@pytest.fixture
def clock():
    return StandingClock()


def test_counts_down_and_never_below_zero(clock):
    deadline = Deadline(5.0, clock)
    assert (deadline.remaining(), deadline.waited, deadline.expired) == (5.0, 0.0, False)
    clock.time += 4.0
    assert (deadline.remaining(), deadline.waited, deadline.expired) == (1.0, 4.0, False)
    clock.time += 4.0
    assert (deadline.remaining(), deadline.waited, deadline.expired) == (0.0, 8.0, True)
    assert deadline.sleep_limit() == 0.0
    assert deadline.limit == 5.0


def test_expires_at_the_very_moment(clock):
    deadline = Deadline(5.0, clock)
    clock.time = math.nextafter(1005.0, 0.0)
    assert not deadline.expired
    clock.time = 1005.0
    assert deadline.expired


def test_zero_polls(clock):
    deadline = Deadline(0, clock)
    assert deadline.expired
    assert deadline.remaining() == 0.0
    assert deadline.sleep_limit() == 0.0


def test_infinity_never_expires(clock):
    deadline = Deadline(math.inf, clock)
    clock.time += 1e12
    assert not deadline.expired
    assert deadline.remaining() == math.inf
    assert deadline.limit == math.inf


@pytest.mark.parametrize("limit", [math.nan, -math.nan, -1.0, -1, -1e-9, -math.inf])
def test_nan_and_negative_limits_are_refused(limit):
    with pytest.raises(ConfigurationError, match="time limit"):
        Deadline(limit, REAL_TIME)
    with pytest.raises(ConfigurationError):
        Deadline.of(limit, 1.0, REAL_TIME)
    with pytest.raises(ConfigurationError):
        Deadline.of(None, limit, REAL_TIME)


def test_none_means_the_default_and_zero_does_not():
    assert Deadline.of(None, 30.0, REAL_TIME).limit == 30.0
    assert Deadline.of(0.0, 30.0, REAL_TIME).limit == 0.0
    assert Deadline.of(2.0, 30.0, REAL_TIME).limit == 2.0
    assert Deadline.of(math.inf, 30.0, REAL_TIME).limit == math.inf


def test_sooner_is_the_one_that_comes_first(clock):
    deadline = Deadline(10.0, clock)
    assert deadline.sooner(20.0) is deadline
    assert deadline.sooner(10.0) is deadline
    assert deadline.sooner(math.inf) is deadline
    early = deadline.sooner(3.0)
    assert (early.limit, early.remaining()) == (3.0, 3.0)
    clock.time += 8.0
    assert early.expired
    assert deadline.sooner(3.0) is deadline, "2 s are left of the whole"


def test_sooner_bounds_one_that_never_expires(clock):
    never = Deadline(math.inf, clock)
    assert never.sooner(5.0).remaining() == 5.0
    assert never.sooner(math.inf) is never


def test_what_is_sooner_goes_by_the_same_clock(clock):
    assert Deadline(math.inf, clock).sooner(5.0).clock is clock


def test_a_lock_is_taken_by_its_clock_within_what_is_left(clock):
    taken = []
    clock.acquire = lambda lock, blocking, seconds: taken.append((lock, blocking, seconds)) or True
    lock, grip = threading.Lock(), []
    with lock:
        assert Deadline(5.0, clock).take(lock, grip)
    assert taken == [(lock, True, 5.0)]
    assert grip == [False, True]


def test_at_once_is_over_and_takes_only_what_is_free():
    assert AT_ONCE.expired
    assert AT_ONCE.sooner(10.0) is AT_ONCE
    lock = threading.Lock()
    assert AT_ONCE.take(lock, [])
    assert not AT_ONCE.take(lock, [])


@pytest.mark.fault(55, "a jump of the wall clock moves no deadline")
def test_a_change_of_the_wall_clock_moves_nothing(monkeypatch):
    deadline = Deadline(1000.0, REAL_TIME)
    for jump in (1e9, -1e9, 0.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: jump)
        monkeypatch.setattr(time, "time_ns", lambda jump=jump: int(jump * 1e9))
        assert not deadline.expired
        assert 900.0 < deadline.remaining() <= 1000.0
        assert 0.0 <= deadline.waited < 100.0
        assert Deadline(0.0, REAL_TIME).expired


@pytest.mark.parametrize("limit", [math.inf, 1e300, 1e18])
def test_the_longest_sleep_is_accepted_by_locks_and_polls(limit):
    seconds = Deadline(limit, REAL_TIME).sleep_limit()
    assert 3600.0 <= seconds <= threading.TIMEOUT_MAX
    assert seconds * 1000 + 1 < 2**31, "poll() takes a C int of milliseconds"
    assert threading.Lock().acquire(timeout=seconds)


def test_real_time_passes():
    deadline = Deadline(0.02, REAL_TIME)
    assert not deadline.expired
    time.sleep(0.03)
    assert deadline.expired
    assert deadline.waited >= 0.03


def test_repr_tells_what_is_left(clock):
    deadline = Deadline(2.5, clock)
    clock.time += 1.0
    assert repr(deadline) == "<Deadline 1.500 s of 2.5 s left>"
    assert repr(Deadline(math.inf, clock)) == "<Deadline inf s of inf s left>"


@pytest.mark.parametrize("limit", ["5", Decimal(5), 10**400, 5j, [5], np.array([1.0]), b"5"])
def test_what_is_no_number_of_seconds_is_a_configuration_error(limit):
    with pytest.raises(ConfigurationError, match="number of seconds"):
        Deadline(limit, REAL_TIME)


@pytest.mark.parametrize("limit", [5, Fraction(5), np.float32(5), np.int64(5), 2**100])
def test_any_real_number_is_a_limit(limit):
    deadline = Deadline(limit, REAL_TIME)
    assert type(deadline.limit) is float
    assert deadline.limit == limit
