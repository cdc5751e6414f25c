"""Faults of starting: a rank does not come, all come at once."""

import time

import pytest

from faults.sizes import QUICK, time_limit, trials
from rankwire import RendezvousError
from worlds import free_port, introduce, process_world, spawn_ranks

pytestmark = pytest.mark.timeout(time_limit(90, 600))


@pytest.mark.fault(23, "a rank that does not come is named by all that did, at their deadline")
@pytest.mark.parametrize("missing", [0, 2])
def test_f23_a_rank_does_not_come(missing, measured):
    deadline = 2.0
    with spawn_ranks(4) as ranks:
        address = f"127.0.0.1:{free_port()}"
        began = time.monotonic()
        present = [rank for rank in ranks if rank.rank != missing]
        forming = [rank.form(4, address, join_timeout=deadline) for rank in present]
        for command in forming:
            error = command.error()
            assert isinstance(error, RendezvousError), repr(error)
            assert error.missing == [missing]
            measured("named after the deadline", command.ended - began - deadline, limit=1.0)


@pytest.mark.fault(56, "64 ranks that start at once are all connected to each other soon")
def test_f56_64_processes_connect_all_pairs(measured):
    """Every rank sends to every other: 4,032 connections; ``make test`` has 992."""
    size = 32 if QUICK else 64
    for _ in range(trials(1, 5)):
        began = time.monotonic()
        with process_world(size, timeout=60.0, join_timeout=60.0) as ranks:
            measured("64 ranks up", time.monotonic() - began)
            introduce(*ranks, timeout=60.0)
            measured("64 ranks up, all pairs connected", time.monotonic() - began, limit=15.0)
