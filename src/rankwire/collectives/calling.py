"""Calling: what all collectives share, from the user's line to the group's sequence.

A collective is written as a function that checks its arguments and returns a ``Plan``. If it
raises instead, the call counts all the same: the other ranks have called it too, cannot know of the
wrong argument, and are told. Errors that leave a collective say which one it was, on which rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from rankwire.backends.base import Backend
from rankwire.collectives.sequence import OperationSequence, Plan
from rankwire.errors import ConfigurationError, RankwireError
from rankwire.observe.stacks import show_as

P = ParamSpec("P")


def collective(
    prepare: Callable[Concatenate[Backend, P], Plan],
) -> Callable[Concatenate[Backend, P], Any]:
    """Make a collective of a function that returns a plan and whose first argument is the group."""
    name = prepare.__name__

    @wraps(prepare)
    def calling(backend: Backend, *args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            operations = backend.operations or OperationSequence.of(backend)
        except AttributeError:
            kind = type(backend).__name__
            raise ConfigurationError(
                f"the first argument of {name} is a backend, not {kind}"
            ).during(op=name) from None
        try:
            return operations.call(name, prepare, backend, *args, **kwargs)
        except RankwireError as error:
            error.during(op=name, rank=backend.rank)
            raise

    show_as(name, calling)
    return calling  # type: ignore[return-value]  # mypy does not know that the name stays
