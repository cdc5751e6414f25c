"""float16 and bfloat16 to float32 and back, by numpy, and by torch where it is loaded."""

import subprocess
import sys
import warnings

import numpy as np
import pytest

from rankwire.collectives import reductions
from rankwire.collectives.reductions import (
    from_bfloat16,
    from_float16,
    reduction,
    to_bfloat16,
    to_float16,
)

EVERY = np.arange(1 << 16, dtype=np.uint16)
# What is cut off: nothing, halves of both types, and their neighbours; some more at random.
LOWER_HALVES = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
LOWER_HALVES += np.random.default_rng(0).integers(0, 1 << 16, 30).tolist()


def wide(lower_half):
    """Return a float32 for each upper half."""
    return ((EVERY.astype(np.uint32) << 16) | np.uint32(lower_half)).view(np.float32)


def narrowed(to_narrow, values, dtype):
    out = np.empty(values.size, dtype)
    with np.errstate(all="ignore"):
        to_narrow(values, out)
    return out.view(np.uint16)


def folded(pieces, op, *, is_bfloat16):
    out = np.empty_like(pieces[0])
    r = reduction(op, out.dtype, is_bfloat16=is_bfloat16)
    r.fold(iter(pieces), len(pieces), out)
    return out.view(np.uint16)


def folded_two(first, second, op, *, is_bfloat16, in_place=None):
    pieces = [first.copy(), second.copy()]
    out = np.empty_like(first) if in_place is None else pieces[in_place]
    reduction(op, out.dtype, is_bfloat16=is_bfloat16).fold_two(*pieces, out)
    return out.view(np.uint16)


# -- what they are ---------------------------------------------------------------------------------


def test_every_bfloat16_is_the_upper_half_of_its_float32():
    back = narrowed(to_bfloat16, from_bfloat16(EVERY.view(np.int16)), np.int16)
    is_nan = np.isnan(wide(0))
    assert np.array_equal(back[~is_nan], EVERY[~is_nan])
    assert np.array_equal(back[is_nan], EVERY[is_nan] | 0x40)


def test_every_float16_comes_back():
    back = narrowed(to_float16, from_float16(EVERY.view(np.float16)), np.float16)
    is_nan = np.isnan(EVERY.view(np.float16))
    assert np.array_equal(back[~is_nan], EVERY[~is_nan])
    assert np.isnan(back[is_nan].view(np.float16)).all()


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0x3F808000, 0x3F80), (0x3F818000, 0x3F82), (0x3F808001, 0x3F81), (0x7F7FFFFF, 0x7F80)],
    ids=["half to even", "half to even, up", "more than half", "too large"],
)
def test_bfloat16_is_rounded_to_the_nearest(value, expected):
    values = np.full(20_000, value, np.uint32).view(np.float32)
    assert set(narrowed(to_bfloat16, values, np.int16).tolist()) == {expected}


def test_torch_is_not_loaded_for_it():
    code = """
import sys
import numpy as np
from rankwire.collectives.reductions import reduction
x = np.ones(100_000, np.float16)
reduction("sum", x.dtype).fold_two(x, x, x)
assert x[0] == 2
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_torch_that_is_only_half_loaded_is_not_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", type(sys)("torch"))
    assert from_float16(np.ones(20_000, np.float16)).tolist() == [1.0] * 20_000


# -- by torch --------------------------------------------------------------------------------------


@pytest.fixture
def both(monkeypatch):
    """Return what a function gives with torch, after it has given the same bits without it."""
    pytest.importorskip("torch")
    conversions = []
    parts = reductions._parts
    monkeypatch.setattr(
        reductions, "_parts", lambda array: conversions.append(array) or parts(array)
    )

    def both(function, *args, by_torch=True, **kwargs):
        conversions.clear()
        with_torch = function(*args, **kwargs)
        assert by_torch is None or bool(conversions) == by_torch
        with monkeypatch.context() as patch:
            patch.setattr(reductions, "_LEAST", 1 << 62)
            conversions.clear()
            without = function(*args, **kwargs)
            assert not conversions
        assert np.array_equal(with_torch.view(np.uint8), without.view(np.uint8))
        return with_torch

    return both


def test_torch_gives_every_value_the_same_bits(both):
    is_nan = np.isnan(EVERY.view(np.float16))
    both(from_float16, EVERY.view(np.float16))
    both(from_float16, EVERY[~is_nan].view(np.float16))
    both(from_bfloat16, EVERY.view(np.int16))


@pytest.mark.parametrize("lower_half", LOWER_HALVES, ids=hex)
def test_torch_rounds_to_the_same_bits(both, lower_half):
    values = wide(lower_half)
    without_nan = values[~np.isnan(values)]
    for to_narrow, dtype in ((to_bfloat16, np.int16), (to_float16, np.float16)):
        both(narrowed, to_narrow, values, dtype, by_torch=False)
        both(narrowed, to_narrow, without_nan, dtype)


@pytest.mark.parametrize("nans", [True, False], ids=["nans", "no nans"])
@pytest.mark.parametrize("op", ["sum", "mean", "product", "min", "max"])
@pytest.mark.parametrize("is_bfloat16", [True, False], ids=["bfloat16", "float16"])
def test_torch_reduces_three_to_the_same_bits(both, op, is_bfloat16, nans):
    random = np.random.default_rng(1)
    dtype = np.dtype(np.int16 if is_bfloat16 else np.float16)
    exponent = 0x7F80 if is_bfloat16 else 0x7C00
    pieces = []
    for _ in range(3):
        bits = random.integers(0, 1 << 16, 200_000).astype(np.uint16)
        if not nans:  # nor infinite ones
            bits[bits & exponent == exponent] = 0
        pieces.append(bits.view(dtype))
    both(folded, pieces, op, is_bfloat16=is_bfloat16)
    both(folded_two, *pieces[:2], op, is_bfloat16=is_bfloat16)


@pytest.mark.parametrize("in_place", [None, 0, 1])
@pytest.mark.parametrize("is_bfloat16", [True, False], ids=["bfloat16", "float16"])
def test_torch_adds_every_value_to_others_with_the_same_bits(both, is_bfloat16, in_place):
    """The parts with NaNs are left to numpy; here some have none."""
    dtype = np.dtype(np.int16 if is_bfloat16 else np.float16)
    for shift in (0, 1, 777, 0x1234, 0x8000):
        first = np.sort(EVERY).view(dtype)
        second = np.roll(EVERY, shift).view(dtype)
        both(folded_two, first, second, "sum", is_bfloat16=is_bfloat16, in_place=in_place)


@pytest.mark.parametrize("what", ["read-only", "with gaps", "of other byte order", "short"])
def test_what_torch_cannot_use_well_numpy_converts(both, what):
    piece = np.arange(20_000).astype(np.float16)
    if what == "read-only":
        piece.flags.writeable = False
    elif what == "with gaps":
        piece = piece[::2]
    elif what == "of other byte order":
        piece = piece.astype(">f2")
    else:
        piece = piece[:100]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both(from_float16, piece, by_torch=False)
