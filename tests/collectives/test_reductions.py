"""Reductions against numpy, for every op and dtype."""

import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from sums import DTYPES, UFUNCS, bits, left_fold, ops_of, same

from faults.sizes import examples
from rankwire.collectives import reductions
from rankwire.collectives.reductions import OpName, Reduction, reduction
from rankwire.errors import ConfigurationError

# Drawing halves filters more than hypothesis likes.
SHUFFLED = settings(max_examples=examples(25), suppress_health_check=[HealthCheck.filter_too_much])


def pieces_of(dtype, most=6):
    """A list of arrays of one length and dtype.

    numpy multiplies a single complex number in place with other rounding than into a new array.
    """
    elements = npst.from_dtype(np.dtype(dtype))
    lengths = st.integers(2 if np.dtype(dtype).kind == "c" else 0, 9)
    shapes = st.tuples(st.integers(1, most), lengths)
    return npst.arrays(dtype, shapes, elements=elements).map(list)


def signless(op, array):
    """numpy's min and max take either zero of 0.0 and -0.0, here this and there that one."""
    if op in ("min", "max") and array.dtype.kind == "f":
        return np.where(array == 0, array.dtype.type(0), array)
    return array


def folded(pieces, op, *, own=0, in_place=False, is_bfloat16=False):
    """Fold pieces as ``algorithms`` does: others' come in one memory, ``own`` may be ``out``."""
    dtype = pieces[0].dtype
    size = len(pieces[0])
    mine = pieces[own].copy()
    out = mine if in_place else np.full(size, 77).astype(dtype)
    fetched, spare = np.empty((2, size + 3), dtype)

    def in_rank_order():
        for index, piece in enumerate(pieces):
            if index == own:
                yield mine
            else:
                fetched[:size] = piece
                yield fetched[:size]

    r = reduction(op, dtype, is_bfloat16=is_bfloat16)
    r.fold(in_rank_order(), len(pieces), out, own=own, spare=spare)
    return out


# -- against numpy ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@SHUFFLED
def test_every_op_is_an_explicit_fold_from_the_left_bit_for_bit(dtype, data):
    pieces = data.draw(pieces_of(dtype))
    for op in ops_of(dtype):
        result, expected = folded(pieces, op), left_fold(pieces, op)
        assert result.dtype == expected.dtype
        assert bits(signless(op, result)) == bits(signless(op, expected)), op


@pytest.mark.parametrize("dtype", ["int64", "float16", "float32", "complex64"])
@given(data=st.data())
@SHUFFLED
def test_the_result_may_take_the_place_of_the_own_piece_whichever_that_is(dtype, data):
    pieces = data.draw(pieces_of(dtype))
    kept = [piece.copy() for piece in pieces]
    for op in ops_of(dtype):
        expected = bits(signless(op, left_fold(pieces, op)))
        for own in range(len(pieces)):
            for in_place in (False, True):
                result = folded(pieces, op, own=own, in_place=in_place)
                assert bits(signless(op, result)) == expected, (op, own)
    assert all(same(piece, before) for piece, before in zip(pieces, kept, strict=True))


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "float16"])
@given(data=st.data())
@SHUFFLED
def test_merging_and_finishing_is_folding(dtype, data):
    pieces = data.draw(pieces_of(dtype))
    for op in ops_of(dtype):
        r = reduction(op, np.dtype(dtype))
        total = pieces[0].copy()
        for piece in pieces[1:]:
            r.merge(total, piece)
        r.finish(total, len(pieces))
        assert bits(signless(op, total)) == bits(signless(op, left_fold(pieces, op)))


@pytest.mark.parametrize("has_context", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_folding_two_is_folding_also_in_place_and_says_nothing(dtype, has_context, monkeypatch):
    """With numpy 1 there is no context in which it is quiet."""
    if not has_context:
        monkeypatch.setattr(reductions, "_QUIET", None)
    rng = np.random.default_rng(3)
    first, second = np.frombuffer(rng.bytes(2048), dtype).reshape(2, -1)
    before = np.geterr()
    for op in ops_of(dtype):
        r = reduction(op, np.dtype(dtype))
        expected = bits(signless(op, left_fold([first, second], op)))
        for own in (None, 0, 1):
            pieces = [first.copy(), second.copy()]
            out = np.empty_like(first) if own is None else pieces[own]
            r.fold_two(*pieces, out)
            assert bits(signless(op, out)) == expected, (op, own)
    assert np.geterr() == before


def test_the_order_is_that_of_the_ranks():
    # (1 + 1e16) - 1e16 is 0, and (1e16 - 1e16) + 1 is 1.
    large = np.array([1e16])
    assert folded([np.ones(1), large, -large], "sum") == [0.0]
    assert folded([large, -large, np.ones(1)], "sum") == [1.0]


@pytest.mark.parametrize("dtype", [">i4", ">f4", ">f8", ">c8", ">u2"])
def test_the_other_byte_order(dtype):
    pieces = [np.array([rank, 2 * rank, 300 * rank]).astype(dtype) for rank in range(4)]
    for own in range(4):
        result = folded(pieces, "sum", own=own, in_place=True)
        assert result.dtype == np.dtype(dtype)
        assert result.tolist() == [6, 12, 1800]


# -- wider than the dtype --------------------------------------------------------------------------


def test_half_precision_is_added_up_in_single_and_rounded_once():
    half = [np.array([2048.0], np.float16), *[np.array([0.5], np.float16)] * 4]
    assert folded(half, "sum") == [2050.0]  # in float16 2048 + 0.5 is 2048, each time
    over = [np.array([value], np.float16) for value in (60000.0, 60000.0, -60000.0)]
    assert folded(over, "sum") == [60000.0]  # in float16 the first two are infinite
    assert folded(over[:2], "mean") == [60000.0]
    assert folded(over[:2], "sum") == [np.inf]
    assert reduction("sum", np.dtype(np.float16)).is_wide
    assert not reduction("sum", np.dtype(np.float32)).is_wide


def test_half_precision_of_the_other_byte_order_too():
    half = [np.array([2048.0], ">f2"), *[np.array([0.5], ">f2")] * 4]
    assert folded(half, "sum") == [2050.0]
    assert reduction("sum", np.dtype(">f2")).is_wide


# -- bfloat16 --------------------------------------------------------------------------------------


def from_bfloat16(halves):
    return (np.asarray(halves).astype(np.uint16).astype(np.uint32) << 16).view(np.float32)


def nearest_bfloat16(value):
    """Round one float32, by comparing the distances to its two neighbours; halves go to even."""
    if math.isnan(value):
        return 0x7FC0
    below = int(np.array([value], np.float32).view(np.uint32)[0]) >> 16  # towards zero
    above = below + 1
    if (below & 0x7FFF) >= 0x7F80:
        return below  # infinite
    low = float(from_bfloat16([below])[0])
    # What would follow the largest number, if there were more exponents, in place of infinity.
    if (above & 0x7FFF) == 0x7F80:
        high = math.copysign(2.0**128, low)
    else:
        high = float(from_bfloat16([above])[0])
    down, up = abs(value - low), abs(high - value)
    if down == up:
        return below if below % 2 == 0 else above
    return below if down < up else above


def plain_nans(halves):
    halves = np.asarray(halves).astype(np.uint16)
    return np.where(np.isnan(from_bfloat16(halves)), np.uint16(0x7FC0), halves).tolist()


@given(
    st.integers(0, 6).flatmap(
        lambda size: st.lists(npst.arrays(np.int16, size), min_size=1, max_size=5)
    )
)
@settings(max_examples=examples(150))
def test_bfloat16_is_added_up_in_single_and_rounded_once(pieces):
    wide = [from_bfloat16(piece) for piece in pieces]
    for op in ("sum", "mean", "product", "min", "max"):
        with np.errstate(all="ignore"):
            total = left_fold(wide, op)
        expected = [nearest_bfloat16(float(value)) for value in signless(op, total)]
        result = folded(pieces, op, own=len(pieces) - 1, in_place=True, is_bfloat16=True)
        result = np.array(
            [0 if op in ("min", "max") and half == 0x8000 else half for half in plain_nans(result)]
        )
        assert result.tolist() == plain_nans(expected), op


def test_bfloat16_does_not_lose_small_summands():
    one, many = np.array([0x3F80], np.int16), np.array([0x4380], np.int16)  # 1 and 256
    assert from_bfloat16(folded([many, *[one] * 4], "sum", is_bfloat16=True)) == [260.0]
    assert reduction("sum", np.dtype(np.int16), is_bfloat16=True).is_wide


def test_a_nan_of_bfloat16_stays_one():
    # Its lower bits only: cut off, it would be infinity; rounded up, the payload would overflow.
    for half in (0x7F81, 0x7FFF, -1, -127):
        nan = np.array([half], np.int64).astype(np.int16)
        for op in ("sum", "max", "product"):
            assert np.isnan(from_bfloat16(folded([nan, nan], op, is_bfloat16=True)))


# -- silence ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "op", "contributions", "expected"),
    [
        ("uint8", "sum", [200, 100], 44),
        ("int8", "product", [100, 100], 16),
        ("int64", "sum", [2**63 - 1, 1], -(2**63)),
        ("bool", "sum", [True, True], True),
        ("bool", "product", [True, False], False),
        ("float32", "sum", [3e38, 3e38], np.inf),
        ("float16", "product", [60000, 60000], np.inf),
        ("float64", "sum", [np.inf, -np.inf], np.nan),
        ("float32", "max", [np.nan, 1], np.nan),
        ("complex64", "product", [np.inf, 0], complex(np.nan, np.nan)),
    ],
)
def test_overflow_gives_what_the_dtype_gives_and_no_warning(dtype, op, contributions, expected):
    pieces = [np.array([value]).astype(dtype) for value in contributions]
    np.testing.assert_array_equal(folded(pieces, op), np.array([expected]).astype(dtype))
    if dtype != "float16":
        r = reduction(op, np.dtype(dtype))
        r.merge(pieces[0], pieces[1])
        r.finish(pieces[0], 2)
        np.testing.assert_array_equal(pieces[0], np.array([expected]).astype(dtype))


# -- what means nothing ----------------------------------------------------------------------------


def test_the_ops_are_those_that_are_documented():
    assert set(get_args(OpName)) == set(UFUNCS)


@pytest.mark.parametrize("dtype", [*DTYPES, "S3", "U3", "M8[s]", "m8[s]"])
@pytest.mark.parametrize("op", get_args(OpName))
def test_what_means_nothing_is_refused_and_the_rest_is_there(op, dtype):
    is_number = np.dtype(dtype).kind in "biufc"
    if is_number and op in ops_of(dtype):
        r = reduction(op, np.dtype(dtype))
        assert isinstance(r, Reduction)
        assert (r.op, r.dtype) == (op, np.dtype(dtype))
        assert reduction(op, np.dtype(dtype)) is r
        return
    with pytest.raises(ConfigurationError) as caught:
        reduction(op, np.dtype(dtype))
    assert repr(op) in str(caught.value)
    assert np.dtype(dtype).name in str(caught.value)


def test_the_advice_says_why():
    for op, dtype, why in [
        ("mean", "int32", "convert to a float first"),
        ("min", "complex64", "complex numbers have no order"),
        ("bitwise_xor", "float32", "whole numbers and bool"),
        ("sum", "S3", "it is for numbers"),
    ]:
        with pytest.raises(ConfigurationError, match=why):
            reduction(op, np.dtype(dtype))
    with pytest.raises(ConfigurationError, match=r"bfloat16.*whole numbers"):
        reduction("bitwise_and", np.dtype(np.int16), is_bfloat16=True)


@pytest.mark.parametrize("op", ["", "SUM", "avg", "prod", None, 3])
def test_an_op_that_is_not_there_is_refused_with_those_that_are(op):
    with pytest.raises(ConfigurationError, match="sum, mean, product") as caught:
        reduction(op, np.dtype(np.float32))
    assert repr(op) in str(caught.value)
