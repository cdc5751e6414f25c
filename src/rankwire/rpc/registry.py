"""The functions that other ranks may call, by name, and the error classes that they may raise.

Functions are registered one by one, or found by the program's ``resolve``. The methods of a
registered object are functions of their own.

A callee sends the names of an error's class and its bases; nothing is imported, and no constructor
runs. Errors of rankwire carry no names: they concern the callee's own calls and peers.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable
from functools import cached_property, partial, partialmethod
from types import FunctionType, MethodType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from rankwire import runtime
from rankwire.errors import (
    ConfigurationError,
    FunctionNotFoundError,
    RankwireError,
    RemoteError,
)
from rankwire.texts import class_name

_MAX_NAME = 1024

T = TypeVar("T")
Resolve = Callable[[str], Callable[..., Any] | None]


class Function:
    """A registered function."""

    def __init__(
        self,
        name: str,
        target: Callable[..., Any],
        *,
        copies: bool = False,
        owner: str | None = None,
    ) -> None:
        self.name = name
        self.copies = copies  # the result, before it is sent
        self.owner = owner  # the name of the registered object whose method it is
        self.target = target
        self.is_async = is_coroutine_function(target)
        self.is_slow = False  # the last run was long: another thread should poll meanwhile

    @cached_property
    def takes_timeout(self) -> bool:
        """Whether it has a parameter ``timeout``. Cached, because that takes as long as a call."""
        try:
            parameters = inspect.signature(self.target).parameters
        except (TypeError, ValueError):  # functions written in C may have no signature
            return False
        parameter = parameters.get("timeout")
        return parameter is not None and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )


def is_coroutine_function(target: Callable[..., Any]) -> bool:
    """Return whether a function is an ``async def``, or an object whose ``__call__`` is one."""
    return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(
        getattr(target, "__call__", None)  # noqa: B004
    )


def is_name(name: object) -> bool:
    """Return whether a function may have that name; names of internal requests are invalid."""
    return isinstance(name, str) and 0 < len(name) <= _MAX_NAME and name.isprintable()


class Resolver:
    """Asks the program's ``resolve`` at every call; as safe from any thread as that is."""

    def __init__(self, resolve: Resolve) -> None:
        if not callable(resolve):
            raise ConfigurationError(f"resolve is a function, not {type(resolve).__name__}")
        self._resolve = resolve
        self._habits: WeakKeyDictionary[Any, Habits] = WeakKeyDictionary()

    def find(self, name: str) -> Function | None:
        """Return the function of a valid name, or None; raise what ``resolve`` raises."""
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
        except TypeError:  # it has no hash, or takes no weak references
            habits = Habits(body)
        return habits


class Habits:
    """What the agent remembers of a resolved function between calls."""

    __slots__ = ("is_async", "is_slow")

    def __init__(self, body: Callable[..., Any]) -> None:
        self.is_async = is_coroutine_function(body)
        self.is_slow = False


class ResolvedFunction(Function):
    """A function for one call, which shares its habits with other calls."""

    def __init__(self, name: str, target: Callable[..., Any], habits: Habits) -> None:
        self.name = name
        self.target = target
        self.copies = False
        self.is_async = habits.is_async
        self._habits = habits

    @property
    def is_slow(self) -> bool:
        """Whether another thread should poll while it runs."""
        return self._habits.is_slow

    @is_slow.setter
    def is_slow(self, value: bool) -> None:
        self._habits.is_slow = value


def _body_of(target: Callable[..., Any]) -> Callable[..., Any]:
    # Bound methods and partials are often new objects at each call.
    while True:
        if type(target) is MethodType:
            target = target.__func__
        elif type(target) is partial:
            target = target.func
        else:
            return target


class Registry:
    """The registered functions. Safe from any thread: the table is replaced, never changed."""

    def __init__(self, resolver: Resolver | None = None) -> None:
        self._resolver = resolver
        # Quick requests between agents, by names that no function can have.
        self.own: dict[str, Callable[[], None]] = {}
        # What the services serve: not among the names that users see.
        self.services: dict[str, Function] = {}
        self._lock = runtime.Lock()
        self.functions: dict[str, Function] = {}
        self.errors = RemoteErrors()

    def add(self, name: Any, thing: T, *, replace: bool, copies: bool = False) -> T:
        """Register a function, or all public methods of an object as ``name.method``; return it.

        Without a name, use its own or that of the object's class. ``replace`` removes the methods
        of the former object of that name. On ``ConfigurationError``, nothing is registered.
        """
        owner = None
        targets: dict[Any, Callable[..., Any]]
        if callable(thing):
            targets = {_own_name(thing) if name is None else name: thing}
        else:
            name = owner = type(thing).__name__ if name is None else name
            methods = exposed_methods(thing)
            targets = {f"{name}.{method}": target for method, target in methods.items()}
            if not targets:
                raise ConfigurationError(
                    f"{thing!r:.200} cannot be registered: it is no function, and an object of type"
                    f" {type(thing).__name__} has no public methods written in Python"
                )
        for each in (*targets, *([] if owner is None else [owner])):
            if not is_name(each):
                raise ConfigurationError(
                    f"a function's name is printable text of 1 to {_MAX_NAME} characters, "
                    f"not {each!r}"
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
        return thing

    def remove(self, name: str) -> None:
        """Unregister a function or all methods of an object; raises ``FunctionNotFoundError``."""
        with self._lock:
            left = {n: f for n, f in self.functions.items() if name not in (n, f.owner)}
            if len(left) == len(self.functions):
                names = self.names()
                reason = "" if names else "this rank has registered nothing"
                raise FunctionNotFoundError(name, names, reason=reason)
            self.functions = left

    def resolve(self, name: str) -> Function | None:
        """Return a function that is not registered: of a service, or the resolver's.

        Raises what the resolver raises.
        """
        if name in self.services:
            return self.services[name]
        return None if self._resolver is None else self._resolver.find(name)

    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted(self.functions)

    def name_of(self, function: str | Callable[..., Any]) -> str:
        """Return the name of a function registered here, or raise ``ConfigurationError``."""
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
        """Raise ``ConfigurationError`` if ``timeout=`` may be meant for the function."""
        function = self.functions.get(name)
        if function is not None and function.takes_timeout:
            raise ConfigurationError(
                f"{name!r} has a parameter 'timeout', so timeout= may mean either: "
                f"agent.to(rank, timeout=...)({name!r}, ...) sets the timeout of the call, "
                f"agent.to(rank)({name!r}, ..., timeout=...) passes it to the function"
            )


def _own_name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        raise ConfigurationError(
            f"{function!r:.200} is callable but has no name of its own; pass one: "
            'agent.register("name", function)'
        )
    return name


def exposed_methods(thing: object) -> dict[str, Callable[..., Any]]:
    """Return the public methods of an object, bound, by name.

    These are functions that its class or a base class defines in Python, not named with an
    underscore first; also static, class, ``async`` and decorated ones. A class itself has none.
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
    return hasattr(member, "__wrapped__") and callable(member) and not isinstance(member, type)


# -- errors ----------------------------------------------------------------------------------------

E = TypeVar("E", bound=type[Exception])

# A peer must not raise these here: they end loops, or Python prints them by attributes that do not
# travel. Other classes than Exceptions are left out too.
_NEVER = (StopIteration, StopAsyncIteration, SyntaxError, BaseExceptionGroup, RankwireError)
# These would look like errors of the call itself, so they become OSError unless registered.
_ON_REQUEST = (TimeoutError, ConnectionError)


def _is_usual(kind: Any) -> bool:
    is_exception = isinstance(kind, type) and issubclass(kind, Exception)
    return is_exception and not issubclass(kind, (*_NEVER, *_ON_REQUEST))


_BUILTINS = {kind.__name__: kind for kind in vars(builtins).values() if _is_usual(kind)}


class RemoteErrors:
    """The exception classes of remote errors of one agent. Safe from any thread."""

    def __init__(self) -> None:
        self._kinds: dict[str, type[Exception]] = dict(_BUILTINS)

    def add(self, kind: type[Exception], name: str | None) -> None:
        """Register an exception class, or raise ``ConfigurationError``. Idempotent."""
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise ConfigurationError(f"only a class of exceptions can be registered, not {kind!r}")
        name = class_name(kind) if name is None else name
        if not isinstance(name, str) or self._kinds.get(name, kind) is not kind:
            raise ConfigurationError(f"another class is registered as {name!r}; pass name=")
        if issubclass(kind, _NEVER):
            raise ConfigurationError(f"{class_name(kind)} must not be raised by another rank")
        try:
            str(_made(kind, ("text",), RemoteError("type", "text", "traceback").__dict__))
        except Exception as error:  # raised by the class
            raise ConfigurationError(
                f"{class_name(kind)} cannot stand for a remote error: {error}"
            ) from error
        self._kinds = self._kinds | {name: kind}

    def typed(self, error: RemoteError) -> RemoteError:
        """Return a remote error as an instance of the class that was raised, if it is known."""
        for name in (error.remote_type, *error.remote_bases):
            kind = self._kinds.get(name)
            if kind is not None:
                return _made(kind, error.args, error.__dict__)
        return error


def _made(kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> RemoteError:
    made = _classes.get(kind)
    if made is None:
        made = _classes[kind] = _new_class(kind)
    error = made.__new__(made)  # without the constructor of the class
    error.args = args
    error.__dict__.update(state)
    return error


_classes: dict[type[Exception], type[RemoteError]] = {}  # cache of ``_new_class``


def _new_class(kind: type[Exception]) -> type[RemoteError]:
    if issubclass(RemoteError, kind):  # RuntimeError, and Exception itself
        return RemoteError

    def reduce(error: RemoteError) -> tuple[Any, ...]:
        return _made, (kind, error.args, error.__dict__)

    members = {
        "__doc__": f"A {kind.__name__} that a function of another rank has raised.",
        "__module__": RemoteError.__module__,  # it prints as RemoteError
        "__new__": _new,
        "__reduce__": reduce,
    }
    metaclass: Any = type(kind)
    made: type[RemoteError] = metaclass(RemoteError.__name__, (RemoteError, kind), members)
    return made


def _new(cls: type[RemoteError], *_: Any, **__: Any) -> Any:
    base: Any = cls  # without arguments, which ``OSError`` would interpret
    while base.__module__ != "builtins":
        base = base.__base__
    return base.__new__(cls)
