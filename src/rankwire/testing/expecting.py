"""``pytest.raises`` without pytest, for the conformance suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["expect"]

E = TypeVar("E", bound=BaseException)


def expect(kind: type[E], action: Callable[[], object]) -> E:
    """Return the error of that kind which ``action`` raises; ``AssertionError`` if it does not."""
    try:
        result = action()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, got {result!r}")
