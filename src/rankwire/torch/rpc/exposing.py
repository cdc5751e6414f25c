"""Exposing: functions and classes that their author lets other ranks call, wherever they are.

Who is exposed is remembered by the object itself and not by an attribute of it: decorators copy
attributes to whatever they make.
"""

from __future__ import annotations

import types
import weakref
from typing import Any, TypeVar

from rankwire.errors import ConfigurationError

T = TypeVar("T")

_exposed: weakref.WeakSet[Any] = weakref.WeakSet()


def exposed(target: T) -> T:
    """Let other ranks call a function, or make and use objects of a class. A decorator.

    With ``init_rpc(..., allow="decorated")`` they can call nothing else of the program. A class is
    exposed with its public methods. Apply it last, above other decorators, but below
    ``@staticmethod`` and ``@classmethod``.

    Returns:
        The function or class itself.

    Raises:
        ConfigurationError: It is neither.
    """
    if not isinstance(target, types.FunctionType | type):
        raise ConfigurationError(f"only a function or a class can be exposed, not {target!r}")
    _exposed.add(target)
    return target


def is_exposed(target: object) -> bool:
    """Tell whether this very function or class was exposed."""
    return isinstance(target, types.FunctionType | type) and target in _exposed
