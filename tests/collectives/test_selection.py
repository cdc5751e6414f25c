"""Which algorithm is taken, by size, number of ranks, hosts and reduction."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from sums import counting_world, on_all

import rankwire
from rankwire.collectives import algorithms, selection
from rankwire.collectives.reductions import reduction

ALGORITHMS = [
    name
    for name, function in vars(algorithms).items()
    if getattr(function, "__module__", "") == algorithms.__name__ and not name.startswith("_")
]


@pytest.fixture
def chosen(monkeypatch):
    """The names of the algorithms that were chosen, which then do nothing."""
    names = []
    for name in ALGORITHMS:
        if name.startswith(("all_reduce", "all_gather", "broadcast", "reduce_by")):
            monkeypatch.setattr(
                algorithms, name, lambda *args, name=name: names.append(name) or itertools.repeat(0)
            )
    monkeypatch.setattr(selection, "zip", lambda *args, strict: (), raising=False)
    return names


def group(size, *, one_host=True):
    return SimpleNamespace(rank=0, size=size, is_one_host=one_host, shared=None, hosts=None)


def all_reduce(size, nbytes, *, op="sum", dtype="u1", ordered=False, one_host=True):
    array = np.empty(nbytes // np.dtype(dtype).itemsize, dtype)
    r = reduction(op, array.dtype)
    selection.all_reduce(group(size, one_host=one_host), array, array, r, ordered=ordered)


# -- all_reduce ------------------------------------------------------------------------------------


def test_two_ranks_exchange_what_is_small(chosen):
    limit = selection.EXCHANGE_UP_TO
    for nbytes in (0, 8, limit):
        all_reduce(2, nbytes)
    assert set(chosen) == {"all_reduce_by_exchange"}
    all_reduce(2, max(limit, selection.GATHER_UP_TO // 2) + 1)
    assert chosen[-1] == "all_reduce_directly"


@pytest.mark.parametrize("size", [3, 8, 100])
def test_what_is_small_for_all_ranks_together_is_gathered(chosen, size):
    limit = selection.GATHER_UP_TO // size
    all_reduce(size, 0)
    all_reduce(size, limit)
    all_reduce(size, limit, ordered=True)
    assert set(chosen) == {"all_reduce_by_gathering"}
    all_reduce(size, limit + 1, ordered=True)
    assert chosen[-1] == "all_reduce_directly"


def test_a_world_of_one_has_nothing_to_send(chosen):
    all_reduce(1, 10 << 20)
    assert chosen == ["all_reduce_by_gathering"]


def test_many_ranks_double_what_is_not_large(chosen):
    many, limit = selection.DOUBLE_FROM_RANKS, selection.DOUBLE_UP_TO
    all_reduce(many, limit)
    assert chosen == ["all_reduce_by_doubling"]
    for case in (
        {"size": many - 1, "nbytes": limit},
        {"size": many, "nbytes": limit + 1},
        {"size": many, "nbytes": limit, "ordered": True},
        {"size": many, "nbytes": limit, "dtype": "f2"},  # which is added up in float32
    ):
        all_reduce(**case)
        assert chosen[-1] == "all_reduce_directly", case


def test_very_many_ranks_on_several_hosts_form_a_ring(chosen):
    many, large = selection.RING_FROM_RANKS, selection.DOUBLE_UP_TO + 2
    all_reduce(many, large, one_host=False)
    assert chosen == ["all_reduce_by_ring"]
    for case in (
        {"size": many - 1, "one_host": False},
        {"size": many, "one_host": True},
        {"size": many, "one_host": False, "ordered": True},
        {"size": many, "one_host": False, "dtype": "f2"},
    ):
        all_reduce(nbytes=large, **case)
        assert chosen[-1] == "all_reduce_directly", case


# -- the others ------------------------------------------------------------------------------------


def test_reduce(chosen):
    limit = selection.TREE_UP_TO
    r = reduction("sum", np.dtype("u1"))
    for nbytes, expected in [
        (0, "reduce_by_gathering"),
        (limit, "reduce_by_gathering"),
        (limit + 1, "reduce_by_scattering"),
    ]:
        selection.reduce(group(4), np.empty(nbytes, "u1"), None, 1, r)
        assert chosen[-1] == expected


def test_broadcast(chosen):
    limit = selection.TREE_UP_TO
    for size, nbytes, one_host, expected in [
        (1, 10, True, "broadcast_directly"),
        (2, 10, False, "broadcast_directly"),
        (3, limit, True, "broadcast_by_tree"),
        (3, limit, False, "broadcast_by_tree"),
        (3, limit + 1, True, "broadcast_directly"),
        (3, limit + 1, False, "broadcast_by_scattering"),
    ]:
        selection.broadcast(group(size, one_host=one_host), np.empty(nbytes, "u1"), 0)
        assert chosen[-1] == expected


def test_all_gather(chosen):
    limit = selection.GATHER_UP_TO // 4
    for nbytes, expected in [
        (0, "all_gather_by_doubling"),
        (limit, "all_gather_by_doubling"),
        (limit + 1, "all_gather_directly"),
    ]:
        selection.all_gather(group(4), np.empty(nbytes, "u1"), np.empty(4 * nbytes, "u1"))
        assert chosen[-1] == expected


# -- all ranks alike -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 5, 8])
def test_all_ranks_take_the_same_one(monkeypatch, size):
    """In real worlds, whose ranks pass arrays of different layout."""
    chosen = [[] for _ in range(size)]
    for name in ALGORITHMS:
        original = getattr(algorithms, name)

        def recording(x, *args, name=name, original=original):
            if hasattr(x, "rank"):
                chosen[x.rank].append(name)
            return original(x, *args)

        monkeypatch.setattr(algorithms, name, recording)
    limits = [selection.GATHER_UP_TO // size, selection.DOUBLE_UP_TO, selection.TREE_UP_TO]

    def each(backend):
        for nbytes in (0, 8, *limits, *(limit + 8 for limit in limits)):
            array = np.ones((2, nbytes // 16)) if nbytes >= 16 else np.ones((1, nbytes // 8))
            if backend.rank % 2:
                array = np.asfortranarray(array)
            for op in ("sum", "max"):
                rankwire.all_reduce(backend, array, op)
            rankwire.reduce(backend, array, size - 1)
            rankwire.broadcast(backend, array, size - 1)
            rankwire.all_gather(backend, array)

    with counting_world(size) as world:
        on_all(world, each)
    assert chosen == [chosen[0]] * size
    assert len(set(chosen[0])) >= 5
