"""What msgpack has no type for, as msgpack extensions: how values become a head, and a head values.

msgspec would encode tuples, dates, enums and more by itself, as the nearest thing that msgpack
has: what arrives would be of another type. So a ``Writer`` walks a value before msgspec sees it.
It passes *plain* values, which msgspec carries exactly, at C speed, and *lowers* the rest to
extensions. A ``Reader`` is msgspec's hook for extensions and *lifts* them again. The body of a
tuple, set, dict or record is again msgpack, with the same hook.

Both are mirrors and meet in the order of the head: what the writer puts beside it (``buffers``),
the reader takes in the same order. Each serves one encode or decode and is then thrown away, so
there is nothing to lock. Where the parts of a payload lie is the codec's business; here is what
the two ends have in common: numbers of the wire format, and what is plain.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from rankwire.codec.limits import MAX_NATIVE_MAP

# No dtype needs more, and small arrays are common.
ALIGNMENT = 16
# Below this, a copy into the head costs less than one more buffer for the socket.
MIN_BUFFER_NBYTES = 4096
# Enough for data; a walk this deep stays far from the interpreter's recursion limit.
MAX_DEPTH = 32
# Looking at types costs seven times what msgspec takes for a list; so long floats have a shortcut.
MIN_LONG_LIST = 4096

# What msgspec carries exactly, or refuses: an int too wide, a string with a lone surrogate. After
# such a refusal the walk is repeated with what it never refuses.
PLAIN: frozenset[type] = frozenset({type(None), bool, int, float, str})
ALWAYS_PLAIN = PLAIN - {int, str}


NBYTES = struct.Struct("<Q")


class Code:
    """Types of extensions; those of single values are in ``scalars``."""

    TUPLE, SET, FROZENSET, DICT = 10, 11, 12, 13
    ORDERED_DICT, DEFAULT_DICT, COUNTER, DEQUE, SLICE = 14, 15, 16, 17, 18
    BYTES, BYTEARRAY, PICKLE = 20, 21, 22
    ENUM, RECORD, HOOKED = 30, 31, 32
    ARRAY, NUMPY_SCALAR, TENSOR, STRUCTURED_ARRAY = 40, 41, 42, 43
    PARAMETER, TORCH_SIZE, TORCH_CONSTANT = 44, 45, 46


def is_flat(value: Any) -> bool:
    """Tell whether msgspec carries a value that is not plain exactly: plain ones in a container."""
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


# What a default dict may make of nothing: a closed list, since it is called at the receiver.
_FACTORIES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(bool, int, float, complex, str, bytes, bytearray),
        *(list, tuple, dict, set, frozenset, OrderedDict, Counter, deque),
    )
}
_METADATA = "_metadata"  # torch's, on the state of a module


def _metadata_of(value: OrderedDict[Any, Any]) -> tuple[Any, ...]:
    """Return nothing, or the metadata of a state dict."""
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
    """Counts may be zero, negative or no numbers at all."""
    built: Counter[Any] = Counter()
    dict.update(built, pairs)
    return built


def _refuse_attributes(value: Any, carried: set[str]) -> None:
    if not carried.issuperset(vars(value)):
        names = ", ".join(sorted(map(str, vars(value).keys() - carried)))[:80]
        raise ValueError(f"It has attributes of its own ({names}): send them beside it.")


# The dicts of ``collections``: their codes, what they have beside their items (or ``ValueError``
# with advice if that is not carried), and how one is built of a dict and that.
KEYED: dict[type, tuple[int, Callable[[Any], tuple[Any, ...]], Callable[..., Any]]] = {
    OrderedDict: (Code.ORDERED_DICT, _metadata_of, _build_ordered_dict),
    defaultdict: (Code.DEFAULT_DICT, _factory_of, _build_default_dict),
    Counter: (Code.COUNTER, _nothing, _build_counter),
}


def build_deque(items: Any, longest: Any) -> deque[Any]:
    """Return the deque of these items; it must have room for them."""
    if type(items) is not list:
        raise ValueError("the items of a deque are not a list")
    if longest is not None and (type(longest) is not int or len(items) > longest):
        raise ValueError("a deque of more items than it has room for")
    return deque(items, longest)


def build_slice(parts: list[Any]) -> slice:
    """Return the slice of three parts."""
    start, stop, step = parts
    return slice(start, stop, step)
