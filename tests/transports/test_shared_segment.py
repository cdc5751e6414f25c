"""Waiting in a segment: short and long, woken by who publishes, by news, or by the deadline."""

import os
import time

import pytest

from rankwire.clock import REAL_TIME
from rankwire.transports.shared_memory import CAN_SHARE, SharedMemory
from rankwire.transports.shared_segment import ASLEEP, SharedSegment
from real_time import Deadline
from worlds import Running, eventually

pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="memory is shared on Linux and x86 only")

SOON = 8.0
LONG = 40.0
TAG = 7 << 16
SPINS = [0.0, 50e-6]  # ranks share cores, or do not


def make(size=2, *, spin=0.0):
    """Return the ends of all ranks, as if each were in a process of its own."""
    options = {"spin": spin, "clock": REAL_TIME}
    first = SharedSegment.make(1 << 16, 0, size, **options)
    others = [
        SharedSegment.open(os.getpid(), first.offer, rank, size, **options)
        for rank in range(1, size)
    ]
    first.keep_private()
    return [first, *others]


def publish(segment):
    segment.begin()
    segment.publish(TAG)
    segment.wake_others()


def await_step(segment, step, rank, deadline):
    return segment.looks_until(step, rank) or segment.sleeps_until(step, rank, deadline)


def is_asleep(segment):
    return segment.words[segment.lines[segment.rank] + ASLEEP] == 1


@pytest.mark.parametrize("spin", SPINS)
def test_who_has_published_is_not_waited_for(spin):
    near, far = make(spin=spin)
    publish(far)
    assert await_step(near, 1, 1, Deadline(0.0))


@pytest.mark.parametrize("spin", SPINS)
def test_a_sleeper_is_woken_by_who_publishes(spin):
    near, far = make(spin=spin)
    waiting = Running(await_step, near, 1, 1, Deadline(LONG))
    eventually(lambda: is_asleep(near), SOON)
    assert not waiting.done
    publish(far)
    assert waiting.result(SOON)
    assert not is_asleep(near)


def test_all_sleepers_are_woken():
    near, *others = make(4)
    waiting = [Running(await_step, other, 1, 0, Deadline(LONG)) for other in others]
    eventually(lambda: all(map(is_asleep, others)), SOON)
    publish(near)
    assert [each.result(SOON) for each in waiting] == [True] * 3


@pytest.mark.parametrize("spin", SPINS)
def test_a_wait_ends_at_its_deadline(spin):
    near, _ = make(spin=spin)
    begin = time.monotonic()
    assert not await_step(near, 1, 1, Deadline(0.05))
    assert time.monotonic() - begin >= 0.045
    assert not is_asleep(near)


def test_news_end_a_wait_once():
    near, far = make()
    waiting = Running(await_step, near, 1, 1, Deadline(LONG))
    eventually(lambda: is_asleep(near), SOON)
    near.disturb()
    assert not waiting.result(SOON)
    publish(far)
    assert await_step(near, 1, 1, Deadline(LONG))


def test_many_steps_of_two_that_sleep_lose_no_wake_up():
    near, far = make()

    def run(segment, other):
        for number in range(1, 2000):
            publish(segment)
            assert await_step(segment, number, other, Deadline(LONG))

    runs = [Running(run, near, 1), Running(run, far, 0)]
    for each in runs:
        each.result(LONG)


def test_a_segment_for_another_number_of_ranks_is_not_opened():
    first = SharedSegment.make(1 << 16, 0, 2, spin=0.0, clock=REAL_TIME)
    with pytest.raises(ValueError, match="no segment for 3 ranks"):
        SharedSegment.open(os.getpid(), first.offer, 1, 3, spin=0.0, clock=REAL_TIME)


def test_other_memory_is_not_opened():
    other = SharedMemory(5000)
    with pytest.raises(ValueError, match="no segment"):
        SharedSegment.open(os.getpid(), other.offer, 1, 2, spin=0.0, clock=REAL_TIME)


def test_once_all_have_opened_it_nobody_else_can():
    first = SharedSegment.make(1 << 16, 0, 2, spin=0.0, clock=REAL_TIME)
    offer = first.offer
    first.keep_private()
    first.keep_private()
    with pytest.raises(OSError):
        SharedSegment.open(os.getpid(), offer, 1, 2, spin=0.0, clock=REAL_TIME)


def test_too_little_is_refused():
    with pytest.raises(OSError, match="too little"):
        SharedSegment.make(100, 0, 2, spin=0.0, clock=REAL_TIME)
