"""Python values to payloads and back, exactly, without running code from the wire.

A payload, little-endian::

    u32 length of the head | head | padding | buffer 0 | padding | buffer 1 | ...

The head is msgpack. Arrays and long byte strings are not in it: it only describes them, and their
bytes follow as the buffers, in the order of the descriptions, each at a multiple of 16. Padding
is zero, an empty buffer takes no place, nothing follows the last buffer. Encoding does not copy
the buffers, decoding makes arrays that are views of the payload.

Contract: a value arrives equal and of the same type, or encoding raises ``UnsupportedTypeError``
with the path to it. Decoding trusts nothing: a payload that no codec writes raises
``InvalidMessageError`` and nothing else, after time and memory in proportion to its length. This
module knows no socket, thread, clock, function or rank; what the parts of a head mean is in
``values``, ``value_writer`` and ``value_reader``.
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
from rankwire.codec.value_writer import BUILT_IN, Refusal, Writer
from rankwire.codec.values import ALIGNMENT, ALWAYS_PLAIN, MIN_BUFFER_NBYTES, PLAIN, is_flat
from rankwire.errors import (
    ConfigurationError,
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
# What it raises for one item of 4 GiB or more, and for nothing else that it is given here.
_TOO_LARGE = msgspec.EncodeError

_pack = msgspec.msgpack.Encoder().encode


class _NotPlain(Exception):
    """A small head that has extensions in it after all."""


def _refuse_extension(code: int, body: memoryview) -> None:
    raise _NotPlain


def unpacker_of(kind: type[T]) -> Callable[[memoryview], T]:
    """Return what decodes a small plain head to one type, or refuses it (``Codec.decode``)."""
    return msgspec.msgpack.Decoder(kind, ext_hook=_refuse_extension).decode


# Most calls are small and plain: without a Reader for each they decode in half the time.
_unpack_plain: Callable[[memoryview], Any] = unpacker_of(object)


class Codec(PublicDir):
    """Turns values into payloads and payloads into values.

    Carried, each exactly: None, bool, int, float, complex, Decimal, Fraction, str, bytes,
    bytearray, list, tuple, dict, set, frozenset, OrderedDict, defaultdict, Counter, deque, range,
    slice, datetime, date, time, timedelta, UUID, paths; numpy arrays, with fields too, and scalars
    that hold no objects; dense torch tensors and parameters on the CPU, sizes, dtypes, devices,
    layouts and memory formats; members and instances of registered enums, dataclasses, namedtuples
    and msgspec Structs, and whatever has hooks (:meth:`register`). Values nest up to 32 deep. A
    subclass counts as another type. ``docs/what-can-i-send.md`` has the limits.

    What changes on the way: a memoryview arrives as bytes; a time zone becomes its UTC offset; an
    array or tensor with gaps between its elements arrives without; a read-only array arrives
    writable; a tensor arrives detached, a parameter without its gradient; of a dataclass only the
    fields travel, and its constructor runs.

    Both ends must register the same classes under the same names, here or with ``message``. Safe
    from any thread, also while another thread registers a class.

    Args:
        types: Classes to register.
        allow_pickle: Send what is not carried as a pickle, and accept pickles. Then every rank that
            sends to this one can run code on it.
        max_items: How many values a message that is decoded may hold, those in containers included;
            an array or a byte string is one.

    Attributes:
        how_to_pickle: What the error for a value that is not carried tells the user to set.
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
        self._pickling: ModuleType | None = None
        if allow_pickle:
            from rankwire.codec import pickling  # not loaded in a process that does not ask for it

            self._pickling = pickling
        for cls in types:
            self.register(cls)

    @property
    def allows_pickle(self) -> bool:
        """Whether it sends and accepts pickles."""
        return self._pickling is not None

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
        """Carry the instances of a class from now on. Also a decorator, with or without arguments.

        An enum, dataclass, namedtuple or msgspec Struct is carried as it is. Any class, such as
        ``types.FunctionType`` or ``torch.Tensor``, is carried by *hooks*: in place of an instance
        (of exactly this class) travels what ``take`` returns, and at the other end ``build`` makes
        an instance of it. They go before the codec's own way for this class. What the codec looks
        for first (None, bool, numbers, texts, bytes, containers, dates, paths, numpy arrays)
        cannot have hooks.

        ``take(value, sending)`` runs on the thread that sends, once for each time that the value is
        encoded, which may be more often than it is sent. ``sending.peer`` is the rank that the
        message is for, or None for several. ``sending.undo(callback)`` has something called if the
        message certainly does not leave: encoding it fails, it is too large, the call or reply that
        it belongs to is not sent. It is not called for a message that may have left, which may
        still not be read: its peer may die, or have given up the call. What ``take`` raises refuses
        the value; if it returns ``NotImplemented``, the value travels as it would without hooks.

        ``build(state, receiving)`` gets whatever a peer wants it to get: check the type and range
        of everything in ``state``. ``receiving.peer`` is the rank that sent it, or None if unknown.
        For the arguments of a call it runs on the thread that polls, so it must be quick and must
        not call or wait. What it raises refuses the message; a ``RankwireError`` keeps its text.

        Args:
            cls: An enum, a dataclass, a namedtuple or a msgspec Struct; with hooks any class.
            name: What the wire calls it; its qualified name if not given.
            take: Returns what travels in place of an instance: any value that is carried.
            build: Returns an instance, made of what ``take`` had returned.

        Raises:
            ConfigurationError: It is of another kind, or it or its name is taken already.
        """
        if cls is None:
            return lambda cls: self.register(cls, name=name, take=take, build=build)
        if cls in BUILT_IN:
            raise ConfigurationError(f"{cls.__qualname__} has a form of its own on the wire")
        self._classes.add(cls, name, take, build)
        return cls

    def encode(
        self, value: Any, *, path: str = "value", peer: int | None = None
    ) -> tuple[Buffers, int]:
        """Encode one value.

        Args:
            value: What to send.
            path: What to call it in an error.
            peer: Whom it is for, to be told to hooks.

        Returns:
            The buffers to send in this order, and the sum of their lengths. Some are the memory of
            the caller's own arrays, which must not change until they have been sent. If they are
            not sent, :meth:`undo` lets hooks know.

        Raises:
            UnsupportedTypeError: The value or one in it is not carried, or is nested too deeply.
            MessageTooLargeError: It has 4 GiB without counting arrays and byte strings.
        """
        if type(value) in PLAIN or is_flat(value):
            try:
                return _join(_pack(value), ())
            except (*_NOT_PLAIN_AFTER_ALL, _TOO_LARGE):
                pass  # the walk says what and where
        return self._encode_by_walk(lambda writer: writer.lower(value), path, peer)

    def encode_record(
        self,
        record: list[Any],
        paths: Sequence[str],
        *,
        levels: int = 1,
        peer: int | None = None,
    ) -> tuple[Buffers, int]:
        """Encode a list whose items have names; the rest is as for :meth:`encode`.

        Args:
            record: The items. The list itself does not count as a level of nesting.
            paths: What to call each item in an error.
            levels: 2 if the containers in it do not count either, only what is in those.
            peer: Whom it is for.
        """
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
        """Encode a record whose items are plain or flat, as the caller has seen to.

        Returns:
            What ``encode_record`` does; None if it has to look closer (a wide int, a strange text).
        """
        try:
            head = _pack(record)
        except (*_NOT_PLAIN_AFTER_ALL, _TOO_LARGE):
            return None
        nbytes = len(head)
        if nbytes < MIN_BUFFER_NBYTES:  # as ``_join`` does
            return [_PREFIX(nbytes) + head], nbytes + 4
        return _join(head, ())

    def undo(self, message: tuple[Sequence[Any], int]) -> None:
        """Have hooks undo what they did for a message that was encoded and will not be sent.

        For a message without hooks, or one that was undone before, there is nothing to do. Safe
        from any thread.

        Args:
            message: What encoding returned, the very list.

        Raises:
            ExceptionGroup: Some callbacks raised; the others were called all the same.
        """
        if type(message[0]) is UndoableBuffers:
            message[0].sending.undo_all()

    @overload
    def decode(
        self,
        payload: bytearray,
        unpack: Callable[[memoryview], Any] = _unpack_plain,
        peer: int | None = None,
    ) -> Any: ...
    @overload
    def decode(
        self,
        payload: tuple[Sequence[Buffer], int],
        unpack: Callable[[memoryview], Any] = _unpack_plain,
        peer: int | None = None,
    ) -> Any: ...
    def decode(
        self,
        payload: Any,
        unpack: Callable[[memoryview], Any] = _unpack_plain,
        peer: int | None = None,
    ) -> Any:
        """Decode a whole payload.

        ``decode(encode(value))`` is a copy of the value. To keep it in a file, write the buffers
        one after the other; ``decode(bytearray(data))`` reads it back.

        Args:
            payload: What the buffers of one ``encode`` held, in one piece. Arrays in the value are
                writable views of it, so it belongs to the value from now on. Or what ``encode``
                returned, which is copied.
            unpack: Decodes a small plain one to the type that is expected (``unpacker_of``); one
                that it refuses, and any other, is decoded to what it says.
            peer: Who sent it, to be told to hooks.

        Raises:
            InvalidMessageError: No codec with the same classes and options made this.
        """
        try:
            head_end = _HEAD_NBYTES.unpack_from(payload)[0] + 4
            if head_end == len(payload) <= MIN_SCANNED_NBYTES:
                try:
                    return unpack(memoryview(payload)[4:])
                except (_NotPlain, msgspec.ValidationError):
                    pass
            reader = Reader(self._classes, self._pickling, payload, head_end, self._max_items, peer)
            value = reader.read(memoryview(payload)[4:head_end])
            if reader.position == len(payload):
                return value
        except (InvalidMessageError, KeyboardInterrupt):
            raise
        # The one border: whatever msgspec, numpy, a constructor, a hook or a hash function raises.
        # It must not end the thread that reads, so only an interrupt (Ctrl-C) passes.
        except BaseException as error:
            if not isinstance(payload, tuple):
                raise InvalidMessageError(
                    one_line(f"the payload does not decode: {type_name(error)}: {text_of(error)}")
                ) from error
        else:
            raise InvalidMessageError(
                f"the payload has {len(payload)} bytes, its head describes {reader.position}"
            )
        # What ``encode`` returned. This comes last, so that the payload of a call is not tested.
        return self.decode(bytearray().join(payload[0]), unpack, peer)

    def _encode_by_walk(
        self, lower: Callable[[Writer], Any], path: str, peer: int | None
    ) -> tuple[Buffers, int]:
        try:
            return self._encode_lowered(lower, path, PLAIN, peer)
        except _NOT_PLAIN_AFTER_ALL:
            return self._encode_lowered(lower, path, ALWAYS_PLAIN, peer)

    def _encode_lowered(
        self,
        lower: Callable[[Writer], Any],
        path: str,
        plain: frozenset[type],
        peer: int | None,
    ) -> tuple[Buffers, int]:
        writer = Writer(self._classes, self._pickling, plain, peer)
        try:
            buffers, nbytes = _join(_pack(lower(writer)), writer.buffers)
        except BaseException as error:
            if writer.sending is not None:
                writer.sending.undo_all()
            explained = _explained(error, path, self.how_to_pickle)
            raise explained from explained.__cause__
        if writer.sending is not None and writer.sending.can_undo:
            buffers = UndoableBuffers(buffers, writer.sending)
        return buffers, nbytes


def _explained(error: BaseException, path: str, how_to_pickle: str) -> BaseException:
    """Return what to raise for what ended a walk that began at ``path``."""
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
    """Lay out a payload: the parts to send, and the sum of their lengths."""
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
