"""The collectives on arrays, as users call them, against numpy."""

import math
import random
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from sums import (
    COLLECTIVES,
    DTYPES,
    CountingBackend,
    bits,
    counting_world,
    left_fold,
    on_all,
    ops_of,
    part,
    parts_for,
    run,
    same,
    values,
)

import rankwire
from faults.sizes import examples
from rankwire.backends.sub import SubBackend
from rankwire.collectives import selection
from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    ConfigurationError,
    InvalidRankError,
    UnsupportedTypeError,
)
from rankwire.testing import in_parallel, run_ranks, simulated_world, tcp_world

NAMES = list(COLLECTIVES)
IN_PLACE = [name for name in NAMES if COLLECTIVES[name].in_place]
ELSEWHERE = [name for name in NAMES if not COLLECTIVES[name].in_place]
WITH_OUT = [name for name in NAMES if name != "broadcast"]

GROUPS = [[0, 1], [1, 2], [0, 2]]

# Over sockets in three ways: reading each other's memory, Unix sockets alone, TCP.
TRANSPORTS = {
    "auto": {"backend": "auto"},
    "unix without single copy": {"backend": "unix", "single_copy": False},
    "tcp": {"backend": "tcp"},
}


def arrays_of(size, shape=(4,), dtype=np.float64):
    """One array a rank, of shape (N * k, ...)."""
    return [values((size * shape[0], *shape[1:]), dtype, seed=rank) for rank in range(size)]


def check(name, arrays, **options):
    """Run an operation on all ranks of a new world, and compare."""
    collective = COLLECTIVES[name]

    def each(backend):
        return collective.call(backend, arrays[backend.rank].copy())

    for rank, result in enumerate(run(len(arrays), each, **options)):
        assert same(result, collective.expected(arrays, rank)), (name, rank)


# -- against numpy ---------------------------------------------------------------------------------


@given(st.data(), st.sampled_from(NAMES), st.integers(1, 5), st.sampled_from([*DTYPES, ">i4"]))
@settings(max_examples=examples(120), suppress_health_check=[HealthCheck.filter_too_much])
def test_any_shape_and_dtype(data, name, size, dtype):
    rows = size * data.draw(st.integers(0, 3))
    shape = (rows, *data.draw(npst.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=4)))
    elements = npst.from_dtype(np.dtype(dtype), allow_nan=False)
    arrays = [data.draw(npst.arrays(dtype, shape, elements=elements)) for _ in range(size)]
    check(name, arrays)


@given(st.data(), st.integers(1, 5), st.sampled_from(DTYPES))
@settings(max_examples=examples(60))
def test_any_op_and_root(data, size, dtype):
    op = data.draw(st.sampled_from(ops_of(dtype)))
    root = data.draw(st.integers(0, size - 1))
    arrays = [values((2 * size, 2), dtype, seed=10 * rank) for rank in range(size)]
    total = left_fold(arrays, op)

    def each(backend):
        mine = arrays[backend.rank]
        reduced = rankwire.all_reduce(backend, mine.copy(), op)
        at_root = rankwire.reduce(backend, mine, root, op)
        scattered = rankwire.reduce_scatter(backend, mine, op)
        spread = rankwire.broadcast(backend, mine.copy(), root)
        cut = rankwire.scatter(backend, mine, root)
        joined = rankwire.gather(backend, mine, root)
        return reduced, at_root, scattered, spread, cut, joined

    for rank, results in enumerate(run(size, each)):
        reduced, at_root, scattered, spread, cut, joined = results
        assert same(reduced, total)
        assert same(at_root, total if rank == root else None)
        assert same(scattered, part(total, rank, size))
        assert same(spread, arrays[root])
        assert same(cut, part(arrays[root], rank, size))
        assert same(joined, np.concatenate(arrays) if rank == root else None)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_arrays_without_dimensions(size):
    def each(backend):
        own = np.array(backend.rank + 1.0)
        gathered = rankwire.all_gather(backend, own)
        at_root = rankwire.gather(backend, own, size - 1)
        total = rankwire.reduce(backend, own, size - 1)
        assert rankwire.all_reduce(backend, own) is own
        spread = rankwire.broadcast(backend, np.array(backend.rank), size - 1)
        return gathered, at_root, total, own, spread

    total = size * (size + 1) / 2
    for rank, (gathered, at_root, at_last, own, spread) in enumerate(run(size, each)):
        everyone = np.arange(1.0, size + 1)
        is_root = rank == size - 1
        assert same(gathered, everyone)
        assert same(at_root, everyone if is_root else None)
        assert same(at_last, np.array(total) if is_root else None)
        assert same(own, np.array(total))
        assert same(spread, np.array(size - 1))


@pytest.mark.parametrize("dtype", ["U3", "S5", "M8[s]", "m8[ms]", "?"])
def test_what_is_no_number_is_only_moved(dtype):
    arrays = [np.arange(12).reshape(6, 2).astype("m8[s]" if dtype == "m8[ms]" else "i8")] * 3
    arrays = [array.astype(dtype) for array in arrays]
    for name in ("broadcast", "all_gather", "gather", "scatter", "all_to_all", "uneven all_to_all"):
        check(name, arrays)


# -- memory ----------------------------------------------------------------------------------------


def in_layout(array, layout):
    """Return an array of the same elements that lies differently in memory."""
    if layout == "Fortran":
        return np.asfortranarray(array)
    if layout == "big-endian":
        return array.astype(array.dtype.newbyteorder(">"))
    if layout == "unaligned":
        memory = np.empty(array.nbytes + 1, np.uint8)
        result = memory[1:].view(array.dtype).reshape(array.shape)
    else:
        step = {"strided": 2, "reversed": -1}[layout]
        memory = np.empty([abs(step) * extent for extent in array.shape], array.dtype)
        result = memory[::step, ::step]
    result[...] = array
    return result


@pytest.mark.parametrize("layout", ["Fortran", "strided", "reversed", "unaligned", "big-endian"])
@pytest.mark.parametrize("rows", [2, 3000], ids=["small", "large"])
def test_arrays_may_lie_in_memory_as_they_like(layout, rows):
    arrays = arrays_of(3, (rows, 8))
    laid_out = [in_layout(array, layout) for array in arrays]

    def each(backend):
        results = {}
        for name, collective in COLLECTIVES.items():
            mine = in_layout(arrays[backend.rank], layout)
            results[name] = result = collective.call(backend, mine)
            if collective.in_place:
                assert result is mine
            else:
                assert same(mine, laid_out[backend.rank]), f"{name} has changed its input"
        return results

    for rank, results in enumerate(run(3, each, backend="auto")):
        for name, result in results.items():
            expected = COLLECTIVES[name].expected(arrays, rank)
            if layout == "big-endian" and expected is not None:
                expected = expected.astype(">f8")
            assert same(result, expected), name


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_is_in_place(name):
    arrays = arrays_of(3)

    def each(backend):
        mine = arrays[backend.rank].copy()
        assert COLLECTIVES[name].call(backend, mine) is mine
        return mine

    for rank, result in enumerate(run(3, each)):
        assert same(result, COLLECTIVES[name].expected(arrays, rank))


@pytest.mark.parametrize("count", [4, 1 << 18], ids=["small", "large"])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_inputs_are_unchanged_may_be_read_only_and_results_have_memory_of_their_own(name, count):
    arrays = arrays_of(3, (count,))

    def each(backend):
        mine = arrays[backend.rank].copy()
        mine.flags.writeable = False
        result = COLLECTIVES[name].call(backend, mine)
        if result is not None:
            assert not np.shares_memory(result, mine)
            assert result.flags.writeable
            result[...] = -1  # which nobody else may see
        rankwire.barrier(backend)
        assert same(mine, arrays[backend.rank])

    run(3, each, backend="auto")


def test_a_broadcast_only_reads_at_the_root(monkeypatch):
    monkeypatch.setattr(CountingBackend, "hosts", property(lambda self: range(self.world_size)))
    for count in (3, 1 << 17):  # along a tree, and between hosts by scattering

        def each(backend, count=count):
            mine = np.full(count, float(backend.rank))
            mine.flags.writeable = backend.rank != 1
            return rankwire.broadcast(backend, mine, 1)

        with counting_world(3) as world:
            for result in on_all(world, each):
                assert same(result, np.ones(count))


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_cannot_be_written_is_refused_in_place(name):
    frozen = np.ones(2)
    frozen.flags.writeable = False
    with counting_world(2) as world:
        with pytest.raises(ConfigurationError, match="read-only"):
            COLLECTIVES[name].call(world[0], frozen)
        assert not world[0].sent
        with pytest.raises(ConfigurationError, match="read-only"):
            rankwire.all_reduce_coalesced(world[0], [np.ones(2), frozen])


# -- out -------------------------------------------------------------------------------------------


def call_into(name, backend, array, out):
    """Pass ``out`` where the operation has a result."""
    if name in ("reduce", "gather") and backend.rank != backend.world_size - 1:
        out = None
    return COLLECTIVES[name].call(backend, array, out=out), out


@pytest.mark.parametrize("layout", ["C", "Fortran", "strided"])
@pytest.mark.parametrize("name", WITH_OUT)
def test_results_go_where_they_are_wanted(name, layout):
    arrays = arrays_of(3, (4, 2))

    def each(backend):
        mine = arrays[backend.rank].copy()
        expected = COLLECTIVES[name].expected(arrays, backend.rank)
        wanted = np.full_like(expected if expected is not None else mine, -1.0)
        result, out = call_into(
            name, backend, mine, wanted if layout == "C" else in_layout(wanted, layout)
        )
        assert result is out
        assert same(mine, arrays[backend.rank])
        return result

    for rank, result in enumerate(run(3, each)):
        assert same(result, COLLECTIVES[name].expected(arrays, rank))


@pytest.mark.parametrize("wrong", ["dtype", "byte order", "shape", "transposed", "read-only"])
@pytest.mark.parametrize("name", WITH_OUT)
def test_an_out_that_does_not_fit_is_refused_and_nothing_is_sent(name, wrong):
    size = 2
    arrays = arrays_of(size, (2, 3))

    def each(backend):
        expected = COLLECTIVES[name].expected(arrays, backend.rank)
        if expected is None:
            return  # only the root has a result, and an error is its own
        out = {
            "dtype": expected.astype(np.float32),
            "byte order": expected.astype(">f8"),
            "shape": np.empty((len(expected) + 1, 3)),
            "transposed": np.empty(expected.shape[::-1]) if len(expected) != 3 else np.empty(1),
            "read-only": expected.copy(),
        }[wrong]
        out.flags.writeable = wrong != "read-only"
        before = out.copy()
        with pytest.raises((ConfigurationError, CollectiveAbortedError), match="out is") as caught:
            COLLECTIVES[name].call(backend, arrays[backend.rank], out=out, timeout=20.0)
        # Where counts are exchanged first, the other one's refusal may be heard before one's own.
        assert isinstance(caught.value, ConfigurationError) or name == "uneven all_to_all"
        assert same(out, before)

    with counting_world(1) as (alone,):  # of one rank, all errors are local
        arrays = arrays_of(1, (2, 3))
        each(alone)
    if name in ("scatter", "uneven all_to_all") and wrong != "read-only":
        return  # what fits is known only when the others have said what they send
    if name in ("reduce", "gather"):
        return  # the other rank would wait
    arrays = arrays_of(size, (2, 3))
    with counting_world(size) as world:
        on_all(world, each)
        if name != "uneven all_to_all":
            assert not any(backend.sent for backend in world)


@pytest.mark.parametrize("name", WITH_OUT)
def test_an_out_that_is_no_array_is_refused(name):
    with counting_world(2) as world:
        with pytest.raises(UnsupportedTypeError) as caught:
            COLLECTIVES[name].call(world[1], np.ones(4), out=[0, 0, 0, 0])
        assert caught.value.path in ("out", "out[0]")
        assert not world[1].sent


@pytest.mark.parametrize("count", [4, 1 << 17], ids=["small", "large"])
@pytest.mark.parametrize("name", ["all_reduce", "reduce", "all_to_all"])
def test_out_may_be_the_array_itself(name, count):
    arrays = arrays_of(3, (count,))

    def each(backend):
        mine = arrays[backend.rank].copy()
        return call_into(name, backend, mine, mine)[0]

    for rank, result in enumerate(run(3, each, backend="auto")):
        assert same(result, COLLECTIVES[name].expected(arrays, rank))


@pytest.mark.parametrize("count", [4, 1 << 17], ids=["small", "large"])
def test_parts_may_lie_where_they_end_up(count):
    """The usual way to save memory: the own part is a part of the whole."""
    arrays = arrays_of(3, (count,))

    def each(backend):
        rank = backend.rank
        whole = arrays[rank].copy()
        scattered = rankwire.reduce_scatter(backend, whole, out=part(whole, rank, 3))
        assert same(scattered, part(left_fold(arrays), rank, 3))
        gathered = rankwire.all_gather(backend, part(whole, rank, 3), out=whole)
        assert same(gathered, left_fold(arrays))
        whole = arrays[rank].copy()
        rankwire.gather(backend, part(whole, rank, 3), 1, out=whole if rank == 1 else None)
        if rank == 1:
            assert same(whole, np.concatenate([part(arrays[r], r, 3) for r in range(3)]))
        whole = arrays[1].copy()
        mine = rankwire.scatter(backend, whole, 1, out=part(whole, rank, 3))
        assert same(mine, part(arrays[1], rank, 3))

    run(3, each, backend="auto")


def overlapping(name, arrays, backend):
    """Give an operation an ``out`` that lies in its array, or the other way round, elsewhere."""
    rank, mine = backend.rank, arrays[backend.rank].copy()
    if name == "all_reduce":
        memory = np.concatenate([mine, [0.0]])
        return rankwire.all_reduce(backend, memory[:-1], out=memory[1:])
    if name == "reduce_scatter":
        return rankwire.reduce_scatter(backend, mine, out=mine[: len(mine) // 3])
    if name == "strided reduce_scatter":
        return rankwire.reduce_scatter(backend, mine, out=mine[::3])
    if name == "strided all_gather":
        memory = np.zeros(6 * len(mine))
        memory[: len(mine)] = mine
        return rankwire.all_gather(backend, memory[: len(mine)], out=memory[::2])
    if name == "strided all_to_all":
        memory = np.zeros(2 * len(mine))
        memory[: len(mine)] = mine
        return rankwire.all_to_all(backend, memory[: len(mine)], out=memory[::2])
    if name == "all_gather":
        whole = np.zeros(3 * len(mine))
        whole[: len(mine)] = mine
        return rankwire.all_gather(backend, whole[: len(mine)], out=whole)
    if name == "gather":
        whole = np.zeros(3 * len(mine))
        whole[: len(mine)] = mine
        out = whole if rank == 2 else None
        return rankwire.gather(backend, whole[: len(mine)], 2, out=out)
    assert name == "scatter"
    return rankwire.scatter(backend, mine, 2, out=mine[: len(mine) // 3])


@pytest.mark.parametrize("count", [4, 1 << 18], ids=["small", "large"])
@pytest.mark.parametrize(
    "name",
    [
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "gather",
        "scatter",
        "strided reduce_scatter",
        "strided all_gather",
        "strided all_to_all",
    ],
)
def test_an_out_that_overlaps_is_right_or_refused(name, count):
    """But never wrong without a word."""
    arrays = arrays_of(3, (count,))

    def each(backend):
        for _ in range(3):  # what goes wrong depends on who is faster
            try:
                result = overlapping(name, arrays, backend)
            except ConfigurationError:
                result = "refused"
            backend.barrier()
            yield result

    results = run(3, lambda backend: list(each(backend)), backend="auto")
    for rank, of_rank in enumerate(results):
        for result in of_rank:
            if not isinstance(result, str):
                expected = COLLECTIVES[name.removeprefix("strided ")].expected(arrays, rank)
                assert same(result, expected), rank


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMES])
@pytest.mark.parametrize("value", [[1, 2], 3.0, None, np.array([object()])])
def test_what_is_no_array_is_refused(name, value):
    with counting_world(1) as (alone,):
        if name == "uneven all_to_all":
            call = partial(rankwire.all_to_all, alone, value, send_counts=[2])
        else:
            call = partial(COLLECTIVES[name].call, alone, value)
        with pytest.raises(UnsupportedTypeError) as caught:
            call()
        assert caught.value.path in ("array", "array[0]")
        assert caught.value.rank == 0
        assert caught.value.op in (name, "all_to_all")


@pytest.mark.parametrize("root", [-1, 3, 100, 1.5, None, "0"])
@pytest.mark.parametrize("call", ["reduce", "broadcast", "gather", "scatter"])
def test_a_root_that_is_not_there_is_refused(call, root):
    with counting_world(3) as world:
        for backend in world:
            with pytest.raises(InvalidRankError) as caught:
                getattr(rankwire, call)(backend, np.ones(3), root)
            assert caught.value.invalid_rank == root
            assert caught.value.op == call
            assert not backend.sent


@pytest.mark.parametrize("shape", [(), (1,), (4, 3), (5,)])
@pytest.mark.parametrize("call", ["reduce_scatter", "all_to_all", "scatter"])
def test_what_cannot_be_cut_into_equal_parts_is_refused(call, shape):
    for size in (1, 3):
        if size == 1 and shape:
            continue
        with counting_world(size) as (first, *_):
            with pytest.raises(ConfigurationError, match="not evenly divisible") as caught:
                getattr(rankwire, call)(first, np.ones(shape))
            assert str(shape) in str(caught.value)
            assert not first.sent


@pytest.mark.parametrize("call", ["all_reduce", "reduce", "reduce_scatter", "all_reduce_coalesced"])
def test_an_op_that_means_nothing_is_refused_before_anything_is_sent(call):
    with counting_world(2) as (first, _):
        for op, dtype in [("mean", "i4"), ("median", "f4"), ("max", "c8"), ("bitwise_or", "f8")]:
            array = np.ones(2, dtype)
            argument = [array] if call == "all_reduce_coalesced" else array
            with pytest.raises(ConfigurationError, match=op):
                getattr(rankwire, call)(first, argument, op=op)
        assert not first.sent


def test_a_root_may_be_any_whole_number_and_there_may_be_no_time_limit():
    def each(backend):
        root = [1, np.int64(1), np.uint8(1)][backend.rank]
        return rankwire.broadcast(backend, np.array([backend.rank]), root, timeout=math.inf)

    assert run(3, each) == [[1]] * 3


def test_a_time_limit_below_zero_is_refused():
    with simulated_world(1) as (alone,):
        for seconds in (-1.0, float("nan")):
            with pytest.raises(ConfigurationError):
                rankwire.all_reduce(alone, np.ones(2), timeout=seconds)


# -- over sockets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("options", TRANSPORTS.values(), ids=TRANSPORTS.keys())
def test_large_arrays_over_sockets(options, size):
    """More than 1 MiB for every part, so that all of it is lent, where that is possible."""
    arrays = arrays_of(size, (150_000,))
    small = [values(300_001, np.float16, seed=rank) for rank in range(size)]

    def each(backend):
        for name, collective in COLLECTIVES.items():
            result = collective.call(backend, arrays[backend.rank].copy())
            assert same(result, collective.expected(arrays, backend.rank)), name
        total = rankwire.all_reduce(backend, small[backend.rank].copy(), "mean")
        assert same(total, left_fold(small, "mean"))

    run(size, each, **options)


def be_one_of_several_processes(backend):
    arrays = arrays_of(backend.world_size, (150_000,))
    assert all(
        backend.link_to(rank).single_copy
        for rank in range(backend.world_size)
        if rank != backend.rank
    )
    wrong = []
    for name, collective in COLLECTIVES.items():
        mine = arrays[backend.rank].copy()
        work = collective.call(backend, arrays[backend.rank].copy(), async_op=True)
        results = collective.call(backend, mine), work.wait()
        expected = collective.expected(arrays, backend.rank)
        wrong += [name for result in results if not same(result, expected)]
    return wrong


@pytest.mark.slow
def test_large_arrays_between_processes():
    assert run_ranks(3, be_one_of_several_processes, backend="auto", processes=True) == [[]] * 3


@pytest.mark.parametrize("options", TRANSPORTS.values(), ids=TRANSPORTS.keys())
def test_the_same_again_and_again_in_any_size(options):
    sizes = [0, 1, 1000, 40_000, 70_000, 3]

    def each(backend):
        for turn, count in enumerate(sizes * 3):
            name = NAMES[turn % len(NAMES)]
            arrays = arrays_of(3, (count,), np.float32)
            result = COLLECTIVES[name].call(backend, arrays[backend.rank].copy())
            assert same(result, COLLECTIVES[name].expected(arrays, backend.rank)), (name, count)

    run(3, each, **options)


# -- the same on all ranks -------------------------------------------------------------------------

# From nothing through every limit of the selection, in bytes.
EVERY_SIZE = [0, 8, 4096, *(limit + extra for limit in (16 << 10, 256 << 10) for extra in (0, 8))]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_results_are_the_same_bit_for_bit_on_all_ranks(size):
    def each(backend):
        return [
            bits(
                rankwire.all_reduce(backend, values(nbytes // dtype.itemsize, dtype, backend.rank))
            )
            for nbytes in EVERY_SIZE
            for dtype in map(np.dtype, ("f4", "f8", "c8", "f2"))
        ]

    results = run(size, each)
    assert all(result == results[0] for result in results)


def test_results_of_a_ring_are_the_same_too(monkeypatch):
    monkeypatch.setattr(CountingBackend, "hosts", property(lambda self: range(self.world_size)))
    monkeypatch.setattr(selection, "RING_FROM_RANKS", 3)
    arrays = arrays_of(4, (20_000,))

    def each(backend):
        free = rankwire.all_reduce(backend, arrays[backend.rank].copy())
        ordered = rankwire.all_reduce(backend, arrays[backend.rank].copy(), ordered=True)
        return free, ordered, rankwire.all_reduce(backend, arrays[backend.rank].copy(), "max")

    with counting_world(4) as world:
        results = on_all(world, each)
    for free, ordered, most in results:
        assert same(free, results[0][0])
        assert not same(free, left_fold(arrays))
        assert same(ordered, left_fold(arrays))
        assert same(most, left_fold(arrays, "max"))


@pytest.mark.parametrize("size", [1, 2, 5, 8, 9])
def test_ordered_is_the_order_of_the_ranks_for_every_size(size):
    def each(backend):
        return [
            rankwire.all_reduce(backend, values(nbytes // 8, "f8", backend.rank), ordered=True)
            for nbytes in EVERY_SIZE
        ]

    for results in run(size, each):
        for nbytes, result in zip(EVERY_SIZE, results, strict=True):
            arrays = [values(nbytes // 8, "f8", rank) for rank in range(size)]
            assert same(result, left_fold(arrays))


def test_ordered_and_not_ordered_are_different_operations():
    def each(backend):
        with pytest.raises(CollectiveMismatchError):
            rankwire.all_reduce(backend, np.ones(2), ordered=backend.rank == 1)

    run(2, each)


@pytest.mark.parametrize("size", [1, 2])
def test_a_backend_that_is_closed_has_no_collectives(size):
    with simulated_world(size) as (first, *_):
        first.close()
        for collective in COLLECTIVES.values():
            with pytest.raises(ChannelClosedError):
                collective.call(first, np.ones(2))


# -- several at once -------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [10, 50_000], ids=["small", "large"])
@pytest.mark.parametrize("options", [{"backend": "simulated"}, *TRANSPORTS.values()], ids=str)
def test_eight_of_one_size_outstanding_waited_for_in_any_order(options, count):
    arrays = [arrays_of(3, (count,)) for _ in range(8)]
    for number, of_all in enumerate(arrays):
        for array in of_all:
            array += number

    def each(backend):
        shuffled = random.Random(backend.rank)  # every rank has an order of its own
        begun = []
        for number, of_all in enumerate(arrays):
            name = NAMES[number % len(NAMES)]
            begun.append(
                COLLECTIVES[name].call(backend, of_all[backend.rank].copy(), async_op=True)
            )
            if number % 3 == 1:  # with one that is not in the background in between
                total = rankwire.all_reduce(backend, of_all[backend.rank].copy())
                assert same(total, left_fold(of_all))
        for number in shuffled.sample(range(8), 8):
            name = NAMES[number % len(NAMES)]
            expected = COLLECTIVES[name].expected(arrays[number], backend.rank)
            assert same(begun[number].wait(), expected), name

    run(3, each, **options)


@pytest.mark.parametrize("options", [{"backend": "simulated"}, *TRANSPORTS.values()], ids=str)
def test_any_program_of_collectives_on_overlapping_groups(options):
    """All ranks run the same random program; each waits for what is outstanding as it likes."""

    def each(backend):
        program, own_taste = random.Random(1), random.Random(backend.rank)
        groups = [backend, *(SubBackend(backend, m) for m in GROUPS if backend.rank in m)]
        outstanding = []

        def finish():
            result, name, arrays, rank = outstanding.pop(own_taste.randrange(len(outstanding)))
            assert same(result.wait(), COLLECTIVES[name].expected(arrays, rank)), name

        for _ in range(80):
            members = program.choice([[0, 1, 2], *GROUPS])
            name, dtype = program.choice(NAMES), program.choice(["f8", "f2", "i4", "c8"])
            count, seed = program.choice([0, 1, 100, 30_000]), program.randrange(1000)
            in_background = program.random() < 0.5
            if backend.rank not in members:
                continue
            group = groups[0] if len(members) == 3 else groups[1 + mine(backend).index(members)]
            size, rank = group.world_size, group.rank
            arrays = [values((size * count,), dtype, seed + r) for r in range(size)]
            result = COLLECTIVES[name].call(group, arrays[rank].copy(), async_op=in_background)
            if in_background:
                outstanding.append((result, name, arrays, rank))
            else:
                assert same(result, COLLECTIVES[name].expected(arrays, rank)), name
            while len(outstanding) > 6 or (outstanding and own_taste.random() < 0.3):
                finish()
        while outstanding:
            finish()

    def mine(backend):
        return [members for members in GROUPS if backend.rank in members]

    run(3, each, **options)


def test_gradients_are_not_swapped():
    """The same operation on eight buckets of one size, as a training step does it."""

    def each(backend):
        buckets = [np.full(1000, 10.0**number * (backend.rank + 1)) for number in range(8)]
        works = [rankwire.all_reduce(backend, b, "mean", async_op=True) for b in buckets]
        for work, bucket in zip(works, buckets, strict=True):
            assert work.wait() is bucket
        return [bucket[0] for bucket in buckets]

    assert run(4, each) == [[2.5 * 10.0**number for number in range(8)]] * 4


@pytest.mark.parametrize("waits_first", [0, 1])
def test_a_rank_may_wait_before_it_goes_on_and_another_one_not(waits_first):
    """Also when what one rank has sent ahead fills its queue to the other."""

    def each(backend):
        begin = partial(rankwire.all_reduce, backend, op="max", timeout=3.0)
        behind = [begin(np.full(1000, number), async_op=True) for number in range(5)]
        if backend.rank == waits_first:
            behind[-1].wait()
        ahead = begin(np.full(1000, 5))
        return [*(work.wait()[0] for work in behind), ahead[0]]

    assert run(2, each, queue_nbytes=2000) == [[0, 1, 2, 3, 4, 5]] * 2


# -- groups ----------------------------------------------------------------------------------------


def make_groups(world, members):
    """Form a group; return its members' views by the rank in the world."""
    formed = in_parallel([partial(SubBackend, world[rank], members) for rank in members])
    return dict(zip(members, formed, strict=True))


@pytest.mark.fault(51, "overlapping groups work at the same time")
@pytest.mark.parametrize(
    "make_world",
    [
        simulated_world,
        tcp_world,
        pytest.param(partial(tcp_world, transport="tcp"), marks=pytest.mark.slow),
    ],
    ids=["simulated", "auto", "tcp"],
)
def test_groups_that_overlap_and_their_parent_at_once(make_world):
    """None of them led by rank 0, each in threads of its own."""
    memberships = [[1, 3], [2, 3], [1, 2, 3], [3]]

    def work_in(backend, seed):
        for count in (3, 30_000):
            for name, collective in COLLECTIVES.items():
                arrays = [array + seed for array in arrays_of(backend.world_size, (count,))]
                result = collective.call(backend, arrays[backend.rank].copy())
                assert same(result, collective.expected(arrays, backend.rank)), name

    with make_world(4) as world:
        views = [(0, backend) for backend in world]
        for seed, members in enumerate(memberships, 1):
            views += [(seed, view) for view in make_groups(world, members).values()]
        in_parallel([partial(work_in, view, seed) for seed, view in views])


@pytest.mark.parametrize("make_world", [simulated_world, tcp_world], ids=["simulated", "auto"])
def test_many_threads_each_with_a_group_of_its_own(make_world):
    def work_in(view, number):
        for turn in range(15):
            total = rankwire.all_reduce(view, np.array([100 * number + view.rank, turn]))
            assert total.tolist() == [300 * number + 3, 3 * turn]
            pending = rankwire.all_gather(view, np.array([number]), async_op=True)
            assert rankwire.broadcast_object(view, (number, turn), turn % 3) == (number, turn)
            assert pending.wait().tolist() == [number] * 3

    with make_world(3) as world:
        groups = [make_groups(world, [0, 1, 2]) for _ in range(6)]
        in_parallel(
            [partial(work_in, group[rank], n) for n, group in enumerate(groups) for rank in group]
        )


def test_a_group_within_a_group():
    def each(backend):
        if backend.rank == 0:
            return None
        outer = SubBackend(backend, [1, 2, 3, 4])
        if outer.rank == 0:
            return None
        inner = SubBackend(outer, [1, 3]) if outer.rank != 2 else SubBackend(outer, [2])
        return rankwire.all_gather(inner, np.array([backend.rank])).tolist()

    assert run(5, each) == [None, None, [2, 4], [3], [2, 4]]


# -- many arrays at once ---------------------------------------------------------------------------


def coalesced(backend):
    rank = backend.rank
    return [
        values((3, 2), "f4", rank),
        values(5, "i8", rank),
        values((), "f4", rank),
        values((2, 4), "f4", rank).T,
        values(0, "f4", rank),
        values(3, ">f4", rank),
        values(7, "f2", rank),
        values(5, "i8", rank + 50),
    ]


@pytest.mark.parametrize("limit", [0, 16, 1 << 20])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_many_arrays_are_reduced_in_place(monkeypatch, size, limit):
    monkeypatch.setattr("rankwire.collectives.coalesced._COALESCE_UP_TO", limit)
    ranks = [type("Rank", (), {"rank": rank}) for rank in range(size)]
    expected = [left_fold(list(arrays)) for arrays in zip(*map(coalesced, ranks), strict=True)]

    def each(backend):
        for async_op in (False, True):
            arrays = coalesced(backend)
            results = rankwire.all_reduce_coalesced(backend, arrays, async_op=async_op)
            results = results.wait() if async_op else results
            for result, array, total in zip(results, arrays, expected, strict=True):
                assert result is array
                assert same(array, total)

    run(size, each)


def test_arrays_of_one_dtype_travel_together(monkeypatch):
    def messages(arrays):
        with counting_world(2) as world:
            on_all(world, lambda b: rankwire.all_reduce_coalesced(b, [a.copy() for a in arrays]))
            return len(world[0].sent)

    single = messages([np.ones(3)])
    assert messages([np.ones(3)] * 50) == single
    assert messages([np.ones(3), np.ones(3, "f4")] * 20) == 2 * single
    monkeypatch.setattr("rankwire.collectives.coalesced._COALESCE_UP_TO", 24)
    assert messages([np.ones(3), np.ones(4), np.ones(3)]) == 2 * single


def test_no_array_at_all():
    assert run(2, lambda backend: rankwire.all_reduce_coalesced(backend, [])) == [[], []]


def test_an_array_that_occurs_twice_is_reduced_once():
    def each(backend):
        array = np.ones(2)
        rankwire.all_reduce_coalesced(backend, [array, array])
        return array.tolist()

    assert run(2, each) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("other", [[], [np.ones(4)], [np.ones(3), np.ones(3)]], ids=len)
def test_ranks_with_other_lists_are_told(other):
    def each(backend):
        arrays = [np.ones(3)] if backend.rank else other
        with pytest.raises(CollectiveMismatchError):
            rankwire.all_reduce_coalesced(backend, arrays, timeout=20.0)

    run(2, each)


# -- barrier ---------------------------------------------------------------------------------------


def test_the_barriers_of_backend_and_collectives_do_not_mix():
    def each(backend):
        for _ in range(5):
            pending = rankwire.barrier(backend, async_op=True)
            backend.barrier()
            pending.wait()

    run(3, each)


def test_all_to_all_twice_is_where_it_began():
    arrays = arrays_of(3, (2, 2))

    def each(backend):
        once = rankwire.all_to_all(backend, arrays[backend.rank])
        assert same(once, parts_for(arrays, backend.rank))
        return rankwire.all_to_all(backend, once)

    for result, array in zip(run(3, each), arrays, strict=True):
        assert same(result, array)
