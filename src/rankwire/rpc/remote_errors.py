"""Remote errors by type: what a function raised at another rank can be caught here by its class.

A callee tells the names of the class that was raised and of its bases, and never more. They are
looked up in two tables: the builtin exceptions, and those that this agent was given
(``RpcAgent.register_error``); nothing is imported, and no constructor runs. The first name that is
found decides: the error is then a ``RemoteError`` and one of that class, with the text and the
traceback of the callee. Without one it is a ``RemoteError`` alone.

Not in the first table, because a peer must not raise them here, or they would mislead:

- what is no ``Exception``: ``SystemExit``, ``KeyboardInterrupt``, ``GeneratorExit``;
- ``StopIteration`` and ``StopAsyncIteration``, which end loops;
- ``SyntaxError`` and exception groups, which Python prints by attributes that did not travel;
- ``TimeoutError`` and ``ConnectionError``: they would pass for the end of the call's own time and
  connection. They are ``OSError`` here, as they are anyway, and a program may register them.

Errors of rankwire that a function has raised have no names to look up: they tell of the callee's
own calls and peers.
"""

from __future__ import annotations

import builtins
from typing import Any, TypeVar

from rankwire.errors import ConfigurationError, RankwireError, RemoteError
from rankwire.texts import class_name

E = TypeVar("E", bound=type[Exception])

_NEVER = (StopIteration, StopAsyncIteration, SyntaxError, BaseExceptionGroup, RankwireError)
_ON_REQUEST = (TimeoutError, ConnectionError)


def _is_usual(kind: Any) -> bool:
    is_exception = isinstance(kind, type) and issubclass(kind, Exception)
    return is_exception and not issubclass(kind, (*_NEVER, *_ON_REQUEST))


_BUILTINS = {kind.__name__: kind for kind in vars(builtins).values() if _is_usual(kind)}


class RemoteErrors:
    """The classes that remote errors of an agent's calls may have. Safe from any thread."""

    def __init__(self) -> None:
        self._kinds: dict[str, type[Exception]] = dict(_BUILTINS)

    def add(self, kind: type[Exception], name: str | None) -> None:
        """Have errors of a class raised as such; repeating it changes nothing.

        Raises:
            ConfigurationError: It is no class of exceptions, or one that must not come from afar,
                or its name is another's.
        """
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise ConfigurationError(f"only a class of exceptions can be registered, not {kind!r}")
        name = class_name(kind) if name is None else name
        if not isinstance(name, str) or self._kinds.get(name, kind) is not kind:
            raise ConfigurationError(f"another class is registered as {name!r}; pass name=")
        if issubclass(kind, _NEVER):
            raise ConfigurationError(f"{class_name(kind)} must not be raised by another rank")
        try:
            str(_made(kind, ("text",), RemoteError("type", "text", "traceback").__dict__))
        except Exception as error:  # of the class: it may be written in any way
            raise ConfigurationError(
                f"{class_name(kind)} cannot stand for a remote error: {error}"
            ) from error
        self._kinds = self._kinds | {name: kind}

    def typed(self, error: RemoteError) -> RemoteError:
        """Return a remote error as one of the class that was raised, as far as that is known."""
        for name in (error.remote_type, *error.remote_bases):
            kind = self._kinds.get(name)
            if kind is not None:
                return _made(kind, error.args, error.__dict__)
        return error


def _made(kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> RemoteError:
    """Make a remote error that is also of a class, without that class's constructor."""
    made = _classes.get(kind)
    if made is None:
        made = _classes[kind] = _new_class(kind)
    error = made.__new__(made)
    error.args = args
    error.__dict__.update(state)
    return error


_classes: dict[type[Exception], type[RemoteError]] = {}  # of remote errors that are also of another


def _new_class(kind: type[Exception]) -> type[RemoteError]:
    if issubclass(RemoteError, kind):  # RuntimeError, and Exception itself
        return RemoteError

    def reduce(error: RemoteError) -> tuple[Any, ...]:
        return _made, (kind, error.args, error.__dict__)

    members = {
        "__doc__": f"A {kind.__name__} that a function of another rank has raised.",
        "__module__": RemoteError.__module__,  # it prints as what it is to its readers
        "__new__": _new,
        "__reduce__": reduce,
    }
    metaclass: Any = type(kind)
    made: type[RemoteError] = metaclass(RemoteError.__name__, (RemoteError, kind), members)
    return made


def _new(cls: type[RemoteError], *_: Any, **__: Any) -> Any:
    """Make an instance as Python lays it out, without arguments: ``OSError`` would read them."""
    base: Any = cls
    while base.__module__ != "builtins":
        base = base.__base__
    return base.__new__(cls)
