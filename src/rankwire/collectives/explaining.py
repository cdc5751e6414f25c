"""Explaining: errors that leave a collective say which one it was, and on which rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from rankwire.backends.base import Backend
from rankwire.errors import RankwireError

__all__ = ["explained"]

P = ParamSpec("P")
T = TypeVar("T")


def explained(
    function: Callable[Concatenate[Backend, P], T],
) -> Callable[Concatenate[Backend, P], T]:
    """Add operation and rank to the errors of a function whose first argument is the group."""

    @wraps(function)
    def explaining(backend: Backend, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(backend, *args, **kwargs)
        except RankwireError as error:
            # With swapped arguments this is no group, and the error says so.
            error.during(op=function.__name__, rank=getattr(backend, "rank", None))
            raise

    return explaining  # type: ignore[return-value]  # mypy does not know that the name stays
