"""Every backend passes the one conformance suite: the behaviour of the seeds, rules R1-R35."""

from functools import partial

import pytest

from rankwire.collectives import work
from rankwire.testing import CHECKS, simulated_world, sub_world, tcp_world

WORLDS = {
    "simulated": simulated_world,
    "tcp": partial(tcp_world, transport="tcp"),
    "unix": partial(tcp_world, transport="unix"),
    "sub of simulated": sub_world(simulated_world),
    "sub of tcp": sub_world(partial(tcp_world, transport="tcp")),
    "sub of unix": sub_world(partial(tcp_world, transport="unix")),
}


@pytest.fixture(autouse=True)
def idle_threads_end_soon(monkeypatch):
    """Those of the collectives: no test must wait for them to be gone."""
    monkeypatch.setattr(work, "_IDLE", 0.01)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
@pytest.mark.parametrize("make_world", WORLDS.values(), ids=WORLDS.keys())
def test_backend(make_world, check):
    check(make_world)
