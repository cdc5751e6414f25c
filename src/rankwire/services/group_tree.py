"""The tree of a group call, and how the values of its members are combined. Pure.

Members are numbered by their position in the caller's list. A range of positions is divided in the
middle, again and again, so the binary tree of ranges depends on the list alone. A rank that is
responsible for a range keeps the half with its own position and hands the other one to the first
member of that half. Values are combined along the tree of ranges, wherever that happens: who took
part in the tree of calls, and which reply came first, makes no difference.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from rankwire.errors import ConfigurationError

Range: TypeAlias = tuple[int, int]  # of positions: the first, and the one after the last
Combine: TypeAlias = Callable[[Any, Any], Any]

ABSENT: Any = object()  # in place of a value


def middle(low: int, high: int) -> int:
    """Return where the second half of a range begins."""
    return (low + high + 1) // 2


def delegations(low: int, high: int, own: int | None) -> Iterator[Range]:
    """Yield the ranges to hand to others, the largest first.

    What is left is the position ``own``; if that is None, nothing.
    """
    while high - low > 1:
        mid = middle(low, high)
        if own is None or own < mid:
            yield mid, high
            high = mid
        else:
            yield low, mid
            low = mid
    if own is None:
        yield low, high


def height(size: int) -> int:
    """Return how many times a range of that size is divided until one position is left."""
    return (size - 1).bit_length()


def combined(low: int, high: int, parts: Mapping[Range, Any], combine: Combine) -> Any:
    """Combine the values of a range, given those of parts of it; ``ABSENT`` if there are none."""
    if (low, high) in parts:
        return parts[low, high]
    if high - low == 1:
        return ABSENT
    mid = middle(low, high)
    left, right = combined(low, mid, parts, combine), combined(mid, high, parts, combine)
    if left is ABSENT or right is ABSENT:
        return right if left is ABSENT else left
    return combine(left, right)


def merged(low: int, high: int, parts: dict[Range, Any], combine: Combine) -> dict[Range, Any]:
    """Combine parts of a range that are the two halves of a larger one, as far as possible."""
    if (low, high) in parts or high - low == 1:
        return {span: value for span, value in parts.items() if span == (low, high)}
    mid = middle(low, high)
    found = merged(low, mid, parts, combine) | merged(mid, high, parts, combine)
    if found.keys() == {(low, mid), (mid, high)}:
        return {(low, high): combine(found[low, mid], found[mid, high])}
    return found


# -- reductions ------------------------------------------------------------------------------------


def _larger(a: Any, b: Any) -> Any:
    if isinstance(a, (np.ndarray, np.generic)):
        return np.maximum(a, b)
    return a.maximum(b) if hasattr(a, "maximum") else max(a, b)  # a tensor has its own


def _smaller(a: Any, b: Any) -> Any:
    if isinstance(a, (np.ndarray, np.generic)):
        return np.minimum(a, b)
    return a.minimum(b) if hasattr(a, "minimum") else min(a, b)


_REDUCTIONS: dict[str, Combine] = {
    "sum": operator.add,
    "mean": operator.add,
    "prod": operator.mul,
    "max": _larger,
    "min": _smaller,
}


def combiner(reduce: str | Combine) -> Combine:
    """Return the function of two values that a reduction applies."""
    combine = _REDUCTIONS.get(reduce) if isinstance(reduce, str) else reduce
    if not callable(combine):
        names = ", ".join(map(repr, _REDUCTIONS))
        raise ConfigurationError(
            f"reduce= is one of {names}, or a function of two values, not {reduce!r}"
        )
    return combine


def finished(reduce: str | Combine, value: Any, count: int) -> Any:
    """Return the result of a reduction, given the combined values and how many they are."""
    return value / count if reduce == "mean" else value
