"""Workers: the ranks of a world by the names that they gave themselves."""

from __future__ import annotations

import re
from typing import Any

_MAX_NAME = 128
_NAME = re.compile(r"[\w:-]+", re.ASCII)


class WorkerInfo:
    """A rank and its name. Cannot be changed, so it is safe from any thread.

    Args:
        name: Letters, digits, underscores, colons and dashes; shorter than 128.
        id: The rank.

    Raises:
        RuntimeError: It is no such name.
    """

    __slots__ = ("id", "name")

    name: str
    id: int

    def __init__(self, name: str, id: int) -> None:
        if not isinstance(name, str) or not name:
            raise RuntimeError("Worker name must be non-empty text.")
        if len(name) >= _MAX_NAME:
            raise RuntimeError(f"Worker name must be shorter than {_MAX_NAME}, not {len(name)}.")
        if not _NAME.fullmatch(name):
            raise RuntimeError(f"Worker name must match ^[A-Za-z0-9-_:]*$, but got {name!r}")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "id", int(id))

    def __setattr__(self, attribute: str, value: object) -> None:
        raise AttributeError("a WorkerInfo cannot be changed")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WorkerInfo):
            return NotImplemented
        return self.id == other.id and self.name == other.name

    def __hash__(self) -> int:
        return hash((self.name, self.id))

    def __reduce__(self) -> Any:
        return WorkerInfo, (self.name, self.id)

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"
