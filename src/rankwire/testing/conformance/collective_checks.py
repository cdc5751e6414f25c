"""Conformance checks of arrays and collectives: the same results on every backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import numpy as np

from rankwire.backends.base import Backend
from rankwire.collectives import coalesced, objects, operations
from rankwire.collectives.reductions import PremulSum
from rankwire.errors import (
    CollectiveMismatchError,
    ConfigurationError,
    InvalidRankError,
)
from rankwire.testing.conformance.tools import (
    PATIENCE,
    SIZES,
    expect,
    has_values,
    on_every_rank,
    run_all,
    run_in_worlds,
)
from rankwire.testing.ranks import MakeWorld


def arrays_go_from_rank_to_rank(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):
        for array in (
            np.array([[1.0, 2.0], [3.0, 4.0]], np.float32),
            np.array([7.0, 8.0, 9.0]),
            np.array(5),
            np.empty((0, 3), np.int16),
        ):
            first.send_array(array, 1)
            assert has_values(second.recv_array(0), array)
            first.send_array(array, 1)
            into = np.full(array.shape, -1, array.dtype)
            assert second.recv_array(0, timeout=1.0, out=into) is into
            assert has_values(into, array)


def two_ranks_swap_arrays(make_world: MakeWorld) -> None:
    mine = [np.array([1.0, 2.0]), np.array([[3.0], [4.0], [5.0]])]

    def swap(backend: Backend) -> None:
        other = 1 - backend.rank
        assert has_values(backend.sendrecv(mine[backend.rank], other), mine[other])
        same = np.full(3, backend.rank, np.int64)
        assert backend.sendrecv(same, other, out=same, timeout=1.0) is same
        assert has_values(same, np.full(3, other))

    run_in_worlds(make_world, swap, (2,))


@on_every_rank()
def sums_and_means_reach_every_rank(backend: Backend) -> None:
    size, rank = backend.world_size, backend.rank
    array = np.full(3, rank, np.float32)
    assert operations.all_reduce(backend, array, timeout=PATIENCE) is array
    assert has_values(array, np.full(3, size * (size - 1) / 2, np.float32))
    array = np.full(3, rank, np.float64)
    mean = np.empty(3)
    assert operations.all_reduce(backend, array, "mean", out=mean) is mean
    assert has_values(mean, [(size - 1) / 2] * 3)
    assert has_values(array, [rank] * 3)


def a_world_of_one_keeps_its_values(make_world: MakeWorld) -> None:
    with make_world(1) as (alone,):
        array = np.array([1.5, -2.0])
        for result in (
            operations.all_reduce(alone, array.copy()),
            operations.all_reduce(alone, array.copy(), "mean"),
            operations.reduce(alone, array),
            operations.broadcast(alone, array.copy()),
            operations.all_gather(alone, array),
            operations.gather(alone, array),
            operations.scatter(alone, array),
            operations.reduce_scatter(alone, array),
            operations.reduce_scatter(alone, array, "mean"),
            operations.all_to_all(alone, array),
            operations.all_to_all(alone, array, send_counts=[2], recv_counts=[2]),
        ):
            assert result is not array
            assert has_values(result, array)
        operations.barrier(alone)
        assert objects.all_gather_object(alone, "x") == ["x"]


def every_op_is_the_same_everywhere(make_world: MakeWorld) -> None:
    # The product of these floats, and even their sum, depends on the order: that of the ranks.
    ufuncs: dict[Any, Callable[..., Any]] = {
        "sum": np.add,
        "product": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
        "bitwise_and": np.bitwise_and,
        "bitwise_or": np.bitwise_or,
        "bitwise_xor": np.bitwise_xor,
    }

    def contribution(op: str, rank: int) -> Any:
        values = np.array([rank + 1, 2 * rank + 3, 255 - rank, 7])
        return values if op.startswith("bitwise") else values / 3.0 * 10.0**-rank

    def each(backend: Backend) -> list[bytes]:
        results = []
        for op, ufunc in ufuncs.items():
            array = operations.all_reduce(backend, contribution(op, backend.rank), op)
            everyone = [contribution(op, rank) for rank in range(backend.world_size)]
            assert has_values(array, reduce(ufunc, everyone))
            results.append(array.tobytes())
        return results

    for size in SIZES:
        with make_world(size) as world:
            results = run_all(world, each)
            assert all(result == results[0] for result in results)


def an_op_that_means_nothing_is_refused(make_world: MakeWorld) -> None:
    for size in (1, 2):
        with make_world(size) as world:
            for backend in world:
                whole, complex_ones = np.ones(2, np.int32), np.ones(2, np.complex64)
                op: Any
                for op, array in (("mean", whole), ("max", complex_ones), ("median", whole)):
                    refused = partial(operations.all_reduce, backend, array, op)
                    assert op in str(expect(ConfigurationError, refused))


@on_every_rank()
def the_root_alone_gets_the_result(backend: Backend) -> None:
    size, rank = backend.world_size, backend.rank
    for root in range(size):
        mine = np.array([[rank, 1], [10 * rank, 2]])
        total = operations.reduce(backend, mine, root)
        joined = operations.gather(backend, mine, root)
        values = objects.gather_object(backend, {"rank": rank}, root)
        assert has_values(mine, [[rank, 1], [10 * rank, 2]])
        if rank != root:
            assert (total, joined, values) == (None, None, None)
            continue
        ranks = size * (size - 1) // 2
        assert has_values(total, [[ranks, size], [10 * ranks, 2 * size]])
        assert has_values(joined, np.concatenate([[[r, 1], [10 * r, 2]] for r in range(size)]))
        assert values == [{"rank": r} for r in range(size)]


@on_every_rank()
def a_broadcast_comes_from_any_root(backend: Backend) -> None:
    for root in range(backend.world_size):
        array = np.full((2, 2), 42.0 if backend.rank == root else -1.0, np.float32)
        assert operations.broadcast(backend, array, root) is array
        assert has_values(array, np.full((2, 2), 42.0, np.float32))
        value = [10, 20, 30] if backend.rank == root else None
        assert objects.broadcast_object(backend, value, root) == [10, 20, 30]


def a_root_outside_the_world_is_refused(make_world: MakeWorld) -> None:
    all_rooted: tuple[Callable[..., Any], ...] = (
        operations.broadcast,
        operations.reduce,
        operations.gather,
        operations.scatter,
        objects.broadcast_object,
        objects.gather_object,
        objects.scatter_object,
    )
    for size in (1, 2):
        with make_world(size) as (first, *_):
            for rooted in all_rooted:
                error = expect(InvalidRankError, partial(rooted, first, np.ones(2), 5))
                assert (error.invalid_rank, error.world_size) == (5, size)
                assert "5" in str(error)


@on_every_rank()
def gathering_joins_along_dim_0(backend: Backend) -> None:
    size, rank = backend.world_size, backend.rank
    pairs = operations.all_gather(backend, np.array([10 * rank, 10 * rank + 1]))
    assert has_values(pairs, np.array([10 * r + i for r in range(size) for i in (0, 1)]))
    rows = operations.all_gather(backend, np.full((2, 3), rank, np.float32), timeout=1.0)
    assert has_values(rows, np.repeat(np.arange(size, dtype=np.float32), 6).reshape(2 * size, 3))
    assert operations.all_gather(backend, np.empty((0, 3))).shape == (0, 3)
    assert has_values(operations.all_gather(backend, np.array(rank)), np.arange(size))
    out = np.full(size, -1)
    assert operations.all_gather(backend, np.array(rank), out=out) is out
    assert has_values(out, np.arange(size))


@on_every_rank()
def scattering_cuts_dim_0(backend: Backend) -> None:
    size, rank = backend.world_size, backend.rank
    for root in range(size):
        whole = np.arange(6.0 * size).reshape(2 * size, 3) if rank == root else None
        part = operations.scatter(backend, whole, root)
        assert has_values(part, np.arange(6.0 * rank, 6.0 * rank + 6).reshape(2, 3))
        values = [f"for {r}" for r in range(size)] if rank == root else None
        assert objects.scatter_object(backend, values, root) == f"for {rank}"
    ones = operations.reduce_scatter(backend, np.arange(1.0, size + 1))
    assert has_values(ones, [float(size * (rank + 1))])
    rows = operations.reduce_scatter(backend, np.ones((2 * size, 3), np.int8))
    assert has_values(rows, np.full((2, 3), size, np.int8))
    mean = operations.reduce_scatter(backend, np.full(size, float(rank)), "mean", timeout=1.0)
    assert has_values(mean, [(size - 1) / 2])


def parts_are_equal_or_refused(make_world: MakeWorld) -> None:
    for size, array in ((1, np.array(1.0)), (2, np.array(1.0)), (2, np.ones((3, 2)))):
        with make_world(size) as (first, *_):
            for cutting in (operations.reduce_scatter, operations.all_to_all, operations.scatter):
                error = expect(ConfigurationError, partial(cutting, first, array))
                assert f"{array.shape} is not evenly divisible" in str(error)


def every_rank_sends_to_every_rank(make_world: MakeWorld) -> None:
    def each(backend: Backend) -> None:
        size, rank = backend.world_size, backend.rank
        # Slot i of rank r is for rank i: 100 i + r.
        mine = 100 * np.arange(size) + rank
        assert has_values(operations.all_to_all(backend, mine), 100 * rank + np.arange(size))
        assert has_values(mine, 100 * np.arange(size) + rank)
        sent = [(rank, dst) for dst in range(size)]
        received = objects.all_to_all_object(backend, sent)
        assert received == [(src, rank) for src in range(size)]
        # Rank r sends r rows to each rank.
        rows = np.full((size * rank, 2), rank)
        parts = operations.all_to_all(backend, rows, send_counts=[rank] * size)
        expected = np.repeat(np.arange(size), np.arange(size))
        assert has_values(parts, np.stack([expected, expected], axis=1))

    run_in_worlds(make_world, each)

    def of_two(backend: Backend) -> None:
        uneven = [
            (np.array([10, 20, 21, 22]), [1, 3], [1, 2], [10, 30, 31]),
            (np.array([30, 31, 40, 41]), [2, 2], [3, 2], [20, 21, 22, 40, 41]),
        ]
        mine, sends, receives, expected = uneven[backend.rank]
        received = operations.all_to_all(backend, mine, send_counts=sends, recv_counts=receives)
        assert has_values(received, expected)

    run_in_worlds(make_world, of_two, (2,))


def wrong_counts_are_refused(make_world: MakeWorld) -> None:
    with make_world(2) as world:

        def refuse(backend: Backend) -> None:
            exchange = partial(operations.all_to_all, backend, np.ones(4))
            for counts in ({"send_counts": [4]}, {"send_counts": [2, 2], "recv_counts": [1, 1, 1]}):
                error = expect(ConfigurationError, partial(exchange, **counts))
                assert "must have length 2" in str(error)
            assert "5" in str(expect(ConfigurationError, partial(exchange, send_counts=[2, 3])))

        run_all(world, refuse)

        def disagree(backend: Backend) -> str:
            own = [2, 2] if backend.rank == 0 else [3, 2]
            call = partial(
                operations.all_to_all, backend, np.ones(4), send_counts=[2, 2], recv_counts=own
            )
            return expect(CollectiveMismatchError, call).message

        assert set(run_all(world, disagree)) == {"rank 0 sends 2 rows to rank 1, which expects 3"}


@on_every_rank()
def lists_have_an_array_for_each_rank(backend: Backend) -> None:
    rank, size = backend.rank, backend.world_size
    parts = [np.full(at, float(rank)) for at in range(size)]  # that of rank 0 is empty
    out = [np.empty(at) for at in range(size)]
    assert operations.all_gather(backend, parts[rank], out=out) is out
    for src, array in enumerate(out):
        assert has_values(array, np.full(src, float(src)))
    total = np.full(rank, float(sum(range(size))))
    assert has_values(operations.reduce_scatter(backend, parts), total)
    out = [np.empty(rank) for _ in range(size)]
    assert operations.all_to_all(backend, parts, out=out) is out
    for src, array in enumerate(out):
        assert has_values(array, np.full(rank, float(src)))
    last = size - 1
    part = operations.scatter(backend, parts if rank == last else None, last)
    assert has_values(part, np.full(rank, float(last)))
    out = [np.empty(2) for _ in range(size)]
    operations.gather(backend, np.full(2, float(rank)), last, out=out if rank == last else None)
    if rank == last:
        assert [array.tolist() for array in out] == [[src, src] for src in range(size)]


@on_every_rank(2)
def lists_that_disagree_are_named(backend: Backend) -> None:
    out = [np.empty(2), np.empty(3 + backend.rank)]
    gather = partial(operations.all_gather, backend, np.ones(2 + 2 * backend.rank), out=out)
    message = expect(CollectiveMismatchError, gather).message
    assert "(3,)" in message
    assert "(4,)" in message
    send = partial(operations.all_to_all, backend, [np.ones(1)] * 2)
    message = expect(CollectiveMismatchError, partial(send, out=out)).message
    assert "rank 0 sends 8 bytes to rank 0, which expects 16" in message


@on_every_rank()
def many_arrays_travel_together(backend: Backend) -> None:
    rank, size = backend.rank, backend.world_size
    mine = [np.full(2, rank), np.full((1, 3), rank + 0.5)]
    first, second = coalesced.all_gather_coalesced(backend, mine)
    assert has_values(first, np.repeat(np.arange(size), 2))
    assert has_values(second, np.repeat(np.arange(size) + 0.5, 3).reshape(size, 3))
    wholes = [np.arange(size), np.arange(2.0 * size)]
    first, second = coalesced.reduce_scatter_coalesced(backend, wholes)
    assert has_values(first, np.array([size * rank]))
    assert has_values(second, size * np.array([2.0 * rank, 2.0 * rank + 1]))


@on_every_rank()
def factors_are_each_ranks_own(backend: Backend) -> None:
    size = backend.world_size
    reduced = operations.all_reduce(backend, np.ones(3), PremulSum(backend.rank + 1))
    assert has_values(reduced, np.full(3, size * (size + 1) / 2))
