"""The methods with which users of ``RpcAgent`` register functions and errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, overload

from rankwire.rpc.registry import E, Registry

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class _LeftOut:
    """The default of ``function``: None is a value that a user may pass by mistake."""

    def __repr__(self) -> str:
        return "<left out>"


_LEFT_OUT: Any = _LeftOut()


class AgentFunctions:
    """The registering methods of ``RpcAgent``, which sets the attributes. Safe from any thread."""

    _registry: Registry

    @overload
    def register(
        self,
        name: str,
        function: T,
        *,
        replace: bool = False,
        copy: bool = False,
        idempotent: bool = False,
        direct: bool = False,
    ) -> T: ...
    @overload
    def register(
        self,
        name: str | None = None,
        *,
        replace: bool = False,
        copy: bool = False,
        idempotent: bool = False,
        direct: bool = False,
    ) -> Callable[[F], F]: ...
    @overload
    def register(
        self,
        name: T,
        *,
        replace: bool = False,
        copy: bool = False,
        idempotent: bool = False,
        direct: bool = False,
    ) -> T: ...
    def register(
        self,
        name: str | T | None = None,
        function: T = _LEFT_OUT,
        *,
        replace: bool = False,
        copy: bool = False,
        idempotent: bool = False,
        direct: bool = False,
    ) -> T | Callable[[F], F]:
        """Let other ranks call a function, or the public methods of an object.

        Write ``register("add", add)``, ``@agent.register`` or ``@agent.register("add")``. An
        object's methods are called ``"name.method"``: after ``register("params", server)``, others
        call ``"params.pull"`` and ``"params.push"``; after ``register(server)``, the name is that
        of its class. These are all methods, also inherited, that are written in Python and whose
        names do not begin with an underscore.

        Arrays and long byte strings in a result are read after the function has returned, until the
        caller has them. If they change meanwhile, the caller may get some old and some new values.
        If other code changes the array, return ``array.copy()``, made under the lock that guards
        it.

        A function may return a ``concurrent.futures.Future``, also that of another call. Then the
        thread that ends the future sends the reply, without waiting for the caller. Any number of
        calls can wait like this, whatever ``workers`` is. If the call's deadline passes, its caller
        cancels it or is gone, or this agent closes, the future is cancelled. A call made by a
        callback of the future is part of the call which its thread serves, if any; in callbacks of
        an ``RpcFuture``, of the call in which the future was made.

        Args:
            name: The name to call it by; by default the function's own name, or that of the
                object's class. Or the function or object itself, as the only argument.
            function: The function, which may be an ``async def``; or the object. A callable object
                counts as a function.
            replace: Whether to replace a function or object of that name; otherwise that is an
                error.
            copy: Whether to copy the result as soon as the function has returned, before sending.
                That is enough for an ``async def`` whose array changes on the event loop alone. It
                is not enough if other threads change the array, because the function releases its
                lock before the copy, which takes about a millisecond for 10 MB. Then copy under the
                lock instead.
            idempotent: Whether running it again for the same arguments does no harm. ``map`` and
                ``executor`` of this rank then repeat its calls on another rank when one is lost.
            direct: Whether the function reads ``Call.src``. Then the agent refuses group calls that
                another rank passes on, and their caller calls this rank itself.

        Returns:
            The function or object, or a decorator.

        Raises:
            ConfigurationError: It is neither callable nor has such methods, it has no name of its
                own and you passed none, or the name is taken or invalid.
        """
        add = partial(
            self._registry.add, replace=replace, copies=copy, idempotent=idempotent, direct=direct
        )
        if function is not _LEFT_OUT:
            return add(name, function)
        if name is None or isinstance(name, str):
            return partial(add, name)
        return add(None, name)

    def unregister(self, name: str) -> None:
        """Stop others from calling a function, or the methods of an object; running calls go on.

        Raises:
            FunctionNotFoundError: No function or object is registered by that name.
        """
        self._registry.remove(name)

    def register_error(self, kind: E, *, name: str | None = None) -> E:
        """Let calls raise an exception class of your program when the callee raises it.

        Then ``except MyError`` around a call of this agent works, as it does for builtin exceptions
        without this; also for classes derived from it. The exception is a ``RemoteError`` and an
        instance of this class, but its constructor does not run, and its attributes do not travel.
        Also a decorator.

        Args:
            kind: The class, an ``Exception``.
            name: Module and qualified name of the class at the callee, if they differ there.

        Raises:
            ConfigurationError: It is not such a class, or one that other ranks must not raise
                (``StopIteration``, ``SyntaxError``, groups, errors of rankwire), or the name is
                taken.
        """
        self._registry.errors.add(kind, name)
        return kind

    def functions(self) -> list[str]:
        """Return the registered names, sorted."""
        return self._registry.names()

    def lookup(self, name: str) -> Callable[..., Any] | None:
        """Return the function registered under a name, or None."""
        function = self._registry.functions.get(name)
        return None if function is None else function.target
