"""``message``: registers classes with all codecs of this process (the table ``classes.SHARED``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from rankwire.codec.classes import SHARED
from rankwire.codec.hooks import BuildContext, HookedClass, TakeContext
from rankwire.codec.value_writer import BUILT_IN
from rankwire.errors import ConfigurationError

T = TypeVar("T")


@overload
def message(
    cls: type[T],
    *,
    name: str | None = None,
    take: Callable[[T, TakeContext], Any] | None = None,
    build: Callable[[Any, BuildContext], T] | None = None,
) -> type[T]: ...
@overload
def message(
    cls: None = None,
    *,
    name: str | None = None,
    take: Callable[[Any, TakeContext], Any] | None = None,
    build: Callable[[Any, BuildContext], Any] | None = None,
) -> Callable[[type[T]], type[T]]: ...
def message(
    cls: type[T] | None = None,
    *,
    name: str | None = None,
    take: Callable[[Any, TakeContext], Any] | None = None,
    build: Callable[[Any, BuildContext], Any] | None = None,
) -> Any:
    """Let instances of a class be sent, in calls and object collectives.

    A decorator, with or without arguments: it registers the class with every ``Codec`` of this
    process. All ranks must register it, under the same name. Safe from any thread.

    Args:
        cls: A dataclass, enum, namedtuple or msgspec Struct; with hooks any class.
        name: Its name on the wire; by default its qualified name. A class that is defined again
            replaces the former one.
        take: Returns what is sent in place of an instance, as for :meth:`Codec.register`.
        build: Returns an instance, made of what ``take`` returned.

    Returns:
        The class itself, or a decorator.

    Raises:
        ConfigurationError: The class needs hooks, its name is taken, or one hook is missing.
    """
    if cls is None:
        return lambda cls: message(cls, name=name, take=take, build=build)
    if cls in BUILT_IN:
        raise ConfigurationError(
            f"{cls.__qualname__} cannot be registered: the codec has its own encoding of it"
        )
    if isinstance(cls, type):
        SHARED.forget_former(cls, cls.__qualname__ if name is None else name)
    SHARED.add(cls, name, take, build)
    return cls


def options_of(cls: type) -> dict[str, Any] | None:
    """Return the keyword arguments by which ``message`` registered a class, if it did."""
    carried = SHARED.registered(cls)
    if carried is None:
        return None
    hooks = (carried.take, carried.build_hook) if isinstance(carried, HookedClass) else (None, None)
    return {"name": carried.name, "take": hooks[0], "build": hooks[1]}
