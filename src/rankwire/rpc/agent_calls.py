"""The calling methods of ``RpcAgent``, and the objects that ``agent.to(1)`` returns.

A function is named by an attribute, ``agent.to(1).add(2, 3)``, or passed, as itself or by name,
``agent.to(1)(add, 2, 3)``. Only the function itself gives a type checker its signature.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar, overload

from rankwire.backends.arguments import check_rank
from rankwire.backends.base import Backend
from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.rpc.call import Call, serving
from rankwire.rpc.caller import Caller
from rankwire.rpc.future import RpcFuture
from rankwire.rpc.registry import Registry

P = ParamSpec("P")
R = TypeVar("R")
# Returned by an ``async def`` or a function that defers its reply; callers get its result.
Later: TypeAlias = Awaitable[R] | Future[R]

# Makes a call, given the function or its name, and the arguments.
MakeCall = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _check_public(name: str) -> None:
    """Reject attributes that Python and notebooks look up by themselves."""
    if name.startswith("_"):
        raise AttributeError(
            f"functions whose names begin with an underscore are called as agent.to(rank)({name!r})"
        )


class RemoteFunction(Generic[R]):
    """A function of another rank, by name. Safe from any thread.

    Its attributes are the methods of the object that the rank has registered by this name:
    ``agent.to(0).server.pull()`` calls ``"server.pull"``.
    """

    __slots__ = ("_make_call", "_name")

    def __init__(self, make_call: MakeCall, name: str) -> None:
        self._make_call = make_call
        self._name = name

    def __call__(self, /, *args: Any, **kwargs: Any) -> R:
        """Call the function."""
        return self._make_call(self._name, args, kwargs)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> RemoteFunction[R]:
        _check_public(name)
        return RemoteFunction(self._make_call, f"{self._name}.{name}")

    def __repr__(self) -> str:
        return f"<remote function {self._name!r}>"


class RankFunctions(Generic[R]):
    """The functions of a rank. Other public attributes would hide functions of that name."""

    __slots__ = ("_description", "_make_call")
    _MANNER = ""

    def __init__(self, make_call: MakeCall, description: str) -> None:
        self._make_call = make_call
        self._description = description

    def __getattr__(self, name: str) -> RemoteFunction[R]:
        _check_public(name)
        return RemoteFunction(self._make_call, name)

    def __repr__(self) -> str:
        return f"<functions of {self._description}{self._MANNER}>"


class RemoteRank(RankFunctions[Any]):
    """The functions of a rank; a call returns the function's result. Safe from any thread."""

    __slots__ = ()

    @overload
    def __call__(self, function: str, /, *args: Any, **kwargs: Any) -> Any: ...
    @overload
    def __call__(
        self, function: Callable[P, Later[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    @overload
    def __call__(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def __call__(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, as ``rpc_sync`` does."""
        return self._make_call(function, args, kwargs)


class AsyncRemoteRank(RankFunctions[RpcFuture[Any]]):
    """The functions of a rank; a call returns its future. Safe from any thread."""

    __slots__ = ()
    _MANNER = ", asynchronously"

    @overload
    def __call__(self, function: str, /, *args: Any, **kwargs: Any) -> RpcFuture[Any]: ...
    @overload
    def __call__(
        self, function: Callable[P, Later[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RpcFuture[R]: ...
    @overload
    def __call__(
        self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> RpcFuture[R]: ...
    def __call__(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Start a call, as ``rpc_async`` does."""
        return self._make_call(function, args, kwargs)


class AgentCalls:
    """The calling methods of ``RpcAgent``, which sets the attributes. Safe from any thread."""

    backend: Backend  # its ranks are called
    timeout: float  # seconds for calls without a timeout of their own
    _clock: Clock
    _registry: Registry
    _caller: Caller

    # A type checker cannot check the arguments and accept ``timeout`` at once, so with ``timeout``
    # it only knows the type of the result. ``to(rank, timeout=...)`` has both.
    @overload
    def rpc_sync(
        self, dst: int, function: str, /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Any: ...
    @overload
    def rpc_sync(
        self,
        dst: int,
        function: Callable[..., Later[R]],
        /,
        *args: Any,
        timeout: float | None,
        **kwargs: Any,
    ) -> R: ...
    @overload
    def rpc_sync(
        self,
        dst: int,
        function: Callable[..., R],
        /,
        *args: Any,
        timeout: float | None,
        **kwargs: Any,
    ) -> R: ...
    @overload
    def rpc_sync(
        self, dst: int, function: Callable[P, Later[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    @overload
    def rpc_sync(
        self, dst: int, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    def rpc_sync(
        self, dst: int, function: Any, /, *args: Any, timeout: Any = None, **kwargs: Any
    ) -> Any:
        """Call a function of another rank, or of this one, and return its result.

        Args:
            dst: The rank to call.
            function: A name registered there, or a function registered here under the same name.
                With the function itself, a type checker checks the arguments (unless you pass
                ``timeout``) and knows the type of the result.
            *args: Positional arguments. Arrays are sent from where they are, without a copy.
            timeout: Seconds for all of it. It travels along and limits the calls that the function
                makes. It is never an argument of the function: if that has a parameter of this
                name, use ``to``. This raises if the function is registered here and has one.
            **kwargs: Keyword arguments.

        Raises:
            RemoteError: The function raised; type, message and remote traceback are attributes. If
                it raised a builtin exception, or one of ``register_error``, this is one too, so
                that ``except KeyError`` works.
            FunctionNotFoundError: The rank has no such function.
            DeadlineExceededError: No result in time; ``may_have_run`` says whether the function
                may have run.
            PeerLostError: The peer is lost; the error has ``may_have_run`` too.
            CircularCallError: While serving a call: this call and others wait for each other.
            CallCancelledError: While serving a call: its caller does not want the result any more.
            OverloadedError: A limit was reached; the function did not run.
            UnsupportedTypeError: An argument cannot be sent.
            ConfigurationError: The rank, function or timeout is invalid, or ``timeout`` is
                ambiguous.
        """
        name = function if type(function) is str else self._registry.name_of(function)
        call = serving.get()
        if call is None and timeout is None:
            deadline = Deadline(self.timeout, self._clock)
        else:
            deadline = self._deadline(name, timeout, call)
        return self._caller.call(dst, name, deadline, call, args, kwargs)

    @overload
    def rpc_async(
        self, dst: int, function: str, /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> RpcFuture[Any]: ...
    @overload
    def rpc_async(
        self,
        dst: int,
        function: Callable[..., Later[R]],
        /,
        *args: Any,
        timeout: float | None,
        **kwargs: Any,
    ) -> RpcFuture[R]: ...
    @overload
    def rpc_async(
        self,
        dst: int,
        function: Callable[..., R],
        /,
        *args: Any,
        timeout: float | None,
        **kwargs: Any,
    ) -> RpcFuture[R]: ...
    @overload
    def rpc_async(
        self, dst: int, function: Callable[P, Later[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RpcFuture[R]: ...
    @overload
    def rpc_async(
        self, dst: int, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> RpcFuture[R]: ...
    def rpc_async(
        self, dst: int, function: Any, /, *args: Any, timeout: Any = None, **kwargs: Any
    ) -> Any:
        """Start a call and return its future.

        Arguments are as for ``rpc_sync``. They are encoded, and large ones sent, before this
        returns: you may change them afterwards. Invalid arguments raise here; errors of the network
        or the callee end the future. This waits, until the deadline, while too many calls to that
        rank are in flight (``max_in_flight``), or too many large ones are queued there
        (``max_queued_nbytes``).
        """
        name = function if type(function) is str else self._registry.name_of(function)
        call = serving.get()
        if call is None and timeout is None:
            deadline = Deadline(self.timeout, self._clock)
        else:
            deadline = self._deadline(name, timeout, call)
        return self._caller.start(dst, name, deadline, call, args, kwargs)

    def to(self, dst: int, /, *, timeout: float | None = None) -> RemoteRank:
        """Return a proxy whose methods call the functions of a rank with these settings.

        ``agent.to(1, timeout=5).add(2, 3)`` is ``agent.rpc_sync(1, "add", 2, 3, timeout=5)``, and
        so is ``agent.to(1, timeout=5)(add, 2, 3)``, whose arguments a type checker checks. All
        keywords of the call, ``timeout`` too, go to the function. The proxy is safe from any
        thread, for any number of calls.

        Args:
            dst: The rank to call.
            timeout: Seconds for each call; None is the agent's timeout.

        Raises:
            ConfigurationError: The rank or the timeout is invalid.
        """
        dst, limit, description = self._settings(dst, timeout)

        def rpc_sync(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name, deadline, call = self._prepare(function, limit)
            return self._caller.call(dst, name, deadline, call, args, kwargs)

        return RemoteRank(rpc_sync, description)

    def to_async(self, dst: int, /, *, timeout: float | None = None) -> AsyncRemoteRank:
        """Return a proxy like ``to`` does; its calls return futures."""
        dst, limit, description = self._settings(dst, timeout)

        def rpc_async(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name, deadline, call = self._prepare(function, limit)
            return self._caller.start(dst, name, deadline, call, args, kwargs)

        return AsyncRemoteRank(rpc_async, description)

    def _settings(self, dst: int, timeout: float | None) -> tuple[int, float, str]:
        limit = self.timeout if timeout is None else Deadline(timeout, self._clock).limit
        dst = check_rank(dst, self.backend.world_size)
        return dst, limit, f"rank {dst}, each call within {limit:g} s"

    def _prepare(self, function: Any, limit: float) -> tuple[str, Deadline, Call | None]:
        name = function if type(function) is str else self._registry.name_of(function)
        call = serving.get()
        return name, self._limited(limit, call), call

    def _deadline(self, name: str, timeout: float | None, call: Call | None) -> Deadline:
        deadline = self._limited(self.timeout if timeout is None else timeout, call)
        if timeout is not None:
            self._registry.check_keyword(name)
        return deadline

    def _limited(self, limit: float, call: Call | None) -> Deadline:
        deadline = Deadline(limit, self._clock)
        return deadline if call is None else call.deadline_of_nested(deadline)
