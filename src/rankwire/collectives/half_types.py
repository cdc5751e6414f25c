"""Half types: convert float16 and bfloat16 to float32 and back, rounding to nearest even.

numpy has no bfloat16. If the program has loaded torch, torch converts several times as fast; it is
never imported here. Both give the same bits except for NaNs, which numpy converts. Pieces are so
small that torch uses only this thread: its other threads may share cores with other ranks.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_LEAST = 8192  # elements from which torch is faster
_MOST = 32767  # elements up to which torch uses no other thread


def from_float16(piece: Array) -> Array:
    """Return float16 values as float32."""
    if _can_torch(piece):
        wide = np.empty(piece.size, np.float32)
        _convert(piece, wide)
        if not _has_nan(wide):
            return wide
    return piece.astype(np.float32)


def to_float16(wide: Array, out: Array) -> None:
    """Round float32 values to float16."""
    if _can_torch(out) and not _has_nan(wide):
        _convert(wide, out)
    else:
        np.copyto(out, wide, casting="unsafe")


def from_bfloat16(piece: Array) -> Array:
    """Return bfloat16 values as float32: each is the upper half of one."""
    if _can_torch(piece):
        wide = np.empty(piece.size, np.float32)
        _convert(piece, wide)
        return wide
    return (piece.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(wide: Array, out: Array) -> None:
    """Round float32 values to bfloat16; NaNs stay NaNs."""
    if _can_torch(out) and not _has_nan(wide):
        _convert(wide, out)
        return
    bits = wide.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    quiet_nan = (bits >> 16) | 0x0040
    out.view(np.uint16)[...] = np.where(np.isnan(wide), quiet_nan, rounded)


def add_by_torch(first: Array, second: Array, out: Array) -> list[slice] | None:
    """Add two arrays of float16, or of bfloat16 as int16, into ``out``, which may be one of them.

    Returns the slices that were skipped because of NaNs; None if torch cannot add these.
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
