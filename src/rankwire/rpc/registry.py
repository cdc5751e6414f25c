"""The functions that other ranks may call, by name, and the error classes that they may raise.

Functions are registered one by one, or found by the program's ``resolve``. The methods of a
registered object are functions of their own.

A callee sends the names of an error's class and its bases; nothing is imported, and no constructor
runs. Errors of rankwire carry no names: they concern the callee's own calls and peers.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial, partialmethod
from types import FunctionType, MethodType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from rankwire import runtime
from rankwire.codec.codec import Codec
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
FindMethods = Callable[[object], dict[str, Callable[..., Any]]]
# Makes a variant of a served function, such as one that takes many arguments at once; the flag says
# whether results are copied.
Vary = Callable[[Callable[..., Any], Codec, bool], Callable[..., Any]]

VARIANT = "\0"  # between a function's name and that of the requested variant


class Function:
    """A registered function."""

    needs_worker = True  # False for quick ones of the agent itself, which run beside the workers

    def __init__(
        self,
        name: str,
        target: Callable[..., Any],
        *,
        copies: bool = False,
        idempotent: bool = False,
        direct: bool = False,
        owner: str | None = None,
    ) -> None:
        self.name = name
        self.copies = copies  # the result, before it is sent
        self.idempotent = idempotent  # a call that may have run may be repeated
        self.direct = direct  # refuse group calls that another rank passes on
        self.owner = owner  # the name of the registered object whose method it is
        self.target = target
        self.is_async = is_coroutine_function(target)
        self.is_slow = False  # the last run was long: another thread should poll meanwhile

    @cached_property
    def keywords(self) -> frozenset[str]:
        """The parameters to pass by name. Cached, because finding them takes as long as a call."""
        try:
            parameters = inspect.signature(self.target).parameters
        except (TypeError, ValueError):  # functions written in C may have no signature
            return frozenset()
        return frozenset(
            name
            for name, parameter in parameters.items()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
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

    def __init__(self, name: str, target: Callable[..., Any], habits: Habits | Function) -> None:
        self.name = name
        self.target = target
        self.copies = False
        self.direct = False
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
        # Requests between agents, by names that no function can have: functions of the agent, or
        # something quick for the polling thread to do.
        self.own: dict[str, Function | Callable[[], None]] = {}
        self._lock = runtime.Lock()
        self.functions: dict[str, Function] = {}
        self.errors = RemoteErrors()

    def serve(self, served: Mapping[str, Any]) -> None:
        """Register functions, objects' own methods, and in pairs with an object listed ones."""
        for name, thing in served.items():
            methods: FindMethods | None = None if callable(thing) else _own_methods
            if type(thing) is tuple and len(thing) == 2:
                thing, names = thing
                methods = partial(_listed_methods, names)
            self.add(name, thing, replace=False, methods=methods)

    def add(
        self,
        name: Any,
        thing: T,
        *,
        replace: bool,
        copies: bool = False,
        methods: FindMethods | None = None,
        idempotent: bool = False,
        direct: bool = False,
    ) -> T:
        """Register a function, or all public methods of an object as ``name.method``; return it.

        ``methods`` finds those of any object. Without a name, use its own or that of the object's
        class. ``replace`` removes the methods of the former object of that name. On
        ``ConfigurationError``, nothing is registered.
        """
        owner = None
        targets: dict[Any, Callable[..., Any]]
        if callable(thing) and methods is None:
            targets = {_own_name(thing) if name is None else name: thing}
        else:
            name = owner = type(thing).__name__ if name is None else name
            found = (methods or exposed_methods)(thing)
            targets = {f"{name}.{method}": target for method, target in found.items()}
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
                name: Function(
                    name,
                    target,
                    copies=copies,
                    idempotent=idempotent,
                    direct=direct,
                    owner=owner,
                )
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
        """Ask the resolver for a function that is not registered; raise what it raises."""
        return None if self._resolver is None else self._resolver.find(name)

    def variant(self, function: Function, make: Vary, codec: Codec) -> Function:
        """Return a variant of a function for one call, which shares the function's habits."""
        target = make(function.target, codec, function.copies)
        return ResolvedFunction(function.name, target, function)

    def is_idempotent(self, name: str) -> bool:
        """Return whether a function of that name is registered here as idempotent."""
        function = self.functions.get(name)
        return function is not None and function.idempotent

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

    def check_keyword(self, name: str, keyword: str = "timeout", to: str = "to(rank") -> None:
        """Raise ``ConfigurationError`` if a keyword of a call may be meant for the function."""
        function = self.functions.get(name)
        if function is not None and keyword in function.keywords:
            separator = "" if to.endswith("(") else ", "
            what = "the timeout" if keyword == "timeout" else repr(keyword)
            raise ConfigurationError(
                f"{name!r} has a parameter {keyword!r}, so {keyword}= may mean either: "
                f"agent.{to}{separator}{keyword}=...)({name!r}, ...) sets {what} of the call, "
                f"agent.{to})({name!r}, ..., {keyword}=...) passes it to the function"
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
    """Return the public methods of an object, bound, by name. A class itself has none."""
    if isinstance(thing, type):
        return {}
    names = public_methods(type(thing))
    return {name: method for name in names if callable(method := getattr(thing, name))}


def _own_methods(thing: object) -> dict[str, Callable[..., Any]]:
    """Return the public methods that the class of an object defines itself; raise if none."""
    found, own = exposed_methods(thing), vars(type(thing))
    methods = {name: method for name, method in found.items() if name in own}
    if found and not methods:
        raise ConfigurationError(
            f"{type(thing).__name__} only inherits its public methods: list those to serve, such as"
            f" serve={{name: (object, [{next(iter(found))!r}])}}"
        )
    return methods


def _listed_methods(names: Iterable[str], thing: object) -> dict[str, Callable[..., Any]]:
    """Return the public methods of these names; raise if one does not exist."""
    found = exposed_methods(thing)
    names = [names] if isinstance(names, str) else [*names]
    if missing := [name for name in names if name not in found]:
        raise ConfigurationError(
            f"{type(thing).__name__} has no public method {missing[0]!r} that is written in Python"
        )
    return {name: found[name] for name in names}


def public_methods(cls: type) -> list[str]:
    """Return the names of the methods that others can call on objects of a class.

    These are functions that the class or a base class defines in Python, not named with an
    underscore first; also static, class, ``async`` and decorated ones.
    """
    members: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__ != "builtins":
            members.update(vars(base))
    return [n for n, member in members.items() if not n.startswith("_") and _is_method(member)]


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
