"""Operands: the user's arrays and tensors as flat memory, and the memory for results.

A tensor is used as an array on its memory (``codec.tensors``). torch is imported only by a receiver
of a scattered tensor.

A root scatters each part as a message that describes itself, because the other ranks need not know
its dtype and shape. Layout, little-endian::

    u32 length of the description | description | padding | elements, from a multiple of 64 on

The description is a msgpack array of whether it is a tensor, the dtype and the shape. Elements of
any torch dtype are sent as bytes. A receiver checks the description before it allocates memory.
"""

from __future__ import annotations

import importlib
import math
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import numpy as np

from rankwire.backends.arguments import check_rank
from rankwire.backends.base import Backend
from rankwire.codec.arrays import (
    ArrayHead,
    advice_for_array,
    dtype_code,
    dtype_of,
    is_plain_array,
    view_array,
)
from rankwire.codec.tensors import advice_for, carrier_of, is_tensor, map_tensor
from rankwire.errors import ConfigurationError, InvalidMessageError, UnsupportedTypeError
from rankwire.wire.frames import Message, Payload, whole_of
from rankwire.wire.receive import MessageWithdrawnError, copy_payload

Array = np.ndarray[Any, Any]


class Operand:
    """One array or tensor: the user's ``value``."""

    __slots__ = ("array", "dtype_name", "has_gaps", "is_bfloat16", "is_opaque", "shape", "value")

    def __init__(
        self, value: Any, array: Array, dtype_name: str, *, is_opaque: bool = False
    ) -> None:
        self.value = value
        self.array = array  # on the memory of ``value``; of integers if numpy lacks the dtype
        self.dtype_name = dtype_name
        self.shape = array.shape
        self.is_bfloat16 = dtype_name == "bfloat16"
        self.is_opaque = is_opaque  # whether the elements can be moved but not reduced
        self.has_gaps = not array.flags.c_contiguous

    @property
    def rows(self) -> int:
        """The length of dim 0; 1 for a 0-d array."""
        return self.shape[0] if self.shape else 1

    def part(self, flat: Array, shape: tuple[int, ...]) -> Operand:
        """Return some elements as an operand of the same kind and with the same ``value``."""
        array = flat.reshape(shape)
        return Operand(self.value, array, self.dtype_name, is_opaque=self.is_opaque)

    def flat(self) -> Array:
        """Return the elements in C order as a 1-d array: a view, or a copy if there are gaps."""
        if self.has_gaps:
            return self.array.ravel()
        return self.array if len(self.shape) == 1 else self.array.reshape(-1)

    def check_writable(self, name: str) -> None:
        """Raise ConfigurationError if the memory is read-only."""
        if not self.array.flags.writeable:
            raise ConfigurationError(f"{name} is read-only")

    def check_like(
        self, other: Operand, shape: tuple[int, ...], name: str, fills: str = "the result"
    ) -> None:
        """Raise ConfigurationError unless this is writable and has this dtype and shape."""
        if self.dtype_name != other.dtype_name or self.shape != shape:
            raise ConfigurationError(
                f"{name} is {self.dtype_name} {self.shape}, {fills} is {other.dtype_name} {shape}"
            )
        self.check_writable(name)

    def store(self, flat: Array) -> None:
        """Copy back the elements that ``flat`` returned, if that was a copy."""
        if self.has_gaps:
            self.array[...] = flat.reshape(self.shape)


def operand(value: Any, name: str = "array") -> Operand:
    """Return an array or tensor as an operand; raise if it cannot be sent."""
    if type(value) is not np.ndarray and is_tensor(value):
        obstacle = advice_for(value, any_dtype=True)
        if obstacle is not None:
            raise UnsupportedTypeError(name, type(value).__qualname__, obstacle)
        return _tensor_operand(value, name)
    if is_plain_array(value):
        dtype_name = _name_of(value.dtype)
        if dtype_name is None:
            advice = f"Arrays of dtype {value.dtype} are not carried."
            raise UnsupportedTypeError(name, type(value).__qualname__, advice)
        return Operand(value, value, dtype_name)
    raise UnsupportedTypeError(name, type(value).__qualname__, advice_for_array(value))


def new_like(other: Operand, shape: tuple[int, ...]) -> Operand:
    """Return a new operand of the same kind and dtype, with uninitialized memory."""
    if isinstance(other.value, np.ndarray):
        return operand(np.empty(shape, other.array.dtype))
    torch = sys.modules["torch"]
    return _tensor_operand(torch.empty(shape, dtype=other.value.dtype), "out")


@lru_cache(maxsize=256)
def _name_of(dtype: np.dtype[Any]) -> str | None:
    if dtype_code(dtype) is None:
        return None
    return f"big-endian {dtype.name}" if dtype.str.startswith(">") else dtype.name


def _tensor_operand(tensor: Any, name: str) -> Operand:
    if tensor.is_conj() or tensor.is_neg():
        call = ".resolve_conj()" if tensor.is_conj() else ".resolve_neg()"
        raise UnsupportedTypeError(name, "Tensor", f"It is a lazy view: call {call} first.")
    carrier, dtype_name, is_opaque = carrier_of(tensor.dtype)
    array = map_tensor(tensor, carrier)
    if array is None:
        advice = "Its storage is smaller than the tensor: it has been freed or resized."
        raise UnsupportedTypeError(name, "Tensor", advice)
    return Operand(tensor, array, dtype_name, is_opaque=is_opaque)


def kinds_of(operands: Sequence[Operand]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the dtype and shape of each operand."""
    return tuple((value.dtype_name, value.shape) for value in operands)


def copy_if_shared(own: Array, target: Operand) -> Array:
    """Return the array to send: a copy if the result may overwrite it while others read it."""
    return own.copy() if np.may_share_memory(own, target.array) else own


def make_root_target(
    backend: Backend, source: Operand, shape: tuple[int, ...], root: int, out: Any
) -> Operand | None:
    """Return the memory for the root's result; None on other ranks."""
    root = check_rank(root, backend.world_size)
    if backend.rank != root:
        return None
    return make_target(source, shape, out)


def make_target(source: Operand, shape: tuple[int, ...], out: Any) -> Operand:
    """Return the memory for a result: ``out`` after a check, or new memory if it is None."""
    if out is None:
        return new_like(source, shape)
    target = operand(out, "out")
    target.check_like(source, shape, "out")
    return target


def part_shape(backend: Backend, source: Operand) -> tuple[int, ...]:
    """Return the shape of one of N equal parts along dim 0."""
    count = backend.world_size
    if not source.shape or source.shape[0] % count:
        raise ConfigurationError(
            f"dim 0 of an array of shape {source.shape} is not evenly divisible among {count} ranks"
        )
    return (source.shape[0] // count, *source.shape[1:])


def store_result(target: Operand | None, flat: Array | None) -> Any:
    """Store a result in its target and return the user's array; None without a target."""
    if target is None or flat is None:
        return None
    if target.has_gaps:
        target.store(flat)
    return target.value


# -- scattered parts -------------------------------------------------------------------------------

_LENGTH = struct.Struct("<I")
_ALIGNMENT = 64
_HEAD_NBYTES = 512  # a description of 32 extents of 9 bytes each has 330
_Extent = Annotated[int, msgspec.Meta(ge=0)]
# Not every byte is a valid bool or character, so these are checked.
_CHECKED_KINDS = "bU"


class ScatteredPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The description in a message; ``dtype`` is torch's name, or numpy's code."""

    is_tensor: bool
    dtype: str
    shape: Annotated[tuple[_Extent, ...], msgspec.Meta(max_length=32)]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ScatteredPart).decode


def pack_part(source: Operand, flat: Array) -> Message:
    """Return the message that carries an operand, whose elements are ``flat``."""
    head = _head_of(_describe(source))
    return (head, flat.view(np.uint8).data), len(head) + flat.nbytes


def _describe(part: Operand) -> ScatteredPart:
    is_array = isinstance(part.value, np.ndarray)
    return ScatteredPart(
        not is_array, part.array.dtype.str if is_array else part.dtype_name, part.shape
    )


@lru_cache(maxsize=256)
def _head_of(part: ScatteredPart) -> bytes:
    body = _encode(part)
    head = _LENGTH.pack(len(body)) + body
    return head + bytes(-len(head) % _ALIGNMENT)


def unpack_part(payload: Payload, out: Operand | None) -> Any:
    """Return a message's array or tensor, in ``out`` if given; raise if it does not fit."""
    try:
        return _unpack_part(payload, out)
    except BaseException:
        if not isinstance(payload, bytearray):
            with suppress(MessageWithdrawnError):
                payload.release()
        raise


def _unpack_part(payload: Payload, out: Operand | None) -> Any:
    part, start = _unpack_head(payload)
    target = _allocate(part, len(payload) - start) if out is None else out
    mine = _describe(target)
    if mine != part:
        kind = "tensor" if part.is_tensor else "array"
        raise ConfigurationError(
            f"out is {mine.dtype} {mine.shape}, "
            f"the message holds a {kind} {part.dtype} {part.shape}"
        )
    _check_size(part, target.array.itemsize, len(payload) - start)
    flat = target.flat()
    if flat.dtype.kind in _CHECKED_KINDS:
        head = ArrayHead(flat.dtype, flat.shape, False, flat.nbytes)
        flat[...] = view_array(head, whole_of(payload), start)
    else:
        copy_payload(payload, flat.view(np.uint8).data, start)
        if not isinstance(payload, bytearray):
            payload.release()
    target.store(flat)
    return target.value


def _unpack_head(payload: Payload) -> tuple[ScatteredPart, int]:
    if isinstance(payload, bytearray):
        beginning = payload
    else:
        beginning = bytearray(min(_HEAD_NBYTES, len(payload)))
        payload.read_into(0, memoryview(beginning))
    try:
        (length,) = _LENGTH.unpack_from(beginning)
        end = _LENGTH.size + length
        part = _decode(memoryview(beginning)[_LENGTH.size : end])
    except (struct.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidMessageError(f"the message was not sent by scatter: {error}") from error
    return part, end + -end % _ALIGNMENT


def _allocate(part: ScatteredPart, nbytes: int) -> Operand:
    try:
        if part.is_tensor:
            torch = importlib.import_module("torch")
            empty = torch.empty(0, dtype=getattr(torch, part.dtype))
            _check_size(part, empty.element_size(), nbytes)
            return operand(empty.new_empty(part.shape))
        dtype = dtype_of(part.dtype)
        _check_size(part, dtype.itemsize, nbytes)
        return operand(np.empty(part.shape, dtype))
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise InvalidMessageError(
            f"cannot make {part.dtype[:32]!r} {part.shape} here: {error}"
        ) from error


def _check_size(part: ScatteredPart, itemsize: int, nbytes: int) -> None:
    if itemsize * math.prod(part.shape) != nbytes:
        raise InvalidMessageError(f"{nbytes} bytes for {part.dtype[:32]!r} {part.shape}")
