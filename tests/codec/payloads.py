"""Payloads as a codec makes them, and as none would."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.msgpack import Ext

from rankwire.codec.codec import Codec


def payload_of(codec: Codec, value: Any, peer: int | None = None) -> bytearray:
    """Return what a codec sends for a value."""
    buffers, nbytes = codec.encode(value, peer=peer)
    payload = bytearray().join(buffers)
    assert len(payload) == nbytes
    return payload


def roundtrip(codec: Codec, value: Any) -> Any:
    """Return what arrives of a value."""
    return codec.decode(payload_of(codec, value))


def forge(head: Any, tail: bytes = b"") -> bytearray:
    """Return a payload with any msgpack as its head."""
    packed = head if isinstance(head, bytes) else msgspec.msgpack.encode(head)
    return bytearray(len(packed).to_bytes(4, "little") + packed + tail)


def forge_extension(code: int, body: Any) -> bytearray:
    """Return a payload of one extension."""
    return forge(Ext(code, msgspec.msgpack.encode(body)))
