"""After ``os.fork``: the child has none of its parent's threads, and shares all of its sockets.

A child must neither use what it inherited (a lock may be held for ever, by a thread that is not
there) nor harm it (a socket that it shuts down is shut down in the parent too). So whatever has
descriptors, locks or threads is *guarded*: in the child its ``forsake`` is called, once, before
anything else runs there. It closes its copies of descriptors, without a word to peers, so that
the child does not keep a connection open which its parent has ended by dying.

What users hold is also *disowned*: every use of it raises ``ForkedProcessError`` at once. That is
done by giving the object another class, not by a check in each operation: it costs the parent
nothing, needs no lock, and forgets none. Closing, and leaving a ``with`` block, do nothing.

The child may make a backend of its own; locks of modules are free there (``renew_in_child``).
Nothing here knows what is guarded.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from operator import methodcaller
from typing import Any, NoReturn, Protocol, TypeVar, overload
from weakref import WeakKeyDictionary

from rankwire.errors import ForkedProcessError


class Forkable(Protocol):
    """What is guarded. It must be hashable by identity and weakly referable.

    Where that would be one more method for users to see, ``guard`` is given a function instead.
    """

    def forsake(self) -> None:
        """In a child: close descriptors and leave locks, threads and peers alone. No waiting."""


T = TypeVar("T")

_guarded: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()
_disowned: dict[type, type] = {}


@overload
def guard(thing: Forkable) -> None: ...
@overload
def guard(thing: T, forsake: Callable[[T], None]) -> None: ...
def guard(thing: Any, forsake: Callable[[Any], None] = methodcaller("forsake")) -> None:
    """Have ``forsake`` called with this in every child that is forked while it exists."""
    _guarded[thing] = forsake


def renew_in_child(lock: threading.Lock) -> None:
    """Have a module's lock free in every child, where the thread that held it is not there."""
    # As the standard library does for its own: there is no public way to free a lock whose holder
    # is gone, and replacing it would not reach those who have it by name.
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]


def disown(thing: object) -> None:
    """In a child: have every use of an object raise, closing it apart."""
    kind = type(thing)
    if kind not in _disowned:
        _disowned[kind] = _disowned_class(kind)
    thing.__class__ = _disowned[kind]


def _in_child() -> None:
    inherited = list(_guarded.items())
    _guarded.clear()
    for thing, forsake in inherited:
        forsake(thing)


os.register_at_fork(after_in_child=_in_child)


def _disowned_class(kind: type) -> type:
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
    """Leave what belongs to the parent as it is."""
