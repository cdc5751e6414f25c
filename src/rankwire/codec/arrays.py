"""numpy arrays and scalars as a short description and their own bytes.

A description is a msgpack array of dtype, order and shape. The bytes travel beside it and are not
copied here, except those of an array with gaps. What a description claims is checked in Python
ints before numpy sees it, and the dtype comes from a closed list: no object, structured or void
type, whose elements could be addresses or code (for those with fields see ``structured``). Where
the bytes lie in a payload is for the caller to know. Tensors are arrays too (``tensors``).
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

# numpy 1.26, the oldest supported, has no more.
MAX_NDIM = 32
# The longest description has 32 extents of 9 bytes and a dtype.
_MAX_BODY_NBYTES = 512
# What numpy can address.
_MAX_NBYTES = 2**63 - 1

# numpy's own codes: byte order, kind, item size, unit of time. Without f16 and c32, whose layout
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
# Closed to maps, whose keys a sender could choose to have one hash.
_unpack = msgspec.msgpack.Decoder(list[str | bool | int]).decode


class ArrayHead(NamedTuple):
    """What the wire says of an array, checked."""

    dtype: DType
    shape: tuple[int, ...]
    is_fortran: bool
    nbytes: int


# -- arrays ----------------------------------------------------------------------------------------


def is_plain_array(value: object) -> bool:
    """Tell whether a value is an array whose elements are all there is to it.

    Other subclasses mean more by it, such as a mask.
    """
    return type(value) is np.ndarray or type(value) is np.memmap


def is_masked(value: object) -> bool:
    """Tell whether a value is an array of ``numpy.ma``, without importing that."""
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(value, masked.MaskedArray)


def advice_for_array(value: object) -> str:
    """Return what to do in place of passing something that is no plain array."""
    if is_masked(value):
        return ADVICE_FOR_MASKED
    return "Pass a numpy array or a torch tensor; numpy.asarray(...) makes one."


@lru_cache(maxsize=256)
def dtype_code(dtype: DType) -> str | None:
    """Return what the wire calls a dtype, or None if it is not carried."""
    code = dtype.str
    return code if _CARRIED.fullmatch(code) and np.dtype(code) == dtype else None


def has_carried_ndim(array: Array) -> bool:
    """Tell whether an array has no more dimensions than are carried."""
    return array.ndim <= MAX_NDIM


def array_body(array: Array) -> bytes | None:
    """Return the description of an array, or None if it is not carried."""
    code = dtype_code(array.dtype)
    if code is None or not has_carried_ndim(array):
        return None
    return _pack([code, array.flags.fnc, *array.shape])


def array_bytes(array: Array) -> memoryview:
    """Return an array's bytes in memory order: its own memory, or a copy if it has gaps."""
    return array.ravel("A").view(np.uint8).data


def array_head(body: memoryview) -> ArrayHead:
    """Check the description of an array.

    Raises:
        InvalidMessageError: It is not one that :func:`array_body` makes.
    """
    return _known_head(bytes(body))


# A program sends arrays of few kinds, and to check one takes a third of the time of decoding it.
@lru_cache(maxsize=256)
def _known_head(body: bytes) -> ArrayHead:
    code, is_fortran, *shape = description_parts(body)
    if type(code) is not str or type(is_fortran) is not bool:
        raise InvalidMessageError("malformed description of an array")
    return checked_head(dtype_of(code), shape, is_fortran)


def view_array(head: ArrayHead, payload: bytearray, start: int) -> Array:
    """Return the array whose bytes are in the payload from ``start`` on, as a view of them.

    The caller has checked that all bytes are there.

    Raises:
        InvalidMessageError: Some bytes are no value of the dtype.
    """
    _check_elements(head, payload, start)
    # Positional arguments: keywords would triple the cost.
    return np.ndarray(head.shape, head.dtype, payload, start, None, "F" if head.is_fortran else "C")


def description_parts(body: bytes | memoryview) -> list[str | bool | int]:
    """Return what a description lists, not yet checked.

    Raises:
        InvalidMessageError: It is too long; msgspec raises its own errors if it is malformed.
    """
    if len(body) > _MAX_BODY_NBYTES:
        raise InvalidMessageError(f"a description of an array in {len(body)} bytes")
    return _unpack(body)


@lru_cache(maxsize=256)
def dtype_of(code: str) -> DType:
    """Return the dtype that the wire calls so.

    Raises:
        InvalidMessageError: It is not carried.
    """
    dtype = np.dtype(code) if _CARRIED.fullmatch(code) else None
    # numpy reads more spellings than it writes; one dtype has one code.
    if dtype is None or dtype.str != code:
        raise InvalidMessageError(f"arrays of dtype {code[:32]!r} are not carried")
    return dtype


def checked_head(dtype: DType, shape: list[Any], is_fortran: bool) -> ArrayHead:
    """Return what the wire says of an array.

    Raises:
        InvalidMessageError: There cannot be an array of this shape.
    """
    if len(shape) > MAX_NDIM:
        raise InvalidMessageError(f"an array of {len(shape)} dimensions; at most {MAX_NDIM}")
    if not _INT.issuperset(map(type, shape)) or min(shape, default=0) < 0:
        raise InvalidMessageError("an extent of an array is not a natural number")
    nbytes = dtype.itemsize * math.prod(shape)
    # numpy refuses an empty array too if its other extents are too large.
    if (nbytes or dtype.itemsize * math.prod(filter(None, shape))) > _MAX_NBYTES:
        raise InvalidMessageError("an array larger than memory can be")
    return ArrayHead(dtype, tuple(shape), is_fortran, nbytes)


def _check_elements(head: ArrayHead, payload: bytearray, start: int) -> None:
    """Refuse bytes that would make numpy or torch misbehave much later, far from here.

    A bool must be 0 or 1: anything else is undefined behaviour in C++. A character must exist:
    numpy raises ``SystemError`` when it looks at another one.
    """
    if head.nbytes == 0 or head.dtype.kind not in "bU":
        return
    itemsize = head.dtype.itemsize
    check_strided(head.dtype, (head.nbytes // itemsize,), (itemsize,), payload, start)


def check_strided(
    dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...], payload: bytearray, start: int
) -> None:
    """Refuse bytes of a payload that are no values of the dtype, at these strides.

    Raises:
        InvalidMessageError: Some are not.
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
    """Return a numpy scalar as a code and a plain value, or None if it is not carried.

    Strings travel as text: as elements of an array they would lose trailing zeros.
    """
    if type(scalar) is np.str_:
        return ["U", scalar[:]]
    if type(scalar) is np.bytes_:
        return ["S", scalar[:]]
    code = dtype_code(scalar.dtype)
    if code is None or type(scalar) is not scalar.dtype.type:
        return None
    return [code, scalar.tobytes()]


def scalar_of(parts: list[Any]) -> np.generic:
    """Return the numpy scalar that :func:`scalar_parts` took apart.

    Raises:
        InvalidMessageError: It did not make these parts.
    """
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
# Of PEP 3118: objects, pointers of several kinds, functions. "Zd" is a complex number.
_REFERENCE = re.compile(r"[OPz&X]|Z(?![efdg])")
_FIELD_NAME = re.compile(r":[^:]*:")
_REFERRING_CODES = "OPzZX"  # of simple ctypes


def holds_references(view: memoryview) -> bool:
    """Tell whether a buffer holds references, also if it was cast to bytes."""
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
    # Some fields of a record: those left out lie between them.
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
        # Its format may be that of bytes, so it is not asked.
        fields = [field for base in kind.__mro__ for field in vars(base).get("_fields_", ())]
        return any(_is_referring(field[1]) for field in fields)
    if issubclass(kind, ctypes.Array):
        return _is_referring(kind._type_)
    return not issubclass(kind, ctypes._SimpleCData) or kind._type_ in _REFERRING_CODES
