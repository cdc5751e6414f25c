"""Items of queues as bytes: the owner of a queue passes them on and never decodes them.

Several small items travel joined, with their lengths; larger ones as arrays of bytes, which are not
copied on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from rankwire.codec.codec import Codec
from rankwire.codec.hooks import Buffer
from rankwire.errors import InvalidMessageError

Packed: TypeAlias = list[Any]  # the lengths and one buffer, or None and a buffer for each item

_LARGE = 16 << 10  # bytes of an item
_INLINE = 4096  # the codec sends longer byte strings as arrays would be, and copies them on arrival


def encode_item(codec: Codec, item: Any) -> bytes:
    """Return an item as bytes. Raises ``UnsupportedTypeError``."""
    return b"".join(codec.encode(item, path="item")[0])


def decode_item(codec: Codec, payload: Buffer) -> Any:
    """Return an item; arrays in it are writable. Raises ``InvalidMessageError``."""
    if len(payload) < _LARGE or memoryview(payload).readonly:
        payload = bytearray(payload)
    return codec.decode(payload)  # type: ignore[arg-type]


def pack(payloads: Sequence[Buffer]) -> Packed:
    """Return items as one value that the codec sends."""
    if sum(map(len, payloads)) >= _LARGE * len(payloads):
        return [None, *(np.frombuffer(payload, np.uint8) for payload in payloads)]
    joined = b"".join(payloads)
    blob = joined if len(joined) < _INLINE else np.frombuffer(joined, np.uint8)
    return [list(map(len, payloads)), blob]


def unpack(packed: Packed) -> list[Buffer]:
    """Return the items of ``pack``; small ones are copied, and keep nothing else alive."""
    match packed:
        case [None, *buffers] if buffers and all(_is_bytes(buffer) for buffer in buffers):
            return [memoryview(buffer) for buffer in buffers]
        case [list(lengths), buffer] if lengths and _is_bytes(buffer):
            view, start, payloads = memoryview(buffer), 0, []
            for length in lengths:
                if type(length) is not int or length < 0:
                    break
                payloads.append(bytes(view[start : start + length]))
                start += length
            if start == len(view) and len(payloads) == len(lengths):
                return payloads  # type: ignore[return-value]
    raise InvalidMessageError("these are not the items of a queue")


def _is_bytes(value: Any) -> bool:
    if type(value) is np.ndarray:
        return value.dtype == np.uint8 and value.ndim == 1
    return type(value) is bytes
