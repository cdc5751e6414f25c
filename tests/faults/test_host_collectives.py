"""Collectives of two hosts with two ranks each, and what holds if one of them vanishes."""

import time
from contextlib import contextmanager

import pytest

from faults import netns
from faults.sizes import trials
from random_collectives import SIZES
from rankwire import PeerLostError
from rankwire.transports.shared_memory import CAN_SHARE

pytestmark = [
    pytest.mark.usefixtures("several_hosts"),
    pytest.mark.timeout(120),
    pytest.mark.skipif(not CAN_SHARE, reason="memory is shared on Linux and x86 only"),
]

PLACES = (0, 1, 0, 1)
SOON = 20.0  # a cut link is an error after 6 seconds
RANDOM = "__import__('random_collectives').run(backend, seed, count, sizes)"
BY_HOSTS = "backend.operations.agreement.hosts is not None"
FOR_EVER = """
[__import__("rankwire").all_reduce(backend, __import__("numpy").ones({count}))
 for _ in range(10**7)]
"""


@contextmanager
def two_by_two(**options):
    with netns.network(2) as hosts:
        ranks = [hosts.rank(rank, host=place) for rank, place in enumerate(PLACES)]
        netns.form(hosts, ranks, **options)
        yield hosts, ranks


def test_random_collectives_of_two_hosts_give_what_numpy_gives():
    count = trials(100, 10_000, quick=40)
    with two_by_two() as (_, ranks):
        options = {"seed": 1, "count": count, "sizes": SIZES}
        commands = [rank.start("eval", RANDOM, **options) for rank in ranks]
        assert sum(command.result(60.0 + count / 20) for command in commands) >= count
        assert all(rank.call("eval", BY_HOSTS) for rank in ranks)


@pytest.mark.parametrize("count", [10, pytest.param(600_000, marks=pytest.mark.slow)])
def test_if_a_host_vanishes_all_ranks_of_the_other_one_name_one_of_its_ranks(count):
    with two_by_two() as (hosts, ranks):
        running = [rank.start("eval", FOR_EVER.format(count=count)) for rank in ranks]
        time.sleep(0.5)
        began = time.monotonic()
        hosts.part([0], [1])
        for place, command in zip(PLACES, running, strict=True):
            error = command.error(SOON)
            assert isinstance(error, PeerLostError), repr(error)
            assert error.peer is not None
            assert PLACES[error.peer] != place
            assert command.ended - began < SOON
