"""The objects that ``agent.to(1)`` and ``agent.to_async(1)`` return: the functions of a rank.

The settings of the calls are given there, so every argument here goes to the function. A function
is named by an attribute, ``agent.to(1).add(2, 3)``, or passed, as itself or by name,
``agent.to(1)(add, 2, 3)``; only the function itself tells a type checker what it takes and returns.
These objects have no other public attributes, which would hide functions of that name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar, overload

from rankwire.rpc.future import RpcFuture

P = ParamSpec("P")
R = TypeVar("R")
# Returned by an ``async def`` or a function that defers its reply; callers get its result.
Later: TypeAlias = Awaitable[R] | Future[R]

# Makes a call, given the function or its name, and the arguments.
MakeCall = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


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
        """Call it."""
        return self._make_call(self._name, args, kwargs)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> RemoteFunction[R]:
        _check_public(name)
        return RemoteFunction(self._make_call, f"{self._name}.{name}")

    def __repr__(self) -> str:
        return f"<remote function {self._name!r}>"


class RemoteRank:
    """The functions of a rank; a call returns the function's result. Safe from any thread."""

    __slots__ = ("_description", "_make_call")

    def __init__(self, make_call: MakeCall, description: str) -> None:
        self._make_call = make_call
        self._description = description

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

    def __getattr__(self, name: str) -> RemoteFunction[Any]:
        _check_public(name)
        return RemoteFunction(self._make_call, name)

    def __repr__(self) -> str:
        return f"<functions of {self._description}>"


class AsyncRemoteRank:
    """The functions of a rank; a call returns its future. Safe from any thread."""

    __slots__ = ("_description", "_make_call")

    def __init__(self, make_call: MakeCall, description: str) -> None:
        self._make_call = make_call
        self._description = description

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

    def __getattr__(self, name: str) -> RemoteFunction[RpcFuture[Any]]:
        _check_public(name)
        return RemoteFunction(self._make_call, name)

    def __repr__(self) -> str:
        return f"<functions of {self._description}, asynchronously>"


def _check_public(name: str) -> None:
    """Reject attributes that Python and notebooks look for by themselves.

    Also before the object has its own attributes, as when it is copied.
    """
    if name.startswith("_"):
        raise AttributeError(
            f"functions whose names begin with an underscore are called as agent.to(rank)({name!r})"
        )
