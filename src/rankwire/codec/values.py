"""What writer and reader share: the numbers of the wire format, plain values, and collections.

msgspec would encode tuples, dates, enums and more as the nearest msgpack type, and they would
arrive as that type. So a ``Writer`` walks a value first. It passes *plain* values on to msgspec,
which carries them exactly and at C speed, and *lowers* the others to msgpack extensions, which a
``Reader`` *lifts* again. The body of a tuple, set, dict or record is msgpack too. The reader takes
the buffers beside the head in the order in which the writer put them there.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from rankwire.codec import scalars
from rankwire.codec.limits import MAX_NATIVE_MAP

# No dtype needs more, and small arrays are common.
ALIGNMENT = 16
# Copying fewer bytes into the head costs less than one more buffer for the socket.
MIN_BUFFER_NBYTES = 4096
# Far below the interpreter's recursion limit.
MAX_DEPTH = 32
# Checking types takes seven times as long as msgspec does, so long lists of floats have a shortcut.
MIN_LONG_LIST = 4096

# msgspec carries these exactly, or refuses them: a wide int, a string with a lone surrogate. Then
# the codec walks again with ``ALWAYS_PLAIN``, which msgspec never refuses.
PLAIN: frozenset[type] = frozenset({type(None), bool, int, float, str})
ALWAYS_PLAIN = PLAIN - {int, str}


NBYTES = struct.Struct("<Q")


class Code:
    """The types of extensions; those of single values are in ``scalars``."""

    TUPLE, SET, FROZENSET, DICT = 10, 11, 12, 13
    ORDERED_DICT, DEFAULT_DICT, COUNTER, DEQUE, SLICE = 14, 15, 16, 17, 18
    BYTES, BYTEARRAY, PICKLE = 20, 21, 22
    ENUM, RECORD, HOOKED = 30, 31, 32
    ARRAY, NUMPY_SCALAR, TENSOR, STRUCTURED_ARRAY = 40, 41, 42, 43
    PARAMETER, TORCH_SIZE, TORCH_CONSTANT = 44, 45, 46


def is_flat(value: Any) -> bool:
    """Return whether msgspec carries a list, dict or bytes exactly: all its values are plain."""
    kind = type(value)
    if kind is list:
        return not value or (len(value) < MIN_LONG_LIST and PLAIN.issuperset(map(type, value)))
    if kind is dict:
        return not value or (
            len(value) <= MAX_NATIVE_MAP
            and PLAIN.issuperset(map(type, value))
            and PLAIN.issuperset(map(type, value.values()))
        )
    return kind is bytes and len(value) < MIN_BUFFER_NBYTES


# Default factories: a closed list, since the receiver calls them.
_FACTORIES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(bool, int, float, complex, str, bytes, bytearray),
        *(list, tuple, dict, set, frozenset, OrderedDict, Counter, deque),
    )
}
_METADATA = "_metadata"  # torch sets it on the state of a module


def _metadata_of(value: OrderedDict[Any, Any]) -> tuple[Any, ...]:
    _refuse_attributes(value, {_METADATA})
    return tuple(vars(value).values())


def _build_ordered_dict(pairs: dict[Any, Any], *metadata: Any) -> OrderedDict[Any, Any]:
    built = OrderedDict(pairs)
    if metadata:
        (built._metadata,) = metadata  # type: ignore[attr-defined]
    return built


def _factory_of(value: defaultdict[Any, Any]) -> tuple[str | None]:
    factory = value.default_factory
    if factory is None:
        return (None,)
    name = str(getattr(factory, "__name__", ""))
    if _FACTORIES.get(name) is not factory:
        raise ValueError(
            f"Its factory must be None or one of {', '.join(_FACTORIES)}: send dict(value)."
        )
    return (name,)


def _build_default_dict(pairs: dict[Any, Any], name: Any) -> defaultdict[Any, Any]:
    if name is not None and (type(name) is not str or name not in _FACTORIES):
        raise ValueError("a default dict of an unknown factory")
    return defaultdict(None if name is None else _FACTORIES[name], pairs)


def _nothing(value: Counter[Any]) -> tuple[()]:
    _refuse_attributes(value, set())
    return ()


def _build_counter(pairs: dict[Any, Any]) -> Counter[Any]:
    """Return a counter with these counts, which may be zero, negative or not numbers."""
    built: Counter[Any] = Counter()
    dict.update(built, pairs)
    return built


def _refuse_attributes(value: Any, carried: set[str]) -> None:
    if not carried.issuperset(vars(value)):
        names = ", ".join(sorted(map(str, vars(value).keys() - carried)))[:80]
        raise ValueError(f"It has attributes of its own ({names}): send them beside it.")


# The dicts of ``collections``: the code, a function that returns what they hold beside their items
# (``ValueError`` with advice if that cannot be sent), and a function that builds one.
KEYED: dict[type, tuple[int, Callable[[Any], tuple[Any, ...]], Callable[..., Any]]] = {
    OrderedDict: (Code.ORDERED_DICT, _metadata_of, _build_ordered_dict),
    defaultdict: (Code.DEFAULT_DICT, _factory_of, _build_default_dict),
    Counter: (Code.COUNTER, _nothing, _build_counter),
}


# The writer tests for these before it looks for a registered class, so they cannot have hooks.
BUILT_IN = PLAIN.union(
    scalars.PACKERS,
    KEYED,
    (list, tuple, set, frozenset, dict, deque, slice, bytes, bytearray, memoryview, np.ndarray),
)
