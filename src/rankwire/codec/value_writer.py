"""The writer: encodes values that msgspec would not carry exactly as extensions (``values``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from rankwire.codec import arrays, limits, scalars, structured, tensors
from rankwire.codec.advice import advice_for
from rankwire.codec.arrays import holds_references
from rankwire.codec.classes import ClassTable, EnumClass, RecordClass
from rankwire.codec.hooks import HookedClass, TakeContext
from rankwire.codec.values import (
    KEYED,
    MAX_DEPTH,
    MIN_BUFFER_NBYTES,
    MIN_LONG_LIST,
    NBYTES,
    PLAIN,
    Code,
)
from rankwire.errors import RankwireError
from rankwire.texts import one_line, text_of, type_name

_NATIVE_INTS = range(-(2**63), 2**64)
_PICKLE_PROTOCOL = 5  # every supported Python version reads it
_pack = msgspec.msgpack.Encoder().encode


class Refusal(Exception):
    """A value cannot be sent. The path to it grows from its end, container by container."""

    def __init__(self, value: Any, advice: str) -> None:
        super().__init__(advice)
        self.type_name = type_name(value)
        self.advice = advice
        self.trail: list[str] = []


class Writer:
    """Lowers the values of one payload, and collects the buffers that travel beside its head.

    If ``pickle`` (the module) is None, unsupported values are refused. ``plain`` is ``PLAIN`` or
    ``ALWAYS_PLAIN``. ``sending`` is the context of the hooks; None if no hook ran.
    """

    def __init__(
        self,
        classes: ClassTable,
        pickle: ModuleType | None,
        plain: frozenset[type],
        peer: int | None = None,
    ) -> None:
        self.classes = classes
        self.pickle = pickle
        self.plain = plain
        self._depth = 0
        self.peer = peer
        self.buffers: list[bytes | memoryview] = []
        self.sending: TakeContext | None = None

    def lower(self, value: Any) -> Any:
        """Return a plain value itself, or what stands for it in the head; raise ``Refusal``."""
        kind = type(value)
        if kind in self.plain:
            return value
        lower = _LOWER.get(kind)
        return _other(self, value) if lower is None else lower(self, value)

    def lower_record(self, record: list[Any], paths: Sequence[str], levels: int = 1) -> Any:
        """Lower a list whose items have names; the outer ``levels`` do not count as nesting."""
        self._depth = 1 - levels
        lowered: list[Any] = []
        try:
            for item in record:
                # Most items of a call are plain or empty.
                is_plain = type(item) in self.plain or (type(item) in _CONTAINERS and not item)
                lowered.append(item if is_plain else self.lower(item))
        except Refusal as refusal:
            refusal.trail.append(paths[len(lowered)])
            raise
        return lowered

    def each(self, owner: Any, values: Collection[Any], name: Callable[[int], str]) -> Any:
        """Lower the values of a container; ``name`` returns the path to a refused one."""
        if self._depth == MAX_DEPTH:
            raise Refusal(owner, f"It is nested more than {MAX_DEPTH} levels deep, or in itself.")
        if not values:
            return values
        if len(values) >= MIN_LONG_LIST and (floats := _packed_floats(values)) is not None:
            return floats
        if self.plain.issuperset(map(type, values)):
            return values
        lowered: list[Any] = []
        self._depth += 1
        try:
            for value in values:
                lowered.append(self.lower(value))  # noqa: PERF401 - its length says which failed
        except Refusal as refusal:
            refusal.trail.append(name(len(lowered)))
            raise
        self._depth -= 1
        return lowered

    def buffer(self, code: int, buffer: bytes | memoryview) -> Ext:
        """Put a buffer beside the head; return the extension that stands for it."""
        self.put_beside(buffer)
        return Ext(code, NBYTES.pack(len(buffer)))

    def put_beside(self, buffer: bytes | memoryview) -> None:
        """Send a buffer beside the head, unless it is empty."""
        if len(buffer) > 0:
            self.buffers.append(buffer)

    def unsupported(self, value: Any, advice: str, cause: Exception | None = None) -> Ext:
        """Pickle a value if that is allowed, and refuse it otherwise."""
        if self.pickle is None:
            raise Refusal(value, advice) from cause
        try:
            return self.buffer(Code.PICKLE, self.pickle.dumps(value, _PICKLE_PROTOCOL))
        except Exception as error:
            raise Refusal(value, f"{advice} Its pickling raised {error!r}.") from error


def _list(writer: Writer, value: list[Any]) -> Any:
    return writer.each(value, value, "[{}]".format)


def _tuple(writer: Writer, value: tuple[Any, ...]) -> Ext:
    return Ext(Code.TUPLE, _pack(writer.each(value, value, "[{}]".format)))


def _set(writer: Writer, value: set[Any]) -> Ext:
    return Ext(Code.SET, _pack(writer.each(value, value, "{{element {}}}".format)))


def _frozenset(writer: Writer, value: frozenset[Any]) -> Ext:
    return Ext(Code.FROZENSET, _pack(writer.each(value, value, "{{element {}}}".format)))


def _dict(writer: Writer, value: dict[Any, Any]) -> Any:
    if not value:
        return writer.each(value, value, str)
    keys = list(value)
    if len(keys) <= limits.MAX_NATIVE_MAP and writer.plain.issuperset(map(type, keys)):
        return dict(zip(keys, _values(writer, value, keys), strict=True))
    return Ext(Code.DICT, _pack(_keys_and_values(writer, value)))


def _keys_and_values(writer: Writer, value: dict[Any, Any]) -> list[Any]:
    keys = list(value)
    return [writer.each(value, keys, "{{key {}}}".format), _values(writer, value, keys)]


def _values(writer: Writer, value: dict[Any, Any], keys: list[Any]) -> Any:
    return writer.each(value, list(value.values()), lambda index: f"[{_key_text(keys[index])}]")


def _keyed(writer: Writer, value: Any) -> Any:
    code, besides_of, _ = KEYED[type(value)]
    try:
        besides = besides_of(value)
    except ValueError as error:
        return writer.unsupported(value, str(error), error)
    pairs = _keys_and_values(writer, value)  # first, in the order of the reader
    return Ext(code, _pack([*pairs, *writer.each(value, besides, lambda index: "._metadata")]))


def _deque(writer: Writer, value: deque[Any]) -> Ext:
    items = list(value)  # a copy, since the deque may change
    return Ext(Code.DEQUE, _pack([writer.each(value, items, "[{}]".format), value.maxlen]))


def _slice(writer: Writer, value: slice) -> Ext:
    parts = (value.start, value.stop, value.step)
    names = (".start", ".stop", ".step")
    return Ext(Code.SLICE, _pack(writer.each(value, parts, names.__getitem__)))


def _int(writer: Writer, value: int) -> Any:
    return value if value in _NATIVE_INTS else _scalar(writer, value)


def _str(writer: Writer, value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        advice = "It holds a lone surrogate: send value.encode(errors='surrogatepass')."
        return writer.unsupported(value, advice, error)
    return value


def _scalar(writer: Writer, value: Any) -> Any:
    code, pack = scalars.PACKERS[type(value)]
    try:
        return Ext(code, pack(value))
    except ValueError as error:
        return writer.unsupported(value, str(error), error)


def _bytes(writer: Writer, value: bytes) -> Any:
    return value if len(value) < MIN_BUFFER_NBYTES else writer.buffer(Code.BYTES, value)


def _bytearray(writer: Writer, value: bytearray) -> Ext:
    return writer.buffer(Code.BYTEARRAY, memoryview(value))


def _memoryview(writer: Writer, value: memoryview) -> Any:
    if holds_references(value):
        return writer.unsupported(value, "It holds references to objects: send the objects.")
    if value.nbytes < MIN_BUFFER_NBYTES or not value.c_contiguous:
        return _bytes(writer, value.tobytes())
    return writer.buffer(Code.BYTES, value.cast("B"))


def _array(writer: Writer, value: np.ndarray[Any, Any]) -> Any:
    body = arrays.array_body(value)
    if body is not None:
        writer.put_beside(arrays.array_bytes(value))
        return Ext(Code.ARRAY, body)
    body = structured.array_body(value)
    if body is None:
        return writer.unsupported(value, structured.advice_for(value))
    writer.put_beside(structured.array_bytes(value))
    return Ext(Code.STRUCTURED_ARRAY, body)


def _numpy_scalar(writer: Writer, value: np.generic) -> Any:
    parts = arrays.scalar_parts(value)
    if parts is None:
        advice = f"Its dtype {value.dtype} is not carried: convert it, such as by .item()."
        return writer.unsupported(value, advice)
    code, content = parts
    return Ext(Code.NUMPY_SCALAR, _pack([code, writer.lower(content) if code == "U" else content]))


def _tensor(writer: Writer, value: Any) -> Any:
    advice = tensors.advice_for(value)
    if advice is not None:
        return writer.unsupported(value, advice)
    is_parameter = tensors.is_parameter(value)
    body, data = tensors.tensor_body(value, *([value.requires_grad] if is_parameter else []))
    writer.put_beside(data)
    return Ext(Code.PARAMETER if is_parameter else Code.TENSOR, body)


def _enum(writer: Writer, carried: EnumClass, value: Any) -> Any:
    try:
        key = carried.key_of(value)
    except ValueError as error:
        return writer.unsupported(value, str(error), error)
    return Ext(Code.ENUM, _pack([carried.name, writer.lower(key)]))


def _record(writer: Writer, carried: RecordClass, value: Any) -> Any:
    try:
        values = carried.values_of(value)
    except AttributeError as error:
        return writer.unsupported(value, f"One of its fields was never set: {error}.", error)
    lowered = writer.each(value, values, lambda index: f".{carried.fields[index]}")
    return Ext(Code.RECORD, _pack([carried.name, carried.signature, lowered]))


def _hooked(writer: Writer, carried: HookedClass, value: Any) -> Any:
    """Return the extension for a hook's state, or ``NotImplemented`` if the codec must encode."""
    if writer.sending is None:
        writer.sending = TakeContext(writer.peer)
    try:
        state = carried.take(value, writer.sending)
    except RankwireError as error:
        raise Refusal(value, error.message) from error
    except Exception as error:
        what = one_line(f"{type_name(error)}: {text_of(error)}")
        raise Refusal(value, f"Its hook raised {what}") from error
    if state is NotImplemented:
        return state
    (lowered,) = writer.each(value, (state,), lambda index: ".state")
    return Ext(Code.HOOKED, _pack([carried.name, lowered]))


def _other(writer: Writer, value: Any) -> Any:
    carried = writer.classes.of_class(type(value))
    if isinstance(carried, HookedClass):
        lowered = _hooked(writer, carried, value)
        if lowered is not NotImplemented:
            return lowered
    if isinstance(carried, RecordClass):
        return _record(writer, carried, value)
    if isinstance(carried, EnumClass):
        return _enum(writer, carried, value)
    if isinstance(value, np.generic):
        return _numpy_scalar(writer, value)
    if tensors.is_tensor(value):
        return _tensor(writer, value)
    extents = tensors.size_of(value)
    if extents is not None:
        return Ext(Code.TORCH_SIZE, _pack(extents))
    constant = tensors.constant_of(value)
    if constant is not None:
        return Ext(Code.TORCH_CONSTANT, _pack(constant))
    return writer.unsupported(value, advice_for(value))


_LOWER: dict[type, Callable[[Writer, Any], Any]] = {
    **dict.fromkeys(scalars.PACKERS, _scalar),
    int: _int,
    str: _str,
    list: _list,
    tuple: _tuple,
    set: _set,
    frozenset: _frozenset,
    dict: _dict,
    **dict.fromkeys(KEYED, _keyed),
    deque: _deque,
    slice: _slice,
    bytes: _bytes,
    bytearray: _bytearray,
    memoryview: _memoryview,
    np.ndarray: _array,
}
_CONTAINERS = frozenset((list, dict))


def _packed_floats(values: Collection[Any]) -> msgspec.Raw | None:
    """Return the encoding of many values if all of them are floats.

    msgspec encodes only floats in nine bytes that begin with 0xcb, so checking these is enough.
    """
    if type(next(iter(values))) is not float:
        return None
    try:
        packed = _pack(values)
    except Exception:  # the walk finds the path
        return None
    start = 3 if len(values) < 2**16 else 5
    is_long_enough = len(packed) == start + 9 * len(values)
    if is_long_enough and packed[start::9].count(0xCB) == len(values):
        return msgspec.Raw(packed)
    return None


def _key_text(key: Any) -> str:
    if type(key) is str:
        return f'"{repr(key[:40])[1:-1]}"'
    return repr(key)[:40] if type(key) in PLAIN else f"<{type(key).__qualname__}>"
