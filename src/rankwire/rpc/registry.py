"""The registry: which functions other ranks may call, by name. Nothing else can be called.

Functions are registered one by one, or found by a rule of the program's (``resolver``). An object
is registered by its methods, each as a function of its own (``exposed_methods``).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from functools import partialmethod
from types import FunctionType
from typing import Any, Protocol

from rankwire.errors import ConfigurationError, FunctionNotFoundError

_MAX_NAME = 1024


class Function:
    """A registered function.

    Attributes:
        name: What callers call it.
        target: The function.
        is_async: Whether it is an ``async def``.
        is_slow: Whether its last run took so long, or blocked, that another thread should poll
            meanwhile.
        copies: Whether its result is copied before it is sent.
        owner: The name of the object whose method it is, if it was registered with that.
    """

    __slots__ = ("_takes_timeout", "copies", "is_async", "is_slow", "name", "owner", "target")

    def __init__(
        self,
        name: str,
        target: Callable[..., Any],
        *,
        copies: bool = False,
        owner: str | None = None,
    ) -> None:
        self.name = name
        self.copies = copies
        self.owner = owner
        self.target = target
        self.is_async = is_coroutine_function(target)
        self.is_slow = False
        self._takes_timeout: bool | None = None

    @property
    def takes_timeout(self) -> bool:
        """Whether it has a parameter ``timeout``. Looked at once: that takes as long as a call."""
        if self._takes_timeout is None:
            self._takes_timeout = _has_timeout(self.target)
        return self._takes_timeout


def is_coroutine_function(target: Callable[..., Any]) -> bool:
    """Whether a function is an ``async def``, or an object whose ``__call__`` is one."""
    return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(
        getattr(target, "__call__", None)  # noqa: B004
    )


def is_name(name: object) -> bool:
    """Whether a function may have that name; those of the agents' own questions are none."""
    return isinstance(name, str) and 0 < len(name) <= _MAX_NAME and name.isprintable()


class Finder(Protocol):
    """A resolver, as far as it is known here."""

    def find(self, name: str) -> Function | None:
        """Return the function of a name that is not registered, or None; may raise anything."""


class Registry:
    """Functions by name.

    Safe from any thread; readers take no lock, because the table is replaced and never changed.

    Args:
        resolver: Finds those that are not registered.

    Attributes:
        functions: The table.
        own: What agents have each other do, by names that no function can have. The polling thread
            does it, so it is quick.
    """

    def __init__(self, resolver: Finder | None = None) -> None:
        self._resolver = resolver
        self.own: dict[str, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self.functions: dict[str, Function] = {}

    def add(
        self, name: str, target: Callable[..., Any], *, replace: bool, copies: bool = False
    ) -> None:
        """Register a function.

        Raises:
            ConfigurationError: The name is taken and ``replace`` is not set, or is no name, or
                ``target`` is no function.
        """
        if not callable(target):
            raise ConfigurationError(f"{name!r} needs a function, not {type(target).__name__}")
        self._add({name: target}, replace=replace, copies=copies)

    def add_object(self, name: str, thing: object, *, replace: bool, copies: bool = False) -> None:
        """Register the public methods of an object as ``name.method``: all of them, or none.

        With ``replace``, methods that an object of that name had before are gone afterwards.

        Raises:
            ConfigurationError: It has none, or a name is taken and ``replace`` is not set, or is no
                name.
        """
        methods = exposed_methods(thing)
        if not methods:
            raise ConfigurationError(
                f"{thing!r:.200} cannot be registered: it is no function, and an object of type "
                f"{type(thing).__name__} has no public methods written in Python"
            )
        targets = {f"{name}.{method}": target for method, target in methods.items()}
        self._add(targets, replace=replace, copies=copies, owner=name)

    def _add(
        self,
        targets: Mapping[str, Callable[..., Any]],
        *,
        replace: bool,
        copies: bool,
        owner: str | None = None,
    ) -> None:
        for name in (*targets, *([] if owner is None else [owner])):
            if not is_name(name):
                raise ConfigurationError(
                    f"a function's name is printable text of 1 to {_MAX_NAME} characters, "
                    f"not {name!r}"
                )
        with self._lock:
            taken = sorted(name for name in targets if name in self.functions)
            if taken and not replace:
                raise ConfigurationError(
                    f"{taken[0]!r} is registered already; replace=True replaces it"
                )
            kept = {n: f for n, f in self.functions.items() if owner is None or f.owner != owner}
            self.functions = kept | {
                name: Function(name, target, copies=copies, owner=owner)
                for name, target in targets.items()
            }

    def remove(self, name: str) -> None:
        """Unregister a function, or all methods of an object.

        Raises:
            FunctionNotFoundError: There is neither of that name.
        """
        with self._lock:
            left = {n: f for n, f in self.functions.items() if name not in (n, f.owner)}
            if len(left) == len(self.functions):
                names = self.names()
                reason = "" if names else "this rank has registered nothing"
                raise FunctionNotFoundError(name, names, reason=reason)
            self.functions = left

    def resolve(self, name: str) -> Function | None:
        """Return the function of a name that is not registered, or None; may raise anything."""
        return None if self._resolver is None else self._resolver.find(name)

    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted(self.functions)

    def name_of(self, function: str | Callable[..., Any]) -> str:
        """Return the name to call.

        It is ``function`` itself if that is a name, or the one under which it is registered here.

        Raises:
            ConfigurationError: The function is not registered here.
        """
        if isinstance(function, str):
            return function
        for entry in self.functions.values():
            if entry.target is function or entry.target == function:
                return entry.name
        raise ConfigurationError(
            f"{function!r} is not registered on this rank; "
            "pass the name under which the other rank registered it"
        )

    def check_timeout(self, name: str) -> None:
        """Refuse the ``timeout=`` of a call that may have been meant for the function.

        Known is what a function takes that is registered here, so any that was given itself. Of one
        that is registered only elsewhere, nothing is known.

        Raises:
            ConfigurationError: The function has a parameter of that name.
        """
        function = self.functions.get(name)
        if function is not None and function.takes_timeout:
            raise ConfigurationError(
                f"{name!r} has a parameter 'timeout' of its own, so timeout= may mean either: "
                f"agent.to(rank, timeout=...)({name!r}, ...) is for the time limit of the call, "
                f"agent.to(rank)({name!r}, ..., timeout=...) for the function's"
            )


def exposed_methods(thing: object) -> dict[str, Callable[..., Any]]:
    """Return the methods of an object that it is registered by, bound, by name.

    They are those that its class, or a base of it, has in Python under a name without a leading
    underscore: also static, class and ``async`` ones, and those with decorators. Not: properties,
    what the object alone has as an attribute, what types in C have, and what a class would have.
    """
    if isinstance(thing, type):
        return {}
    members: dict[str, Any] = {}
    for cls in reversed(type(thing).__mro__):
        if cls.__module__ != "builtins":
            members.update(vars(cls))
    names = [n for n, member in members.items() if not n.startswith("_") and _is_method(member)]
    return {name: method for name in names if callable(method := getattr(thing, name))}


def _is_method(member: Any) -> bool:
    if isinstance(member, (FunctionType, staticmethod, classmethod, partialmethod)):
        return True
    # What functools.cache and the like have made of one.
    return hasattr(member, "__wrapped__") and callable(member) and not isinstance(member, type)


def _has_timeout(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # one in C may not say
        return False
    parameter = parameters.get("timeout")
    return parameter is not None and parameter.kind in (
        parameter.POSITIONAL_OR_KEYWORD,
        parameter.KEYWORD_ONLY,
    )
