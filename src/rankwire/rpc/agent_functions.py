"""The functions of an agent as users register them: forms, names, and what can be registered.

``registry`` keeps them. It is a part of ``RpcAgent``, which provides the attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from rankwire.errors import ConfigurationError
from rankwire.rpc.caller import Caller
from rankwire.rpc.registry import Registry
from rankwire.rpc.remote_errors import E

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class _LeftOut:
    """Stands for a function that was not given: None would be one that cannot be registered."""

    def __repr__(self) -> str:
        return "<left out>"


_LEFT_OUT: Any = _LeftOut()


class AgentFunctions:
    """How users let other ranks call functions of theirs. Every method is safe from any thread."""

    _registry: Registry
    _caller: Caller

    @overload
    def register(
        self, name: str, function: T, *, replace: bool = False, copy: bool = False
    ) -> T: ...
    @overload
    def register(
        self, name: str | None = None, *, replace: bool = False, copy: bool = False
    ) -> Callable[[F], F]: ...
    @overload
    def register(self, name: T, *, replace: bool = False, copy: bool = False) -> T: ...
    def register(
        self,
        name: str | T | None = None,
        function: T = _LEFT_OUT,
        *,
        replace: bool = False,
        copy: bool = False,
    ) -> T | Callable[[F], F]:
        """Let other ranks call a function, or the public methods of an object.

        Written ``register("add", add)``, ``@agent.register`` or ``@agent.register("add")``. An
        object's methods are called ``"name.method"``: after ``register("params", server)``, others
        call ``"params.pull"`` and ``"params.push"``; after ``register(server)``, the name is that
        of its class. These are all methods, inherited ones too, that are written in Python and
        whose names do not begin with an underscore; not its other attributes.

        A result is sent from where it is: arrays and long byte strings in it are read after the
        function has returned, until the caller has them. If they change meanwhile, the caller may
        get some of the old and some of the new. So return what nothing changes any more. An array
        that goes on changing is returned as ``array.copy()``, made under the lock that guards it.

        A function may return a ``concurrent.futures.Future``, also that of another call. Then its
        thread is free at once, and the reply is sent when the future is done, by the thread that
        ends it, which does not wait for the caller. Any number of calls may wait so, whatever
        ``workers`` is. When the call's deadline passes, its caller cancels it or is gone, or this
        agent closes, the future is cancelled. Callbacks of the future run in the thread that ends
        it, and a call that one makes is part of the call which that thread serves, if it serves
        one; in callbacks of an ``RpcFuture`` it is part of the call in which the future was made.

        Args:
            name: What callers call it; the function's own name, or that of the object's class, if
                left out. Or the function or object itself, as the only argument.
            function: The function; it may be an ``async def``, and may return a future. Or the
                object. One that can be called itself counts as a function.
            replace: Whether a function or object of that name is replaced; without it that is an
                error.
            copy: Whether the result is copied as soon as the function has returned, before anything
                is sent. After that nobody's changes reach the caller: enough for an ``async def``
                whose array changes on the event loop alone, as nothing else runs there between its
                return and the copy. Not enough where other threads change the array: a lock that
                the function lets go as it returns does not cover the copy, which takes about
                a millisecond for 10 MB. There, copy under the lock.

        Returns:
            The function or object, or a decorator.

        Raises:
            ConfigurationError: It can neither be called nor has it such methods; or it has no name
                of its own, and was given none; or the name is taken, or is no name.
        """
        if function is not _LEFT_OUT:
            return self._register(name, function, replace, copy)
        if name is None or isinstance(name, str):
            return lambda target: self._register(name, target, replace, copy)
        return self._register(None, name, replace, copy)

    def _register(self, name: Any, target: T, replace: bool, copy: bool) -> T:
        if callable(target):
            name = _own_name(target) if name is None else name
            self._registry.add(name, target, replace=replace, copies=copy)
        else:
            name = type(target).__name__ if name is None else name
            self._registry.add_object(name, target, replace=replace, copies=copy)
        return target

    def unregister(self, name: str) -> None:
        """Let nobody call a function any more, or the methods of an object; calls that run go on.

        Raises:
            FunctionNotFoundError: Neither is registered by that name.
        """
        self._registry.remove(name)

    def register_error(self, kind: E, *, name: str | None = None) -> E:
        """Have errors of a class of the program's raised here as such, when a callee raises them.

        Then ``except MyError`` around a call of this agent works, as it does for builtin exceptions
        without this; also for classes derived from it. What is raised is a ``RemoteError`` and of
        this class, but the constructor of the class does not run, and its own attributes do not
        travel. Can be a decorator.

        Args:
            kind: The class, an ``Exception``.
            name: What the callee calls it: module and qualified name; those it has here if left
                out.

        Returns:
            The class.

        Raises:
            ConfigurationError: It is no such class, or one that must not be raised by another rank
                (``StopIteration``, ``SyntaxError``, groups, errors of rankwire), or the name is
                another's.
        """
        self._caller.remote_errors.add(kind, name)
        return kind

    def functions(self) -> list[str]:
        """Return the registered names, sorted."""
        return self._registry.names()

    def lookup(self, name: str) -> Callable[..., Any] | None:
        """Return the function registered under a name, or None."""
        function = self._registry.functions.get(name)
        return None if function is None else function.target


def _own_name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", None)
    if isinstance(name, str):
        return name
    raise ConfigurationError(
        f"{function!r:.200} can be called but has no name of its own; pass one: "
        'agent.register("name", function)'
    )
