"""Collectives on lists: one array for each rank, of sizes of their own."""

from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from listed import CASES, LIMIT, WORLDS, numbers, strided, waited
from sums import left_fold, on_all, run, same

import rankwire
from faults.sizes import examples
from rankwire.collectives.exchange import describe_many
from rankwire.errors import (
    CollectiveAbortedError,
    CollectiveMismatchError,
    ConfigurationError,
    RankwireError,
    UnsupportedTypeError,
)
from rankwire.testing import simulated_world

# Nothing, little, what fits into a slot of little memory or not, what is lent.
SHAPES = [(), (0,), (1,), (3, 2), (0, 4), (1000,), (9000,), (40_000,)]
LARGE = (400_000,)
DTYPES = ["float64", "float32", "int16", "bool", "complex64"]


IN_ONE_WORLD = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def worlds():
    """Return the world of a case, which all examples of a test share."""
    made = {}
    with ExitStack() as stack:

        def world_of(case):
            if case not in made:
                kind, size = case
                made[case] = stack.enter_context(WORLDS[kind](size))
            return made[case]

        yield world_of


KINDS = st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES))
KINDS_BY_RANK = st.lists(KINDS, min_size=4, max_size=4)


def outs_of(kinds, with_gaps):
    made = [np.full(shape, 1).astype(dtype) for dtype, shape in kinds]
    return [strided(array) for array in made] if with_gaps else made


# -- all_gather ------------------------------------------------------------------------------------


@given(st.sampled_from(CASES), KINDS_BY_RANK, st.booleans(), st.booleans())
@IN_ONE_WORLD
def test_all_gather_fills_an_array_for_each_rank(worlds, case, kinds, async_op, with_gaps):
    world = worlds(case)
    kinds = kinds[: len(world)]

    def each(backend):
        dtype, shape = kinds[backend.rank]
        mine, out = numbers(shape, dtype, backend.rank), outs_of(kinds, with_gaps)
        before = mine.copy()
        assert (
            waited(rankwire.all_gather(backend, mine, out=out, async_op=async_op), async_op) is out
        )
        assert same(mine, before)
        return out

    for out in on_all(world, each):
        for rank, (array, (dtype, shape)) in enumerate(zip(out, kinds, strict=True)):
            assert same(array, numbers(shape, dtype, rank))


@pytest.mark.parametrize("kind", WORLDS)
@pytest.mark.parametrize("shapes", [[LARGE] * 3, [(3,), LARGE, (0,)], [LARGE, (70_000,), (2, 5)]])
def test_large_arrays_are_gathered_as_well(worlds, kind, shapes):
    def each(backend):
        out = [np.zeros(shape) for shape in shapes]
        rankwire.all_gather(
            backend, numbers(shapes[backend.rank], "float64", backend.rank), out=out
        )
        return out

    for out in on_all(worlds((kind, 3)), each):
        for rank, array in enumerate(out):
            assert same(array, numbers(shapes[rank], "float64", rank))


@pytest.mark.parametrize("count", [5, 100_000, 500_000])
@pytest.mark.parametrize("kind", ["simulated", "shared", "sockets", "hosts"])
def test_the_array_of_a_rank_may_be_where_it_is_gathered(worlds, kind, count):
    def each(backend):
        out = [np.full(count, -1.0) for _ in range(3)]
        out[backend.rank][...] = backend.rank
        rankwire.all_gather(backend, out[backend.rank], out=out)
        return [set(array.tolist()) for array in out]

    assert on_all(worlds((kind, 3)), each) == [[{0.0}, {1.0}, {2.0}]] * 3


@pytest.mark.parametrize("count", [4, 100_000, 500_000])
@pytest.mark.parametrize("kind", ["simulated", "shared", "sockets"])
def test_an_array_that_a_result_overwrites_is_sent_as_it_was(worlds, kind, count):
    def each(backend):
        other = np.full(count, float(backend.rank))
        out = [np.empty(count) for _ in range(3)]
        out[(backend.rank + 1) % 3] = other
        rankwire.all_gather(backend, other, out=out)
        return [set(array.tolist()) for array in out]

    assert on_all(worlds((kind, 3)), each) == [[{0.0}, {1.0}, {2.0}]] * 3


# -- reduce_scatter --------------------------------------------------------------------------------


@given(
    st.sampled_from(CASES),
    st.lists(st.sampled_from(SHAPES), min_size=4, max_size=4),
    st.sampled_from(["float64", "float32", "float16", "int16", "bool"]),
    st.sampled_from(["sum", "max"]),
    st.booleans(),
    st.booleans(),
)
@IN_ONE_WORLD
def test_reduce_scatter_reduces_an_array_for_each_rank(
    worlds, case, shapes, dtype, op, async_op, with_gaps
):
    world = worlds(case)
    shapes = shapes[: len(world)]

    def given_by(rank):
        return [numbers(shape, dtype, 10 * rank + at) for at, shape in enumerate(shapes)]

    def each(backend):
        arrays = [strided(a) if with_gaps else a for a in given_by(backend.rank)]
        (out,) = outs_of([(dtype, shapes[backend.rank])], with_gaps)
        result = rankwire.reduce_scatter(backend, arrays, op, out=out, async_op=async_op)
        assert waited(result, async_op) is out
        for array, before in zip(arrays, given_by(backend.rank), strict=True):
            assert same(array, before)
        assert same(rankwire.reduce_scatter(backend, tuple(arrays), op), out)
        return out

    contributions = [given_by(rank) for rank in range(len(world))]
    for rank, out in enumerate(on_all(world, each)):
        assert same(out, left_fold([arrays[rank] for arrays in contributions], op))


@pytest.mark.parametrize("kind", WORLDS)
@pytest.mark.parametrize("shapes", [[LARGE] * 3, [(3,), LARGE, (0,)]])
def test_large_arrays_are_reduced_as_well(worlds, kind, shapes):
    def each(backend):
        arrays = [numbers(shape, "float32", backend.rank) for shape in shapes]
        return rankwire.reduce_scatter(backend, arrays, "mean")

    for rank, out in enumerate(on_all(worlds((kind, 3)), each)):
        arrays = [numbers(shapes[rank], "float32", at) for at in range(3)]
        assert same(out, left_fold(arrays, "mean"))


def test_the_result_may_be_where_an_input_was():
    def each(backend):
        arrays = [np.full(3, 1.0 + backend.rank) for _ in range(3)]
        return rankwire.reduce_scatter(backend, arrays, out=arrays[backend.rank]).tolist()

    for kind in ("simulated", "auto"):
        assert run(3, each, backend=kind) == [[6.0] * 3] * 3


# -- all_to_all ------------------------------------------------------------------------------------


@given(
    st.sampled_from(CASES),
    st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)), min_size=16, max_size=16),
    st.booleans(),
    st.booleans(),
)
@IN_ONE_WORLD
def test_all_to_all_sends_an_array_to_each_rank(worlds, case, kinds, async_op, with_gaps):
    world = worlds(case)
    size = len(world)

    def sent(src, dst):
        dtype, shape = kinds[4 * src + dst]
        return numbers(shape, dtype, 4 * src + dst)

    def each(backend):
        arrays = [sent(backend.rank, dst) for dst in range(size)]
        arrays = [strided(a) if with_gaps else a for a in arrays]
        out = outs_of([kinds[4 * src + backend.rank] for src in range(size)], with_gaps)
        result = rankwire.all_to_all(backend, arrays, out=out, async_op=async_op)
        assert waited(result, async_op) is out
        return out

    for rank, out in enumerate(on_all(world, each)):
        for src, array in enumerate(out):
            assert same(array, sent(src, rank))


@pytest.mark.parametrize("kind", WORLDS)
def test_large_arrays_are_sent_as_well(worlds, kind):
    shapes = {(0, 1): LARGE, (1, 2): (70_000,), (2, 2): LARGE}

    def sent(src, dst):
        return numbers(shapes.get((src, dst), (src, dst)), "float64", 3 * src + dst)

    def each(backend):
        arrays = [sent(backend.rank, dst) for dst in range(3)]
        out = [np.zeros_like(sent(src, backend.rank)) for src in range(3)]
        return rankwire.all_to_all(backend, arrays, out=out)

    for rank, out in enumerate(on_all(worlds((kind, 3)), each)):
        for src, array in enumerate(out):
            assert same(array, sent(src, rank))


@pytest.mark.parametrize("count", [4, 100_000, 500_000])
@pytest.mark.parametrize("kind", ["simulated", "shared", "sockets", "hosts"])
def test_the_arrays_may_be_exchanged_in_place(worlds, kind, count):
    def each(backend):
        arrays = [np.full(count, 10.0 * backend.rank + dst) for dst in range(3)]
        rankwire.all_to_all(backend, arrays, out=arrays)
        return [set(array.tolist()) for array in arrays]

    expected = [[{10.0 * src + dst} for src in range(3)] for dst in range(3)]
    assert on_all(worlds((kind, 3)), each) == expected


# -- scatter and gather ----------------------------------------------------------------------------


@given(
    st.sampled_from(CASES),
    KINDS_BY_RANK,
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
    st.booleans(),
)
@IN_ONE_WORLD
def test_scatter_hands_out_a_list(worlds, case, kinds, async_op, with_gaps, root, with_out):
    world = worlds(case)
    root, kinds = root % len(world), kinds[: len(world)]

    def each(backend):
        arrays = [numbers(shape, dtype, at) for at, (dtype, shape) in enumerate(kinds)]
        arrays = [strided(a) if with_gaps else a for a in arrays]
        (out,) = outs_of([kinds[backend.rank]], with_gaps)
        result = rankwire.scatter(
            backend,
            arrays if backend.rank == root else None,
            root,
            out=out if with_out else None,
            async_op=async_op,
        )
        result = waited(result, async_op)
        assert not with_out or result is out
        return result

    for rank, (result, (dtype, shape)) in enumerate(zip(on_all(world, each), kinds, strict=True)):
        assert same(np.ascontiguousarray(result).reshape(shape), numbers(shape, dtype, rank))


@given(
    st.sampled_from(CASES),
    st.sampled_from([*SHAPES, LARGE]),
    st.sampled_from(DTYPES),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
@IN_ONE_WORLD
def test_gather_fills_a_list_at_the_root(worlds, case, shape, dtype, root, async_op, with_gaps):
    world = worlds(case)
    root %= len(world)

    def each(backend):
        out = outs_of([(dtype, shape)] * len(world), with_gaps) if backend.rank == root else None
        mine = numbers(shape, dtype, backend.rank)
        result = waited(rankwire.gather(backend, mine, root, out=out, async_op=async_op), async_op)
        assert result is out
        return result

    for rank, result in enumerate(on_all(world, each)):
        if rank == root:
            for src, array in enumerate(result):
                assert same(array, numbers(shape, dtype, src))


def test_a_list_at_the_root_goes_with_what_the_others_call():
    def each(backend):
        rank = backend.rank
        out = [np.zeros(2), np.zeros(2)] if rank else None
        rankwire.gather(backend, np.full(2, 1.0 + rank), 1, out=out)
        part = rankwire.scatter(backend, [np.zeros(1), np.ones((2, 2))] if rank else None, 1)
        return out and [array.tolist() for array in out], part.shape

    assert run(2, each) == [(None, (1,)), ([[1.0, 1.0], [2.0, 2.0]], (2, 2))]


# -- arguments -------------------------------------------------------------------------------------

ONE = np.ones(2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda b: rankwire.all_gather(b, ONE, out=[ONE]), "out has 1 arrays, there are 2 ranks"),
        (
            lambda b: rankwire.all_gather(b, ONE, out=[np.ones(3), np.ones(3)]),
            r"out\[0\] is float64 \(3,\), the array of this rank is float64 \(2,\)",
        ),
        (
            lambda b: rankwire.all_gather(b, ONE, out=[np.ones(2), np.broadcast_to(1.0, 2)]),
            r"out\[1\] is read-only",
        ),
        (
            lambda b: rankwire.gather(b, ONE, out=[np.ones(2), np.ones(3)]),
            r"out\[1\] is float64 \(3,\)",
        ),
        (lambda b: rankwire.reduce_scatter(b, [ONE] * 3), "array has 3 arrays"),
        (
            lambda b: rankwire.reduce_scatter(b, [ONE, ONE.astype("f4")]),
            r"array\[1\] is float32, array\[0\] is float64",
        ),
        (lambda b: rankwire.reduce_scatter(b, [ONE] * 2, "least"), "there is no op 'least'"),
        (
            lambda b: rankwire.reduce_scatter(b, [ONE] * 2, out=np.ones(3)),
            r"out is float64 \(3,\), the result is float64 \(2,\)",
        ),
        (lambda b: rankwire.all_to_all(b, [ONE] * 2), "needs out="),
        (lambda b: rankwire.all_to_all(b, [ONE] * 2, out=np.ones(4)), "needs out="),
        (lambda b: rankwire.all_to_all(b, [ONE] * 2, out=[ONE]), "out has 1 arrays"),
        (lambda b: rankwire.scatter(b, [ONE]), "array has 1 arrays"),
    ],
)
def test_lists_that_do_not_fit_are_refused_here_and_told(call, words):
    with simulated_world(2, timeout=LIMIT) as world:
        with pytest.raises(ConfigurationError, match=words):
            call(world[0])
        with pytest.raises(CollectiveAbortedError):
            rankwire.barrier(world[1])


@pytest.mark.parametrize(
    "call",
    [
        lambda b: rankwire.all_gather(b, ONE, out=[ONE, "text"]),
        lambda b: rankwire.reduce_scatter(b, [ONE, "text"]),
        lambda b: rankwire.all_to_all(b, [ONE, "text"], out=[ONE, ONE]),
        lambda b: rankwire.scatter(b, [ONE, "text"]),
    ],
)
def test_an_error_says_which_one_of_a_list_is_no_array(call):
    with simulated_world(2, timeout=LIMIT) as world, pytest.raises(UnsupportedTypeError) as caught:
        call(world[0])
    assert caught.value.path.endswith("[1]")


# -- ranks that disagree ---------------------------------------------------------------------------

DISAGREEING = {
    "all_gather": (
        lambda b: rankwire.all_gather(
            b, np.ones(b.rank + 1), out=[np.ones(at + 1 + (at and b.rank == 0)) for at in range(3)]
        ),
        ["(3,)", "(4,)"],
    ),
    "all_gather dtype": (
        lambda b: rankwire.all_gather(
            b, np.ones(2), out=[np.ones(2), np.ones(2), np.ones(2, "f4" if b.rank == 1 else "f8")]
        ),
        ["float32", "float64"],
    ),
    "all_gather joined": (
        lambda b: rankwire.all_gather(
            b, np.ones(2), out=[np.ones(2) for _ in range(3)] if b.rank else np.ones(6)
        ),
        ["into a list"],
    ),
    "reduce_scatter": (
        lambda b: rankwire.reduce_scatter(b, [np.ones(2 + (b.rank == at == 1)) for at in range(3)]),
        ["(2,)", "(3,)"],
    ),
    "reduce_scatter op": (
        lambda b: rankwire.reduce_scatter(b, [np.ones(2)] * 3, "max" if b.rank else "sum"),
        ["max", "sum"],
    ),
}


@pytest.mark.parametrize("kind", WORLDS)
@pytest.mark.parametrize("name", DISAGREEING)
def test_lists_that_differ_between_ranks_are_named_on_all(name, kind):
    call, words = DISAGREEING[name]

    def each(backend):
        with pytest.raises(CollectiveMismatchError) as caught:
            call(backend)
        rankwire.barrier(backend)
        return caught.value.message

    with WORLDS[kind](3) as world:
        for message in on_all(world, each):
            assert all(word in message for word in words), message


@pytest.mark.parametrize("kind", WORLDS)
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (np.ones(5), "rank 0 sends 16 bytes to rank 2, which expects 40"),
        (np.ones(0), "rank 0 sends 16 bytes to rank 2, which expects 0"),
        (np.ones((1, 2)), "which expects 16 of another dtype or shape"),
        (np.ones(2, int), "which expects 16 of another dtype or shape"),
        (np.ones(90_000), "rank 0 sends 16 bytes to rank 2, which expects 720000"),
    ],
)
def test_what_a_rank_does_not_expect_is_named_on_all(kind, wrong, words):
    def each(backend):
        out = [np.full(2, -7.0) for _ in range(3)]
        if backend.rank == 2:
            out[0] = wrong.copy()
        with pytest.raises(CollectiveMismatchError) as caught:
            rankwire.all_to_all(backend, [np.ones(2)] * 3, out=out)
        assert all((array == -7.0).all() for array in out[1:]), "nothing must have moved"
        rankwire.barrier(backend)
        return caught.value.message

    with WORLDS[kind](3) as world:
        assert all(words in message for message in on_all(world, each))


def test_a_rank_may_disagree_with_itself():
    with simulated_world(1) as (alone,), pytest.raises(CollectiveMismatchError):
        rankwire.all_to_all(alone, [np.ones(2)], out=[np.ones(3)])


@pytest.mark.parametrize("kind", ["simulated", "shared", "hosts"])
def test_uneven_contributions_are_not_gathered_at_a_root(kind):
    def each(backend):
        out = [np.ones(2)] * 3 if backend.rank == 0 else None
        with pytest.raises(RankwireError) as caught:
            rankwire.gather(backend, np.ones(2 + (backend.rank == 1)), out=out)
        return type(caught.value)

    with WORLDS[kind](3) as world:
        assert on_all(world, each) == [CollectiveMismatchError] * 3


# -- words -----------------------------------------------------------------------------------------


def test_many_arrays_are_described_in_few_words():
    alike = (("float32", (3,)),) * 500
    assert describe_many("all_gather", each=alike) == "all_gather([500 x float32 (3,)])"
    different = tuple(("float32", (at,)) for at in range(5000))
    words = describe_many("all_gather", "sum", each=different)
    assert len(words) < 1200
    others = (*different[:-1], ("float32", (1,)))
    assert words != describe_many("all_gather", "sum", each=others)


@pytest.mark.parametrize("kind", ["simulated", "shared"])
def test_a_rank_that_comes_late_with_many_arrays_is_in_the_same_operation(worlds, kind):
    """What ranks tell each other meanwhile is cut; that must not make it something else."""

    def each(backend):
        arrays = [np.ones(1 + at) for at in range(600)]
        if backend.rank == 2:
            backend.clock.sleep(0.3)
        rankwire.all_reduce_coalesced(backend, arrays)
        return arrays[-1][-1]

    assert on_all(worlds((kind, 3)), each) == [3.0] * 3
