"""The codec: Python values to payloads and back, exactly, without running code from the wire.

A payload, little-endian::

    u32 length of the head | head | padding | buffer 0 | padding | buffer 1 | ...

The head is msgpack. The bytes of the arrays and long byte strings in it follow as the buffers, in
the same order, each at a multiple of 16. Padding is zero, an empty buffer takes no space, and
nothing follows the last buffer. Encoding does not copy buffers; decoded arrays are views of the
payload. Decoding raises only ``InvalidMessageError``, in time and memory linear in the length.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, TypeAlias, TypeVar, overload

import msgspec

from rankwire.codec.advice import HOW_TO_PICKLE
from rankwire.codec.classes import SHARED, ClassTable
from rankwire.codec.hooks import Buffer, BuildContext, TakeContext, UndoableBuffers
from rankwire.codec.limits import DEFAULT_MAX_ITEMS, MIN_SCANNED_NBYTES
from rankwire.codec.value_reader import Reader
from rankwire.codec.value_writer import Refusal, Writer
from rankwire.codec.values import ALIGNMENT, ALWAYS_PLAIN, MIN_BUFFER_NBYTES, PLAIN, is_flat
from rankwire.errors import (
    InvalidMessageError,
    MessageTooLargeError,
    UnsupportedTypeError,
)
from rankwire.public_dir import PublicDir
from rankwire.texts import one_line, text_of, type_name

T = TypeVar("T")
Buffers: TypeAlias = list[Buffer]

_HEAD_NBYTES = struct.Struct("<I")  # the length of the head, in 4 bytes
_PREFIX = _HEAD_NBYTES.pack
_MAX_HEAD_NBYTES = 2**32 - 1
_CONTAINERS = frozenset((list, dict))
_PADDING = [bytes(nbytes) for nbytes in range(ALIGNMENT)]

# What msgspec raises for an int of more than 64 bits and for a string with a lone surrogate.
_NOT_PLAIN_AFTER_ALL = (OverflowError, UnicodeEncodeError)
# What msgspec raises for one item of 4 GiB or more, and for nothing else here.
_TOO_LARGE = msgspec.EncodeError

_pack = msgspec.msgpack.Encoder().encode


class _NotPlain(Exception):
    """A small head contains an extension."""


def _refuse_extension(code: int, body: memoryview) -> None:
    raise _NotPlain


def unpacker_of(kind: type[T]) -> Callable[[memoryview], T]:
    """Return a decoder of small plain heads to one type, for ``Codec.decode``."""
    return msgspec.msgpack.Decoder(kind, ext_hook=_refuse_extension).decode


# Most calls are small and plain; without a Reader, decoding takes half the time.
_unpack_plain: Callable[[memoryview], Any] = unpacker_of(object)


class Codec(PublicDir):
    """Encodes values to payloads and decodes payloads to values.

    Its types are: None, bool, int, float, complex, Decimal, Fraction, str, bytes, bytearray,
    list, tuple, dict, set, frozenset, OrderedDict, defaultdict, Counter, deque, range, slice,
    datetime, date, time, timedelta, UUID, paths; numpy arrays, also structured ones, and scalars
    without objects; dense torch tensors and parameters on the CPU, sizes, dtypes, devices, layouts
    and memory formats; members and instances of registered enums, dataclasses, namedtuples and
    msgspec Structs, and classes with hooks (``register``). Values nest up to 32 deep. A
    subclass counts as another type. ``docs/what-can-i-send.md`` has the limits.

    What changes: a memoryview arrives as bytes; a time zone becomes its UTC offset; an array or
    tensor with gaps arrives without them; a read-only array arrives writable; a tensor arrives
    detached, a parameter without its gradient; only the fields of a dataclass travel, and its
    constructor runs.

    Both ends must register the same classes under the same names, here or with ``message``. Safe
    from any thread, also while another thread registers a class.

    Args:
        types: Classes to register.
        allow_pickle: Send other values as pickles, and accept pickles. Then every rank that sends
            to this one can run code on it.
        max_items: Maximum number of values in a decoded message, including those in containers; an
            array or byte string counts as one.

    Attributes:
        how_to_pickle: The setting that the error for an unsupported value recommends.
    """

    _SHOWN = ("allows_pickle", "decode", "encode", "register", "undo")

    def __init__(
        self,
        types: Iterable[type] = (),
        *,
        allow_pickle: bool = False,
        max_items: int = DEFAULT_MAX_ITEMS,
    ) -> None:
        self._max_items = max_items
        self.how_to_pickle = HOW_TO_PICKLE
        self._classes = ClassTable(SHARED)
        self._pickle: ModuleType | None = None
        if allow_pickle:
            # Only here: a sender of pickles can run code on the receiver. There is no "restricted
            # unpickler": those have been bypassed, and a half-safe format invites trust.
            import pickle

            self._pickle = pickle
        for cls in types:
            self.register(cls)

    @property
    def allows_pickle(self) -> bool:
        """Whether it sends and accepts pickles."""
        return self._pickle is not None

    @overload
    def register(
        self,
        cls: type[T],
        *,
        name: str | None = None,
        take: Callable[[T, TakeContext], Any] | None = None,
        build: Callable[[Any, BuildContext], T] | None = None,
    ) -> type[T]: ...
    @overload
    def register(
        self,
        cls: None = None,
        *,
        name: str | None = None,
        take: Callable[[Any, TakeContext], Any] | None = None,
        build: Callable[[Any, BuildContext], Any] | None = None,
    ) -> Callable[[type[T]], type[T]]: ...
    def register(
        self,
        cls: type[T] | None = None,
        *,
        name: str | None = None,
        take: Callable[[Any, TakeContext], Any] | None = None,
        build: Callable[[Any, BuildContext], Any] | None = None,
    ) -> Any:
        """Let this codec send instances of a class. Also a decorator, with or without arguments.

        An enum, dataclass, namedtuple or msgspec Struct needs no hooks. Any other class, such as
        ``types.FunctionType`` or ``torch.Tensor``, needs them. They replace the codec's own
        encoding of exactly this class. None, bool, numbers, texts, bytes, containers, dates, paths
        and numpy arrays cannot have hooks.

        ``take(value, sending)`` runs on the sending thread each time the value is encoded, which
        may be more often than it is sent. ``sending.undo(callback)`` registers a callback for a
        message that certainly does not leave: encoding fails, the message is too large, or its call
        or reply is not sent. The callback does not run for a message that may have left, even if
        the peer never reads it. An exception of ``take`` refuses the value; ``NotImplemented``
        encodes it as without hooks.

        ``build(state, receiving)`` gets what the peer sent: check the type and range of everything
        in ``state``. For the arguments of a call it runs on the polling thread, so it must be quick
        and must not call or wait. An exception refuses the message; a ``RankwireError`` keeps its
        text.

        Args:
            cls: An enum, dataclass, namedtuple or msgspec Struct; with hooks any class.
            name: Its name on the wire; by default its qualified name.
            take: Returns the value to send in place of an instance.
            build: Returns an instance, made of what ``take`` returned.

        Raises:
            ConfigurationError: The class needs hooks, or it or its name is registered already.
        """
        if cls is None:
            return lambda cls: self.register(cls, name=name, take=take, build=build)
        self._classes.add(cls, name, take, build)
        return cls

    def encode(
        self, value: Any, *, path: str = "value", peer: int | None = None
    ) -> tuple[Buffers, int]:
        """Encode one value.

        Args:
            value: The value to send.
            path: Its name in errors.
            peer: The receiving rank, for hooks.

        Returns:
            The buffers to send, in order, and the sum of their lengths. Some are the memory of
            arrays, which must not change until they are sent. If they are not, call ``undo``.

        Raises:
            UnsupportedTypeError: A value cannot be sent, or is nested too deeply.
            MessageTooLargeError: The value without its arrays and byte strings takes 4 GiB.
        """
        if type(value) in PLAIN or is_flat(value):
            try:
                return _join(_pack(value), ())
            except (*_NOT_PLAIN_AFTER_ALL, _TOO_LARGE):
                pass  # the walk finds the path
        return self._encode_by_walk(lambda writer: writer.lower(value), path, peer)

    def encode_record(
        self,
        record: list[Any],
        paths: Sequence[str],
        *,
        levels: int = 1,
        peer: int | None = None,
    ) -> tuple[Buffers, int]:
        """Encode a list with a path for each item; the outer ``levels`` do not count as nesting."""
        for item in record:
            kind = type(item)
            if not (kind in PLAIN or (kind in _CONTAINERS and not item) or is_flat(item)):
                break
        else:
            message = self.encode_flat(record)
            if message is not None:
                return message
        return self._encode_by_walk(
            lambda writer: writer.lower_record(record, paths, levels), "", peer
        )

    def encode_flat(self, record: Sequence[Any]) -> tuple[Buffers, int] | None:
        """Encode a record of plain or flat items; None if it has a wide int or a lone surrogate."""
        try:
            head = _pack(record)
        except (*_NOT_PLAIN_AFTER_ALL, _TOO_LARGE):
            return None
        nbytes = len(head)
        if nbytes < MIN_BUFFER_NBYTES:  # as ``_join`` does
            return [_PREFIX(nbytes) + head], nbytes + 4
        return _join(head, ())

    def undo(self, message: tuple[Sequence[Any], int]) -> None:
        """Let hooks undo their work for an encoded message that will not be sent. Idempotent.

        Args:
            message: What encoding returned, the same list.

        Raises:
            ExceptionGroup: Some callbacks raised; all were called.
        """
        if type(message[0]) is UndoableBuffers:
            message[0].sending.undo_all()

    def decode(
        self,
        payload: bytearray | tuple[Sequence[Buffer], int],
        unpack: Callable[[memoryview], Any] = _unpack_plain,
        peer: int | None = None,
    ) -> Any:
        """Decode a whole payload.

        Args:
            payload: The joined buffers of one ``encode``, which may come from a file; arrays in the
                value are writable views of it. Or what ``encode`` returned, which is copied.
            unpack: Decodes a small plain head to the expected type (``unpacker_of``); other
                heads, and heads that it refuses, are decoded without a type.
            peer: The sending rank, for hooks.

        Raises:
            InvalidMessageError: No codec with the same classes and options made this payload.
        """
        data: Any = payload
        try:
            head_end = _HEAD_NBYTES.unpack_from(data)[0] + 4
            if head_end == len(data) <= MIN_SCANNED_NBYTES:
                try:
                    return unpack(memoryview(data)[4:])
                except (_NotPlain, msgspec.ValidationError):
                    pass
            reader = Reader(self._classes, self._pickle, data, head_end, self._max_items, peer)
            value = reader.read(memoryview(data)[4:head_end])
            if reader.position == len(data):
                return value
        except (InvalidMessageError, KeyboardInterrupt):
            raise
        # msgspec, numpy, constructors, hooks and hash functions may raise anything, which must not
        # end the reader thread.
        except BaseException as error:
            if not isinstance(payload, tuple):
                raise InvalidMessageError(
                    one_line(f"the payload does not decode: {type_name(error)}: {text_of(error)}")
                ) from error
        else:
            raise InvalidMessageError(
                f"the payload has {len(data)} bytes, its head describes {reader.position}"
            )
        # A tuple from ``encode``: last, because the test takes a tenth of decoding a small payload.
        return self.decode(bytearray().join(payload[0]), unpack, peer)

    def _encode_by_walk(
        self,
        lower: Callable[[Writer], Any],
        path: str,
        peer: int | None,
        plain: frozenset[type] = PLAIN,
    ) -> tuple[Buffers, int]:
        writer = Writer(self._classes, self._pickle, plain, peer)
        try:
            buffers, nbytes = _join(_pack(lower(writer)), writer.buffers)
        except BaseException as error:
            if writer.sending is not None:
                writer.sending.undo_all()
            if isinstance(error, _NOT_PLAIN_AFTER_ALL) and plain is PLAIN:
                return self._encode_by_walk(lower, path, peer, ALWAYS_PLAIN)
            explained = _explained(error, path, self.how_to_pickle)
            raise explained from explained.__cause__
        if writer.sending is not None and writer.sending.can_undo:
            buffers = UndoableBuffers(buffers, writer.sending)
        return buffers, nbytes


def _explained(error: BaseException, path: str, how_to_pickle: str) -> BaseException:
    if isinstance(error, Refusal):
        path += "".join(reversed(error.trail))
        advice = error.advice.replace(HOW_TO_PICKLE, how_to_pickle)
        refusal = UnsupportedTypeError(path, error.type_name, advice)
        refusal.__cause__ = error.__cause__
        return refusal
    if isinstance(error, _TOO_LARGE):
        too_large = MessageTooLargeError(_MAX_HEAD_NBYTES + 1, _MAX_HEAD_NBYTES)
        too_large.__cause__ = error
        return too_large
    return error


def _join(head: bytes, buffers: Iterable[bytes | memoryview]) -> tuple[Buffers, int]:
    if len(head) > _MAX_HEAD_NBYTES:
        raise MessageTooLargeError(len(head), _MAX_HEAD_NBYTES)
    prefix = _PREFIX(len(head))
    parts: Buffers = [prefix + head] if len(head) < MIN_BUFFER_NBYTES else [prefix, head]
    total = len(prefix) + len(head)
    for buffer in buffers:
        if padding := -total % ALIGNMENT:
            parts.append(_PADDING[padding])
        parts.append(buffer)
        total += padding + len(buffer)
    return parts, total
