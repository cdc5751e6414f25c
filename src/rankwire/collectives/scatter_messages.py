"""Scatter messages: the part that a root scatters to a rank, as a message that describes itself.

Other ranks need not know what they will get. Layout, little-endian::

    u32 length of the description | description | padding | elements, from a multiple of 64 on

The description is a msgpack array of whether it is a tensor, the dtype and the shape. Elements of
any torch dtype are sent as bytes. A receiver checks the description before it allocates memory.
"""

from __future__ import annotations

import importlib
import math
import struct
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import numpy as np

from rankwire.codec.arrays import ArrayHead, dtype_code, view_array
from rankwire.collectives.operands import Array, Operand, operand
from rankwire.errors import ConfigurationError, InvalidMessageError
from rankwire.wire.frames import Message, Payload, whole_of
from rankwire.wire.receive import MessageWithdrawnError, copy_payload

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
    is_array = isinstance(source.value, np.ndarray)
    dtype = source.array.dtype.str if is_array else source.dtype_name
    head = _head_of(not is_array, dtype, source.shape)
    return (head, flat.view(np.uint8).data), len(head) + flat.nbytes


@lru_cache(maxsize=256)
def _head_of(is_tensor: bool, dtype: str, shape: tuple[int, ...]) -> bytes:
    body = _encode(ScatteredPart(is_tensor, dtype, shape))
    head = _LENGTH.pack(len(body)) + body
    return head + bytes(-len(head) % _ALIGNMENT)


def unpack_part(payload: Payload, out: Operand | None) -> Any:
    """Return the array or tensor of a message, in ``out`` if that is given.

    Raises InvalidMessageError, or ConfigurationError if ``out`` has another dtype or shape.
    """
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
    is_array = isinstance(target.value, np.ndarray)
    dtype = target.array.dtype.str if is_array else target.dtype_name
    if ScatteredPart(not is_array, dtype, target.shape) != part:
        kind = "tensor" if part.is_tensor else "array"
        raise ConfigurationError(
            f"out is {dtype} {target.shape}, the message holds a {kind} {part.dtype} {part.shape}"
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
        dtype = np.dtype(part.dtype)
        if dtype_code(dtype) != part.dtype:
            raise InvalidMessageError(f"arrays of dtype {part.dtype[:32]!r} are not carried")
        _check_size(part, dtype.itemsize, nbytes)
        return operand(np.empty(part.shape, dtype))
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise InvalidMessageError(
            f"cannot make {part.dtype[:32]!r} {part.shape} here: {error}"
        ) from error


def _check_size(part: ScatteredPart, itemsize: int, nbytes: int) -> None:
    if itemsize * math.prod(part.shape) != nbytes:
        raise InvalidMessageError(f"{nbytes} bytes for {part.dtype[:32]!r} {part.shape}")
