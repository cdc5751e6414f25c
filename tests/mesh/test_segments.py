"""The segments of one rank: made or opened where that can be, and disturbed by news."""

import gc
import os

import pytest

from rankwire.clock import REAL_TIME
from rankwire.errors import ConfigurationError
from rankwire.mesh.segments import Segments
from rankwire.transports.shared_memory import CAN_SHARE
from real_time import Deadline
from worlds import Running, eventually

pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="memory is shared on Linux and x86 only")

SOON = 8.0


def test_one_rank_makes_what_another_opens():
    made = Segments(1 << 16, REAL_TIME).make(0, 2)
    opened = Segments(1 << 16, REAL_TIME).open(os.getpid(), made.offer, 1, 2)
    opened.begin()
    opened.publish(5)
    assert made.sleeps_until(1, 1, Deadline(SOON))


def test_a_rank_that_wants_none_neither_makes_nor_opens_one():
    made = Segments(1 << 16, REAL_TIME).make(0, 2)
    none = Segments(0, REAL_TIME)
    assert none.make(0, 2) is None
    assert none.open(os.getpid(), made.offer, 1, 2) is None


def test_why_nothing_is_shared_is_told():
    assert Segments(1 << 20, REAL_TIME).why_not() == ""
    assert "turned off" in Segments(0, REAL_TIME).why_not()
    assert "too little" in Segments(100, REAL_TIME).why_not()


def test_what_cannot_be_opened_is_none_and_not_an_error():
    segments = Segments(1 << 16, REAL_TIME)
    assert segments.open(0, b"", 1, 2) is None  # it came over TCP: no process is known
    assert segments.open(os.getpid(), b"nonsense", 1, 2) is None
    assert Segments(10, REAL_TIME).make(0, 2) is None


def test_news_reach_all_who_wait():
    segments = Segments(1 << 16, REAL_TIME)
    made = [segments.make(0, 2) for _ in range(2)]
    waiting = [Running(each.sleeps_until, 1, 1, Deadline(40.0)) for each in made]
    eventually(
        lambda: segments.disturb() or all(each.done for each in waiting),
        SOON,
    )
    assert [each.result() for each in waiting] == [False, False]


def test_a_segment_that_nobody_uses_is_forgotten():
    segments = Segments(1 << 16, REAL_TIME)
    segments.make(0, 2)
    gc.collect()
    assert not list(segments._segments)


@pytest.mark.parametrize("wrong", [-1, 2.0, False, None])
def test_a_size_that_is_none_is_refused(wrong):
    with pytest.raises(ConfigurationError):
        Segments(wrong, REAL_TIME)
