"""Sums of what every rank has multiplied by a factor of its own."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from listed import CASES, WORLDS, waited
from sums import on_all, part, run, same, values

import rankwire
from faults.sizes import examples
from rankwire import PremulSum
from rankwire.collectives.reductions import PremultipliedSum, factor_of, name_of
from rankwire.errors import CollectiveMismatchError, ConfigurationError

FACTORS = [0.5, -3, 0.1, 7.25]


def scaled(array, factor):
    """Multiply as is documented: half precision in single, rounded."""
    if array.dtype == np.float16:
        return (array.astype(np.float32) * np.float32(factor)).astype(np.float16)
    return array * array.dtype.type(factor)


def total_of(arrays):
    with np.errstate(all="ignore"):
        terms = [scaled(a, f) for a, f in zip(arrays, FACTORS, strict=False)]
        return np.sum(np.stack(terms).astype(np.complex128), axis=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rank_has_a_factor_of_its_own(case):
    kind, size = case
    with WORLDS[kind](size) as world:

        @given(
            st.sampled_from(["float16", "float32", "float64", "complex64", "complex128"]),
            st.sampled_from([0, 1, 50, 20_000, 70_000]),
            st.booleans(),
            st.booleans(),
        )
        @settings(max_examples=examples(12), deadline=None)
        def check(dtype, count, as_tuple, async_op):
            arrays = [values((size * count,), dtype, rank) for rank in range(size)]
            total = total_of(arrays)
            tolerance = {"float16": 4e-3, "float32": 1e-5, "complex64": 1e-5}.get(dtype, 1e-12)

            def close(result, expected):
                assert result.dtype == dtype
                scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
                assert np.allclose(result, expected, rtol=tolerance, atol=tolerance * scale)

            def each(backend):
                rank, mine = backend.rank, arrays[backend.rank].copy()
                op = ("premul_sum", FACTORS[rank]) if as_tuple else PremulSum(FACTORS[rank])
                at_root = waited(
                    rankwire.reduce(backend, mine, size - 1, op, async_op=async_op), async_op
                )
                own = waited(
                    rankwire.reduce_scatter(backend, mine, op, async_op=async_op), async_op
                )
                parts = [part(mine, at, size) for at in range(size)]
                of_list = rankwire.reduce_scatter(backend, parts, op)
                (coalesced,) = rankwire.reduce_scatter_coalesced(backend, [mine], op)
                assert same(mine, arrays[rank]), "an input was changed"
                (reduced,) = rankwire.all_reduce_coalesced(backend, [mine.copy()], op)
                result = waited(rankwire.all_reduce(backend, mine, op, async_op=async_op), async_op)
                assert result is mine
                if rank == size - 1:
                    close(at_root, total)
                close(own, part(total, rank, size))
                close(of_list, part(total, rank, size))
                close(coalesced, part(total, rank, size))
                close(reduced, total)
                close(mine, total)
                return mine.tobytes()

            assert len(set(on_all(world, each))) == 1, "the bits differ between ranks"

        check()


@pytest.mark.parametrize(
    "factor",
    [2, 2.0, np.float32(2), np.float64(2), np.array(2.0), np.array([2]), np.array([[2.0]])],
    ids=repr,
)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_a_factor_is_a_number_or_an_array_of_one(factor, dtype):
    def each(backend):
        return rankwire.all_reduce(backend, np.ones(3, dtype), PremulSum(factor))

    for result in run(2, each):
        assert same(result, np.full(3, 4, dtype))


def test_complex_numbers_have_complex_factors():
    (result,) = run(1, lambda b: rankwire.all_reduce(b, np.ones(2, "c8"), PremulSum(2j)))
    assert same(result, np.full(2, 2j, "c8"))


def test_overflow_is_silent():
    (result,) = run(1, lambda b: rankwire.all_reduce(b, np.ones(2, "f4"), PremulSum(1e300)))
    assert np.isinf(result).all()


@pytest.mark.parametrize(
    ("op", "array", "words"),
    [
        (PremulSum(2), np.ones(2, int), "premul_sum.* on int64: it is for floats"),
        (PremulSum(2), np.ones(2, bool), "it is for floats"),
        (PremulSum(1j), np.ones(2), "a complex factor"),
        (PremulSum("2"), np.ones(2), "a factor is a number"),
        (PremulSum(None), np.ones(2), "a factor is a number"),
        (PremulSum(np.ones(2)), np.ones(2), "a factor is one number"),
        (("premul_sum",), np.ones(2), "an op is a name"),
        (("sum", 2), np.ones(2), "an op is a name"),
        ("premul_sum", np.ones(2), "there is no op 'premul_sum'"),
        (3, np.ones(2), "an op is a name"),
    ],
)
def test_what_is_no_factor_or_has_no_meaning_is_refused(op, array, words):
    with pytest.raises(ConfigurationError, match=words):
        run(1, lambda b: rankwire.all_reduce(b, array, op))


def test_a_premultiplied_sum_is_not_a_sum():
    def each(backend):
        with pytest.raises(CollectiveMismatchError, match="premul_sum"):
            rankwire.all_reduce(backend, np.ones(2), PremulSum(1) if backend.rank else "sum")

    run(2, each)


def test_names_and_factors():
    assert (name_of("max"), name_of(PremulSum(3)), name_of(("premul_sum", 3))) == (
        "max",
        "premul_sum",
        "premul_sum",
    )
    assert factor_of(PremulSum(np.float32(0.5))) == 0.5
    assert type(factor_of(PremulSum(3))) is float
    r = PremultipliedSum(np.dtype("f8"), 3.0, is_bfloat16=False)
    own = np.ones(2)
    assert r.contribution(own).tolist() == [3.0, 3.0]
    assert own.tolist() == [1.0, 1.0]
