"""The streaming methods of ``RpcAgent``, and the objects that ``agent.to_stream(1)`` returns."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, ParamSpec, TypeAlias, TypeVar, overload

from rankwire.backends.arguments import check_rank
from rankwire.deadline import Deadline
from rankwire.errors import ConfigurationError
from rankwire.rpc.agent_calls import AgentCalls
from rankwire.rpc.argument_streams import ITEMS
from rankwire.rpc.call import Call, serving
from rankwire.rpc.feed import UNREAD, WINDOW, WINDOW_NBYTES, StreamLimits
from rankwire.rpc.proxies import Interface, RankFunctions, RemoteObject
from rankwire.rpc.stream import Stream
from rankwire.wire.credit import MOST_ITEMS, MOST_NBYTES

P = ParamSpec("P")
T = TypeVar("T")
# Returned by a generator or an async generator.
Items: TypeAlias = Iterator[T] | AsyncIterator[T]


class StreamRank(RankFunctions[Stream[Any]]):
    """The functions of a rank; a call returns its stream. Safe from any thread."""

    __slots__ = ()
    _MANNER = ", as streams"

    @overload
    def __call__(self, function: str, /, *args: Any, **kwargs: Any) -> Stream[Any]: ...
    @overload
    def __call__(
        self, function: Callable[P, Items[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Stream[T]: ...
    def __call__(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Start a stream, as ``agent.stream`` does."""
        return self._make_call(function, args, kwargs)


class AgentStreams(AgentCalls):
    """The streaming methods of ``RpcAgent``. Safe from any thread."""

    @overload
    def stream(
        self,
        dst: int | str,
        function: str,
        /,
        *args: Any,
        window: int = WINDOW,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Stream[Any]: ...
    # As for ``rpc_sync``: with settings, a type checker only knows the type of the items.
    @overload
    def stream(
        self,
        dst: int | str,
        function: Callable[..., Items[T]],
        /,
        *args: Any,
        window: int,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Stream[T]: ...
    @overload
    def stream(
        self,
        dst: int | str,
        function: Callable[..., Items[T]],
        /,
        *args: Any,
        timeout: float | None,
        **kwargs: Any,
    ) -> Stream[T]: ...
    @overload
    def stream(
        self, dst: int | str, function: Callable[P, Items[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Stream[T]: ...
    def stream(
        self,
        dst: int | str,
        function: Any,
        /,
        *args: Any,
        window: Any = WINDOW,
        timeout: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Start a generator on another rank, or on this one, and return its items as they come.

        The function is a generator or an async generator. It runs ahead of the reader by at most
        ``window`` items, or 64 MiB and one item; then it is suspended at its ``yield`` and occupies
        no thread. If the reader ends the stream or is lost, ``yield`` raises ``GeneratorExit``
        there. The function runs at most once.

        Args:
            dst: The rank to call, or its name.
            function: As for ``rpc_sync``.
            *args: Positional arguments.
            window: How many items may be on their way or unread.
            timeout: Seconds to wait for each item; None is the agent's timeout. ``to_stream`` also
                takes a limit for the whole stream. It is never an argument of the function, nor is
                ``window``: if that has parameters of these names, use ``to_stream``.
            **kwargs: Keyword arguments.

        Raises:
            RankwireError: From this method for invalid arguments, or if the request cannot be sent.
                From the stream as ``rpc_sync`` raises them, after the items that came; the error
                says how many.
        """
        return self.to_stream(dst, window=window, timeout=timeout)(function, *args, **kwargs)

    @overload
    def to_stream(
        self,
        dst: int | str,
        /,
        *,
        window: int = WINDOW,
        window_nbytes: int = WINDOW_NBYTES,
        timeout: float | None = None,
        total_timeout: float | None = None,
        unread_timeout: float = UNREAD,
    ) -> StreamRank: ...
    @overload
    def to_stream(
        self,
        dst: int | str,
        interface: Callable[..., T],
        /,
        *,
        name: str | None = None,
        window: int = WINDOW,
        window_nbytes: int = WINDOW_NBYTES,
        timeout: float | None = None,
        total_timeout: float | None = None,
        unread_timeout: float = UNREAD,
    ) -> T: ...
    def to_stream(
        self,
        dst: int | str,
        interface: Any = None,
        /,
        *,
        name: str | None = None,
        window: int = WINDOW,
        window_nbytes: int = WINDOW_NBYTES,
        timeout: float | None = None,
        total_timeout: float | None = None,
        unread_timeout: float = UNREAD,
    ) -> Any:
        """Return a proxy like ``to`` does; its calls return streams.

        Args:
            dst: The rank to call.
            interface: As for ``to``. To a type checker a stream is the iterator that the method
                returns.
            name: As for ``to``.
            window: How many items may be on their way or unread, up to 65,536.
            window_nbytes: How many bytes of items may be, up to 1 GiB; one item always may.
            timeout: Seconds to wait for each item; None is the agent's timeout.
            total_timeout: Seconds for the whole stream, also while the reader does not read; None
                is no limit.
            unread_timeout: Seconds after which a stream ends if the reader takes nothing, an hour
                unless you set it: the generator does not stay suspended without a limit.

        Raises:
            ConfigurationError: An argument is invalid.
        """
        for option, value, most in (
            ("window", window, MOST_ITEMS),
            ("window_nbytes", window_nbytes, MOST_NBYTES),
        ):
            if type(value) is not int or not 1 <= value <= most:
                raise ConfigurationError(f"{option} is a number from 1 to {most}, not {value!r}")
        limit = self.timeout if timeout is None else Deadline(timeout, self._clock).limit
        unread = Deadline(unread_timeout, self._clock).limit
        limits = StreamLimits(limit, unread, window, window_nbytes)
        total = math.inf if total_timeout is None else Deadline(total_timeout, self._clock).limit
        dst = check_rank(dst, self.backend.world_size, self.backend.roles)

        def stream(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Stream[Any]:
            name = function if type(function) is str else self._registry.name_of(function)
            call = serving.get()
            deadline = self._limited(total, call)
            return self._caller.stream(dst, name, limits, deadline, call, args, kwargs)

        description = f"rank {dst}, each item within {limit:g} s"
        if interface is None and name is None:
            return StreamRank(stream, description)
        return RemoteObject(Interface(interface, name), description, stream, stream)

    def _items_of(self, call: Call, src: int, place: tuple[int, int]) -> Stream[Any]:
        """Request the items of an iterator that is an argument of ``call``."""
        limits = StreamLimits(self.timeout, UNREAD, WINDOW, WINDOW_NBYTES)
        return self._caller.stream(
            src, ITEMS, limits, self._limited(math.inf, call), call, place, {}
        )
