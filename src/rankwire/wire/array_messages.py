"""Array messages: an array or tensor as one message that describes itself.

Layout, little-endian::

    u8 kind (0 array, 1 tensor) | u8 zero | u16 length of the description | description | padding

and then the elements, at a multiple of 64. The description is the one of ``codec.arrays``. After
reading ``HEAD_NBYTES``, a receiver knows where the elements belong.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from rankwire.codec.arrays import (
    ArrayHead,
    advice_for_array,
    array_body,
    array_bytes,
    array_head,
    is_plain_array,
    view_array,
)
from rankwire.codec.tensors import advice_for, is_tensor, tensor_body, tensor_head, view_tensor
from rankwire.errors import InvalidMessageError, UnsupportedTypeError
from rankwire.wire.frames import Buffer

_PREFIX = struct.Struct("<BBH")
_ARRAY, _TENSOR = 0, 1
_ALIGNMENT = 64
HEAD_NBYTES = 512  # the longest description, with 32 extents of 9 bytes, has 300


class ArrayMessage(NamedTuple):
    """The parsed head of an array message."""

    head: ArrayHead
    tensor_dtype: str  # torch's name for it; empty for an array
    start: int  # where the elements begin

    @property
    def nbytes(self) -> int:
        """The length of the whole message."""
        return self.start + self.head.nbytes

    def view(self, payload: bytearray) -> Any:
        """Return the array or tensor in a whole message, as a view; check its elements."""
        array = view_array(self.head, payload, self.start)
        return view_tensor(self.tensor_dtype, array) if self.tensor_dtype else array

    def describe(self) -> str:
        """Return dtype and shape as text."""
        return f"{self.tensor_dtype or self.head.dtype.name} {self.head.shape}"


def pack_array(value: Any) -> tuple[list[Buffer], int]:
    """Return the buffers of an array's message, which may be its own memory, and their size.

    Raise ``UnsupportedTypeError`` for a value that cannot be sent.
    """
    if is_plain_array(value):
        kind, body = _ARRAY, array_body(value)
        if body is None:
            advice = f"Arrays of dtype {value.dtype} are not carried."
            raise UnsupportedTypeError("array", type(value).__qualname__, advice)
        elements: Buffer = array_bytes(value)
    elif is_tensor(value):
        obstacle = advice_for(value)
        if obstacle is not None:
            raise UnsupportedTypeError("array", type(value).__qualname__, obstacle)
        kind = _TENSOR
        body, elements = tensor_body(value)
    else:
        raise UnsupportedTypeError("array", type(value).__qualname__, advice_for_array(value))
    head = _PREFIX.pack(kind, 0, len(body)) + body
    head += bytes(-len(head) % _ALIGNMENT)
    return [head, elements], len(head) + len(elements)


def unpack_head(beginning: bytearray | memoryview, nbytes: int) -> ArrayMessage:
    """Parse the first ``HEAD_NBYTES`` of a message of ``nbytes``."""
    foreign = "the message was not sent by send_array"
    try:
        kind, reserved, length = _PREFIX.unpack_from(beginning)
        end = _PREFIX.size + length
        body = bytes(beginning[_PREFIX.size : end])
        if kind > _TENSOR or reserved or len(body) != length:
            raise InvalidMessageError(foreign)
        start = end + -end % _ALIGNMENT
        name, head = ("", array_head(body)) if kind == _ARRAY else tensor_head(body)
    except InvalidMessageError:
        raise
    except Exception as error:  # of struct or msgspec
        raise InvalidMessageError(foreign) from error
    message = ArrayMessage(head, name, start)
    if message.nbytes != nbytes:
        raise InvalidMessageError(f"an array of {message.nbytes} bytes in a message of {nbytes}")
    return message
