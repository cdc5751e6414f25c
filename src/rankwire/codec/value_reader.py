"""The reader: decodes extensions to the values that a ``Writer`` encoded (``values``).

It raises ``InvalidMessageError``, or what msgspec, numpy or Python raise on malformed input, which
the codec translates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import msgspec
import numpy as np

from rankwire.codec import arrays, limits, scalars, structured, tensors
from rankwire.codec.classes import ClassTable, EnumClass, RecordClass
from rankwire.codec.hooks import BuildContext, HookedClass
from rankwire.codec.limits import MANY_KEYS, ItemCount
from rankwire.codec.values import ALIGNMENT, KEYED, MAX_DEPTH, NBYTES, Code
from rankwire.errors import InvalidMessageError

_unpack = msgspec.msgpack.decode

Carried = TypeVar("Carried", EnumClass, RecordClass, HookedClass)
Keyed = TypeVar("Keyed", set[Any], dict[Any, Any])


class Reader:
    """Decodes the extensions of one payload, and takes the buffers beside its head in order.

    Native lists and maps nest up to the interpreter's recursion limit: counting them would take
    longer than decoding them.

    ``position`` is the end of the head; after reading it must be the end of the payload. If
    ``pickle`` (the module) is None, pickles are refused.
    """

    def __init__(
        self,
        classes: ClassTable,
        pickle: ModuleType | None,
        payload: bytearray,
        position: int,
        max_items: int,
        peer: int | None = None,
    ) -> None:
        self.classes = classes
        self.pickle = pickle
        self.payload = payload
        self._depth = 0
        self._must_scan = position > limits.MIN_SCANNED_NBYTES and (
            limits.may_hold_wide_maps(payload, position)
        )
        self._item_count = ItemCount(max_items) if position > max_items else None
        self._keys: limits.KeyCheck | None = None
        self._head_nbytes = position
        self.receiving = BuildContext(peer)
        # Bodies in decoding, outermost first, that were not checked for extensions as keys.
        self._open: list[memoryview] = []
        self.position = position

    def read(self, body: memoryview) -> Any:
        """Decode msgpack and the extensions in it."""
        if self._item_count is not None:
            self._item_count.add(body)
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
        """Return the value of an extension. msgspec calls this in the order of the head."""
        if code in _LIFT:
            return _LIFT[code](self, body)
        if code in scalars.UNPACKERS:
            if code in scalars.COSTLY_KEYS:
                self.refuse_odd_keys()
            return scalars.UNPACKERS[code](body)
        raise InvalidMessageError(f"extension {code} does not exist")

    def level(self, body: memoryview) -> list[Any]:
        """Decode the body of a container, which is one level of nesting."""
        if self._depth == MAX_DEPTH:
            raise InvalidMessageError(f"the payload nests more than {MAX_DEPTH} levels deep")
        self._depth += 1
        items = self.items(body)
        self._depth -= 1
        return items

    def items(self, body: memoryview) -> list[Any]:
        """Decode a body that must be a list."""
        items = self.read(body)
        if type(items) is not list:
            raise InvalidMessageError("the body of an extension is not a list")
        return items

    def refuse_odd_keys(self) -> None:
        """Refuse extensions as keys in all open bodies: msgspec compares them without a check."""
        while self._open:
            limits.refuse_extensions_as_keys(self._open.pop())

    def check_keys(self, keys: list[Any], *, is_set: bool = False) -> None:
        """Refuse keys that take too long to put into a dict or set."""
        if self._head_nbytes <= limits.MIN_SCANNED_NBYTES:
            return
        if self._keys is None:
            self._keys = limits.KeyCheck(self._head_nbytes, self.classes.parts_of)
        self._keys.check(keys, is_set=is_set)

    def take(self, nbytes: int) -> int:
        """Consume the next buffer; return where it starts."""
        if nbytes == 0:
            return self.position
        start = self.position + -self.position % ALIGNMENT
        if start + nbytes > len(self.payload):
            raise InvalidMessageError(
                f"a buffer of {nbytes} bytes at {start}, in a payload of {len(self.payload)}"
            )
        if any(self.payload[self.position : start]):
            raise InvalidMessageError(f"the padding at {self.position} is not zero")
        self.position = start + nbytes
        return start


def _set(reader: Reader, body: memoryview) -> set[Any]:
    items = reader.level(body)
    reader.check_keys(items, is_set=True)
    # A large set is made of a dict, so that it has its final size at once, which was checked.
    keyed = set(items) if len(items) <= MANY_KEYS else set(dict.fromkeys(items))
    return _without_repeats(keyed, len(items))


def _frozenset(reader: Reader, body: memoryview) -> frozenset[Any]:
    reader.refuse_odd_keys()
    return frozenset(_set(reader, body))


def _dict(reader: Reader, body: memoryview) -> dict[Any, Any]:
    keys, values = reader.level(body)
    return _pairs(reader, keys, values)


def _keyed(reader: Reader, body: memoryview, build: Callable[..., Any]) -> Any:
    keys, values, *besides = reader.level(body)
    return build(_pairs(reader, keys, values), *besides)


def _deque(reader: Reader, body: memoryview) -> deque[Any]:
    items, longest = reader.level(body)
    if type(items) is not list:
        raise InvalidMessageError("the items of a deque are not a list")
    if longest is not None and (type(longest) is not int or len(items) > longest):
        raise InvalidMessageError("a deque of more items than it has room for")
    return deque(items, longest)


def _slice(reader: Reader, body: memoryview) -> slice:
    reader.refuse_odd_keys()  # Python 3.12 hashes slices
    start, stop, step = reader.level(body)
    return slice(start, stop, step)


def _pairs(reader: Reader, keys: Any, values: Any) -> dict[Any, Any]:
    if type(keys) is not list or type(values) is not list:
        raise InvalidMessageError("a dict is not a list of keys and a list of values")
    reader.check_keys(keys)
    return _without_repeats(dict(zip(keys, values, strict=True)), len(keys))


def _buffer(reader: Reader, body: memoryview) -> memoryview:
    (nbytes,) = NBYTES.unpack(body)
    start = reader.take(nbytes)
    return memoryview(reader.payload)[start : start + nbytes]


def _pickle(reader: Reader, body: memoryview) -> Any:
    if reader.pickle is None:
        raise InvalidMessageError("the payload holds a pickle, and allow_pickle is off here")
    return reader.pickle.loads(_buffer(reader, body))


def _array(reader: Reader, body: memoryview) -> np.ndarray[Any, Any]:
    head = arrays.array_head(bytes(body))
    return arrays.view_array(head, reader.payload, reader.take(head.nbytes))


def _numpy_scalar(reader: Reader, body: memoryview) -> np.generic:
    reader.refuse_odd_keys()
    return arrays.scalar_of(reader.items(body))


def _tensor(reader: Reader, body: memoryview) -> Any:
    dtype, head = tensors.tensor_head(bytes(body))
    array = arrays.view_array(head, reader.payload, reader.take(head.nbytes))
    return tensors.view_tensor(dtype, array)


def _structured_array(reader: Reader, body: memoryview) -> np.ndarray[Any, Any]:
    head = structured.array_head(body)
    return structured.view_array(head, reader.payload, reader.take(head.nbytes))


def _parameter(reader: Reader, body: memoryview) -> Any:
    requires_grad, dtype, head = tensors.parameter_head(body)
    array = arrays.view_array(head, reader.payload, reader.take(head.nbytes))
    return tensors.view_parameter(requires_grad, dtype, array)


def _torch_size(reader: Reader, body: memoryview) -> Any:
    reader.refuse_odd_keys()
    return tensors.build_size(reader.items(body))


def _enum(reader: Reader, body: memoryview) -> Any:
    name, key = reader.items(body)
    return _registered(reader, EnumClass, name).member_of(key)


def _record(reader: Reader, body: memoryview) -> Any:
    reader.refuse_odd_keys()
    name, signature, values = reader.level(body)
    carried = _registered(reader, RecordClass, name)
    if signature != carried.signature:
        raise InvalidMessageError(f"the two ends have different fields for class {name!r}")
    return carried.build(values)


def _hooked(reader: Reader, body: memoryview) -> Any:
    reader.refuse_odd_keys()
    name, state = reader.level(body)
    return _registered(reader, HookedClass, name).build(state, reader.receiving)


def _registered(reader: Reader, kind: type[Carried], name: Any) -> Carried:
    if type(name) is not str:
        raise InvalidMessageError("the name of a class is not a string")
    carried = reader.classes.of_name(name)
    if not isinstance(carried, kind):
        raise InvalidMessageError(f"no class is registered here as {name[:80]!r}")
    return carried


_LIFT: dict[int, Callable[[Reader, memoryview], Any]] = {
    Code.TUPLE: lambda reader, body: tuple(reader.level(body)),
    Code.SET: _set,
    Code.FROZENSET: _frozenset,
    Code.DICT: _dict,
    **{code: partial(_keyed, build=build) for code, _, build in KEYED.values()},
    Code.DEQUE: _deque,
    Code.SLICE: _slice,
    Code.BYTES: lambda reader, body: bytes(_buffer(reader, body)),
    Code.BYTEARRAY: lambda reader, body: bytearray(_buffer(reader, body)),
    Code.PICKLE: _pickle,
    Code.ARRAY: _array,
    Code.NUMPY_SCALAR: _numpy_scalar,
    Code.TENSOR: _tensor,
    Code.STRUCTURED_ARRAY: _structured_array,
    Code.PARAMETER: _parameter,
    Code.TORCH_SIZE: _torch_size,
    Code.TORCH_CONSTANT: lambda reader, body: tensors.build_constant(reader.items(body)),
    Code.ENUM: _enum,
    Code.RECORD: _record,
    Code.HOOKED: _hooked,
}


def _without_repeats(keyed: Keyed, count: int) -> Keyed:
    if len(keyed) != count:
        raise InvalidMessageError("a key is repeated")
    return keyed
