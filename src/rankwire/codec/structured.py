"""Structured dtypes: arrays whose elements have named fields.

The wire describes one as ``[itemsize, is_aligned, [name, offset, dtype, *shape], ...]``, where the
dtype of a field is a code of ``arrays`` or such a list again. The fields are in the order of their
offsets and do not overlap. numpy parses nothing, and no field can be an address. The gaps between
fields are sent as zeros.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from rankwire.codec import arrays
from rankwire.codec.arrays import Array, ArrayHead, DType
from rankwire.errors import InvalidMessageError

# More than programs need.
_MAX_DEPTH = 4
_MAX_FIELDS = 256
_MAX_BODY_NBYTES = 16_384
_MAX_ITEMSIZE = 2**31 - 1  # numpy's

_pack = msgspec.msgpack.Encoder().encode


def _described_type() -> Any:
    """Return the type of a description. It has no maps: a sender could choose keys of one hash."""
    described: Any = str
    for _ in range(_MAX_DEPTH):
        described = list[int | bool | list[str | int | described]]
    return described


_unpack = msgspec.msgpack.Decoder(list[bool | int | _described_type()]).decode  # type: ignore[misc]


def array_body(array: Array) -> bytes | None:
    """Return the description of a structured array, or None if it cannot be sent."""
    described = describe(array.dtype) if array.ndim <= arrays.MAX_NDIM else None
    if described is None:
        return None
    body = _pack([described, array.flags.fnc, *array.shape])
    return body if len(body) <= _MAX_BODY_NBYTES else None


def array_head(body: memoryview) -> ArrayHead:
    """Check the description of a structured array."""
    if len(body) > _MAX_BODY_NBYTES:
        raise InvalidMessageError(f"a description of an array in {len(body)} bytes")
    described, is_fortran, *shape = _unpack(body)
    if type(is_fortran) is not bool:
        raise InvalidMessageError("malformed description of a structured array")
    return arrays.checked_head(dtype_of(described), shape, is_fortran)


def advice_for(array: Array) -> str:
    """Return advice for an array that neither this module nor ``arrays`` can describe."""
    if array.ndim > arrays.MAX_NDIM:
        return f"It has {array.ndim} dimensions, more than numpy 1.26 has: reshape it."
    if array.dtype.hasobject:
        return "Its elements are Python objects: send array.tolist(), or an array of numbers."
    if array.dtype.fields is not None:
        return f"Its dtype {array.dtype} is not carried: send each field as an array of its own."
    return f"Its dtype {array.dtype} is not carried: convert it with array.astype()."


def describe(dtype: DType, depth: int = _MAX_DEPTH) -> list[Any] | None:
    """Return the description of a structured dtype, or None if it cannot be sent."""
    if dtype.type is not np.void or dtype.fields is None or dtype.names is None or not depth:
        return None
    if len(dtype.names) != len(dtype.fields) or len(dtype.names) > _MAX_FIELDS:  # titles
        return None
    described: list[Any] = [dtype.itemsize, dtype.isalignedstruct]
    end = 0
    for name in dtype.names:
        field, offset = dtype.fields[name][:2]
        if offset < end:
            return None
        end = offset + field.itemsize
        base = field.base
        kind = arrays.dtype_code(base) if base.fields is None else describe(base, depth - 1)
        if kind is None or not _is_text(name):
            return None
        described.append([name, offset, kind, *field.shape])
    return described


def _is_text(name: str) -> bool:
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False


def dtype_of(described: Any, depth: int = _MAX_DEPTH) -> DType:
    """Return the dtype of a description."""
    if type(described) is not list or not depth or not 3 <= len(described) <= _MAX_FIELDS + 2:
        raise InvalidMessageError("malformed description of a structured array")
    itemsize, is_aligned, *fields = described
    if type(is_aligned) is not bool:
        raise InvalidMessageError("malformed description of a structured array")
    formats = []
    end = 0
    for name, offset, kind, *shape in fields:
        numbers = [itemsize, offset, *shape]
        if type(name) is not str or {*map(type, numbers)} != {int} or min(numbers) < 0:
            raise InvalidMessageError("malformed field of a structured array")
        base = arrays.dtype_of(kind) if type(kind) is str else dtype_of(kind, depth - 1)
        head = arrays.checked_head(base, shape, is_fortran=False)
        if offset < end or offset + head.nbytes > min(itemsize, _MAX_ITEMSIZE):
            raise InvalidMessageError("fields of a structured array overlap or are outside of it")
        end = offset + head.nbytes
        formats.append((head.dtype, head.shape) if shape else head.dtype)
    names, offsets = map(list, zip(*(field[:2] for field in fields), strict=True))
    layout = {"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize}
    dtype: DType = np.dtype(layout, align=is_aligned)  # type: ignore[call-overload]
    if describe(dtype) != described:
        raise InvalidMessageError("not as a structured array is described")
    return dtype


def array_bytes(array: Array) -> memoryview:
    """Return the bytes of a structured array in memory order, with zeros between its fields."""
    if _has_gaps(array.dtype):
        # Not the dtype itself: numpy counts objects in fields that a view leaves out. Nor
        # zeros_like, which writes only to the fields.
        dtype = dtype_of(describe(array.dtype))
        clean = np.zeros(array.shape, dtype, "F" if array.flags.fnc else "C")
        _copy_fields(array, clean)
        array = clean
    return arrays.array_bytes(array)


def _has_gaps(dtype: DType) -> bool:
    if dtype.fields is None or dtype.names is None:
        return False
    fields = [dtype.fields[name][0] for name in dtype.names]
    is_full = sum(field.itemsize for field in fields) == dtype.itemsize
    return not is_full or any(_has_gaps(field.base) for field in fields)


def _copy_fields(source: Array, target: Array) -> None:
    """Copy field by field: copying the whole element, numpy copies the gaps too."""
    if source.dtype.names is None:
        target[...] = source
        return
    for name in source.dtype.names:
        _copy_fields(source[name], target[name])


def view_array(head: ArrayHead, payload: bytearray, start: int) -> Array:
    """Return a view of the array whose bytes are in the payload from ``start`` on."""
    array = arrays.view_array(head, payload, start)
    _check_fields(array.dtype, array.shape, array.strides, payload, start)
    return array


def _check_fields(
    dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...], payload: bytearray, start: int
) -> None:
    if dtype.fields is None or dtype.names is None:
        arrays.check_strided(dtype, shape, strides, payload, start)
        return
    for name in dtype.names:
        field, offset = dtype.fields[name][:2]
        steps: list[int] = []  # of its own extents, the last one first
        step = field.base.itemsize
        for extent in reversed(field.shape):
            steps.append(step)
            step *= extent
        inner_shape, inner_strides = (*shape, *field.shape), (*strides, *reversed(steps))
        _check_fields(field.base, inner_shape, inner_strides, payload, start + offset)
