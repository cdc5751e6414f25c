"""The registry: which functions other ranks may call, by name. Nothing else can be called."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

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
    """

    __slots__ = ("copies", "is_async", "is_slow", "name", "target")

    def __init__(self, name: str, target: Callable[..., Any], *, copies: bool = False) -> None:
        self.name = name
        self.copies = copies
        self.target = target
        self.is_async = inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(
            getattr(target, "__call__", None)  # noqa: B004  (an object whose __call__ is async)
        )
        self.is_slow = False


class Registry:
    """Functions by name.

    Safe from any thread; readers take no lock, because the table is replaced and never changed.

    Attributes:
        functions: The table.
    """

    def __init__(self) -> None:
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
        if not isinstance(name, str) or not name or len(name) > _MAX_NAME or not name.isprintable():
            raise ConfigurationError(
                f"a function's name is printable text of 1 to {_MAX_NAME} characters, not {name!r}"
            )
        if not callable(target):
            raise ConfigurationError(f"{name!r} needs a function, not {type(target).__name__}")
        with self._lock:
            if name in self.functions and not replace:
                raise ConfigurationError(
                    f"{name!r} is registered already; replace=True replaces it"
                )
            function = Function(name, target, copies=copies)
            self.functions = {**self.functions, name: function}

    def remove(self, name: str) -> None:
        """Unregister; raises ``FunctionNotFoundError`` if there is no such function."""
        with self._lock:
            if name not in self.functions:
                raise FunctionNotFoundError(name, self.names())
            self.functions = {n: f for n, f in self.functions.items() if n != name}

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
