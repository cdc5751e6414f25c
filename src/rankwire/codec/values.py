"""What msgpack has no type for, as msgpack extensions: how values become a head, and a head values.

msgspec would encode tuples, dates, enums and more by itself, as the nearest thing that msgpack
has: what arrives would be of another type. So a ``Writer`` walks a value before msgspec sees it.
It passes *plain* values, which msgspec carries exactly, at C speed, and *lowers* the rest to
extensions. A ``Reader`` is msgspec's hook for extensions and *lifts* them again. The body of a
tuple, set, dict or record is again msgpack, with the same hook.

Both are mirrors and meet in the order of the head: what the writer puts beside it (``buffers``),
the reader takes in the same order. Each serves one encode or decode and is then thrown away, so
there is nothing to lock. Where the parts of a payload lie is the codec's business; here is only
``ALIGNMENT``. A reader raises ``InvalidMessageError``, or what msgspec, numpy or Python raise on
malformed input; the codec translates that.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from rankwire.codec import arrays, limits, scalars
from rankwire.codec.classes import ClassTable, EnumClass, RecordClass
from rankwire.codec.limits import DEFAULT_MAX_ITEMS, ItemCount
from rankwire.codec.probing import MANY_KEYS
from rankwire.codec.references import holds_references
from rankwire.errors import InvalidMessageError

__all__ = [
    "ALIGNMENT",
    "ALWAYS_PLAIN",
    "MIN_BUFFER_NBYTES",
    "PLAIN",
    "Reader",
    "Refusal",
    "Writer",
    "is_flat",
]

# No dtype needs more, and small arrays are common.
ALIGNMENT = 16
# Below this, a copy into the head costs less than one more buffer for the socket.
MIN_BUFFER_NBYTES = 4096
# Enough for data; a walk this deep stays far from the interpreter's recursion limit.
_MAX_DEPTH = 32
# Looking at types costs seven times what msgspec takes for a list; so long floats have a shortcut.
_MIN_LONG_LIST = 4096

# What msgspec carries exactly, or refuses: an int too wide, a string with a lone surrogate. After
# such a refusal the walk is repeated with what it never refuses.
PLAIN: frozenset[type] = frozenset({type(None), bool, int, float, str})
ALWAYS_PLAIN = PLAIN - {int, str}
_NATIVE_INTS = range(-(2**63), 2**64)

# Types of extensions; those below 10 are in scalars.
_TUPLE, _SET, _FROZENSET, _DICT = 10, 11, 12, 13
_BYTES, _BYTEARRAY, _PICKLE = 20, 21, 22
_ENUM, _RECORD = 30, 31
_ARRAY, _NUMPY_SCALAR, _TENSOR = 40, 41, 42

_NBYTES = struct.Struct("<Q")
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.decode

_ADVICE = (
    "Register its class with codec.register (an enum, dataclass or msgspec Struct), convert it to a"
    " carried type, or set allow_pickle=True on both ends."
)


def is_flat(value: Any) -> bool:
    """Tell whether msgspec carries a value that is not plain exactly: plain ones in a container."""
    kind = type(value)
    if kind is list:
        return not value or (len(value) < _MIN_LONG_LIST and PLAIN.issuperset(map(type, value)))
    if kind is dict:
        return not value or (
            len(value) <= limits.MAX_NATIVE_MAP
            and PLAIN.issuperset(map(type, value))
            and PLAIN.issuperset(map(type, value.values()))
        )
    return kind is bytes and len(value) < MIN_BUFFER_NBYTES


class Refusal(Exception):
    """A value that is not carried. The path to it grows from its end, container by container."""

    def __init__(self, value: Any, advice: str) -> None:
        super().__init__(advice)
        kind = type(value)
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        self.type_name = f"{module}{kind.__qualname__}"
        self.advice = advice
        self.trail: list[str] = []


class Writer:
    """Lowers the values of one payload, and collects the buffers that travel beside its head.

    Args:
        classes: What was registered.
        pickling: The module to pickle with, or None to refuse what is not carried.
        plain: ``PLAIN`` or ``ALWAYS_PLAIN``.
    """

    def __init__(
        self, classes: ClassTable, pickling: ModuleType | None, plain: frozenset[type]
    ) -> None:
        self._classes = classes
        self._pickling = pickling
        self._plain = plain
        self._depth = 0
        self.buffers: list[bytes | memoryview] = []

    def lower(self, value: Any) -> Any:
        """Return the value itself if it is plain, or what stands for it in the head.

        Raises:
            Refusal: It, or a value in it, is not carried.
        """
        kind = type(value)
        if kind in self._plain:
            return value
        lower = _LOWER.get(kind)
        return self._other(value) if lower is None else lower(self, value)

    def lower_record(self, record: list[Any], paths: Sequence[str], levels: int = 1) -> Any:
        """Lower a list whose items have names; so many outer levels do not count as nesting."""
        self._depth = -levels
        return self._each(record, record, paths.__getitem__)

    def _each(self, owner: Any, values: Collection[Any], name: Callable[[int], str]) -> Any:
        """Lower the values of a container; ``name`` is asked for the path to the one refused."""
        if self._depth == _MAX_DEPTH:
            raise Refusal(owner, f"It is nested more than {_MAX_DEPTH} levels deep, or in itself.")
        if len(values) >= _MIN_LONG_LIST and (floats := _packed_floats(values)) is not None:
            return floats
        if self._plain.issuperset(map(type, values)):
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

    def _list(self, value: list[Any]) -> Any:
        return self._each(value, value, "[{}]".format)

    def _tuple(self, value: tuple[Any, ...]) -> Ext:
        return Ext(_TUPLE, _pack(self._each(value, value, "[{}]".format)))

    def _set(self, value: set[Any]) -> Ext:
        return Ext(_SET, _pack(self._each(value, value, "{{element {}}}".format)))

    def _frozenset(self, value: frozenset[Any]) -> Ext:
        return Ext(_FROZENSET, _pack(self._each(value, value, "{{element {}}}".format)))

    def _dict(self, value: dict[Any, Any]) -> Any:
        keys, values = list(value), list(value.values())

        def name(index: int) -> str:
            return f"[{_key_text(keys[index])}]"

        if len(keys) <= limits.MAX_NATIVE_MAP and self._plain.issuperset(map(type, keys)):
            return dict(zip(keys, self._each(value, values, name), strict=True))
        lowered_keys = self._each(value, keys, "{{key {}}}".format)
        return Ext(_DICT, _pack([lowered_keys, self._each(value, values, name)]))

    def _int(self, value: int) -> Any:
        return value if value in _NATIVE_INTS else self._scalar(value)

    def _str(self, value: str) -> Any:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            advice = "It holds a lone surrogate: send value.encode(errors='surrogatepass')."
            return self._unsupported(value, advice, error)
        return value

    def _scalar(self, value: Any) -> Any:
        code, pack = scalars.PACKERS[type(value)]
        try:
            return Ext(code, pack(value))
        except ValueError as error:
            return self._unsupported(value, str(error), error)

    def _bytes(self, value: bytes) -> Any:
        return value if len(value) < MIN_BUFFER_NBYTES else self._buffer(_BYTES, value)

    def _bytearray(self, value: bytearray) -> Ext:
        return self._buffer(_BYTEARRAY, memoryview(value))

    def _memoryview(self, value: memoryview) -> Any:
        if holds_references(value):
            return self._unsupported(value, "It holds references to objects: send the objects.")
        if value.nbytes < MIN_BUFFER_NBYTES or not value.c_contiguous:
            return self._bytes(value.tobytes())
        return self._buffer(_BYTES, value.cast("B"))

    def _buffer(self, code: int, buffer: bytes | memoryview) -> Ext:
        self._put_beside(buffer)
        return Ext(code, _NBYTES.pack(len(buffer)))

    def _put_beside(self, buffer: bytes | memoryview) -> None:
        if len(buffer) > 0:
            self.buffers.append(buffer)

    def _array(self, value: np.ndarray[Any, Any]) -> Any:
        body = arrays.array_body(value)
        if body is None:
            what = f"dtype {value.dtype} or {value.ndim} dimensions"
            return self._unsupported(value, f"Arrays of {what} are not carried: convert it.")
        self._put_beside(arrays.array_bytes(value))
        return Ext(_ARRAY, body)

    def _numpy_scalar(self, value: np.generic) -> Any:
        parts = arrays.scalar_parts(value)
        if parts is None:
            return self._unsupported(value, "Its dtype is not carried: convert it.")
        code, content = parts
        return Ext(_NUMPY_SCALAR, _pack([code, self.lower(content) if code == "U" else content]))

    def _tensor(self, value: Any) -> Any:
        advice = arrays.tensor_advice(value)
        if advice is not None:
            return self._unsupported(value, advice)
        body, data = arrays.tensor_body(value)
        self._put_beside(data)
        return Ext(_TENSOR, body)

    def _enum(self, carried: EnumClass, value: Any) -> Ext:
        return Ext(_ENUM, _pack([carried.name, self.lower(carried.key_of(value))]))

    def _record(self, carried: RecordClass, value: Any) -> Any:
        try:
            values = carried.values_of(value)
        except AttributeError as error:
            return self._unsupported(value, f"One of its fields was never set: {error}.", error)
        lowered = self._each(value, values, lambda index: f".{carried.fields[index]}")
        return Ext(_RECORD, _pack([carried.name, carried.signature, lowered]))

    def _other(self, value: Any) -> Any:
        carried = self._classes.by_class.get(type(value))
        if isinstance(carried, RecordClass):
            return self._record(carried, value)
        if isinstance(carried, EnumClass):
            return self._enum(carried, value)
        if isinstance(value, np.generic):
            return self._numpy_scalar(value)
        if arrays.is_tensor(value):
            return self._tensor(value)
        return self._unsupported(value, _ADVICE)

    def _unsupported(self, value: Any, advice: str, cause: Exception | None = None) -> Ext:
        """Pickle a value if that is allowed, and refuse it otherwise."""
        if self._pickling is None:
            raise Refusal(value, advice) from cause
        try:
            return self._buffer(_PICKLE, self._pickling.dumps(value))
        except Exception as error:
            raise Refusal(value, f"{advice} Its pickling raised {error!r}.") from error


_LOWER: dict[type, Callable[[Writer, Any], Any]] = {
    **dict.fromkeys(scalars.PACKERS, Writer._scalar),
    int: Writer._int,
    str: Writer._str,
    list: Writer._list,
    tuple: Writer._tuple,
    set: Writer._set,
    frozenset: Writer._frozenset,
    dict: Writer._dict,
    bytes: Writer._bytes,
    bytearray: Writer._bytearray,
    memoryview: Writer._memoryview,
    np.ndarray: Writer._array,
}


def _packed_floats(values: Collection[Any]) -> msgspec.Raw | None:
    """Return the encoding of many values if all of them are floats.

    msgspec encodes nothing but a true float as a float. So it is enough to see in what it wrote
    that each item has nine bytes and begins with 0xcb.
    """
    if type(next(iter(values))) is not float:
        return None
    try:
        packed = _pack(values)
    except Exception:  # whatever it is, the walk says it with the path
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


class Reader:
    """Lifts the extensions of one payload, and takes the buffers beside its head in their order.

    Extensions nest as deep as the writer allows. Native lists and maps are msgspec's, which ends at
    the interpreter's recursion limit: counting them here would take longer than decoding them.

    Args:
        classes: What was registered.
        pickling: The module to unpickle with, or None to refuse pickles.
        payload: All of it.
        position: Where the head ends. In the end it must be where the payload ends.
        max_items: How many items the head may have.
    """

    def __init__(
        self,
        classes: ClassTable,
        pickling: ModuleType | None,
        payload: bytearray,
        position: int,
        max_items: int = DEFAULT_MAX_ITEMS,
    ) -> None:
        self._classes = classes
        self._pickling = pickling
        self._payload = payload
        self._depth = 0
        self._must_scan = position > limits.MIN_SCANNED_NBYTES and (
            limits.may_hold_wide_maps(payload, position)
        )
        self._items = ItemCount(max_items) if position > max_items else None
        self._keys: limits.KeyCheck | None = None
        self._head_nbytes = position
        # What is being decoded now, from outside to inside, and was not looked at for odd keys.
        self._open: list[memoryview] = []
        self.position = position

    def read(self, body: memoryview) -> Any:
        """Decode msgpack and the extensions in it."""
        if self._items is not None:
            self._items.add(body)
        if self._must_scan:
            limits.refuse_wide_maps(body)
        if self._head_nbytes <= limits.MIN_SCANNED_NBYTES:
            return _unpack(body, ext_hook=self._lift)
        self._open.append(body)
        value = _unpack(body, ext_hook=self._lift)
        if self._open and self._open[-1] is body:
            self._open.pop()
        return value

    def _lift(self, code: int, body: memoryview) -> Any:
        """Return what an extension stands for. msgspec calls this in the order of the head."""
        if code in _LIFT:
            return _LIFT[code](self, body)
        if code in scalars.UNPACKERS:
            return scalars.UNPACKERS[code](body)
        raise InvalidMessageError(f"there is no extension {code}")

    def _level(self, body: memoryview) -> list[Any]:
        """Decode the body of a container, which is one level of nesting."""
        if self._depth == _MAX_DEPTH:
            raise InvalidMessageError(f"the payload nests more than {_MAX_DEPTH} levels deep")
        self._depth += 1
        items = self._list(body)
        self._depth -= 1
        return items

    def _list(self, body: memoryview) -> list[Any]:
        items = self.read(body)
        if type(items) is not list:
            raise InvalidMessageError("the body of an extension is not a list")
        return items

    def _tuple(self, body: memoryview) -> tuple[Any, ...]:
        return tuple(self._level(body))

    def _set(self, body: memoryview) -> set[Any]:
        items = self._level(body)
        self._check_keys(items, is_set=True)
        # By way of a dict if it is large, so that the set has its final size at once: that is the
        # table which was checked.
        keyed = set(items) if len(items) <= MANY_KEYS else set(dict.fromkeys(items))
        return _without_repeats(keyed, len(items))

    def _frozenset(self, body: memoryview) -> frozenset[Any]:
        self._refuse_odd_keys()
        return frozenset(self._set(body))

    def _dict(self, body: memoryview) -> dict[Any, Any]:
        keys, values = self._level(body)
        if type(keys) is not list or type(values) is not list:
            raise InvalidMessageError("a dict is not a list of keys and a list of values")
        self._check_keys(keys)
        return _without_repeats(dict(zip(keys, values, strict=True)), len(keys))

    def _refuse_odd_keys(self) -> None:
        """Refuse native maps with extensions as keys in all that is being decoded.

        No writer makes them. msgspec would compare them without asking, and a frozenset or a
        record takes long to compare.
        """
        while self._open:
            limits.refuse_extensions_as_keys(self._open.pop())

    def _check_keys(self, keys: list[Any], *, is_set: bool = False) -> None:
        if self._head_nbytes <= limits.MIN_SCANNED_NBYTES:
            return
        if self._keys is None:
            self._keys = limits.KeyCheck(self._head_nbytes, self._classes.parts_of)
        self._keys.check(keys, is_set=is_set)

    def _take(self, nbytes: int) -> int:
        """Consume the next buffer; return where it starts."""
        if nbytes == 0:
            return self.position
        start = self.position + -self.position % ALIGNMENT
        if start + nbytes > len(self._payload):
            raise InvalidMessageError(
                f"a buffer of {nbytes} bytes at {start}, in a payload of {len(self._payload)}"
            )
        if any(self._payload[self.position : start]):
            raise InvalidMessageError(f"the padding at {self.position} is not zero")
        self.position = start + nbytes
        return start

    def _buffer(self, body: memoryview) -> memoryview:
        (nbytes,) = _NBYTES.unpack(body)
        start = self._take(nbytes)
        return memoryview(self._payload)[start : start + nbytes]

    def _bytes(self, body: memoryview) -> bytes:
        return bytes(self._buffer(body))

    def _bytearray(self, body: memoryview) -> bytearray:
        return bytearray(self._buffer(body))

    def _pickle(self, body: memoryview) -> Any:
        if self._pickling is None:
            raise InvalidMessageError("the payload holds a pickle, and allow_pickle is off here")
        return self._pickling.loads(self._buffer(body))

    def _array(self, body: memoryview) -> np.ndarray[Any, Any]:
        head = arrays.array_head(body)
        return arrays.view_array(head, self._payload, self._take(head.nbytes))

    def _numpy_scalar(self, body: memoryview) -> np.generic:
        return arrays.scalar_of(self._list(body))

    def _tensor(self, body: memoryview) -> Any:
        dtype, head = arrays.tensor_head(body)
        array = arrays.view_array(head, self._payload, self._take(head.nbytes))
        return arrays.view_tensor(dtype, array)

    def _enum(self, body: memoryview) -> Any:
        name, key = self._list(body)
        return _registered(self._classes.enums, name).member_of(key)

    def _record(self, body: memoryview) -> Any:
        self._refuse_odd_keys()
        name, signature, values = self._level(body)
        carried = _registered(self._classes.records, name)
        if signature != carried.signature:
            raise InvalidMessageError(f"the two ends have different fields for class {name!r}")
        return carried.build(values)


_LIFT: dict[int, Callable[[Reader, memoryview], Any]] = {
    _TUPLE: Reader._tuple,
    _SET: Reader._set,
    _FROZENSET: Reader._frozenset,
    _DICT: Reader._dict,
    _BYTES: Reader._bytes,
    _BYTEARRAY: Reader._bytearray,
    _PICKLE: Reader._pickle,
    _ARRAY: Reader._array,
    _NUMPY_SCALAR: Reader._numpy_scalar,
    _TENSOR: Reader._tensor,
    _ENUM: Reader._enum,
    _RECORD: Reader._record,
}

Carried = TypeVar("Carried", EnumClass, RecordClass)
Keyed = TypeVar("Keyed", set[Any], dict[Any, Any])


def _registered(classes: dict[str, Carried], name: Any) -> Carried:
    carried = classes.get(name)
    if carried is None:
        raise InvalidMessageError(f"no class is registered here as {str(name)[:80]!r}")
    return carried


def _without_repeats(keyed: Keyed, count: int) -> Keyed:
    if len(keyed) != count:
        raise InvalidMessageError("a key is repeated")
    return keyed
