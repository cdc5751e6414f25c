"""The reader: decodes extensions to the values that a ``Writer`` made them of (``values``).

It raises ``InvalidMessageError``, or what msgspec, numpy or Python raise on malformed input; the
codec translates that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import msgspec
import numpy as np

from rankwire.codec import (
    arrays,
    limits,
    scalars,
    structured,
    tensors,
)
from rankwire.codec.classes import ClassTable, EnumClass, RecordClass
from rankwire.codec.hash_tables import MANY_KEYS
from rankwire.codec.hooks import BuildContext, HookedClass
from rankwire.codec.limits import ItemCount
from rankwire.codec.values import (
    ALIGNMENT,
    KEYED,
    MAX_DEPTH,
    NBYTES,
    Code,
    build_deque,
    build_slice,
)
from rankwire.errors import InvalidMessageError

_unpack = msgspec.msgpack.decode

Carried = TypeVar("Carried", EnumClass, RecordClass, HookedClass)
Keyed = TypeVar("Keyed", set[Any], dict[Any, Any])


class Reader:
    """Decodes the extensions of one payload, and takes the buffers beside its head in their order.

    Extensions nest as deep as the writer allows. Native lists and maps are limited only by the
    interpreter's recursion limit: counting them would take longer than decoding them.

    Size: it has a method for each extension.

    Args:
        classes: The registered classes.
        pickling: The module to unpickle with, or None to refuse pickles.
        payload: The whole payload.
        position: Where the head ends. After reading it must be the end of the payload.
        max_items: How many items the head may have.
        peer: The sending rank, for hooks.
    """

    def __init__(
        self,
        classes: ClassTable,
        pickling: ModuleType | None,
        payload: bytearray,
        position: int,
        max_items: int,
        peer: int | None = None,
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
        self._receiving = BuildContext(peer)
        # Bodies that are being decoded, outermost first, and were not checked for odd keys.
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
        """Return the value of an extension. msgspec calls this in the order of the head."""
        if code in _LIFT:
            return _LIFT[code](self, body)
        if code in scalars.UNPACKERS:
            if code in scalars.COSTLY_KEYS:
                self._refuse_odd_keys()
            return scalars.UNPACKERS[code](body)
        raise InvalidMessageError(f"extension {code} does not exist")

    def _level(self, body: memoryview) -> list[Any]:
        """Decode the body of a container, which is one level of nesting."""
        if self._depth == MAX_DEPTH:
            raise InvalidMessageError(f"the payload nests more than {MAX_DEPTH} levels deep")
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
        # A large set is made of a dict, so that it has its final size at once: that table was
        # checked.
        keyed = set(items) if len(items) <= MANY_KEYS else set(dict.fromkeys(items))
        return _without_repeats(keyed, len(items))

    def _frozenset(self, body: memoryview) -> frozenset[Any]:
        self._refuse_odd_keys()
        return frozenset(self._set(body))

    def _dict(self, body: memoryview) -> dict[Any, Any]:
        keys, values = self._level(body)
        return self._pairs(keys, values)

    def _keyed(self, body: memoryview, build: Callable[..., Any]) -> Any:
        keys, values, *besides = self._level(body)
        return build(self._pairs(keys, values), *besides)

    def _deque(self, body: memoryview) -> deque[Any]:
        items, longest = self._level(body)
        return build_deque(items, longest)

    def _slice(self, body: memoryview) -> slice:
        self._refuse_odd_keys()  # Python 3.12 hashes slices
        return build_slice(self._level(body))

    def _pairs(self, keys: Any, values: Any) -> dict[Any, Any]:
        if type(keys) is not list or type(values) is not list:
            raise InvalidMessageError("a dict is not a list of keys and a list of values")
        self._check_keys(keys)
        return _without_repeats(dict(zip(keys, values, strict=True)), len(keys))

    def _refuse_odd_keys(self) -> None:
        """Refuse native maps with extensions as keys in all bodies that are being decoded.

        No writer makes them. msgspec would compare the keys without a check, and the callers decode
        values that take long to compare.
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
        (nbytes,) = NBYTES.unpack(body)
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
        self._refuse_odd_keys()
        return arrays.scalar_of(self._list(body))

    def _tensor(self, body: memoryview) -> Any:
        dtype, head = tensors.tensor_head(body)
        array = arrays.view_array(head, self._payload, self._take(head.nbytes))
        return tensors.view_tensor(dtype, array)

    def _structured_array(self, body: memoryview) -> np.ndarray[Any, Any]:
        head = structured.array_head(body)
        return structured.view_array(head, self._payload, self._take(head.nbytes))

    def _parameter(self, body: memoryview) -> Any:
        requires_grad, dtype, head = tensors.parameter_head(body)
        array = arrays.view_array(head, self._payload, self._take(head.nbytes))
        return tensors.view_parameter(requires_grad, dtype, array)

    def _torch_size(self, body: memoryview) -> Any:
        self._refuse_odd_keys()
        return tensors.build_size(self._list(body))

    def _torch_constant(self, body: memoryview) -> Any:
        return tensors.build_constant(self._list(body))

    def _enum(self, body: memoryview) -> Any:
        name, key = self._list(body)
        return self._registered(EnumClass, name).member_of(key)

    def _record(self, body: memoryview) -> Any:
        self._refuse_odd_keys()
        name, signature, values = self._level(body)
        carried = self._registered(RecordClass, name)
        if signature != carried.signature:
            raise InvalidMessageError(f"the two ends have different fields for class {name!r}")
        return carried.build(values)

    def _hooked(self, body: memoryview) -> Any:
        self._refuse_odd_keys()
        name, state = self._level(body)
        return self._registered(HookedClass, name).build(state, self._receiving)

    def _registered(self, kind: type[Carried], name: Any) -> Carried:
        if type(name) is not str:
            raise InvalidMessageError("the name of a class is not a string")
        carried = self._classes.of_name(name)
        if not isinstance(carried, kind):
            raise InvalidMessageError(f"no class is registered here as {name[:80]!r}")
        return carried


_LIFT: dict[int, Callable[[Reader, memoryview], Any]] = {
    Code.TUPLE: Reader._tuple,
    Code.SET: Reader._set,
    Code.FROZENSET: Reader._frozenset,
    Code.DICT: Reader._dict,
    **{code: partial(Reader._keyed, build=build) for code, _, build in KEYED.values()},
    Code.DEQUE: Reader._deque,
    Code.SLICE: Reader._slice,
    Code.BYTES: Reader._bytes,
    Code.BYTEARRAY: Reader._bytearray,
    Code.PICKLE: Reader._pickle,
    Code.ARRAY: Reader._array,
    Code.NUMPY_SCALAR: Reader._numpy_scalar,
    Code.TENSOR: Reader._tensor,
    Code.STRUCTURED_ARRAY: Reader._structured_array,
    Code.PARAMETER: Reader._parameter,
    Code.TORCH_SIZE: Reader._torch_size,
    Code.TORCH_CONSTANT: Reader._torch_constant,
    Code.ENUM: Reader._enum,
    Code.RECORD: Reader._record,
    Code.HOOKED: Reader._hooked,
}


def _without_repeats(keyed: Keyed, count: int) -> Keyed:
    if len(keyed) != count:
        raise InvalidMessageError("a key is repeated")
    return keyed
