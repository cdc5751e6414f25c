"""Iterators as arguments of a call: the callee reads them as streams from the caller.

Two numbers travel in place of the iterator. Until the call has ended, the rank that was called may
request the items, once, by a stream of its own. Then the caller's agent runs the iterator, and the
window, the limits and the errors are those of every stream.
"""

from __future__ import annotations

import io
import itertools
import logging
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar
from weakref import WeakValueDictionary

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

_ENDED = "the call that had this iterator as an argument has ended"
_log = logging.getLogger("rankwire")
T = TypeVar("T")


class _IteratorPlace(NamedTuple):
    """What is encoded in place of an iterator."""

    offer: int
    position: int


class _Offered:
    """An iterator that one rank may request; ``stream`` once it has."""

    def __init__(self, items: Any) -> None:
        self.items = items
        self.stream: Call | None = None


class Offer:
    """The arguments of one call with places of the iterators, which the called rank may request.

    It ends with ``end``, or when it is dropped, such as by an interrupt.
    """

    def __init__(
        self, number: int, server: Server, dst: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._number = number
        self._server = server
        self.dst = dst
        self._offered: list[_Offered] = []
        self.args = tuple(map(self._placed, args))
        self.kwargs = {name: self._placed(value) for name, value in kwargs.items()}

    def _placed(self, value: Any) -> Any:
        if not is_iterator(value):
            return value
        self._offered.append(_Offered(value))
        return _IteratorPlace(self._number, len(self._offered) - 1)

    def take(self, position: int) -> Any:
        """Return an iterator to the rank that may request it, in a call that it makes."""
        stream = serving.get()
        if stream is None or stream.src != self.dst or not 0 <= position < len(self._offered):
            raise LookupError(_ENDED)
        offered = self._offered[position]
        if offered.stream is not None:
            raise LookupError("the items of this iterator were requested already")
        offered.stream = stream
        return offered.items

    def end(self, _: object = None) -> None:
        """End the iterators, because the call has ended. Idempotent."""
        offered, self._offered = self._offered, []
        for each in offered:
            if each.stream is not None:
                served: ServedCall = each.stream  # type: ignore[assignment]
                self._server.cancel_job(served)
            elif isinstance(each.items, Iterator) and hasattr(each.items, "close"):
                try:
                    each.items.close()
                except Exception:
                    _log.warning("closing %r raised", each.items, exc_info=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class OfferedItems:
    """The iterators in the arguments of an agent's calls in flight. Safe from any thread."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._offers: WeakValueDictionary[int, Offer] = WeakValueDictionary()
        self._numbers = itertools.count(1)

    def offer(self, dst: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Offer | None:
        """Offer the iterators among the arguments of a call; None if there are none."""
        if not any(map(is_iterator, (*args, *kwargs.values()))):
            return None
        number = next(self._numbers)
        offer = self._offers[number] = Offer(number, self._server, dst, args, kwargs)
        return offer

    def take(self, number: int, position: int) -> Any:
        """Return the iterator at a place. Served as the function ``ITEMS``."""
        offer = self._offers.get(number)
        if offer is None:
            raise LookupError(_ENDED)
        return offer.take(position)


class ArgumentStream(Generic[T]):
    """The items of an iterator that a caller passed as an argument, as they come.

    Iterate over it once, with ``for``, or with ``async for`` in an ``async def``, while the
    function runs to which it was passed. Leaving the loop early ends the caller's iterator.
    """

    def __init__(self, src: int, place: tuple[int, int]) -> None:
        self._src = src
        self._place = place
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
            self._stream = served.items_of(self._src, self._place)
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


def _take(value: _IteratorPlace, sending: TakeContext) -> list[int]:
    return [*value]


def _build(state: Any, receiving: BuildContext) -> Any:
    if type(state) is not list or [*map(type, state)] != [int, int] or receiving.peer is None:
        raise InvalidMessageError("the place of an iterator is two integers")
    return ArgumentStream(receiving.peer, (state[0], state[1]))


SHARED.add(_IteratorPlace, "rankwire.iterator", _take, _build)
