"""Collectives over several hosts: numpy's results, the same bits on all ranks, few messages."""

from functools import partial

import numpy as np
import pytest
from sums import COLLECTIVES, bits, everywhere, joined, left_fold, part, same, values

import rankwire
from faults.sizes import QUICK, trials
from random_collectives import SIZES
from rankwire import SubBackend
from rankwire.collectives import selection
from rankwire.collectives.slots import Hosts
from rankwire.testing import tcp_world
from rankwire.transports.shared_memory import CAN_SHARE
from several_hosts import PLACES, processes_on, threads_on, works_by_hosts

pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="memory is shared on Linux and x86 only")

SLOW = pytest.mark.slow
RANDOM = "__import__('random_collectives').run(backend, seed, count, sizes)"
BY_HOSTS = "backend.operations.agreement.hosts is not None"
PATIENCE = 120.0
SMALL_SEGMENT = 1 << 18  # so that little is large
# Elements of one rank's part: nothing, little, what fits, and several MiB.
COUNTS = [0, 1, 3, 1000, 20_000, 300_000]


def folded(arrays, places, op="sum"):
    """Combine the ranks of each host, and then the hosts, as is documented."""
    groups = Hosts(places, 0).groups
    if op == "mean":
        total = folded(arrays, places, "sum")
        return total / total.dtype.type(len(arrays))
    return left_fold([left_fold([arrays[rank] for rank in group], op) for group in groups], op)


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", PLACES[:2] if QUICK else PLACES, ids=str)
@pytest.mark.parametrize(
    "dtype",
    ["float64", *(pytest.param(d, marks=SLOW) for d in ("int32", "complex64", "float16", "bool"))],
)
def test_every_operation_gives_what_numpy_gives(places, dtype):
    size = len(places)

    def run(backend):
        results = []
        for count in COUNTS:
            arrays = [values((size * (count // size),), dtype, rank) for rank in range(size)]
            for name, collective in COLLECTIVES.items():
                own = arrays[backend.rank].copy()
                result = collective.call(backend, own)
                results.append((name, count, None if result is None else np.array(result)))
        assert works_by_hosts(backend)
        return results

    with threads_on(places) as world:
        by_rank = everywhere(run, world)
    for rank, results in enumerate(by_rank):
        for name, count, result in results:
            arrays = [values((size * (count // size),), dtype, at) for at in range(size)]
            expected = COLLECTIVES[name].expected(arrays, rank)
            if "reduce" in name and dtype in ("float64", "complex64"):
                total = folded(arrays, places)
                is_root = name != "reduce" or rank == size - 1
                expected = total if is_root else None
                if name == "reduce_scatter":
                    expected = part(total, rank, size)
            assert same(result, expected), (name, count, rank)


@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize(
    "op", ["mean", "max", *(pytest.param(op, marks=SLOW) for op in ("product", "min"))]
)
def test_ops_have_the_same_bits_on_all_ranks_whatever_they_meet(places, op):
    """Also where contributions are infinite or no numbers."""
    size = len(places)
    arrays = [values((5000,), np.float32, rank) for rank in range(size)]
    arrays[1][::7] = np.nan
    arrays[size - 1][::5] = np.inf

    def run(backend):
        own = arrays[backend.rank]
        total = rankwire.all_reduce(backend, own.copy(), op)
        parts = rankwire.reduce_scatter(backend, own, op)
        at_root = rankwire.reduce(backend, own, 1, op)
        return total, parts, at_root

    with threads_on(places, segment_nbytes=SMALL_SEGMENT) as world:
        results = everywhere(run, world)
        assert all(works_by_hosts(backend) for backend in world)
    expected = folded(arrays, places, op)
    for total, _, _ in results:
        assert total.tobytes() == results[0][0].tobytes()
        assert bits(total) == bits(expected)
    assert bits(joined([parts for _, parts, _ in results])) == bits(expected)
    assert bits(results[1][2]) == bits(expected)


def test_ordered_sums_and_those_of_half_precision_are_in_rank_order():
    places = (0, 1, 0, 1)
    single = [values((3000,), np.float32, rank) for rank in range(4)]
    half = [values((3000,), np.float16, rank) for rank in range(4)]

    def run(backend):
        ordered = rankwire.all_reduce(backend, single[backend.rank].copy(), ordered=True)
        return ordered, rankwire.all_reduce(backend, half[backend.rank].copy())

    with threads_on(places) as world:
        for ordered, wide in everywhere(run, world):
            assert same(ordered, left_fold(single))
            assert same(wide, left_fold(half))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("nbytes", [32 << 20, 1 << 18])
@pytest.mark.parametrize("places", PLACES[:1] if QUICK else PLACES, ids=str)
def test_random_operations_in_groups_give_what_numpy_gives(places, nbytes):
    """In processes; with little memory most go in pieces, and some by messages."""
    count = trials(120, 20_000, quick=60)
    with processes_on(places, segment_nbytes=nbytes) as ranks:
        options = {"seed": len(places), "count": count, "sizes": SIZES}
        commands = [rank.start("eval", RANDOM, **options) for rank in ranks]
        assert sum(command.result(PATIENCE + count / 50) for command in commands) >= count
        assert all(rank.call("eval", BY_HOSTS) for rank in ranks)


def test_groups_and_what_is_in_the_background_work_by_hosts_too():
    def run(backend):
        members = [rank for rank in range(5) if rank != 1]
        results = []
        if backend.rank in members:
            group = SubBackend(backend, members)
            works = [
                rankwire.all_reduce(group, np.full(count, 1.0), async_op=True)
                for count in (3, 100_000)
            ]
            results = [work.wait()[-1] for work in works]
            assert works_by_hosts(group)
        return [*results, float(rankwire.all_reduce(backend, np.ones(2))[0])]

    with threads_on((0, 1, 2, 0, 2)) as world:
        others = [[4.0, 4.0, 5.0]] * 5
        assert everywhere(run, world) == [*others[:1], [5.0], *others[2:]]


def test_many_arrays_at_once():
    def run(backend):
        arrays = [np.full(count, backend.rank + 1.0) for count in (1, 0, 50_000, 7)]
        rankwire.all_reduce_coalesced(backend, arrays)
        return [set(array.tolist()) for array in arrays]

    with threads_on((0, 1, 0)) as world:
        assert everywhere(run, world) == [[{6.0}, set(), {6.0}, {6.0}]] * 3


def test_what_is_reduced_into_another_array_is_unchanged():
    def run(backend):
        own = np.full(90_000, backend.rank + 1.0)
        out = rankwire.all_reduce(backend, own, out=np.empty(90_000))
        return set(own.tolist()) == {backend.rank + 1.0} and set(out.tolist()) == {10.0}

    with threads_on((0, 0, 1, 1), segment_nbytes=SMALL_SEGMENT) as world:
        assert everywhere(run, world) == [True] * 4


# -- objects ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize("large", [0, 300, 6000, selection.SPREAD_UP_TO])
def test_objects_of_any_size_pass(places, large):
    """Those that do not fit are sent, as all ranks find alike: 6000 bytes fit on some hosts."""
    size = len(places)

    def run(backend):
        value = b"x" * (large if backend.rank == 1 else backend.rank)
        gathered = rankwire.all_gather_object(backend, value)
        assert [len(got) for got in gathered] == [large if at == 1 else at for at in range(size)]
        for root in (1, size - 1):
            got = rankwire.broadcast_object(backend, value, root)
            assert len(got) == (large if root == 1 else root)
            at_root = rankwire.gather_object(backend, value, root)
            assert at_root == (gathered if backend.rank == root else None)
        parts = rankwire.all_to_all_object(backend, [(backend.rank, dst) for dst in range(size)])
        assert parts == [(src, backend.rank) for src in range(size)]
        return works_by_hosts(backend)

    with threads_on(places, segment_nbytes=8 * 4096) as world:
        assert all(everywhere(run, world))


# -- messages --------------------------------------------------------------------------------------


def messages_of(world, run):
    """Return who sent to whom in an operation, and the bytes; after one by which they agree."""
    sent = []

    def each(backend):
        rankwire.barrier(backend)
        offer = backend.messages.offer

        def noting(dst, envelope, message, *args, **options):
            sent.append((backend.rank, dst, message[1]))
            return offer(dst, envelope, message, *args, **options)

        backend.messages.offer = noting
        run(backend)
        del backend.messages.offer

    everywhere(each, world)
    return sent


OPERATIONS = {
    "barrier": rankwire.barrier,
    "all_reduce": lambda b: rankwire.all_reduce(b, np.ones(1000)),
    "reduce": lambda b: rankwire.reduce(b, np.ones(1000), 3),
    "broadcast": lambda b: rankwire.broadcast(b, np.ones(1000), 3),
    "all_gather": lambda b: rankwire.all_gather(b, np.ones(1000)),
    "reduce_scatter": lambda b: rankwire.reduce_scatter(b, np.ones(1000)),
    "all_gather_object": lambda b: rankwire.all_gather_object(b, "x" * 1000),
    "broadcast_object": lambda b: rankwire.broadcast_object(b, "x" * 1000),
}
# Bytes that one host sends to the other, if 2 ranks of 8000 bytes are on each. Objects also need
# the sizes.
LIMITS = {"barrier": 0, "all_reduce": 8000, "reduce": 8000, "broadcast": 8000,
          "all_gather": 16_000, "reduce_scatter": 4000, "all_gather_object": 2100,
          "broadcast_object": 1100}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_one_rank_of_each_host_sends_to_the_other_what_its_host_has(name):
    places = (0, 1, 0, 1)
    with threads_on(places) as world:
        sent = messages_of(world, OPERATIONS[name])
        rooted = name in ("reduce", "broadcast")
        going = {0, 3} if rooted else {0, 1}
        assert {src for src, _, _ in sent} <= going
        assert {dst for _, dst, _ in sent} <= going
        for leader in going:
            assert sum(n for src, _, n in sent if src == leader) <= LIMITS[name]


def test_hosts_with_one_rank_each_have_nothing_to_agree_on():
    with threads_on((0, 1, 2)) as world:
        assert (
            everywhere(lambda b: float(rankwire.all_reduce(b, np.ones(3))[0]), world) == [3.0] * 3
        )
        assert not any(works_by_hosts(backend) for backend in world)


def test_without_room_for_pieces_parts_are_sent_by_all():
    """16 bytes of each of 5 ranks fit into a page, 8000 do not, and pieces would be too small."""

    def run(backend):
        for count in (2, 1000):
            gathered = rankwire.all_gather(backend, np.full(count, float(backend.rank)))
            assert gathered.tolist() == [float(at) for at in range(5) for _ in range(count)]
            part = rankwire.reduce_scatter(backend, np.arange(5.0 * count))
            assert (part == 5 * np.arange(5.0 * count).reshape(5, count)[backend.rank]).all()
        return works_by_hosts(backend)

    with threads_on((0, 0, 0, 1, 1), segment_nbytes=6 * 4096) as world:
        assert everywhere(run, world) == [True] * 5
        gather = partial(rankwire.all_gather, array=np.ones(1000))
        assert {src for src, _, _ in messages_of(world, gather)} == set(range(5))


def test_a_group_on_one_host_of_several_meets_in_memory_alone():
    def run(backend):
        group = SubBackend(backend, [0, 2] if backend.rank in (0, 2) else [1, 3])
        total = float(rankwire.all_reduce(group, np.ones(3))[0])
        return total, group.operations.agreement.slots is not None, works_by_hosts(group)

    with threads_on((0, 1, 0, 1)) as world:
        assert everywhere(run, world) == [(2.0, True, False)] * 4
    with tcp_world(4) as world:
        assert everywhere(run, world) == [(2.0, True, False)] * 4
