"""Iterators as arguments of a call: the callee reads them as streams from the caller.

A number travels in place of the iterator. Until the call has ended, the rank that was called may
request the items, once, by a stream of its own. Then the caller's agent runs the iterator, and the
window, the limits and the errors are those of every stream.
"""

from __future__ import annotations

import io
import itertools
import logging
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from rankwire.codec.classes import SHARED
from rankwire.codec.hooks import BuildContext, TakeContext
from rankwire.errors import ConfigurationError, InvalidMessageError
from rankwire.rpc.call import serving
from rankwire.rpc.stream import Stream

if TYPE_CHECKING:
    from rankwire.rpc.call import Call
    from rankwire.rpc.served_call import ServedCall
    from rankwire.rpc.server import Server

ITEMS = "\0items of an argument"  # a request; no function can have this name

_log = logging.getLogger("rankwire")
T = TypeVar("T")


class _Number:
    """What is encoded in place of an iterator."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Offered:
    """An iterator that one rank may request; ``stream`` once it has."""

    def __init__(self, dst: int, items: Any) -> None:
        self.dst = dst
        self.items = items
        self.stream: Call | None = None


class Offer:
    """The arguments of one call, with numbers in place of the iterators, until the call ends."""

    def __init__(
        self, offers: OfferedItems, dst: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._offers = offers
        self._numbers: list[int] = []
        self.args = tuple(self._offered(dst, value) for value in args)
        self.kwargs = {name: self._offered(dst, value) for name, value in kwargs.items()}

    def _offered(self, dst: int, value: Any) -> Any:
        if not is_iterator(value):
            return value
        self._numbers.append(self._offers.add(dst, value))
        return _Number(self._numbers[-1])

    def end(self, _: object = None) -> None:
        """End the iterators: the call has ended. Idempotent."""
        for number in self._numbers:
            self._offers.remove(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class OfferedItems:
    """The iterators in the arguments of an agent's calls in flight. Safe from any thread."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._offered: dict[int, _Offered] = {}
        self._numbers = itertools.count(1)

    def offer(self, dst: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Offer | None:
        """Offer the iterators among the arguments of a call; None if there are none."""
        if not any(map(is_iterator, (*args, *kwargs.values()))):
            return None
        return Offer(self, dst, args, kwargs)

    def add(self, dst: int, items: Any) -> int:
        """Let a rank request the items of an iterator; return its number."""
        number = next(self._numbers)
        self._offered[number] = _Offered(dst, items)
        return number

    def take(self, number: int) -> Any:
        """Return an iterator to the rank that may request it. Served as the function ``ITEMS``."""
        stream = serving.get()
        offered = self._offered.get(number)
        if stream is None or offered is None or offered.dst != stream.src:
            raise LookupError("the call that had this iterator as an argument has ended")
        if offered.stream is not None:
            raise LookupError("the items of this iterator were requested already")
        offered.stream = stream
        return offered.items

    def remove(self, number: int) -> None:
        """End an iterator, or the stream of its items. Idempotent."""
        offered = self._offered.pop(number, None)
        if offered is None:
            return
        if offered.stream is not None:
            served: ServedCall = offered.stream  # type: ignore[assignment]
            self._server.cancel_job(served)
        elif isinstance(offered.items, Iterator) and hasattr(offered.items, "close"):
            try:
                offered.items.close()
            except Exception:
                _log.warning("closing %r raised", offered.items, exc_info=True)


class ArgumentStream(Generic[T]):
    """The items of an iterator that a caller passed as an argument, as they come.

    Iterate over it once, with ``for``, or with ``async for`` in an ``async def``, while the
    function runs to which it was passed. Leaving the loop early ends the caller's iterator.
    """

    def __init__(self, src: int, number: int) -> None:
        self._src = src
        self._number = number
        self._stream: Stream[T] | None = None

    def _opened(self) -> Stream[T]:
        if self._stream is None:
            call = serving.get()
            if call is None:
                raise ConfigurationError(
                    "an iterator that came as an argument is read by the function that got it; "
                    "in a thread of your own, run that with contextvars.copy_context()"
                )
            served: ServedCall = call  # type: ignore[assignment]
            self._stream = served.items_of(self._src, self._number)
        return self._stream

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return next(self._opened())

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        return await anext(self._opened())

    def close(self) -> None:
        """End the caller's iterator. Idempotent."""
        if self._stream is not None:
            self._stream.close()

    def __repr__(self) -> str:
        count = 0 if self._stream is None else self._stream.count
        return f"<ArgumentStream from rank {self._src}, {count} items taken>"


def is_iterator(value: Any) -> bool:
    """Return whether a value is an iterator to send the items of; files are not."""
    return isinstance(value, (Iterator, AsyncIterator)) and not isinstance(value, io.IOBase)


def _take(value: _Number, sending: TakeContext) -> int:
    return value.number


def _build(state: Any, receiving: BuildContext) -> Any:
    if type(state) is not int or receiving.peer is None:
        raise InvalidMessageError("the number of an iterator is an integer")
    return ArgumentStream(receiving.peer, state)


SHARED.add(_Number, "rankwire.iterator", _take, _build)
