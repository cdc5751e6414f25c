"""The containers of ``collections``: what they have beside their items, and how they are built.

The items travel as those of a list or dict do, and what is beside them follows (``KEYED``). What is
built has been checked for repeated and costly keys. A builder raises any ordinary exception on
parts that no writer makes, and the codec translates it. Pure.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from rankwire.codec.values import Code

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
