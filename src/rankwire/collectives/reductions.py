"""Reductions: combine the contributions of all ranks into one array.

Contributions are combined in the order in which they are given. float16 and bfloat16 are added up
in float32 and rounded once. Pure.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextvars import Context
from dataclasses import dataclass
from functools import lru_cache, partial
from numbers import Complex
from typing import Any, Literal, TypeAlias

import numpy as np

from rankwire.collectives.operands import Array, Operand
from rankwire.errors import ConfigurationError
from rankwire.override import override

# The keys of ``_OPS``.
OpName = Literal["sum", "mean", "product", "min", "max", "bitwise_and", "bitwise_or", "bitwise_xor"]

_NUMBERS, _REAL, _WHOLE = "biufc", "biuf", "biu"  # kinds of numpy dtypes
_NO_ORDER = "complex numbers have no order"
_NO_MEAN = "the mean of whole numbers is not one; convert to a float first, or use sum"
_NO_BITS = "it is for whole numbers and bool"
_NO_NUMBERS = "it is for numbers"
# For each op: the function, the kinds of dtypes that it supports, and why not others.
_OPS: dict[str, tuple[np.ufunc, str, str]] = {
    "sum": (np.add, _NUMBERS, _NO_NUMBERS),
    "mean": (np.add, "fc", _NO_MEAN),
    "product": (np.multiply, _NUMBERS, _NO_NUMBERS),
    "min": (np.minimum, _REAL, _NO_ORDER),
    "max": (np.maximum, _REAL, _NO_ORDER),
    "bitwise_and": (np.bitwise_and, _WHOLE, _NO_BITS),
    "bitwise_or": (np.bitwise_or, _WHOLE, _NO_BITS),
    "bitwise_xor": (np.bitwise_xor, _WHOLE, _NO_BITS),
}

_LEAST = 8192  # elements from which torch is faster
_MOST = 32767  # elements up to which torch uses no other thread

# numpy 2 keeps its error state in the context. To copy this one and call a function in it takes
# 0.15 us, ``np.errstate`` takes 1.
_QUIET: Context | None = Context() if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else None
if _QUIET is not None:
    _QUIET.run(partial(np.seterr, all="ignore"))


def quietly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call a function with numpy's overflow and invalid-value warnings off."""
    if _QUIET is not None:
        _QUIET.copy().run(function, *args, **kwargs)
    else:
        with np.errstate(all="ignore"):
            function(*args, **kwargs)


class Reduction:
    """One op on one dtype, which is that of the arrays in memory."""

    def __init__(self, op: str, dtype: np.dtype[Any], *, is_bfloat16: bool) -> None:
        self.op = op
        self.dtype = dtype
        self._ufunc = _OPS[op][0]
        self._mean = op == "mean"
        self._quiet = dtype.kind not in "fc" and not is_bfloat16  # integers never warn
        self._widen: Callable[[Array], Array] | None = None
        self._narrow: Callable[[Array, Array], None] = _copy
        if is_bfloat16:
            self._widen, self._narrow = from_bfloat16, to_bfloat16
        elif dtype.kind == "f" and dtype.itemsize == 2:
            self._widen, self._narrow = from_float16, to_float16

    def contribution(self, own: Array) -> Array:
        """Return this rank's contribution, for most ops the array itself."""
        return own

    def fold(
        self,
        pieces: Iterable[Array],
        count: int,
        out: Array,
        *,
        own: int = 0,
        spare: Array | None = None,
    ) -> None:
        """Reduce ``count`` pieces, one of each rank in this order, into ``out``, without warnings.

        Each piece is used before the next one is requested, and may share its memory. ``out`` may
        be the piece with the index ``own``, and is not written before it; if ``own`` is above 1,
        ``spare`` has memory of the size of ``out`` for the total before that.
        """
        if self._quiet:
            self._fold(pieces, count, out, own, spare)
        else:
            quietly(self._fold, pieces, count, out, own, spare)

    def fold_two(self, first: Array, second: Array, out: Array) -> None:
        """Reduce the pieces of two ranks, in this order, into ``out``, which may be one of them."""
        if self._widen is not None and self.op == "sum":
            left = add_by_torch(first, second, out)
            if left is None:
                self.fold((first, second), 2, out)
            elif left:  # fold it all: which of two NaNs numpy takes depends on their place
                total = np.empty_like(out)
                self.fold((first, second), 2, total)
                for part in left:
                    out[part] = total[part]
        elif self._widen is not None or self._mean:
            self.fold((first, second), 2, out)
        elif self._quiet:
            self._ufunc(first, second, out=out)
        else:
            quietly(self._ufunc, first, second, out=out)

    def _fold(
        self, pieces: Iterable[Array], count: int, out: Array, own: int, spare: Array | None
    ) -> None:
        total: Array | None = None
        for index, piece in enumerate(pieces):
            if self._widen is not None:
                wide = self._widen(piece)
                total = wide if total is None else self._ufunc(total, wide, out=total)
            elif total is None:
                total = piece
                if own > 1:  # the next piece may use the same memory
                    assert spare is not None
                    total = spare[: piece.size]
                    np.copyto(total, piece)
            else:
                total = self._ufunc(total, piece, out=out if index >= own else total)
        assert total is not None
        if self._mean:
            total = np.divide(total, count, out=total if self._widen is not None else out)
        if total is not out:
            self._narrow(total, out)

    def merge(self, total: Array, piece: Array) -> None:
        """Add a contribution to a total, in place. Not for types that need a wider one."""
        assert self._widen is None
        quietly(self._ufunc, total, piece, out=total)

    def finish(self, total: Array, count: int) -> None:
        """Turn a total of ``count`` merged contributions into the result, in place."""
        if self._mean:
            quietly(np.divide, total, count, out=total)

    @property
    def of_parts(self) -> Reduction:
        """The reduction for totals that are merged later; ``finish`` comes last."""
        return reduction("sum", self.dtype) if self._mean else self

    @property
    def is_wide(self) -> bool:
        """Whether contributions are added up in a wider type, and so in one place only."""
        return self._widen is not None


@lru_cache(maxsize=256)
def reduction(op: str, dtype: np.dtype[Any], is_bfloat16: bool = False) -> Reduction:
    """Return the reduction of an op for a dtype; raise ConfigurationError if there is none."""
    if op not in _OPS:
        raise ConfigurationError(f"there is no op {op!r}; there are {', '.join(_OPS)}")
    kind = "f" if is_bfloat16 else dtype.kind
    _, kinds, why_not = _OPS[op]
    if kind not in kinds:
        name = "bfloat16" if is_bfloat16 else dtype.name
        why = why_not if kind in _NUMBERS else _NO_NUMBERS
        raise ConfigurationError(f"op {op!r} on {name}: {why}")
    return Reduction(op, dtype, is_bfloat16=is_bfloat16)


def _copy(source: Array, out: Array) -> None:
    np.copyto(out, source, casting="unsafe")


def reduction_of(op: Any, source: Operand) -> Reduction:
    """Return the reduction of an op for the dtype of an operand; raise as ``reduction`` does."""
    if source.is_opaque:
        raise ConfigurationError(f"{source.dtype_name} can be moved, but not reduced")
    if isinstance(op, str):
        return reduction(op, source.array.dtype, source.is_bfloat16)
    return PremultipliedSum(source.array.dtype, factor_of(op), is_bfloat16=source.is_bfloat16)


_PREMUL_SUM = "premul_sum"


@dataclass(frozen=True)
class PremulSum:
    """The op of a sum of ``factor * array``, for floats and complex numbers.

    Args:
        factor: This rank's factor: a number, or an array or tensor of one element, which is read
            when the operation is called. Other ranks may use other factors.
    """

    factor: Any


# What users may pass as ``op=``.
Op: TypeAlias = OpName | PremulSum | tuple[Literal["premul_sum"], Any]


def name_of(op: Any) -> str:
    """Return the name of an op in descriptions; factors are not compared between ranks."""
    if isinstance(op, str):
        return op
    factor_of(op)
    return _PREMUL_SUM


def factor_of(op: Any) -> complex:
    """Return the factor of a premultiplied sum, as a Python number; raise if the op has none."""
    match op:
        case PremulSum(factor) | ("premul_sum", factor):
            pass
        case _:
            raise ConfigurationError(
                f"an op is a name such as 'sum', or PremulSum(factor), not {op!r}"
            )
    try:
        number = factor.item() if hasattr(factor, "item") else factor
    except (ValueError, RuntimeError) as error:  # from numpy and torch, if it has several elements
        raise ConfigurationError(f"a factor is one number: {error}") from error
    if not isinstance(number, Complex):
        raise ConfigurationError(f"a factor is a number, or an array of one, not {factor!r}")
    return complex(number) if isinstance(number, complex) else float(number)  # type: ignore[arg-type]


class PremultipliedSum(Reduction):
    """A sum on one dtype, with this rank's factor."""

    def __init__(self, dtype: np.dtype[Any], factor: complex, *, is_bfloat16: bool) -> None:
        if not is_bfloat16 and dtype.kind not in "fc":
            raise ConfigurationError(
                f"op {_PREMUL_SUM!r} on {dtype.name}: it is for floats and complex numbers"
            )
        if isinstance(factor, complex) and dtype.kind != "c":
            raise ConfigurationError(f"a complex factor {factor} needs complex elements")
        super().__init__("sum", dtype, is_bfloat16=is_bfloat16)
        self.op = _PREMUL_SUM
        self._factor = factor

    @override
    def contribution(self, own: Array) -> Array:
        result = np.empty_like(own)
        quietly(self._multiply, own, result)
        return result

    def _multiply(self, own: Array, result: Array) -> None:
        if self._widen is None:
            np.multiply(own, self._factor, out=result)
        else:
            self._narrow(self._widen(own) * self._factor, result)


# numpy has no bfloat16. If the program has loaded torch, torch converts several times as fast; it
# is never imported here. Both round to nearest even and give the same bits except for NaNs, which
# numpy converts. Pieces are so small that torch uses only this thread: its other threads may share
# cores with other ranks.


def from_float16(piece: Array) -> Array:
    """Return float16 values as float32."""
    wide = _widen_by_torch(piece)
    return piece.astype(np.float32) if wide is None or _has_nan(wide) else wide


def from_bfloat16(piece: Array) -> Array:
    """Return bfloat16 values as float32: each is the upper half of one."""
    wide = _widen_by_torch(piece)
    if wide is None:
        return (piece.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return wide


def to_float16(wide: Array, out: Array) -> None:
    """Round float32 values to float16."""
    if not _narrow_by_torch(wide, out):
        np.copyto(out, wide, casting="unsafe")


def to_bfloat16(wide: Array, out: Array) -> None:
    """Round float32 values to bfloat16; NaNs stay NaNs."""
    if not _narrow_by_torch(wide, out):
        bits = wide.view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        quiet_nan = (bits >> 16) | 0x0040
        out.view(np.uint16)[...] = np.where(np.isnan(wide), quiet_nan, rounded)


def _widen_by_torch(piece: Array) -> Array | None:
    if not _can_torch(piece):
        return None
    wide = np.empty(piece.size, np.float32)
    _convert(piece, wide)
    return wide


def _narrow_by_torch(wide: Array, out: Array) -> bool:
    if not _can_torch(out) or _has_nan(wide):
        return False
    _convert(wide, out)
    return True


def add_by_torch(first: Array, second: Array, out: Array) -> list[slice] | None:
    """Add two arrays of float16, or of bfloat16 as int16, into ``out``, which may be one of them.

    Return the slices that were skipped because of NaNs; None if torch cannot add these arrays.
    """
    if not (_can_torch(first) and _can_torch(second) and _can_torch(out)):
        return None
    left, start = [], 0
    for one, other, place in zip(*map(_parts, (first, second, out)), strict=True):
        total = one + other
        largest = total.max().item()  # NaN if there is any
        if largest == largest:
            place.copy_(total)
        else:
            left.append(slice(start, start + len(one)))
        start += len(one)
    return left


def _can_torch(narrow: Array) -> bool:
    """Whether torch is loaded, pays off, and accepts the memory; it warns of read-only memory."""
    return (
        narrow.size >= _LEAST
        and hasattr(sys.modules.get("torch"), "from_numpy")  # another thread may be loading it
        and narrow.flags.writeable
        and narrow.flags.c_contiguous
        and narrow.dtype.isnative
    )


def _has_nan(wide: Array) -> bool:
    return bool(np.isnan(wide.max()))


def _convert(source: Array, target: Array) -> None:
    for part, place in zip(_parts(source), _parts(target), strict=True):
        place.copy_(part)


def _parts(array: Array) -> Any:
    """Return an array as tensors of at most ``_MOST`` elements; int16 becomes bfloat16."""
    torch = sys.modules["torch"]
    tensor = torch.from_numpy(array)
    if tensor.dtype == torch.int16:
        tensor = tensor.view(torch.bfloat16)
    return tensor.split(_MOST)
