"""The conformance checks about arrays and collectives: the same results on every backend.

The vectors are those of the contract's sections on collectives, point-to-point arrays and their
asynchronous forms, for worlds of 1, 2, 3, 4 and 7 ranks where they make sense.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from time import monotonic
from typing import Any

import numpy as np

from rankwire.backends.base import Backend
from rankwire.backends.sub import SubBackend
from rankwire.collectives import objects, operations
from rankwire.collectives.work import Work
from rankwire.errors import (
    CollectiveAbortedError,
    CollectiveMismatchError,
    ConfigurationError,
    DeadlineExceededError,
    InvalidRankError,
    MessageTooLargeError,
    RankwireError,
    SelfSendError,
)
from rankwire.testing.expecting import expect
from rankwire.testing.ranks import in_parallel
from rankwire.testing.worlds import MakeWorld

__all__ = ["COLLECTIVE_CHECKS"]

_SIZES = (1, 2, 3, 4, 7)
_SOON = 5.0  # seconds within which all ranks know that they disagree, on a machine that is busy
_LARGE = 3 << 17  # elements: of 8 bytes, more than a message that is sent as a whole

Each = Callable[[Backend], Any]


def _run(world: Sequence[Backend], each: Each) -> list[Any]:
    """Run a function on all ranks; return what each of them got."""
    return in_parallel([partial(each, backend) for backend in world])


def _is(array: Any, expected: Any) -> bool:
    """Whether an array has these values, this shape and, if it is said, this dtype."""
    wanted = np.asarray(expected)
    same_kind = not isinstance(expected, np.ndarray) or array.dtype == wanted.dtype
    return same_kind and array.shape == wanted.shape and bool(np.all(array == wanted))


# -- arrays from rank to rank ----------------------------------------------------------------------


def _arrays_go_from_rank_to_rank(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):
        for array in (
            np.array([[1.0, 2.0], [3.0, 4.0]], np.float32),
            np.array([7.0, 8.0, 9.0]),
            np.array(5),
            np.empty((0, 3), np.int16),
        ):
            first.send_array(array, 1)
            assert _is(second.recv_array(0), array)
            first.send_array(array, 1)
            into = np.full(array.shape, -1, array.dtype)
            assert second.recv_array(0, timeout=1.0, out=into) is into
            assert _is(into, array)


def _two_ranks_swap_arrays(make_world: MakeWorld) -> None:
    mine = [np.array([1.0, 2.0]), np.array([[3.0], [4.0], [5.0]])]

    def swap(backend: Backend) -> None:
        other = 1 - backend.rank
        assert _is(backend.sendrecv(mine[backend.rank], other), mine[other])
        same = np.full(3, backend.rank, np.int64)
        assert backend.sendrecv(same, other, out=same, timeout=1.0) is same
        assert _is(same, np.full(3, other))

    with make_world(2) as world:
        _run(world, swap)


def _arrays_to_wrong_ranks_are_refused(make_world: MakeWorld) -> None:
    with make_world(2) as (first, _):
        assert "5" in str(expect(InvalidRankError, lambda: first.recv_array(5)))
        assert "5" in str(expect(InvalidRankError, lambda: first.send_array(np.ones(1), 5)))
        expect(SelfSendError, lambda: first.sendrecv(np.ones(1), 0))
    with make_world(1) as (alone,):
        expect(SelfSendError, lambda: alone.send_array(np.ones(1), 0))


# -- reducing --------------------------------------------------------------------------------------


def _sums_and_means_reach_every_rank(make_world: MakeWorld) -> None:
    def each(backend: Backend) -> None:
        size, rank = backend.world_size, backend.rank
        array = np.full(3, rank, np.float32)
        assert operations.all_reduce(backend, array) is array
        assert _is(array, np.full(3, size * (size - 1) / 2, np.float32))
        array = np.full(3, rank, np.float64)
        mean = np.empty(3)
        assert operations.all_reduce(backend, array, "mean", out=mean) is mean
        assert _is(mean, [(size - 1) / 2] * 3)
        assert _is(array, [rank] * 3)

    for size in _SIZES:
        with make_world(size) as world:
            _run(world, each)

    def of_two(backend: Backend) -> None:
        mine = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]][backend.rank])
        assert _is(operations.all_reduce(backend, mine.copy()), [5.0, 7.0, 9.0])
        assert _is(operations.all_reduce(backend, mine.copy(), "mean"), [2.5, 3.5, 4.5])
        assert _is(operations.all_reduce(backend, mine.copy(), timeout=1.0), [5.0, 7.0, 9.0])

    with make_world(2) as world:
        _run(world, of_two)


def _a_world_of_one_keeps_its_values(make_world: MakeWorld) -> None:
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
            assert _is(result, array)
        operations.barrier(alone)
        assert objects.all_gather_object(alone, "x") == ["x"]


def _every_op_is_the_same_everywhere(make_world: MakeWorld) -> None:
    # The product of these floats, and even their sum, depends on the order: that of the ranks.
    ufuncs: dict[str, Callable[..., Any]] = {
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
            assert _is(array, reduce(ufunc, everyone))
            results.append(array.tobytes())
        return results

    for size in _SIZES:
        with make_world(size) as world:
            results = _run(world, each)
            assert all(result == results[0] for result in results)


def _an_op_that_means_nothing_is_refused(make_world: MakeWorld) -> None:
    for size in (1, 2):
        with make_world(size) as world:
            for backend in world:
                whole, complex_ones = np.ones(2, np.int32), np.ones(2, np.complex64)
                for op, array in (("mean", whole), ("max", complex_ones), ("median", whole)):
                    refused = partial(operations.all_reduce, backend, array, op)
                    assert op in str(expect(ConfigurationError, refused))


def _the_root_alone_gets_the_result(make_world: MakeWorld) -> None:
    def each(backend: Backend) -> None:
        size, rank = backend.world_size, backend.rank
        for root in range(size):
            mine = np.array([[rank, 1], [10 * rank, 2]])
            total = operations.reduce(backend, mine, root)
            joined = operations.gather(backend, mine, root)
            values = objects.gather_object(backend, {"rank": rank}, root)
            assert _is(mine, [[rank, 1], [10 * rank, 2]])
            if rank != root:
                assert total is joined is values is None
                continue
            ranks = size * (size - 1) // 2
            assert _is(total, [[ranks, size], [10 * ranks, 2 * size]])
            assert _is(joined, np.concatenate([[[r, 1], [10 * r, 2]] for r in range(size)]))
            assert values == [{"rank": r} for r in range(size)]

    for size in _SIZES:
        with make_world(size) as world:
            _run(world, each)


# -- copying ---------------------------------------------------------------------------------------


def _a_broadcast_comes_from_any_root(make_world: MakeWorld) -> None:
    def each(backend: Backend) -> None:
        for root in range(backend.world_size):
            array = np.full((2, 2), 42.0 if backend.rank == root else -1.0, np.float32)
            assert operations.broadcast(backend, array, root) is array
            assert _is(array, np.full((2, 2), 42.0, np.float32))
            value = [10, 20, 30] if backend.rank == root else None
            assert objects.broadcast_object(backend, value, root) == [10, 20, 30]

    for size in _SIZES:
        with make_world(size) as world:
            _run(world, each)


def _a_root_outside_the_world_is_refused(make_world: MakeWorld) -> None:
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


def _gathering_joins_along_dim_0(make_world: MakeWorld) -> None:
    def each(backend: Backend) -> None:
        size, rank = backend.world_size, backend.rank
        pairs = operations.all_gather(backend, np.array([10 * rank, 10 * rank + 1]))
        assert _is(pairs, np.array([10 * r + i for r in range(size) for i in (0, 1)]))
        rows = operations.all_gather(backend, np.full((2, 3), rank, np.float32), timeout=1.0)
        assert _is(rows, np.repeat(np.arange(size, dtype=np.float32), 6).reshape(2 * size, 3))
        assert operations.all_gather(backend, np.empty((0, 3))).shape == (0, 3)
        assert _is(operations.all_gather(backend, np.array(rank)), np.arange(size))
        out = np.full(size, -1)
        assert operations.all_gather(backend, np.array(rank), out=out) is out
        assert _is(out, np.arange(size))

    for size in _SIZES:
        with make_world(size) as world:
            _run(world, each)


def _scattering_cuts_dim_0(make_world: MakeWorld) -> None:
    def each(backend: Backend) -> None:
        size, rank = backend.world_size, backend.rank
        for root in range(size):
            whole = np.arange(6.0 * size).reshape(2 * size, 3) if rank == root else None
            part = operations.scatter(backend, whole, root)
            assert _is(part, np.arange(6.0 * rank, 6.0 * rank + 6).reshape(2, 3))
            values = [f"for {r}" for r in range(size)] if rank == root else None
            assert objects.scatter_object(backend, values, root) == f"for {rank}"
        ones = operations.reduce_scatter(backend, np.arange(1.0, size + 1))
        assert _is(ones, [float(size * (rank + 1))])
        rows = operations.reduce_scatter(backend, np.ones((2 * size, 3), np.int8))
        assert _is(rows, np.full((2, 3), size, np.int8))
        mean = operations.reduce_scatter(backend, np.full(size, float(rank)), "mean", timeout=1.0)
        assert _is(mean, [(size - 1) / 2])

    for size in _SIZES:
        with make_world(size) as world:
            _run(world, each)

    def of_two(backend: Backend) -> None:
        mine = np.array([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]][backend.rank])
        part = operations.reduce_scatter(backend, mine)
        assert _is(part, [[6.0, 8.0], [10.0, 12.0]][backend.rank])

    with make_world(2) as world:
        _run(world, of_two)


def _parts_are_equal_or_refused(make_world: MakeWorld) -> None:
    for size in (1, 2):
        with make_world(size) as (first, *_):
            for cutting in (operations.reduce_scatter, operations.all_to_all, operations.scatter):
                error = expect(ConfigurationError, partial(cutting, first, np.array(1.0)))
                assert "not evenly divisible" in str(error)
    with make_world(2) as (first, _):
        for cutting in (operations.reduce_scatter, operations.all_to_all, operations.scatter):
            error = expect(ConfigurationError, partial(cutting, first, np.ones((3, 2))))
            assert "(3, 2)" in str(error)


def _every_rank_sends_to_every_rank(make_world: MakeWorld) -> None:
    def each(backend: Backend) -> None:
        size, rank = backend.world_size, backend.rank
        # Slot i of rank r is for rank i: 100 i + r.
        mine = 100 * np.arange(size) + rank
        assert _is(operations.all_to_all(backend, mine), 100 * rank + np.arange(size))
        assert _is(mine, 100 * np.arange(size) + rank)
        sent = [(rank, dst) for dst in range(size)]
        received = objects.all_to_all_object(backend, sent)
        assert received == [(src, rank) for src in range(size)]
        # Rank r sends r rows to each rank.
        rows = np.full((size * rank, 2), rank)
        parts = operations.all_to_all(backend, rows, send_counts=[rank] * size)
        expected = np.repeat(np.arange(size), np.arange(size))
        assert _is(parts, np.stack([expected, expected], axis=1))

    for size in _SIZES:
        with make_world(size) as world:
            _run(world, each)

    def of_two(backend: Backend) -> None:
        mine = np.array([[10, 20, 30, 40], [50, 60, 70, 80]][backend.rank])
        expected = [[10, 20, 50, 60], [30, 40, 70, 80]][backend.rank]
        assert _is(operations.all_to_all(backend, mine, timeout=1.0), expected)
        uneven = [
            (np.array([10, 20, 21, 22]), [1, 3], [1, 2], [10, 30, 31]),
            (np.array([30, 31, 40, 41]), [2, 2], [3, 2], [20, 21, 22, 40, 41]),
        ]
        mine, sends, receives, expected = uneven[backend.rank]
        received = operations.all_to_all(backend, mine, send_counts=sends, recv_counts=receives)
        assert _is(received, expected)

    with make_world(2) as world:
        _run(world, of_two)


def _wrong_counts_are_refused(make_world: MakeWorld) -> None:
    with make_world(2) as world:

        def refuse(backend: Backend) -> None:
            exchange = partial(operations.all_to_all, backend, np.ones(4))
            for counts in ({"send_counts": [4]}, {"send_counts": [2, 2], "recv_counts": [1, 1, 1]}):
                error = expect(ConfigurationError, partial(exchange, **counts))
                assert "must have length 2" in str(error)
            assert "5" in str(expect(ConfigurationError, partial(exchange, send_counts=[2, 3])))

        _run(world, refuse)

        def disagree(backend: Backend) -> str:
            own = [2, 2] if backend.rank == 0 else [3, 2]
            call = partial(
                operations.all_to_all,
                backend,
                np.ones(4),
                send_counts=[2, 2],
                recv_counts=own,
            )
            return expect(CollectiveMismatchError, call).message

        assert set(_run(world, disagree)) == {"rank 0 sends 2 rows to rank 1, which expects 3"}


# -- of any size -----------------------------------------------------------------------------------


def _large_arrays_are_whole(make_world: MakeWorld) -> None:
    def each(backend: Backend) -> None:
        size, rank = backend.world_size, backend.rank
        base = np.arange(_LARGE * size, dtype=np.float64)
        total = base * size + size * (size - 1) // 2
        mine = slice(rank * _LARGE, (rank + 1) * _LARGE)
        assert _is(operations.all_reduce(backend, base + rank), total)
        assert _is(operations.reduce_scatter(backend, base + rank), total[mine])
        assert _is(operations.all_gather(backend, base[mine]), base)
        own = base.copy() if rank == size - 1 else np.zeros_like(base)
        assert _is(operations.broadcast(backend, own, size - 1), base)
        assert _is(operations.scatter(backend, base, size - 1), base[mine])
        received = operations.all_to_all(backend, base + rank)
        assert _is(received, np.concatenate([base[mine] + src for src in range(size)]))
        at_root = operations.reduce(backend, base + rank, size - 1)
        joined = operations.gather(backend, base[mine], size - 1)
        if rank == size - 1:
            assert _is(at_root, total)
            assert _is(joined, base)

    for size in (2, 3):
        with make_world(size) as world:
            _run(world, each)


def _shapes_do_not_depend_on_the_number_of_ranks(make_world: MakeWorld) -> None:
    def each(backend: Backend) -> None:
        size = backend.world_size
        for shape in ((), (0,), (3, 0, 2), (1, 1)):
            ones = np.ones(shape, np.int32)
            assert _is(operations.all_reduce(backend, ones.copy()), ones * size)
            assert _is(operations.broadcast(backend, ones.copy()), ones)
            rows = (size * shape[0], *shape[1:]) if shape else (size,)
            assert _is(operations.all_gather(backend, ones), np.ones(rows, np.int32))
        empty = np.empty((0, 4), np.float16)
        assert _is(operations.reduce_scatter(backend, empty), empty)
        assert _is(operations.all_to_all(backend, empty), empty)
        assert _is(operations.scatter(backend, empty), empty)

    for size in _SIZES:
        with make_world(size) as world:
            _run(world, each)


# -- in the background -----------------------------------------------------------------------------


def _the_background_gives_the_same(make_world: MakeWorld) -> None:
    def each(backend: Backend) -> None:
        size, rank = backend.world_size, backend.rank
        gathering = operations.all_gather(backend, np.array([rank, rank + 10]), async_op=True)
        reducing = operations.reduce_scatter(
            backend, np.arange(1.0, 2 * size + 1), "mean", async_op=True
        )
        assert isinstance(gathering, Work)
        assert "all_gather" in repr(gathering)
        assert "reduce_scatter" in reducing.description
        assert _is(reducing.wait(timeout=10.0), [2.0 * rank + 1, 2.0 * rank + 2])
        assert _is(gathering.wait(), np.concatenate([[r, r + 10] for r in range(size)]))
        assert gathering.done()
        assert gathering.exception() is None
        assert gathering.result() is gathering.wait()
        operations.broadcast(backend, np.ones(2), async_op=True)  # dropped, and completes
        operations.barrier(backend, async_op=True).wait()
        assert objects.all_gather_object(backend, rank, async_op=True).wait() == list(range(size))

    for size in _SIZES:
        with make_world(size) as world:
            _run(world, each)


def _eight_operations_of_one_size_never_mix(make_world: MakeWorld) -> None:
    def each(backend: Backend) -> None:
        size, rank = backend.world_size, backend.rank
        arrays = [np.full(1000, 100.0 * number + rank) for number in range(8)]
        outstanding = [
            operations.all_reduce(backend, array, async_op=True)
            if number % 2
            else operations.all_gather(backend, array, async_op=True)
            for number, array in enumerate(arrays)
        ]
        assert _is(operations.all_reduce(backend, np.ones(1000)), np.full(1000, float(size)))
        # Every rank waits in an order of its own.
        for number in np.random.default_rng(rank).permutation(8):
            if number % 2:
                expected = np.full(1000, 100.0 * number * size + size * (size - 1) / 2)
            else:
                expected = np.repeat(100.0 * number + np.arange(size), 1000)
            assert _is(outstanding[number].wait(), expected)

    for size in (2, 4):
        with make_world(size) as world:
            _run(world, each)


# -- when ranks disagree, fail or do not come ------------------------------------------------------


def _whoever_disagrees_all_are_told(make_world: MakeWorld) -> None:
    def call(backend: Backend, case: str) -> object:
        other = backend.rank == 1
        array = np.ones(4, np.float64 if other and case == "dtype" else np.float32)
        if case == "shape":
            array = array.reshape((2, 2) if other else (4,))
        if case == "empty on one":
            array = array[:0] if other else array
        if case == "root":
            return operations.broadcast(backend, array, int(other))
        if case == "kind" and other:
            return operations.all_gather(backend, array)
        return operations.all_reduce(backend, array, "max" if other and case == "op" else "sum")

    def each(backend: Backend, case: str) -> None:
        begin = monotonic()
        error = expect(CollectiveMismatchError, partial(call, backend, case))
        assert monotonic() - begin < _SOON
        assert error.rank == backend.rank

    for case in ("shape", "dtype", "op", "root", "kind", "empty on one"):
        with make_world(3) as world:
            _run(world, partial(each, case=case))


def _one_rank_that_fails_ends_it_for_all(make_world: MakeWorld) -> None:
    def each(backend: Backend) -> RankwireError:
        wrong = np.empty(3) if backend.rank == 1 else None
        call = partial(
            operations.all_to_all,
            backend,
            np.ones(2 * backend.world_size),
            send_counts=[2] * backend.world_size,
            out=wrong,
        )
        return expect(RankwireError, call)

    for size in (2, 4):
        with make_world(size) as world:
            begin = monotonic()
            errors = _run(world, each)
            assert monotonic() - begin < _SOON
            assert isinstance(errors.pop(1), ConfigurationError)
            for error in errors:
                assert isinstance(error, CollectiveAbortedError)
                assert error.peer == 1


def _an_array_above_the_limit_harms_nobody(make_world: MakeWorld) -> None:
    calls: tuple[Callable[..., Any], ...] = (
        operations.all_gather,
        operations.broadcast,
        operations.scatter,
    )

    def each(backend: Backend, call: Callable[..., Any]) -> None:
        error = expect(RankwireError, partial(call, backend, np.ones(300_000)))
        assert isinstance(error, MessageTooLargeError | CollectiveAbortedError)
        assert "limit" in error.message
        backend.barrier()
        assert _is(operations.all_reduce(backend, np.ones(2)), [3.0, 3.0])

    for call in calls:
        with make_world(3, max_message_nbytes=100_000) as world:
            _run(world, partial(each, call=call))


def _who_does_not_come_is_named(make_world: MakeWorld) -> None:
    def each(backend: Backend) -> RankwireError | None:
        if backend.rank == 2:
            return None
        call = partial(operations.all_reduce, backend, np.ones(3), timeout=0.3)
        return expect(RankwireError, call)

    with make_world(4) as world:
        errors = [error for error in _run(world, each) if error is not None]
        # Whose time is up first tells the others, and what they raise says so.
        late = [error for error in errors if isinstance(error, DeadlineExceededError)]
        assert late
        assert all(error.waiting_for == [2] for error in late)
        assert all("waiting for rank 2" in error.message for error in errors)


def _nobody_leaves_a_collective_barrier_early(make_world: MakeWorld) -> None:
    for size in _SIZES:
        with make_world(size) as world:
            entered: list[int] = []

            def each(backend: Backend, entered: list[int] = entered, size: int = size) -> None:
                for episode in range(1, 10):
                    entered.append(backend.rank)
                    operations.barrier(backend)
                    assert len(entered) >= size * episode
                    operations.barrier(backend)

            _run(world, each)


# -- groups ----------------------------------------------------------------------------------------


def _groups_of_a_hybrid_layout_work_at_once(make_world: MakeWorld) -> None:
    """Two nodes of two ranks: parts within a node, means across the nodes."""
    gradients = [np.array([2.0, 4.0, 6.0, 8.0]), np.array([10.0, 20.0, 30.0, 40.0])]

    def each(backend: Backend) -> None:
        node, place = divmod(backend.rank, 2)
        within = SubBackend(backend, [2 * node, 2 * node + 1])
        across = SubBackend(backend, [place, place + 2])
        everyone = operations.all_reduce(backend, np.ones(4), async_op=True)
        part = operations.reduce_scatter(within, gradients[node], "mean")
        other = operations.all_gather(across, np.array([backend.rank]), async_op=True)
        operations.all_reduce(across, part, "mean")
        assert _is(part, [[6.0, 12.0], [18.0, 24.0]][place])
        assert _is(other.wait(), [place, place + 2])
        assert _is(everyone.wait(), np.full(4, 4.0))

    with make_world(4) as world:
        _run(world, each)


COLLECTIVE_CHECKS: tuple[Callable[[MakeWorld], None], ...] = (
    _arrays_go_from_rank_to_rank,
    _two_ranks_swap_arrays,
    _arrays_to_wrong_ranks_are_refused,
    _sums_and_means_reach_every_rank,
    _a_world_of_one_keeps_its_values,
    _every_op_is_the_same_everywhere,
    _an_op_that_means_nothing_is_refused,
    _the_root_alone_gets_the_result,
    _a_broadcast_comes_from_any_root,
    _a_root_outside_the_world_is_refused,
    _gathering_joins_along_dim_0,
    _scattering_cuts_dim_0,
    _parts_are_equal_or_refused,
    _every_rank_sends_to_every_rank,
    _wrong_counts_are_refused,
    _large_arrays_are_whole,
    _shapes_do_not_depend_on_the_number_of_ranks,
    _the_background_gives_the_same,
    _eight_operations_of_one_size_never_mix,
    _whoever_disagrees_all_are_told,
    _one_rank_that_fails_ends_it_for_all,
    _an_array_above_the_limit_harms_nobody,
    _who_does_not_come_is_named,
    _nobody_leaves_a_collective_barrier_early,
    _groups_of_a_hybrid_layout_work_at_once,
)
