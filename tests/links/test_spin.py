"""Spinning adapts to whether it pays."""

import os
import socket

import pytest

from rankwire.clock import REAL_TIME
from rankwire.links.spin import Spin, share_cores


def test_begins_with_the_whole_budget():
    assert Spin(100e-6, REAL_TIME).budget == 100e-6


def test_a_wasted_budget_is_halved_down_to_none():
    spin = Spin(100e-6, REAL_TIME)
    budgets = []
    while spin.budget > 0.0:
        budgets.append(spin.budget)
        spin.wasted()
        assert len(budgets) < 20
    assert budgets == pytest.approx([100e-6, 50e-6, 25e-6, 12.5e-6])
    spin.wasted()
    assert spin.budget == 0.0


def test_data_that_comes_while_polling_restores_the_whole_budget():
    spin = Spin(100e-6, REAL_TIME)
    spin.wasted()
    spin.wasted()
    near, far = socket.socketpair()
    with near, far:
        far.send(b"x")
        assert spin.finds_input(near.fileno())
    assert spin.budget == 100e-6


def test_polling_is_tried_again_now_and_then():
    spin = Spin(100e-6, REAL_TIME)
    while spin.budget > 0.0:
        spin.wasted()
    tries = 0
    for _ in range(160):
        spin.skipped()
        if spin.budget > 0.0:
            tries += 1
            while spin.budget > 0.0:
                spin.wasted()
    assert tries == 10


def test_no_budget_stays_none():
    spin = Spin(0.0, REAL_TIME)
    for _ in range(100):
        spin.skipped()
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

        monkeypatch.setattr(os, "sched_yield", run_another)
        assert Spin(10.0, REAL_TIME, yields=True).finds_input(near.fileno())
        assert Spin(10.0, REAL_TIME).finds_input(near.fileno())
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
