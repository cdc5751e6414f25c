"""Each algorithm by itself: its result, on every number of ranks, and what it sends."""

import threading
import time
from math import ceil, log2

import numpy as np
import pytest
from sums import left_fold, run_algorithm, same, values

from rankwire.collectives import algorithms, exchange
from rankwire.collectives.algorithms import split
from rankwire.collectives.reductions import reduction

SIZES = [1, 2, 3, 5, 8, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 7, 16))]
# None, one, fewer than most ranks, and more than a block for every rank.
COUNTS = [0, 1, 3, 1000]
BLOCK_NBYTES = 96  # a number of elements of every dtype that 1000 / N is no multiple of


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(exchange, "BLOCK_NBYTES", BLOCK_NBYTES)


def rounds(size):
    """The rounds in which everyone can have heard from everyone."""
    return ceil(log2(size))


def sum_of(dtype, op="sum"):
    return reduction(op, np.dtype(dtype))


def contributions(size, count, dtype=np.float64):
    return [values(count, dtype, seed=rank) for rank in range(size)]


def messages(sent):
    return [len(of_rank) for of_rank in sent]


def nbytes(sent):
    return [sum(of_message for _, of_message in of_rank) for of_rank in sent]


def all_same(results, expected):
    return all(same(result, expected) for result in results)


# -- cutting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 16])
def test_parts_differ_by_one_element_at_most(parts):
    for count in (0, 1, 6, 7, 8, 100):
        cut = split(np.arange(count), parts)
        assert len(cut) == parts
        assert np.concatenate(cut).tolist() == list(range(count))
        sizes = [part.size for part in cut]
        assert max(sizes) - min(sizes) <= 1


def test_parts_are_views():
    whole = np.zeros(10)
    split(whole, 3)[1][...] = 1
    assert whole.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0]


# -- meeting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_meeting_takes_one_empty_message_a_round(size):
    _, sent = run_algorithm(size, algorithms.meet)
    assert messages(sent) == [rounds(size)] * size
    assert nbytes(sent) == [0] * size


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("late", [0, -1])
def test_nobody_leaves_a_meeting_before_all_have_come(size, late):
    come = []
    lock = threading.Lock()

    def each(x):
        if x.rank == late % size:
            time.sleep(0.03)
        with lock:
            come.append(x.rank)
        algorithms.meet(x)
        return len(come)

    results, _ = run_algorithm(size, each)
    assert results == [size] * size


@pytest.mark.parametrize("size", [1, 3, 8])
def test_ranks_meet_before_they_send_much(monkeypatch, size):
    monkeypatch.setattr(algorithms, "_MUCH", 100)
    for nbytes, expected in [(0, 0), (99, 0), (100, rounds(size)), (10**9, rounds(size))]:
        _, sent = run_algorithm(size, lambda x, n=nbytes: algorithms.meet_before_much(x, n))
        assert messages(sent) == [expected] * size
    own = contributions(size, 1000)
    results, sent = all_reduce(IN_RANK_ORDER["directly"], own, sum_of("f8"), in_place=True)
    assert all_same(results, left_fold(own))
    assert messages(sent) == [rounds(size) + 2 * (size - 1)] * size


# -- gathering -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", SIZES)
def test_gathering_by_doubling(size, count):
    own = contributions(size, count)
    results, sent = run_algorithm(size, lambda x: algorithms.all_gather_by_doubling(x, own[x.rank]))
    for parts in results:
        assert all(same(part, theirs) for part, theirs in zip(parts, own, strict=True))
    assert messages(sent) == [rounds(size)] * size
    assert nbytes(sent) == [(size - 1) * own[0].nbytes] * size


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", SIZES)
def test_gathering_directly(size, count):
    own = contributions(size, count)

    def each(x):
        out = np.full(size * count, -1.0)
        parts = split(out, size)
        algorithms.all_gather_directly(x, own[x.rank], parts)
        parts[x.rank][...] = own[x.rank]  # which it leaves to its caller
        return out

    results, sent = run_algorithm(size, each)
    assert all_same(results, np.concatenate(own))
    assert messages(sent) == [size - 1] * size


@pytest.mark.parametrize("count", [0, 1, 17])
@pytest.mark.parametrize("size", SIZES)
def test_gathering_at_a_root(size, count):
    own = contributions(size, count)
    for root in {0, size // 2, size - 1}:

        def each(x, root=root):
            out = np.full(size * count, -1.0)
            parts = split(out, size)
            parts[root][...] = own[root]
            is_root = x.rank == root
            algorithms.gather_directly(x, own[x.rank], parts if is_root else None, root)
            return out

        results, sent = run_algorithm(size, each)
        assert same(results[root], np.concatenate(own))
        assert messages(sent) == [rounds(size) + (rank != root) for rank in range(size)]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", SIZES)
def test_scattering(size, count):
    whole, root = values(count), size - 1

    def each(x):
        parts = split(whole, size) if x.rank == root else None
        own = np.full_like(split(whole, size)[x.rank], -1.0)
        algorithms.scatter_directly(x, parts, own, root)
        return own

    results, sent = run_algorithm(size, each)
    for rank in range(size - 1):  # the root has its part already
        assert same(results[rank], split(whole, size)[rank])
    assert messages(sent) == [0] * (size - 1) + [size - 1]


@pytest.mark.parametrize("count", [0, 1, 17])
@pytest.mark.parametrize("size", SIZES)
def test_exchanging_parts_with_everyone(size, count):
    own = contributions(size, size * count)

    def each(x):
        out = np.full(size * count, -1.0)
        algorithms.all_to_all_directly(x, split(own[x.rank], size), split(out, size))
        return out

    results, sent = run_algorithm(size, each)
    for rank, result in enumerate(results):
        expected = np.concatenate([split(theirs, size)[rank] for theirs in own])
        assert same(result, expected)
    assert messages(sent) == [size - 1] * size


# -- broadcasting ----------------------------------------------------------------------------------


def broadcast(algorithm, size, count, root):
    whole = values(count)

    def each(x):
        array = whole.copy() if x.rank == root else np.full(count, -1.0)
        algorithm(x, array, root)
        return array

    results, sent = run_algorithm(size, each)
    assert all_same(results, whole)
    return sent, whole.nbytes


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", SIZES)
def test_broadcasting_by_a_tree(size, count):
    for root in {0, size // 2, size - 1}:
        sent, whole = broadcast(algorithms.broadcast_by_tree, size, count, root)
        assert sum(messages(sent)) == size * rounds(size) + size - 1
        assert len(sent[root]) == 2 * rounds(size)
        assert sum(nbytes(sent)) == (size - 1) * whole


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", SIZES)
def test_broadcasting_directly(size, count):
    root = size // 2
    sent, whole = broadcast(algorithms.broadcast_directly, size, count, root)
    only_root = [size - 1 if rank == root else 0 for rank in range(size)]
    assert messages(sent) == [rounds(size) + extra for extra in only_root]
    assert nbytes(sent) == [extra * whole for extra in only_root]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", SIZES)
def test_broadcasting_by_scattering_sends_no_more_than_twice_the_array(size, count):
    for root in {0, size // 2}:
        sent, whole = broadcast(algorithms.broadcast_by_scattering, size, count, root)
        if count >= size:
            assert max(nbytes(sent)) <= 2 * whole


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("name", ["tree", "directly", "scattering"])
def test_the_root_of_a_broadcast_is_only_read(name, size):
    algorithm = {
        "tree": algorithms.broadcast_by_tree,
        "directly": algorithms.broadcast_directly,
        "scattering": algorithms.broadcast_by_scattering,
    }[name]
    whole = values(50)

    def each(x):
        array = whole.copy() if x.rank == 0 else np.full(50, -1.0)
        array.flags.writeable = x.rank != 0
        algorithm(x, array, 0)
        return array

    results, _ = run_algorithm(size, each)
    assert all_same(results, whole)


# -- reducing --------------------------------------------------------------------------------------

IN_RANK_ORDER = {
    "gathering": algorithms.all_reduce_by_gathering,
    "directly": algorithms.all_reduce_directly,
}
IN_ANOTHER_ORDER = {
    "doubling": algorithms.all_reduce_by_doubling,
    "ring": algorithms.all_reduce_by_ring,
}
ALL_REDUCES = IN_RANK_ORDER | IN_ANOTHER_ORDER


def all_reduce(algorithm, own, r, *, in_place):
    def each(x):
        source = own[x.rank].copy()
        out = source if in_place else np.full_like(source, -1)
        algorithm(x, source, out, r)
        x.settle()
        if not in_place:
            assert same(source, own[x.rank])
        return out

    return run_algorithm(len(own), each)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", IN_RANK_ORDER.values(), ids=IN_RANK_ORDER.keys())
def test_all_reducing_in_rank_order(algorithm, size, count):
    for dtype, op, in_place in [("f8", "sum", True), ("f4", "mean", False), ("f2", "sum", True)]:
        own = contributions(size, count, dtype)
        results, _ = all_reduce(algorithm, own, sum_of(dtype, op), in_place=in_place)
        assert all_same(results, left_fold(own, op))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", IN_ANOTHER_ORDER.values(), ids=IN_ANOTHER_ORDER.keys())
def test_all_reducing_in_another_order(algorithm, size, count):
    whole = contributions(size, count, "i8")
    results, _ = all_reduce(algorithm, whole, sum_of("i8"), in_place=True)
    assert all_same(results, left_fold(whole))
    own = contributions(size, count)
    for op, in_place in [("sum", True), ("mean", False), ("max", False)]:
        results, _ = all_reduce(algorithm, own, sum_of("f8", op), in_place=in_place)
        np.testing.assert_allclose(results[0], left_fold(own, op), rtol=1e-12, atol=1e-10)
        assert all_same(results, results[0])


def test_a_ring_begins_each_part_at_the_next_rank():
    # Part i is added up from rank i + 1 on: 1e16 swallows a 1 that comes after it.
    own = [np.array([1e16, 1.0, 1.0]), np.array([1.0, 1e16, 1.0]), np.array([1.0, 1.0, 1e16])]
    results, _ = all_reduce(algorithms.all_reduce_by_ring, own, sum_of("f8"), in_place=True)
    assert all_same(results, np.full(3, (1.0 + 1.0) + 1e16))


@pytest.mark.parametrize("count", [0, 1, 17])
def test_two_ranks_exchange_everything(count):
    for dtype, op, in_place in [("f8", "sum", True), ("f4", "mean", False), ("f2", "sum", True)]:
        own = contributions(2, count, dtype)
        results, sent = all_reduce(
            algorithms.all_reduce_by_exchange, own, sum_of(dtype, op), in_place=in_place
        )
        assert all_same(results, left_fold(own, op))
        assert messages(sent) == [1, 1]


@pytest.mark.parametrize("size", SIZES)
def test_what_all_reducing_sends(size):
    own = contributions(size, 16 * 15 * 7)
    whole = own[0].nbytes
    inner = 1 << (size.bit_length() - 1)
    _, sent = all_reduce(IN_RANK_ORDER["gathering"], own, sum_of("f8"), in_place=True)
    assert messages(sent) == [rounds(size)] * size
    _, sent = all_reduce(IN_RANK_ORDER["directly"], own, sum_of("f8"), in_place=True)
    assert messages(sent) == [2 * (size - 1)] * size
    assert max(nbytes(sent)) == 2 * (size - 1) * whole // size
    _, sent = all_reduce(IN_ANOTHER_ORDER["ring"], own, sum_of("f8"), in_place=True)
    assert messages(sent) == [rounds(size) + 2 * (size - 1)] * size
    assert max(nbytes(sent)) == 2 * (size - 1) * whole // size
    for rank, of_rank in enumerate(sent):  # the meeting aside, to the next one only
        assert {dst for dst, of_message in of_rank if of_message} <= {(rank + 1) % size}
    _, sent = all_reduce(IN_ANOTHER_ORDER["doubling"], own, sum_of("f8"), in_place=True)
    assert messages(sent) == [
        1 if rank >= inner else int(log2(inner)) + (rank + inner < size) for rank in range(size)
    ]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", SIZES)
def test_reduce_scattering(size, count):
    for dtype, op in [("f8", "sum"), ("f2", "mean"), ("u1", "bitwise_xor")]:
        own, r = contributions(size, count, dtype), sum_of(dtype, op)

        def each(x, own=own, r=r):
            out = np.full_like(split(own[0], size)[x.rank], -1 if r.dtype.kind == "f" else 1)
            algorithms.reduce_scatter_directly(x, split(own[x.rank], size), out, r)
            return out

        results, sent = run_algorithm(size, each)
        for result, expected in zip(results, split(left_fold(own, op), size), strict=True):
            assert same(result, expected)
        assert messages(sent) == [size - 1] * size


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("algorithm", "most_messages"),
    [
        (algorithms.reduce_by_gathering, lambda size: rounds(size) + 1),
        (algorithms.reduce_by_scattering, lambda size: size),
    ],
    ids=["gathering", "scattering"],
)
def test_reducing_at_a_root(algorithm, most_messages, size, count):
    own = contributions(size, count)
    for root, in_place in [(0, True), (size - 1, False)]:

        def each(x, root=root, in_place=in_place):
            source = own[x.rank].copy()
            out = None
            if x.rank == root:
                out = source if in_place else np.full_like(source, -1.0)
            algorithm(x, source, out, root, sum_of("f8"))
            x.settle()
            if out is not source:
                assert same(source, own[x.rank])
            return out

        results, sent = run_algorithm(size, each)
        assert same(results.pop(root), left_fold(own))
        assert results == [None] * (size - 1)
        assert max(messages(sent)) <= most_messages(size)


# -- nothing waits for what cannot come ------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("algorithm", ALL_REDUCES.values(), ids=ALL_REDUCES.keys())
def test_queues_that_hold_next_to_nothing_are_enough(algorithm, size):
    own = contributions(size, 1000)

    def each(x):
        out = own[x.rank].copy()
        algorithm(x, out, out, sum_of("f8"))
        return out

    results, _ = run_algorithm(size, each, queue_nbytes=1, timeout=10.0)
    assert all_same(results, results[0])
