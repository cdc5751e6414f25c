"""Conformance checks of groups, and of collectives that overlap or do not match."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from rankwire.backends.base import Backend
from rankwire.backends.sub import SubBackend
from rankwire.clock import REAL_TIME
from rankwire.collectives import objects, operations
from rankwire.collectives.work import Work
from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    ConfigurationError,
    DeadlineExceededError,
    InvalidRankError,
    InvalidWorldSizeError,
    MembershipError,
    MessageTooLargeError,
    RankwireError,
)
from rankwire.testing.conformance.tools import (
    expect,
    has_values,
    on_every_rank,
    run_all,
    run_in_worlds,
)
from rankwire.testing.ranks import MakeWorld, in_parallel

_SOON = 5.0  # seconds for all ranks to learn of a mismatch, on a busy machine
_LARGE = 3 << 17  # elements of 8 bytes: more than fits one message


@on_every_rank(2, 3)
def large_arrays_are_whole(backend: Backend) -> None:
    size, rank = backend.world_size, backend.rank
    base = np.arange(_LARGE * size, dtype=np.float64)
    total = base * size + size * (size - 1) // 2
    mine = slice(rank * _LARGE, (rank + 1) * _LARGE)
    assert has_values(operations.all_reduce(backend, base + rank), total)
    assert has_values(operations.reduce_scatter(backend, base + rank), total[mine])
    assert has_values(operations.all_gather(backend, base[mine]), base)
    own = base.copy() if rank == size - 1 else np.zeros_like(base)
    assert has_values(operations.broadcast(backend, own, size - 1), base)
    assert has_values(operations.scatter(backend, base, size - 1), base[mine])
    received = operations.all_to_all(backend, base + rank)
    assert has_values(received, np.concatenate([base[mine] + src for src in range(size)]))
    at_root = operations.reduce(backend, base + rank, size - 1)
    joined = operations.gather(backend, base[mine], size - 1)
    if rank == size - 1:
        assert has_values(at_root, total)
        assert has_values(joined, base)


@on_every_rank()
def shapes_do_not_depend_on_the_number_of_ranks(backend: Backend) -> None:
    size = backend.world_size
    for shape in ((), (0,), (3, 0, 2), (1, 1)):
        ones = np.ones(shape, np.int32)
        assert has_values(operations.all_reduce(backend, ones.copy()), ones * size)
        assert has_values(operations.broadcast(backend, ones.copy()), ones)
        rows = (size * shape[0], *shape[1:]) if shape else (size,)
        assert has_values(operations.all_gather(backend, ones), np.ones(rows, np.int32))
    empty = np.empty((0, 4), np.float16)
    assert has_values(operations.reduce_scatter(backend, empty), empty)
    assert has_values(operations.all_to_all(backend, empty), empty)
    assert has_values(operations.scatter(backend, empty), empty)


@on_every_rank()
def the_background_gives_the_same(backend: Backend) -> None:
    size, rank = backend.world_size, backend.rank
    gathering = operations.all_gather(backend, np.array([rank, rank + 10]), async_op=True)
    reducing = operations.reduce_scatter(
        backend, np.arange(1.0, 2 * size + 1), "mean", async_op=True
    )
    assert isinstance(gathering, Work)
    assert "all_gather" in repr(gathering)
    assert "reduce_scatter" in reducing.description
    assert has_values(reducing.wait(timeout=10.0), [2.0 * rank + 1, 2.0 * rank + 2])
    assert has_values(gathering.wait(), np.concatenate([[r, r + 10] for r in range(size)]))
    assert gathering.done()
    assert gathering.exception() is None
    assert gathering.result() is gathering.wait()
    operations.broadcast(backend, np.ones(2), async_op=True)  # it completes although it was dropped
    operations.barrier(backend, async_op=True).wait()
    assert objects.all_gather_object(backend, rank, async_op=True).wait() == list(range(size))


@on_every_rank(2, 4)
def eight_operations_of_one_size_never_mix(backend: Backend) -> None:
    size, rank = backend.world_size, backend.rank
    arrays = [np.full(1000, 100.0 * number + rank) for number in range(8)]
    outstanding = [
        operations.all_reduce(backend, array, async_op=True)
        if number % 2
        else operations.all_gather(backend, array, async_op=True)
        for number, array in enumerate(arrays)
    ]
    assert has_values(operations.all_reduce(backend, np.ones(1000)), np.full(1000, float(size)))
    # Every rank waits in a different order.
    for number in np.random.default_rng(rank).permutation(8):
        if number % 2:
            expected = np.full(1000, 100.0 * number * size + size * (size - 1) / 2)
        else:
            expected = np.repeat(100.0 * number + np.arange(size), 1000)
        assert has_values(outstanding[number].wait(), expected)


def all_ranks_learn_of_a_mismatch(make_world: MakeWorld) -> None:
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
        begin = REAL_TIME.now()
        error = expect(CollectiveMismatchError, partial(call, backend, case))
        assert REAL_TIME.now() - begin < _SOON
        assert error.rank == backend.rank

    for case in ("shape", "dtype", "op", "root", "kind", "empty on one"):
        with make_world(3) as world:
            run_all(world, partial(each, case=case))


def one_rank_that_fails_ends_it_for_all(make_world: MakeWorld) -> None:
    def each(backend: Backend) -> RankwireError:
        wrong = np.empty(3) if backend.rank == 1 else None
        rows, counts = np.ones(2 * backend.world_size), [2] * backend.world_size
        call = partial(operations.all_to_all, backend, rows, send_counts=counts, out=wrong)
        return expect(RankwireError, call)

    for size in (2, 4):
        with make_world(size) as world:
            begin = REAL_TIME.now()
            errors = run_all(world, each)
            assert REAL_TIME.now() - begin < _SOON
            assert isinstance(errors.pop(1), ConfigurationError)
            for error in errors:
                assert isinstance(error, CollectiveAbortedError)
                assert error.peer == 1


def an_array_above_the_limit_harms_nobody(make_world: MakeWorld) -> None:
    def each(backend: Backend, call: Callable[..., Any]) -> None:
        error = expect(RankwireError, partial(call, backend, np.ones(300_000)))
        assert isinstance(error, MessageTooLargeError | CollectiveAbortedError)
        assert "limit" in error.message
        backend.barrier()
        assert has_values(operations.all_reduce(backend, np.ones(2)), [3.0, 3.0])

    for call in (operations.all_gather, operations.broadcast, operations.scatter):
        with make_world(3, max_message_nbytes=100_000) as world:
            run_all(world, partial(each, call=call))


def who_does_not_come_is_named(make_world: MakeWorld) -> None:
    def each(backend: Backend) -> RankwireError | None:
        if backend.rank == 2:
            return None
        call = partial(operations.all_reduce, backend, np.ones(3), timeout=1.5)
        return expect(RankwireError, call)

    with make_world(4) as world:
        errors = [error for error in run_all(world, each) if error is not None]
        # The first rank to time out notifies the others, and their errors say so.
        late = [error for error in errors if isinstance(error, DeadlineExceededError)]
        assert late
        assert all(error.waiting_for == [2] for error in late)
        assert all("waiting for rank 2" in error.message for error in errors)


def groups_of_a_hybrid_layout_work_at_once(make_world: MakeWorld) -> None:
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
        assert has_values(part, [[6.0, 12.0], [18.0, 24.0]][place])
        assert has_values(other.wait(), [place, place + 2])
        assert has_values(everyone.wait(), np.full(4, 4.0))

    run_in_worlds(make_world, each, (4,))


# -- groups ----------------------------------------------------------------------------------------


def _groups(world: Sequence[Backend], members: Sequence[int]) -> list[SubBackend]:
    return in_parallel([partial(SubBackend, world[rank], members) for rank in sorted(set(members))])


def a_group_has_ranks_of_its_own(make_world: MakeWorld) -> None:
    with make_world(4) as world:
        first, second = _groups(world, [1, 3])
        assert (first.rank, first.world_size) == (0, 2)
        assert (second.rank, second.world_size) == (1, 2)
        assert first.parent is world[1]


def members_are_sorted_and_counted_once(make_world: MakeWorld) -> None:
    with make_world(4) as world:
        group = _groups(world, [3, 2, 0, 2, 3])[1]
        assert (list(group.members), group.rank, group.world_size) == ([0, 2, 3], 1, 3)


def wrong_members_are_refused(make_world: MakeWorld) -> None:
    with make_world(4) as world:
        empty = expect(InvalidWorldSizeError, partial(SubBackend, world[0], []))
        assert empty.world_size == 0
        outside = expect(InvalidRankError, partial(SubBackend, world[0], [0, 9]))
        assert (outside.invalid_rank, outside.world_size) == (9, 4)
        stranger = expect(InvalidRankError, partial(SubBackend, world[0], [1, 3]))
        assert stranger.invalid_rank == 0


def ranks_are_translated_both_ways(make_world: MakeWorld) -> None:
    with make_world(4) as world:
        group, _ = _groups(world, [0, 2])
        assert [group.to_global(rank) for rank in (0, 1)] == [0, 2]
        assert [group.to_local(rank) for rank in (0, 1, 2, 3)] == [0, None, 1, None]
        for wrong in (2, -1):
            expect(InvalidRankError, partial(group.to_global, wrong))


def messages_go_through_the_parent(make_world: MakeWorld) -> None:
    with make_world(4) as world:
        first, second = _groups(world, [0, 2])
        first.send(bytes([9, 8, 7]), 1)
        assert second.recv(0) == bytes([9, 8, 7])
        expect(InvalidRankError, partial(first.send, b"x", 2))


def a_groups_barrier_is_its_own(make_world: MakeWorld) -> None:
    with make_world(6) as world:
        groups = _groups(world, [0, 2, 4])
        in_parallel([group.barrier for group in groups])
        late = expect(DeadlineExceededError, partial(groups[0].barrier, timeout=0.1))
        assert late.waiting_for == [1, 2]


def overlapping_groups_and_their_parent_never_mix(make_world: MakeWorld) -> None:
    with make_world(3) as world:
        groups: dict[str, Sequence[Backend]] = {
            "world": world,
            "low": _groups(world, [0, 1]),
            "high": _groups(world, [1, 2]),
            "everyone": _groups(world, [0, 1, 2]),
        }

        def talk(backend: Backend, name: str) -> None:
            right = (backend.rank + 1) % backend.world_size
            left = (backend.rank - 1) % backend.world_size
            for number in range(30):
                backend.send(f"{name} {number}".encode(), right)
                backend.barrier()
                assert backend.recv(left) == f"{name} {number}".encode()

        in_parallel(
            [partial(talk, member, name) for name, group in groups.items() for member in group]
        )


def members_that_disagree_are_told(make_world: MakeWorld) -> None:
    with make_world(3) as world:

        def disagree(rank: int, members: list[int]) -> MembershipError:
            return expect(MembershipError, partial(SubBackend, world[rank], members, timeout=5.0))

        errors = in_parallel([partial(disagree, 0, [0, 1]), partial(disagree, 1, [0, 1, 2])])
        assert all("[0, 1]" in error.message for error in errors)


def a_member_that_does_not_come_is_named(make_world: MakeWorld) -> None:
    with make_world(3) as world:
        late = expect(DeadlineExceededError, partial(SubBackend, world[0], [0, 1, 2], timeout=0.2))
        assert late.waiting_for == [1, 2]


def leaving_a_group_leaves_the_parent_alone(make_world: MakeWorld) -> None:
    with make_world(2) as world:
        groups = _groups(world, [0, 1])
        groups[0].close()
        expect(ChannelClosedError, partial(groups[0].send, b"x", 1))
        world[0].send(b"still here", 1)
        assert world[1].recv(0) == b"still here"
