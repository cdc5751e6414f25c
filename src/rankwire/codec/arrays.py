"""numpy arrays and scalars as a short description and their bytes.

A description is a msgpack array of dtype, order and shape; the bytes travel beside it, copied only
if the array has gaps. A received description is checked before numpy sees it, and its dtype comes
from a closed list without objects. An address crashes another process that uses it, so buffers of
addresses are never sent (``holds_references``).
"""

from __future__ import annotations

import ctypes
import math
import re
import sys
from functools import lru_cache
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from rankwire.errors import InvalidMessageError

Array = np.ndarray[Any, Any]
DType = np.dtype[Any]

# The limit of numpy 1.26, the oldest supported version.
MAX_NDIM = 32
# The longest description has 32 extents of 9 bytes and a dtype.
_MAX_BODY_NBYTES = 512
_MAX_NBYTES = 2**63 - 1

# numpy's codes: byte order, kind, item size, unit of time. Without f16 and c32, whose layout
# differs between machines.
_CARRIED = re.compile(
    r"[<>|](?:b1|[iu][1248]|f[248]|c(?:8|16)|[SU][1-9][0-9]{0,9}"
    r"|[mM]8(?:\[(?:[1-9][0-9]{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)"
)
ADVICE_FOR_MASKED = (
    "It has a mask, which would be lost: pass value.data and numpy.ma.getmaskarray(value) as two"
    " arrays; numpy.ma.array(data, mask=mask) makes one of them again."
)
_LARGEST_CODE_POINT = 0x10FFFF
_INT = frozenset({int})

_pack = msgspec.msgpack.Encoder().encode
# Maps are refused: a sender could choose keys with equal hashes.
_unpack = msgspec.msgpack.Decoder(list[str | bool | int]).decode


class ArrayHead(NamedTuple):
    """The checked description of an array."""

    dtype: DType
    shape: tuple[int, ...]
    is_fortran: bool
    nbytes: int


# -- arrays ----------------------------------------------------------------------------------------


def is_plain_array(value: object) -> bool:
    """Return whether a value is an array without further content, such as a mask."""
    return type(value) is np.ndarray or type(value) is np.memmap


def is_masked(value: object) -> bool:
    """Return whether a value is an array of ``numpy.ma``, without importing that module."""
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(value, masked.MaskedArray)


def advice_for_array(value: object) -> str:
    """Return advice for a value that is not a plain array."""
    if is_masked(value):
        return ADVICE_FOR_MASKED
    return "Pass a numpy array or a torch tensor; numpy.asarray(...) makes one."


@lru_cache(maxsize=256)
def dtype_code(dtype: DType) -> str | None:
    """Return the code of a dtype on the wire, or None if it cannot be sent."""
    code = dtype.str
    return code if _CARRIED.fullmatch(code) and np.dtype(code) == dtype else None


def array_body(array: Array) -> bytes | None:
    """Return the description of an array, or None if it cannot be sent."""
    code = dtype_code(array.dtype)
    if code is None or array.ndim > MAX_NDIM:
        return None
    return _pack([code, array.flags.fnc, *array.shape])


def array_bytes(array: Array) -> memoryview:
    """Return an array's bytes in memory order: its memory, or a copy if it has gaps."""
    return array.ravel("A").view(np.uint8).data


# Programs send few kinds of arrays, and checking a head takes a third of the decoding time.
@lru_cache(maxsize=256)
def array_head(body: bytes) -> ArrayHead:
    """Check the description of an array."""
    code, is_fortran, *shape = description_parts(body)
    if type(code) is not str or type(is_fortran) is not bool:
        raise InvalidMessageError("malformed description of an array")
    return checked_head(dtype_of(code), shape, is_fortran)


def view_array(head: ArrayHead, payload: bytearray, start: int) -> Array:
    """Return a view of the array whose bytes are in the payload from ``start`` on."""
    if head.nbytes and head.dtype.kind in "bU":
        itemsize = head.dtype.itemsize
        check_strided(head.dtype, (head.nbytes // itemsize,), (itemsize,), payload, start)
    # Positional arguments: keywords would triple the cost.
    return np.ndarray(head.shape, head.dtype, payload, start, None, "F" if head.is_fortran else "C")


def description_parts(body: bytes | memoryview) -> list[str | bool | int]:
    """Return the parts of a description, not checked yet."""
    if len(body) > _MAX_BODY_NBYTES:
        raise InvalidMessageError(f"a description of an array in {len(body)} bytes")
    return _unpack(body)


@lru_cache(maxsize=256)
def dtype_of(code: str) -> DType:
    """Return the dtype of a code."""
    dtype = np.dtype(code) if _CARRIED.fullmatch(code) else None
    # numpy reads more spellings than it writes; one dtype has one code.
    if dtype is None or dtype.str != code:
        raise InvalidMessageError(f"arrays of dtype {code[:32]!r} are not carried")
    return dtype


def checked_head(dtype: DType, shape: list[Any], is_fortran: bool) -> ArrayHead:
    """Return the description of an array as an ``ArrayHead``."""
    if len(shape) > MAX_NDIM:
        raise InvalidMessageError(f"an array of {len(shape)} dimensions; at most {MAX_NDIM}")
    if not _INT.issuperset(map(type, shape)) or min(shape, default=0) < 0:
        raise InvalidMessageError("an extent of an array is not a natural number")
    nbytes = dtype.itemsize * math.prod(shape)
    # numpy refuses an empty array too if its other extents are too large.
    if (nbytes or dtype.itemsize * math.prod(filter(None, shape))) > _MAX_NBYTES:
        raise InvalidMessageError("an array larger than memory can be")
    return ArrayHead(dtype, tuple(shape), is_fortran, nbytes)


def check_strided(
    dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...], payload: bytearray, start: int
) -> None:
    """Refuse bytes that would make numpy or torch misbehave later.

    A bool other than 0 or 1 is undefined behaviour in C++. numpy raises ``SystemError`` when it
    reads a character that does not exist.
    """
    if dtype.kind not in "bU" or not math.prod(shape):
        return
    unit: DType = np.dtype("u1")
    largest = 1
    if dtype.kind == "U":
        unit = np.dtype("u4").newbyteorder(dtype.byteorder)
        largest = _LARGEST_CODE_POINT
    shape, strides = (*shape, dtype.itemsize // unit.itemsize), (*strides, unit.itemsize)
    if np.ndarray(shape, unit, payload, start, strides).max() > largest:
        raise InvalidMessageError(f"not the bytes of an array of dtype {dtype.str}")


# -- scalars ---------------------------------------------------------------------------------------


def scalar_parts(scalar: np.generic) -> list[Any] | None:
    """Return a numpy scalar as code and value, or None; strings as text keep trailing zeros."""
    if type(scalar) is np.str_:
        return ["U", scalar[:]]
    if type(scalar) is np.bytes_:
        return ["S", scalar[:]]
    code = dtype_code(scalar.dtype)
    if code is None or type(scalar) is not scalar.dtype.type:
        return None
    return [code, scalar.tobytes()]


def scalar_of(parts: list[Any]) -> np.generic:
    """Return the numpy scalar of these parts."""
    match parts:
        case ["U", str() as text]:
            return np.str_(text)
        case ["S", bytes() as text]:
            return np.bytes_(text)
        case [str() as code, bytes() as raw] if len(raw) == dtype_of(code).itemsize:
            head = ArrayHead(dtype_of(code), (), False, len(raw))
            return cast(np.generic, view_array(head, bytearray(raw), 0)[()])
        case _:
            raise InvalidMessageError("malformed numpy scalar")


_PLAIN_OWNERS = (bytes, bytearray)
_CTYPES = (
    ctypes.Structure,
    ctypes.Union,
    ctypes.Array,
    ctypes._SimpleCData,
    ctypes._Pointer,
    ctypes._CFuncPtr,  # type: ignore[attr-defined]
)
# PEP 3118: objects, pointers of several kinds, functions. "Zd" is a complex number.
_REFERENCE = re.compile(r"[OPz&X]|Z(?![efdg])")
_FIELD_NAME = re.compile(r":[^:]*:")
_REFERRING_CODES = "OPzZX"  # of simple ctypes


def holds_references(view: memoryview) -> bool:
    """Return whether a buffer holds references, also if it was cast to bytes."""
    owner = view.obj
    if type(owner) in _PLAIN_OWNERS:
        return False
    if isinstance(owner, np.ndarray):
        return _array_refers(owner)
    if isinstance(owner, _CTYPES):
        return _is_referring(type(owner))
    return _names_references(view.format) or _names_references(memoryview(owner).format)


def _array_refers(array: np.ndarray[Any, Any]) -> bool:
    if array.dtype.hasobject:
        return True
    # A view of some fields of a record: the others are between them.
    base = array.base if array.dtype.names is not None else None
    while isinstance(base, np.ndarray):
        if base.dtype.hasobject:
            return True
        base = base.base
    return False


@lru_cache(maxsize=256)
def _names_references(code: str) -> bool:
    return _REFERENCE.search(_FIELD_NAME.sub("", code)) is not None


@lru_cache(maxsize=256)
def _is_referring(kind: Any) -> bool:
    if issubclass(kind, (ctypes.Structure, ctypes.Union)):
        # Its format may say bytes.
        fields = [field for base in kind.__mro__ for field in vars(base).get("_fields_", ())]
        return any(_is_referring(field[1]) for field in fields)
    if issubclass(kind, ctypes.Array):
        return _is_referring(kind._type_)
    return not issubclass(kind, ctypes._SimpleCData) or kind._type_ in _REFERRING_CODES
