"""Every backend passes the one conformance suite: the behaviour of the seeds, rules R1-R35.

On ranks of one host it does so three times: in worlds whose groups share a segment, whose groups
share one that is too small for many arrays, and whose groups share none.
"""

from contextlib import contextmanager
from functools import partial

import pytest

import rankwire
from rankwire.collectives import background, work
from rankwire.collectives.slots import SlotAgreement
from rankwire.testing import CHECKS, in_parallel, simulated_world, sub_world, tcp_world
from rankwire.testing.conformance import collective_checks, group_checks
from rankwire.transports.shared_memory import CAN_SHARE

unix_world = partial(tcp_world, transport="unix")
without_segment = partial(unix_world, segment_nbytes=0)
with_small_segment = partial(unix_world, segment_nbytes=128 << 10)


def in_segment(make_world):
    """Return a maker of worlds whose ranks share a segment already.

    Else the first operation of a check would agree on it, and what goes wrong in it, go wrong in
    the messages of that.
    """

    @contextmanager
    def make(world_size, **options):
        with make_world(world_size, **options) as world:
            in_parallel([partial(rankwire.barrier, backend) for backend in world])
            for backend in world:
                shares = backend.operations.agreement.slots is not None
                assert shares == (CAN_SHARE and world_size > 1)
            yield world

    return make


WORLDS = {
    "simulated": simulated_world,
    "tcp": partial(tcp_world, transport="tcp"),
    "unix": without_segment,
    "segment": in_segment(unix_world),
    "small segment": in_segment(with_small_segment),
    "sub of simulated": sub_world(simulated_world),
    "sub of tcp": sub_world(partial(tcp_world, transport="tcp")),
    "sub of unix": sub_world(without_segment),
    "sub of segment": in_segment(sub_world(unix_world)),
}
WITH_SEGMENT = ("segment", "small segment", "sub of segment")
# These wait for more than half a second: one world shows them in `make test`, all do in test-all.
LONG = {
    "slow_calls_are_no_circles",
    "a_late_call_says_what_its_callee_does",
    "a_circle_through_an_event_loop_is_reported",
    "cycles_of_two_chains_are_reported",
    "a_circle_through_a_full_limit_is_reported",
    "closing_drains_and_then_fails_the_rest",
    "limits_are_visible",
    "all_ranks_learn_of_a_mismatch",
    "a_barrier_names_the_missing",
    "who_does_not_come_is_named",
}
SHOWN_IN = "segment"
# Their parts are shown by the others, and by random collectives in little memory.
LEFT_OUT = ("sub of tcp", "sub of simulated", "sub of unix", "small segment")
COLLECTIVES_ONLY = ("unix",)  # in which alone it differs from "segment"
OF_COLLECTIVES = {
    name
    for name, check in CHECKS.items()
    if check.__module__ in (collective_checks.__name__, group_checks.__name__)
}


def is_slow(world: str, check: str) -> bool:
    if world in LEFT_OUT or (check in LONG and world != SHOWN_IN):
        return True
    return world in COLLECTIVES_ONLY and check not in OF_COLLECTIVES


CASES = [
    pytest.param(
        world,
        name,
        id=f"{world}-{name}",
        marks=[pytest.mark.slow] if is_slow(world, name) else [],
    )
    for world in WORLDS
    for name in CHECKS
]


@pytest.fixture(autouse=True)
def idle_threads_end_soon(monkeypatch):
    """Those of the collectives: no test must wait for them to be gone."""
    for module in (background, work):
        monkeypatch.setattr(module, "_IDLE", 0.01)


@pytest.fixture
def agreements(monkeypatch):
    """Whether memory was shared from then on, for each time that a rank had agreed on that."""
    found = []
    agree = SlotAgreement.agree

    def noting(self, x, epoch):
        agree(self, x, epoch)
        if x.size > 1:
            found.append(self.slots is not None)

    monkeypatch.setattr(SlotAgreement, "agree", noting)
    return found


@pytest.mark.parametrize(("world", "check"), CASES)
def test_backend(world, check, agreements):
    CHECKS[check](WORLDS[world])
    assert set(agreements) <= {CAN_SHARE and world in WITH_SEGMENT}


def test_the_long_checks_are_checks():
    assert LONG <= CHECKS.keys()
