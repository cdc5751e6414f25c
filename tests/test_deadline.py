"""A deadline is one point in monotonic time for a whole operation."""

import math
import threading
import time
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from rankwire import deadline as deadline_module
from rankwire.deadline import Deadline
from rankwire.errors import ConfigurationError


class Clock:
    """A monotonic clock that stands still until it is moved."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(deadline_module, "monotonic", clock)
    return clock


def test_counts_down_and_never_below_zero(clock):
    deadline = Deadline(5.0)
    assert (deadline.remaining(), deadline.waited, deadline.expired) == (5.0, 0.0, False)
    clock.now += 4.0
    assert (deadline.remaining(), deadline.waited, deadline.expired) == (1.0, 4.0, False)
    clock.now += 4.0
    assert (deadline.remaining(), deadline.waited, deadline.expired) == (0.0, 8.0, True)
    assert deadline.sleep_limit() == 0.0
    assert deadline.limit == 5.0


def test_expires_at_the_very_moment(clock):
    deadline = Deadline(5.0)
    clock.now = math.nextafter(1005.0, 0.0)
    assert not deadline.expired
    clock.now = 1005.0
    assert deadline.expired


def test_zero_polls(clock):
    deadline = Deadline(0)
    assert deadline.expired
    assert deadline.remaining() == 0.0
    assert deadline.sleep_limit() == 0.0


@pytest.mark.parametrize("make", [Deadline.never, lambda: Deadline(math.inf)])
def test_infinity_never_expires(clock, make):
    deadline = make()
    clock.now += 1e12
    assert not deadline.expired
    assert deadline.remaining() == math.inf
    assert deadline.limit == math.inf


@pytest.mark.parametrize("limit", [math.nan, -math.nan, -1.0, -1, -1e-9, -math.inf])
def test_nan_and_negative_limits_are_refused(limit):
    with pytest.raises(ConfigurationError, match="time limit"):
        Deadline(limit)
    with pytest.raises(ConfigurationError):
        Deadline.of(limit, 1.0)
    with pytest.raises(ConfigurationError):
        Deadline.of(None, limit)


def test_none_means_the_default_and_zero_does_not():
    assert Deadline.of(None, 30.0).limit == 30.0
    assert Deadline.of(0.0, 30.0).limit == 0.0
    assert Deadline.of(2.0, 30.0).limit == 2.0
    assert Deadline.of(math.inf, 30.0).limit == math.inf


def test_sooner_is_the_one_that_comes_first(clock):
    deadline = Deadline(10.0)
    assert deadline.sooner(20.0) is deadline
    assert deadline.sooner(10.0) is deadline
    assert deadline.sooner(math.inf) is deadline
    early = deadline.sooner(3.0)
    assert (early.limit, early.remaining()) == (3.0, 3.0)
    clock.now += 8.0
    assert early.expired
    assert deadline.sooner(3.0) is deadline, "2 s are left of the whole"


def test_sooner_bounds_one_that_never_expires(clock):
    assert Deadline.never().sooner(5.0).remaining() == 5.0
    never = Deadline.never()
    assert never.sooner(math.inf) is never


@pytest.mark.fault(55, "a jump of the wall clock moves no deadline")
def test_a_change_of_the_wall_clock_moves_nothing(monkeypatch):
    deadline = Deadline(1000.0)
    for jump in (1e9, -1e9, 0.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: jump)
        monkeypatch.setattr(time, "time_ns", lambda jump=jump: int(jump * 1e9))
        assert not deadline.expired
        assert 900.0 < deadline.remaining() <= 1000.0
        assert 0.0 <= deadline.waited < 100.0
        assert Deadline(0.0).expired


@pytest.mark.parametrize("limit", [math.inf, 1e300, 1e18])
def test_the_longest_sleep_is_accepted_by_locks_and_polls(limit):
    seconds = Deadline(limit).sleep_limit()
    assert 3600.0 <= seconds <= threading.TIMEOUT_MAX
    assert seconds * 1000 + 1 < 2**31, "poll() takes a C int of milliseconds"
    assert threading.Lock().acquire(timeout=seconds)


def test_real_time_passes():
    deadline = Deadline(0.02)
    assert not deadline.expired
    time.sleep(0.03)
    assert deadline.expired
    assert deadline.waited >= 0.03


def test_repr_tells_what_is_left(clock):
    deadline = Deadline(2.5)
    clock.now += 1.0
    assert repr(deadline) == "<Deadline 1.500 s of 2.5 s left>"
    assert repr(Deadline.never()) == "<Deadline inf s of inf s left>"


@pytest.mark.parametrize("limit", ["5", Decimal(5), 10**400, 5j, [5], np.array([1.0]), b"5"])
def test_what_is_no_number_of_seconds_is_a_configuration_error(limit):
    with pytest.raises(ConfigurationError, match="number of seconds"):
        Deadline(limit)


@pytest.mark.parametrize("limit", [5, Fraction(5), np.float32(5), np.int64(5), 2**100])
def test_any_real_number_is_a_limit(limit):
    deadline = Deadline(limit)
    assert type(deadline.limit) is float
    assert deadline.limit == limit
