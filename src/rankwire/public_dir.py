"""What ``dir()`` shows of a public object, and so the completion of a shell: what users call.

The layers of the package use each other's objects, and what they use is not private; but it is
nothing to users. So a public class lists what it shows of its own in ``_SHOWN``, and derives from
``PublicDir``. Classes of the package without a list show nothing; others, such as a base class of
the standard library or a user's own class, show what they have. Nothing is hidden from who names
it.

Classes show the same as their objects: Python's prompt completes from both.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterable
from typing import ClassVar

_PACKAGE = __name__.partition(".")[0]


class PublicDirMeta(ABCMeta):
    """The class of classes of which ``dir()`` shows what is for users; they may be abstract."""

    def __dir__(cls) -> list[str]:
        return public_names(cls, super().__dir__())


class PublicDir(metaclass=PublicDirMeta):
    """An object of which ``dir()`` shows what is for users."""

    __slots__ = ()

    _SHOWN: ClassVar[tuple[str, ...]] = ()

    def __dir__(self) -> list[str]:
        return public_names(type(self), super().__dir__())


def public_names(cls: type, names: Iterable[str]) -> list[str]:
    """Return those of the names of a class, or of an object of it, that are for users."""
    public: set[str] = set()
    for base in cls.__mro__:
        is_ours = base.__module__.partition(".")[0] == _PACKAGE
        public.update(vars(base).get("_SHOWN", () if is_ours else vars(base)))
    return [name for name in names if name.startswith("_") or name in public]
