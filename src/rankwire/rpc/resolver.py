"""Functions that are found by a rule of the program's, not registered one by one.

An agent's ``resolve`` is asked each time that a name comes which is not registered, so what it does
not give any more cannot be called any more. What it gives is not kept, nor are objects whose
methods it gives. What is learned of a function, though, is known the next time: whether it is an
``async def``, and whether it was slow (``registry``). That is noted under the function itself, also
of a bound method or a ``functools.partial``, for as long as the function is there.

It is asked by the thread that polls. This module does not know what the caller is told.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from rankwire.errors import ConfigurationError
from rankwire.rpc.registry import Function, is_coroutine_function, is_name

Resolve = Callable[[str], Callable[..., Any] | None]


class Resolver:
    """Asks the program for functions by name. Safe from any thread, if the program's rule is.

    Args:
        resolve: The rule: returns the function of a name, or None, or raises why there is none.
    """

    def __init__(self, resolve: Resolve) -> None:
        if not callable(resolve):
            raise ConfigurationError(f"resolve is a function, not {type(resolve).__name__}")
        self._resolve = resolve
        self._habits: WeakKeyDictionary[Any, Habits] = WeakKeyDictionary()

    def find(self, name: str) -> Function | None:
        """Return the function of a name, or None; raises what the rule raises.

        The rule is not asked for what could not be registered either.
        """
        target = self._resolve(name) if is_name(name) else None
        if target is None:
            return None
        if not callable(target):
            raise TypeError(f"{name!r} needs a function, not {type(target).__name__}")
        return ResolvedFunction(name, target, self._habits_of(target))

    def _habits_of(self, target: Callable[..., Any]) -> Habits:
        body = _body_of(target)
        try:
            habits = self._habits.get(body)
            if habits is None:
                habits = self._habits[body] = Habits(body)
        except TypeError:  # it cannot be noted: no hash, or no weak references
            habits = Habits(body)
        return habits


class Habits:
    """What is known of a function beyond one call.

    Attributes:
        is_async: Whether it is an ``async def``.
        is_slow: Whether its last run took long.
    """

    __slots__ = ("is_async", "is_slow")

    def __init__(self, body: Callable[..., Any]) -> None:
        self.is_async = is_coroutine_function(body)
        self.is_slow = False


class ResolvedFunction(Function):
    """A function for one call; what is learned from that is noted in its habits."""

    __slots__ = ("_habits",)

    def __init__(self, name: str, target: Callable[..., Any], habits: Habits) -> None:
        self.name = name
        self.target = target
        self.copies = False
        self.is_async = habits.is_async
        self._habits = habits

    @property
    def is_slow(self) -> bool:
        """Whether its last run took so long that another thread should poll meanwhile."""
        return self._habits.is_slow

    @is_slow.setter
    def is_slow(self, value: bool) -> None:
        self._habits.is_slow = value


def _body_of(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function in a bound method or partial, of which there is a new one each time."""
    while True:
        if type(target) is MethodType:
            target = target.__func__
        elif type(target) is partial:
            target = target.func
        else:
            return target
