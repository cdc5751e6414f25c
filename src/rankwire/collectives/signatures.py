"""What type checkers know of the collectives: the kind of result for each kind of argument.

Nothing here exists at run time for a program; only type checkers read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Literal, Protocol, Required, TypeAlias, TypedDict, TypeVar

from rankwire.codec.codec import Codec


class AnyArray(Protocol):
    """A numpy array or a torch tensor; not a number, which has no memory for a result."""

    @property
    def shape(self) -> Any:
        """The length of each dimension."""

    @property
    def dtype(self) -> Any:
        """The type of the elements."""

    def __setitem__(self, key: Any, value: Any, /) -> None: ...


A = TypeVar("A", bound=AnyArray)
T = TypeVar("T")
Out = TypeVar("Out")
Counts: TypeAlias = Sequence[int] | None  # rows for each rank
Parts = TypeVar("Parts", bound="list[Any] | tuple[Any, ...]")  # one array for each rank


class Blocking(TypedDict, total=False):
    """The keywords of an operation that returns its result."""

    async_op: Literal[False]
    timeout: float | None


class Async(TypedDict, total=False):
    """The keywords of an operation that returns a ``Work``."""

    async_op: Required[Literal[True]]
    timeout: float | None


class BlockingInto(Blocking, Generic[Out], total=False):
    """With memory for the result."""

    out: Out | None


class AsyncInto(Async, Generic[Out], total=False):
    """With memory for the result."""

    out: Out | None


class BlockingCoded(Blocking, total=False):
    """With a codec for the values."""

    codec: Codec | None


class AsyncCoded(Async, total=False):
    """With a codec for the values."""

    codec: Codec | None
