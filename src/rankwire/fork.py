"""Protect a parent process from the children that ``os.fork`` creates.

A child has none of its parent's threads, so locks may stay held forever, and it shares its parent's
sockets. An object with descriptors, locks or threads is *guarded*: before any other code runs in
the child, it closes the child's copies of the descriptors without notifying peers, so that a
connection ends when the parent dies. A public object is also *invalidated*: every use of it raises
``ForkedProcessError``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from operator import methodcaller
from typing import Any, NoReturn, Protocol, TypeVar, overload
from weakref import WeakKeyDictionary

from rankwire import runtime
from rankwire.errors import ForkedProcessError


class Forkable(Protocol):
    """An object that can be guarded. It is hashable by identity and can have weak references."""

    def close_in_child(self) -> None:
        """Close descriptors in a child. Do not wait, and do not use locks, threads or peers."""


T = TypeVar("T")

_guarded: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()
_invalidated: dict[type, type] = {}


@overload
def guard(thing: Forkable) -> None: ...
@overload
def guard(thing: T, close: Callable[[T], None]) -> None: ...
def guard(thing: Any, close: Callable[[Any], None] = methodcaller("close_in_child")) -> None:
    """Call ``close(thing)``, or its ``close_in_child``, in every child forked while it exists."""
    _guarded[thing] = close


def renew_in_child(lock: runtime.Lock) -> None:
    """Release a module's lock in every child, where the thread that held it does not exist."""
    # As the standard library does: there is no public way, and code may have imported this lock.
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]


def invalidate(thing: object) -> None:
    """Replace an object's class in a child, so that every use but ``close`` raises."""
    kind = type(thing)
    if kind not in _invalidated:
        _invalidated[kind] = _invalidated_class(kind)
    thing.__class__ = _invalidated[kind]


def _in_child() -> None:
    inherited = list(_guarded.items())
    _guarded.clear()
    for thing, close in inherited:
        close(thing)


os.register_at_fork(after_in_child=_in_child)


def _invalidated_class(kind: type) -> type:
    what = f"this {kind.__name__}"

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ForkedProcessError(what)

    harmless: dict[str, Any] = {"close": _do_nothing, "closed": True, "__class__": kind}

    def look_up(_: object, name: str) -> Any:
        return harmless[name] if name in harmless else refuse()

    members: dict[str, Callable[..., Any] | tuple[()]] = {
        "__slots__": (),
        "__getattribute__": look_up,
        "__setattr__": refuse,
        "__enter__": refuse,
        "__await__": refuse,
        "__exit__": _do_nothing,
        "__repr__": lambda _: f"<{kind.__name__} of the parent process>",
    }
    return type(kind)(kind.__name__, (kind,), members)


def _do_nothing(*_: Any, **__: Any) -> None:
    pass
