"""What ``agent.to(1)`` and its variants return: the functions of a rank, or one object there.

A function is named by an attribute, ``agent.to(1).add(2, 3)``, or passed, as itself or by name,
``agent.to(1)(add, 2, 3)``. Only the function itself gives a type checker its signature. An object
is described by its class or a Protocol, ``agent.to(1, Learner).pull()``: to a type checker, the
proxy is a ``Learner``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    TypeAlias,
    TypeVar,
    get_origin,
    overload,
)

from rankwire.errors import ConfigurationError
from rankwire.rpc.future import RpcFuture
from rankwire.rpc.registry import is_coroutine_function, is_name, public_methods

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
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


class Interface:
    """The public methods of a class or Protocol, and the name of the object that has them."""

    __slots__ = ("_class", "_methods", "name")

    def __init__(self, described: Any, name: str | None) -> None:
        described = get_origin(described) or described  # ``Learner[int]`` is no class
        if not isinstance(described, type):
            raise ConfigurationError(
                f"an object is described by its class or a Protocol, not by {described!r:.200}"
            )
        self._class = described
        self._methods = public_methods(described)
        if not self._methods:
            raise ConfigurationError(f"{described.__name__} has no public methods to call")
        self.name = described.__name__ if name is None else name
        if not is_name(self.name):
            raise ConfigurationError(f"an object's name is printable text, not {name!r}")

    def find(self, method: str) -> Any:
        """Return a method as the class has it, or raise AttributeError."""
        if method not in self._methods:
            raise AttributeError(
                f"{self._class.__name__} has no public method {method!r}; "
                f"it has {', '.join(sorted(self._methods))}"
            )
        return getattr(self._class, method)


class RemoteObject:
    """An object of another rank. Its attributes are the methods of its class, and nothing else.

    Safe from any thread.
    """

    __slots__ = ("_description", "_interface", "_make_call", "_start_call")

    def __init__(
        self, interface: Interface, description: str, make_call: MakeCall, start_call: MakeCall
    ) -> None:
        self._interface = interface
        self._description = description
        self._make_call = make_call
        self._start_call = start_call  # for each ``async def``, whose callers await something

    def __getattr__(self, name: str) -> RemoteFunction[Any]:
        _check_public(name)
        is_async = is_coroutine_function(self._interface.find(name))
        make_call = self._start_call if is_async else self._make_call
        return RemoteFunction(make_call, f"{self._interface.name}.{name}")

    def __repr__(self) -> str:
        return f"<remote object {self._interface.name!r} of {self._description}>"


class AsyncRemoteObject(RemoteObject, Generic[T]):
    """An object of another rank whose methods return futures. Safe from any thread."""

    __slots__ = ()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> RemoteFunction[RpcFuture[Any]]: ...

    @overload
    def __call__(
        self,
        method: Callable[Concatenate[T, P], Later[R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> RpcFuture[R]: ...
    @overload
    def __call__(
        self, method: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> RpcFuture[R]: ...
    def __call__(self, method: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Start a call of a method, which is passed as the class defines it: ``Learner.pull``."""
        return getattr(self, getattr(method, "__name__", repr(method)))(*args, **kwargs)
