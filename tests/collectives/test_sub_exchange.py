"""Some ranks of an operation, numbered anew for algorithms but not in errors; and their hosts."""

from functools import partial

import numpy as np
import pytest
from sums import counting_world, on_all, run_algorithm

import rankwire
from rankwire.collectives import algorithms
from rankwire.collectives.sequence import OperationSequence
from rankwire.collectives.slots import Hosts, SubExchange
from rankwire.errors import CollectiveMismatchError, DeadlineExceededError, PeerLostError

SOME = [4, 1, 3]  # of 5, in this order
SOON = 8.0


def among(members, algorithm):
    """Return the steps of an operation in which only some ranks do something."""

    def run(x):
        if x.rank not in members:
            return None
        return algorithm(SubExchange(x, members, members.index(x.rank)))

    return run


def call(backend, run, timeout=None):
    return OperationSequence.of(backend).call("test", lambda **_: ("test()", run), timeout=timeout)


def test_every_algorithm_sees_ranks_from_0():
    def see(x):
        own = np.array([x.rank, x.size])
        rows = algorithms.all_gather_by_doubling(x, own)
        assert x.others == [(x.rank + step) % x.size for step in (1, 2)]
        return [row.tolist() for row in rows]

    results, sent = run_algorithm(5, among(SOME, see))
    for rank, result in enumerate(results):
        assert result == ([[0, 3], [1, 3], [2, 3]] if rank in SOME else None)
    assert {dst for of_rank in sent for dst, _ in of_rank} == set(SOME)


def test_arrays_of_any_size_pass():
    def pass_on(x):
        for count in (1, 1000, 200_000):
            array = np.full(count, float(x.rank))
            algorithms.broadcast_by_tree(x, array, 2)
            assert (array == 2.0).all()
            parts = [np.empty(count) for _ in range(x.size)]
            algorithms.all_gather_directly(x, array + x.rank, parts)
            x.settle()
        return [part[-1] for place, part in enumerate(parts) if place != x.rank]

    results, _ = run_algorithm(5, among(SOME, pass_on))
    assert [results[rank] for rank in SOME] == [[3.0, 4.0], [2.0, 4.0], [2.0, 3.0]]


def test_it_knows_its_group_ranks_and_shares_what_is_not_settled():
    def look_inside(x):
        members = SubExchange(x, [1, 0], 1 - x.rank)
        assert [members.in_group(rank) for rank in (0, 1)] == [1, 0]
        members.offers.append((0, None))
        return x.offers.pop(), members.is_one_host

    results, _ = run_algorithm(2, look_inside)
    assert results == [((0, None), False)] * 2


def test_who_does_not_come_is_named_by_its_own_number():
    def wait(x):
        if x.rank == 0:
            SubExchange(x, [0, 2], 0).receive(1, 0x10)

    with counting_world(3) as world:
        with pytest.raises(DeadlineExceededError) as info:
            call(world[0], wait, timeout=0.3)
        assert info.value.waiting_for == [1, 2], "nobody has come"


def test_a_rank_that_is_gone_is_named_by_its_own_number():
    def wait(x):
        SubExchange(x, [0, 2], 0).receive(1, 0x10)

    with counting_world(3) as world:
        world[0].network.kill(2)
        with pytest.raises(PeerLostError) as info:
            call(world[0], wait, timeout=SOON)
        assert info.value.peer == 2


def test_a_disagreement_with_a_rank_that_is_no_member_is_found():
    def wait(x):
        SubExchange(x, [0, 2], 0 if x.rank == 0 else 1).receive(1 if x.rank == 0 else 0, 0x10)

    def run(backend):
        operation = rankwire.barrier if backend.rank == 1 else partial(call, run=wait)
        with pytest.raises(CollectiveMismatchError) as info:
            operation(backend, timeout=SOON)
        return "barrier()" in str(info.value)

    with counting_world(3) as world:
        assert on_all(world, run) == [True, True, True]


# -- hosts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "groups"),
    [
        ("aaa", [[0, 1, 2]]),
        ("aabb", [[0, 1], [2, 3]]),
        ("abab", [[0, 2], [1, 3]]),
        ("bac", [[0], [1], [2]]),
        ("abcac", [[0, 3], [1], [2, 4]]),
    ],
)
def test_all_ranks_see_the_same_hosts(hosts, groups):
    for rank in range(len(hosts)):
        seen = Hosts(hosts, rank)
        assert seen.groups == groups
        assert seen.groups[seen.here][seen.place] == rank
        assert seen.slots is None, "until they have agreed"


def test_the_lowest_rank_leads_its_host_unless_the_root_is_there():
    hosts = Hosts("abcac", 0)
    assert hosts.leaders() == [0, 1, 2]
    assert hosts.leaders(0) == [0, 1, 2]
    assert hosts.leaders(3) == [3, 1, 2]
    assert hosts.leaders(4) == [0, 1, 4]
