"""Give a remote error the class that the callee raised, so that it can be caught by that class.

A callee sends the names of the class and its bases, nothing more. They are looked up among the
builtin exceptions and the classes of ``RpcAgent.register_error``; nothing is imported, and no
constructor runs. Errors of rankwire carry no names: they concern the callee's own calls and peers.
"""

from __future__ import annotations

import builtins
from typing import Any, TypeVar

from rankwire.errors import ConfigurationError, RankwireError, RemoteError
from rankwire.texts import class_name

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
        """Register an exception class. Idempotent.

        Raises:
            ConfigurationError: It is not an exception class, or one that other ranks must not
                raise, or its name is taken.
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
        except Exception as error:  # raised by the class
            raise ConfigurationError(
                f"{class_name(kind)} cannot stand for a remote error: {error}"
            ) from error
        self._kinds = self._kinds | {name: kind}

    def typed(self, error: RemoteError) -> RemoteError:
        """Return a remote error as an instance of the class that was raised, if that is known."""
        for name in (error.remote_type, *error.remote_bases):
            kind = self._kinds.get(name)
            if kind is not None:
                return _made(kind, error.args, error.__dict__)
        return error


def _made(kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> RemoteError:
    """Make a remote error that is also an instance of a class, without calling its constructor."""
    made = _classes.get(kind)
    if made is None:
        made = _classes[kind] = _new_class(kind)
    error = made.__new__(made)
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
    """Make an instance without arguments, which ``OSError`` would interpret."""
    base: Any = cls
    while base.__module__ != "builtins":
        base = base.__base__
    return base.__new__(cls)
