"""The collectives on any value that the codec can encode.

The codec is safe: decoding runs no code from the message. Values may differ in size and type
between ranks. As with arrays, all ranks call the same functions in the same order.

If one of this rank's values cannot be encoded, codec hooks undo their work for the others. They do
not if the collective fails later, because some ranks may have received the value by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from rankwire.backends.arguments import check_pickle, check_rank
from rankwire.backends.base import Backend
from rankwire.codec.codec import Codec
from rankwire.collectives import algorithms, selection
from rankwire.collectives.exchange import Exchange, describe
from rankwire.collectives.sequence import collective
from rankwire.errors import ConfigurationError
from rankwire.wire.frames import Message, whole_of

if TYPE_CHECKING:
    from typing import Unpack

    from rankwire.collectives.signatures import AsyncCoded, BlockingCoded, T
    from rankwire.collectives.work import Work


_plain = Codec()


@overload
def all_gather_object(backend: Backend, value: T, **how: Unpack[BlockingCoded]) -> list[T]: ...
@overload
def all_gather_object(backend: Backend, value: T, **how: Unpack[AsyncCoded]) -> Work[list[T]]: ...
@collective
def all_gather_object(
    backend: Backend,
    value: Any,
    *,
    codec: Codec | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Return the list of all ranks' values, in rank order.

    Args:
        backend: The group.
        value: This rank's value.
        codec: A codec that knows your own classes; None is the plain one.
        async_op: Return a ``Work`` at once.
        timeout: Seconds for the whole operation; None is the backend's default.
    """
    codec = _check_codec(backend, codec)
    message = codec.encode(value)

    def run(x: Exchange) -> list[Any]:
        return _receive_all(x, codec, value, _share(x, message, x.others))

    return "all_gather_object()", run


@overload
def gather_object(
    backend: Backend, value: T, root: int = ..., **how: Unpack[BlockingCoded]
) -> list[T] | None: ...
@overload
def gather_object(
    backend: Backend, value: T, root: int = ..., **how: Unpack[AsyncCoded]
) -> Work[list[T] | None]: ...
@collective
def gather_object(
    backend: Backend,
    value: Any,
    root: int = 0,
    *,
    codec: Codec | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Return the list of all ranks' values at the root, and None elsewhere."""
    root = check_rank(root, backend.world_size)
    codec = _check_codec(backend, codec)
    message = codec.encode(value, peer=root)

    def run(x: Exchange) -> list[Any] | None:
        payloads = _share(x, message, [] if x.rank == root else [root])
        return _receive_all(x, codec, value, payloads) if x.rank == root else None

    return describe("gather_object", f"root {root}"), run


@overload
def broadcast_object(
    backend: Backend,
    value: None = ...,
    root: int = ...,
    *,
    codec: Codec | None = ...,
    async_op: bool = ...,
    timeout: float | None = ...,
) -> Any: ...
@overload
def broadcast_object(
    backend: Backend, value: T | None, root: int = ..., **how: Unpack[BlockingCoded]
) -> T: ...
@overload
def broadcast_object(
    backend: Backend, value: T | None, root: int = ..., **how: Unpack[AsyncCoded]
) -> Work[T]: ...
@collective
def broadcast_object(
    backend: Backend,
    value: Any = None,
    root: int = 0,
    *,
    codec: Codec | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Return the root's value on all ranks; the values of other ranks are ignored."""
    root = check_rank(root, backend.world_size)
    codec = _check_codec(backend, codec)
    message: Message = codec.encode(value) if backend.rank == root else ([], 0)

    def run(x: Exchange) -> Any:
        payloads = _share(x, message, x.others if x.rank == root else [])
        return value if x.rank == root else _receive_value(x, codec, root, payloads)

    return describe("broadcast_object", f"root {root}"), run


@overload
def scatter_object(
    backend: Backend,
    values: None = ...,
    root: int = ...,
    *,
    codec: Codec | None = ...,
    async_op: bool = ...,
    timeout: float | None = ...,
) -> Any: ...
@overload
def scatter_object(
    backend: Backend, values: Sequence[T] | None, root: int = ..., **how: Unpack[BlockingCoded]
) -> T: ...
@overload
def scatter_object(
    backend: Backend, values: Sequence[T] | None, root: int = ..., **how: Unpack[AsyncCoded]
) -> Work[T]: ...
@collective
def scatter_object(
    backend: Backend,
    values: Sequence[Any] | None = None,
    root: int = 0,
    *,
    codec: Codec | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Return this rank's item of the root's list."""
    root = check_rank(root, backend.world_size)
    codec = _check_codec(backend, codec)
    encoded = _encode_all(backend, codec, values) if backend.rank == root else []

    def run(x: Exchange) -> Any:
        payloads = selection.distribute(x, encoded)
        if x.rank != root:
            return _receive_value(x, codec, root, payloads)
        assert values is not None
        return values[root]

    return describe("scatter_object", f"root {root}"), run


@overload
def all_to_all_object(
    backend: Backend, values: Sequence[T], **how: Unpack[BlockingCoded]
) -> list[T]: ...
@overload
def all_to_all_object(
    backend: Backend, values: Sequence[T], **how: Unpack[AsyncCoded]
) -> Work[list[T]]: ...
@collective
def all_to_all_object(
    backend: Backend,
    values: Sequence[Any],
    *,
    codec: Codec | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Send item i to rank i, and return the list of the items from all ranks."""
    codec = _check_codec(backend, codec)
    encoded = _encode_all(backend, codec, values)

    def run(x: Exchange) -> list[Any]:
        return _receive_all(x, codec, values[x.rank], selection.distribute(x, encoded))

    return "all_to_all_object()", run


def _share(x: Exchange, message: Message, dsts: Sequence[int]) -> list[bytearray] | None:
    """Return the payloads of all ranks if they fit into shared memory; else send this rank's."""
    payloads = selection.spread(x, message)
    if payloads is None:
        for dst in dsts:
            x.send_buffers(dst, algorithms.SPREAD_STEP, *message)
    return payloads


def _receive_value(x: Exchange, codec: Codec, src: int, payloads: list[bytearray] | None) -> Any:
    return codec.decode(whole_of(selection.payload_from(x, src, payloads)), peer=src)


def _receive_all(
    x: Exchange, codec: Codec, own: Any, payloads: list[bytearray] | None
) -> list[Any]:
    values = [own] * x.size
    for src in reversed(x.others):
        values[src] = _receive_value(x, codec, src, payloads)
    return values


def _encode_all(backend: Backend, codec: Codec, values: Sequence[Any] | None) -> list[Message]:
    count = backend.world_size
    if values is None or len(values) != count:
        given = "none" if values is None else len(values)
        raise ConfigurationError(f"one value for each of the {count} ranks is needed, not {given}")
    encoded: list[Message] = []
    try:
        for rank, value in enumerate(values):
            encoded.append(codec.encode(value, path=f"values[{rank}]", peer=rank))
    except BaseException:
        for message in encoded:
            codec.undo(message)
        raise
    codec.undo(encoded[backend.rank])  # this rank's own value is checked, not sent
    return encoded


def _check_codec(backend: Backend, codec: Codec | None) -> Codec:
    if codec is None:
        return _plain
    check_pickle(backend, codec.allows_pickle)
    return codec
