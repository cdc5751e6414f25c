"""Show only users' names in ``dir()`` of public objects, and so in completion.

A public class derives from ``PublicDir`` and lists its own public attributes in ``_SHOWN``. Classes
of the package without a list show nothing; all other classes show everything.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterable
from typing import ClassVar

_PACKAGE = __name__.partition(".")[0]


class PublicDirMeta(ABCMeta):
    """The metaclass of ``PublicDir``. Its classes may be abstract."""

    def __dir__(cls) -> list[str]:
        return public_names(cls, super().__dir__())


class PublicDir(metaclass=PublicDirMeta):
    """An object whose ``dir()`` shows only what users call."""

    __slots__ = ()

    _SHOWN: ClassVar[tuple[str, ...]] = ()

    def __dir__(self) -> list[str]:
        return public_names(type(self), super().__dir__())


def public_names(cls: type, names: Iterable[str]) -> list[str]:
    """Return the public names of a class or of its instances."""
    public: set[str] = set()
    for base in cls.__mro__:
        is_ours = base.__module__.partition(".")[0] == _PACKAGE
        public.update(vars(base).get("_SHOWN", () if is_ours else vars(base)))
    return [name for name in names if name.startswith("_") or name in public]
