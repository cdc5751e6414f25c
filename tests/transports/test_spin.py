"""Spinning adapts to whether it pays."""

import os
import socket

import pytest

from rankwire import runtime
from rankwire.clock import REAL_TIME
from rankwire.transports.byte_stream import look_at
from rankwire.transports.spin import Spin, share_cores


def test_begins_with_the_whole_budget():
    assert Spin(100e-6, REAL_TIME).budget == 100e-6


class Hands:
    """A clock that is set by hand."""

    def __init__(self):
        self.time = 1000.0

    def now(self):
        return self.time


@pytest.fixture
def hands():
    return Hands()


def wait(spin, hands, seconds):
    """Wait as a reader does for something that comes so late; return how long it has looked."""
    budget = spin.budget
    if budget <= 0.0:
        budget = spin.budget if spin.tries_again() else 0.0
    if seconds <= budget:
        spin.budget = spin.most
    elif budget:
        hands.time += budget
        spin.wasted()
        hands.time -= budget
    hands.time += seconds
    return min(budget, seconds)


def test_who_looked_for_nothing_sleeps_at_once_if_the_next_wait_comes_later(hands):
    spin = Spin(100e-6, hands)
    looked = [wait(spin, hands, 5e-3) for _ in range(200)]
    assert looked[0] == 100e-6
    assert sum(looked[1:9]) == 0.0
    assert set(looked) == {0.0, 100e-6}
    assert 200 // 25 <= looked.count(100e-6) <= 200 // 8


def test_waits_that_follow_closely_are_looked_for_longer_but_not_for_ever(hands):
    spin = Spin(100e-6, hands)
    looked = [wait(spin, hands, 300e-6) for _ in range(200)]
    assert looked[:5] == [100e-6, *[200e-6] * 4]
    assert sum(looked[5:12]) == 0.0
    assert sum(looked) < 0.25 * 200 * 300e-6


def test_what_comes_while_looking_restores_the_whole_budget(hands):
    spin = Spin(100e-6, hands)
    for _ in range(10):
        wait(spin, hands, 300e-6)
    for _ in range(30):
        wait(spin, hands, 20e-6)
    assert spin.budget == spin.most
    assert wait(spin, hands, 20e-6) == 20e-6


def test_two_who_fell_asleep_over_each_other_wake_up_for_good(hands):
    """Each is slow to answer only because it has to be woken, which takes more than a budget."""
    waking, work = 180e-6, 20e-6
    spins, clocks = [Spin(100e-6, hands), Spin(100e-6, hands)], hands
    asleep = [True, True]
    looking = 0
    for turn in range(400):  # a call or a reply from one to the other
        sender, receiver = turn % 2, 1 - turn % 2
        comes_after = work + (waking if asleep[sender] else 0.0)
        looked = wait(spins[receiver], clocks, comes_after)
        asleep[receiver] = looked < comes_after
        looking = 0 if asleep[receiver] else looking + 1
    assert looking > 300


def test_data_that_comes_while_polling_restores_the_whole_budget(hands):
    spin = Spin(100e-6, hands)
    spin.wasted()
    near, far = socket.socketpair()
    with near, far:
        far.send(b"x")
        assert spin.finds(*look_at(near.fileno()))
    assert spin.budget == 100e-6


def test_no_budget_stays_none(hands):
    spin = Spin(0.0, hands)
    for _ in range(100):
        assert not spin.tries_again()
        spin.wasted()
        assert spin.budget == spin.most == 0.0


def test_who_shares_cores_lets_others_run_between_two_looks(monkeypatch):
    yielded = []
    near, far = socket.socketpair()
    with near, far:

        def run_another():
            yielded.append(None)
            if len(yielded) == 3:
                far.send(b"x")

        monkeypatch.setattr(runtime, "sched_yield", run_another)
        assert Spin(10.0, REAL_TIME, yields=True).finds(*look_at(near.fileno()))
        assert Spin(10.0, REAL_TIME).finds(*look_at(near.fileno()))
    assert len(yielded) == 3


def test_more_ranks_than_cores_share_them(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5, 7})
    assert [share_cores(count) for count in (1, 4, 5, 1000)] == [False, False, True, True]


def test_cores_are_counted_where_affinity_is_not_known(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert (share_cores(2), share_cores(3)) == (False, True)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert (share_cores(1), share_cores(2)) == (False, True)
