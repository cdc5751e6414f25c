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
# These wait for more than half a second: one world shows them in `make test`, all do in test-all.
LONG = {
    "slow_calls_are_no_circles",
    "a_late_call_says_what_its_callee_does",
    "a_circle_through_an_event_loop_is_reported",
    "circles_of_two_chains_are_reported",
    "a_circle_through_a_full_limit_is_reported",
    "closing_drains_and_then_fails_the_rest",
    "limits_are_visible",
    "whoever_disagrees_all_are_told",
    "a_barrier_names_the_missing",
    "who_does_not_come_is_named",
}
SHOWN_IN = "unix"
# Their parts are shown by "tcp", "simulated" and "sub of unix".
LEFT_OUT = ("sub of tcp", "sub of simulated")


def is_slow(world: str, check: str) -> bool:
    return world in LEFT_OUT or (check in LONG and world != SHOWN_IN)


CASES = [
    pytest.param(
        make_world,
        check,
        id=f"{world}-{name}",
        marks=[pytest.mark.slow] if is_slow(world, name) else [],
    )
    for world, make_world in WORLDS.items()
    for name, check in CHECKS.items()
]


@pytest.fixture(autouse=True)
def idle_threads_end_soon(monkeypatch):
    """Those of the collectives: no test must wait for them to be gone."""
    monkeypatch.setattr(work, "_IDLE", 0.01)


@pytest.mark.parametrize(("make_world", "check"), CASES)
def test_backend(make_world, check):
    check(make_world)


def test_the_long_checks_are_checks():
    assert LONG <= CHECKS.keys()
