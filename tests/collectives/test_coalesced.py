"""Many arrays at once: what each gives by itself. ``test_operations`` has all_reduce_coalesced."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from listed import CASES, LIMIT, WORLDS, numbers, strided, waited
from sums import counting_world, joined, left_fold, on_all, part, run, same

import rankwire
from faults.sizes import examples
from rankwire.errors import (
    CollectiveAbortedError,
    CollectiveMismatchError,
    ConfigurationError,
    UnsupportedTypeError,
)
from rankwire.testing import simulated_world

ROWS = [0, 1, 3, 700, 9000]
MANY = st.lists(
    st.tuples(
        st.sampled_from(["float64", "float32", "int16", "bool"]),
        st.sampled_from(ROWS),
        st.sampled_from([(), (2,), (0,)]),
    ),
    max_size=5,
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_arrays_give_what_each_gives_by_itself(case):
    kind, size = case
    with WORLDS[kind](size) as world:

        @given(MANY, st.booleans(), st.booleans(), st.booleans())
        @settings(max_examples=examples(20), deadline=None)
        def check(many, async_op, with_gaps, with_out):
            def arrays_of(rank):
                made = [
                    numbers((size * rows, *row), dtype, 10 * rank + at)
                    for at, (dtype, rows, row) in enumerate(many)
                ]
                return [strided(array) for array in made] if with_gaps else made

            contributions = [arrays_of(rank) for rank in range(size)]
            gathered = [joined(list(arrays)) for arrays in zip(*contributions, strict=True)]
            totals = [left_fold(list(arrays)) for arrays in zip(*contributions, strict=True)]

            def each(backend):
                arrays = arrays_of(backend.rank)
                parts = [part(total, backend.rank, size) for total in totals]
                for call, expected in (
                    (rankwire.all_gather_coalesced, gathered),
                    (rankwire.reduce_scatter_coalesced, parts),
                ):
                    out = [np.ones_like(array) for array in expected]
                    out = [strided(array) for array in out] if with_gaps else out
                    result = call(backend, arrays, out=out if with_out else None, async_op=async_op)
                    result = waited(result, async_op)
                    for array, wanted, given_out in zip(result, expected, out, strict=True):
                        assert same(array, wanted)
                        assert not with_out or array is given_out
                for array, before in zip(arrays, contributions[backend.rank], strict=True):
                    assert same(array, before)

            on_all(world, each)

        check()


@pytest.mark.parametrize("kind", WORLDS)
def test_large_arrays_among_small_ones(kind):
    counts = [3, 400_000, 5, 0, 200_000, 1]

    def each(backend):
        arrays = [numbers((3 * count,), "float32", backend.rank) for count in counts]
        return (
            rankwire.all_gather_coalesced(backend, arrays),
            rankwire.reduce_scatter_coalesced(backend, arrays, "mean"),
        )

    with WORLDS[kind](3) as world:
        results = on_all(world, each)
    for rank, (gathered, parts) in enumerate(results):
        for count, whole, own in zip(counts, gathered, parts, strict=True):
            arrays = [numbers((3 * count,), "float32", at) for at in range(3)]
            assert same(whole, joined(arrays))
            assert same(own, part(left_fold(arrays, "mean"), rank, 3))


def test_arrays_without_dim_0_are_gathered():
    def each(backend):
        (whole,) = rankwire.all_gather_coalesced(backend, [np.array(backend.rank)])
        return whole.tolist()

    assert run(3, each) == [[0, 1, 2]] * 3


def test_no_array_at_all():
    def each(backend):
        gathered = rankwire.all_gather_coalesced(backend, [])
        return gathered, rankwire.reduce_scatter_coalesced(backend, [])

    assert run(2, each) == [([], [])] * 2


def messages_of(call, arrays):
    with counting_world(2) as world:
        on_all(world, lambda backend: call(backend, arrays))
        return len(world[0].sent)


def test_small_arrays_travel_together():
    """When they are gathered also those of different dtypes; but not without end."""
    gather, scatter = rankwire.all_gather_coalesced, rankwire.reduce_scatter_coalesced
    single, mixed = [np.ones(4)], [np.ones(4), np.ones(4, "f4")]
    assert messages_of(gather, mixed * 20) == messages_of(gather, single)
    assert messages_of(scatter, single * 20) == messages_of(scatter, single)
    assert messages_of(scatter, mixed * 20) == 2 * messages_of(scatter, single)
    large = [np.ones(1 << 16)] * 6  # of which two are 1 MiB
    assert messages_of(gather, large) == 3 * messages_of(gather, large[:2])
    assert messages_of(scatter, large) == 3 * messages_of(scatter, large[:2])


@pytest.mark.parametrize("count", [4, 200_000])
@pytest.mark.parametrize("kind", ["simulated", "shared", "sockets"])
def test_arrays_and_results_may_be_one_memory(kind, count):
    def each(backend):
        wholes = [np.full(2 * count, -1.0) for _ in range(2)]
        mine = [part(whole, backend.rank, 2) for whole in wholes]
        for array in mine:
            array[...] = backend.rank + 1.0
        rankwire.all_gather_coalesced(backend, mine, out=wholes)
        assert all(set(w[:count]) == {1.0} and set(w[count:]) == {2.0} for w in wholes)
        rankwire.reduce_scatter_coalesced(backend, wholes, out=mine)
        return [set(array.tolist()) for array in mine]

    with WORLDS[kind](2) as world:
        assert on_all(world, each) == [[{2.0}] * 2, [{4.0}] * 2]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda b: rankwire.all_gather_coalesced(b, [np.ones(2)], out=[]),
            ConfigurationError,
            "out has 0 arrays, there are 1 to send",
        ),
        (
            lambda b: rankwire.all_gather_coalesced(b, [np.ones(2)], out=[np.ones(2)]),
            ConfigurationError,
            "out is float64",
        ),
        (
            lambda b: rankwire.reduce_scatter_coalesced(b, [np.ones(3)]),
            ConfigurationError,
            "divisible",
        ),
        (
            lambda b: rankwire.reduce_scatter_coalesced(b, [np.ones(2)], "least"),
            ConfigurationError,
            "no op",
        ),
        (
            lambda b: rankwire.reduce_scatter_coalesced(b, [np.ones(2), "text"]),
            UnsupportedTypeError,
            r"array\[1\]",
        ),
        (lambda b: rankwire.reduce_scatter_coalesced(b, [], 3), ConfigurationError, "an op is"),
    ],
)
def test_wrong_arguments_are_refused_here_and_told(call, error, words):
    with simulated_world(2, timeout=LIMIT) as world:
        with pytest.raises(error, match=words):
            call(world[0])
        with pytest.raises(CollectiveAbortedError):
            rankwire.barrier(world[1])


@pytest.mark.parametrize("kind", ["simulated", "shared", "hosts"])
@pytest.mark.parametrize("name", ["all_gather_coalesced", "reduce_scatter_coalesced"])
@pytest.mark.parametrize("other", [[], [np.ones(6)], [np.ones(3), np.ones(3)]], ids=len)
def test_ranks_with_other_arrays_are_told(name, other, kind):
    def each(backend):
        arrays = other if backend.rank == 1 else [np.ones(3)]
        with pytest.raises(CollectiveMismatchError, match=name):
            getattr(rankwire, name)(backend, arrays)

    with WORLDS[kind](3) as world:
        on_all(world, each)
