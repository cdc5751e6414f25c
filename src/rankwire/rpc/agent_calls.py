"""The calling methods of ``RpcAgent``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from rankwire.backends.arguments import check_rank
from rankwire.backends.base import Backend
from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.rpc.call import Call, serving
from rankwire.rpc.caller import Caller
from rankwire.rpc.future import RpcFuture
from rankwire.rpc.proxies import (
    AsyncRemoteObject,
    AsyncRemoteRank,
    Interface,
    Later,
    MakeCall,
    RemoteObject,
    RemoteRank,
)
from rankwire.rpc.registry import Registry

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


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
        self,
        dst: int | str,
        function: str,
        /,
        *args: Any,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any: ...
    @overload
    def rpc_sync(
        self,
        dst: int | str,
        function: Callable[..., Later[R]],
        /,
        *args: Any,
        timeout: float | None,
        **kwargs: Any,
    ) -> R: ...
    @overload
    def rpc_sync(
        self,
        dst: int | str,
        function: Callable[..., R],
        /,
        *args: Any,
        timeout: float | None,
        **kwargs: Any,
    ) -> R: ...
    @overload
    def rpc_sync(
        self, dst: int | str, function: Callable[P, Later[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    @overload
    def rpc_sync(
        self, dst: int | str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    def rpc_sync(
        self, dst: int | str, function: Any, /, *args: Any, timeout: Any = None, **kwargs: Any
    ) -> Any:
        """Call a function of another rank, or of this one, and return its result.

        Args:
            dst: The rank to call, or its name, such as ``"rollout/0"``.
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
        self,
        dst: int | str,
        function: str,
        /,
        *args: Any,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> RpcFuture[Any]: ...
    @overload
    def rpc_async(
        self,
        dst: int | str,
        function: Callable[..., Later[R]],
        /,
        *args: Any,
        timeout: float | None,
        **kwargs: Any,
    ) -> RpcFuture[R]: ...
    @overload
    def rpc_async(
        self,
        dst: int | str,
        function: Callable[..., R],
        /,
        *args: Any,
        timeout: float | None,
        **kwargs: Any,
    ) -> RpcFuture[R]: ...
    @overload
    def rpc_async(
        self, dst: int | str, function: Callable[P, Later[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RpcFuture[R]: ...
    @overload
    def rpc_async(
        self, dst: int | str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> RpcFuture[R]: ...
    def rpc_async(
        self, dst: int | str, function: Any, /, *args: Any, timeout: Any = None, **kwargs: Any
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

    # A Protocol, as a ``Callable``: mypy refuses it as a ``type[T]``, since it has no instances.
    @overload
    def to(self, dst: int | str, /, *, timeout: float | None = None) -> RemoteRank: ...
    @overload
    def to(
        self,
        dst: int | str,
        interface: Callable[..., T],
        /,
        *,
        name: str | None = None,
        timeout: float | None = None,
    ) -> T: ...
    def to(
        self,
        dst: int | str,
        interface: Any = None,
        /,
        *,
        name: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Return a proxy whose methods call the functions of a rank with these settings.

        ``agent.to(1, timeout=5).add(2, 3)`` is ``agent.rpc_sync(1, "add", 2, 3, timeout=5)``, and
        so is ``agent.to(1, timeout=5)(add, 2, 3)``, whose arguments a type checker checks. All
        keywords of the call, ``timeout`` too, go to the function. The proxy is safe from any
        thread, for any number of calls.

        With a class or Protocol, the proxy is an object of that class to a type checker:
        ``agent.to(0, Learner).pull()`` calls ``"Learner.pull"``, which the other rank registers
        with ``register(learner)``. Only public methods of the class can be called; another
        attribute raises ``AttributeError`` here. A call of an ``async def`` returns its future.

        Args:
            dst: The rank to call, or its name, such as ``"rollout/0"``.
            interface: The class of an object there, or a Protocol with some of its methods.
            name: The name of that object; None is the name of ``interface``.
            timeout: Seconds for each call; None is the agent's timeout.

        Raises:
            ConfigurationError: An argument is invalid.
        """
        dst, limit, description = self._settings(dst, timeout)
        call = self._call_to(dst, limit)
        if interface is None and name is None:
            return RemoteRank(call, description)
        start = self._start_to(dst, limit)
        return RemoteObject(Interface(interface, name), description, call, start)

    @overload
    def to_async(self, dst: int | str, /, *, timeout: float | None = None) -> AsyncRemoteRank: ...
    @overload
    def to_async(
        self,
        dst: int | str,
        interface: Callable[..., T],
        /,
        *,
        name: str | None = None,
        timeout: float | None = None,
    ) -> AsyncRemoteObject[T]: ...
    def to_async(
        self,
        dst: int | str,
        interface: Any = None,
        /,
        *,
        name: str | None = None,
        timeout: float | None = None,
    ) -> AsyncRemoteRank | AsyncRemoteObject[Any]:
        """Return a proxy like ``to`` does; its calls return futures.

        A type checker cannot know ``agent.to_async(0, Learner).pull()``, since ``Learner.pull``
        returns no future. It checks ``agent.to_async(0, Learner)(Learner.pull)``.
        """
        dst, limit, description = self._settings(dst, timeout)
        start = self._start_to(dst, limit)
        if interface is None and name is None:
            return AsyncRemoteRank(start, description)
        return AsyncRemoteObject(Interface(interface, name), description, start, start)

    def _call_to(self, dst: int, limit: float) -> MakeCall:
        # A stack shows this name.
        def rpc_sync(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name, deadline, call = self._prepare(function, limit)
            return self._caller.call(dst, name, deadline, call, args, kwargs)

        return rpc_sync

    def _start_to(self, dst: int, limit: float) -> MakeCall:
        def rpc_async(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name, deadline, call = self._prepare(function, limit)
            return self._caller.start(dst, name, deadline, call, args, kwargs)

        return rpc_async

    def _settings(self, dst: int | str, timeout: float | None) -> tuple[int, float, str]:
        limit = self.timeout if timeout is None else Deadline(timeout, self._clock).limit
        dst = check_rank(dst, self.backend.world_size, self.backend.roles)
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
