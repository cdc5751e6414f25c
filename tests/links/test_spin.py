"""Spinning adapts to whether it pays."""

import os
import socket

import pytest

from rankwire.clock import REAL_TIME
from rankwire.links.spin import DEFAULT_SPIN, Spin, default_spin


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


def test_ranks_that_have_to_share_cores_do_not_spin(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5, 7})
    assert default_spin(1) == default_spin(4) == DEFAULT_SPIN > 0.0
    assert default_spin(5) == default_spin(1000) == 0.0


def test_cores_are_counted_where_affinity_is_not_known(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert (default_spin(2), default_spin(3)) == (DEFAULT_SPIN, 0.0)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert (default_spin(1), default_spin(2)) == (DEFAULT_SPIN, 0.0)
