"""RpcAgent: call functions of other ranks by name, and serve them.

This module is what users see: registering, calling, closing. How a call is made is ``caller``, how
one is served ``server``, what travels ``messages``. The agent knows ``Backend`` and ``CallPort``,
and no concrete one.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from numbers import Real
from typing import Any, Self, TypeVar, overload

from rankwire.backends.arguments import check_pickle
from rankwire.backends.base import Backend
from rankwire.backends.calls import IncomingCall
from rankwire.codec.codec import Codec
from rankwire.deadline import Deadline
from rankwire.errors import ConfigurationError
from rankwire.fork import disown, guard
from rankwire.rpc.call import serving
from rankwire.rpc.caller import Caller
from rankwire.rpc.future import RpcFuture
from rankwire.rpc.registry import Registry
from rankwire.rpc.room import DEFAULT_QUEUED_NBYTES
from rankwire.rpc.server import Limits, Server
from rankwire.shutdown import close_at_exit

MAX_DEPTH = 32
_EXIT_GRACE = 0.1  # seconds
_GRACE = 5.0

F = TypeVar("F", bound=Callable[..., Any])


class RpcAgent:
    """Registers functions and calls them on any rank. Serves from construction on.

    Every method is safe from any thread. A call runs at most once; nothing is retried. Calls from
    one thread to one rank are delivered in order, and may finish in any order.

    Args:
        backend: Any backend; the agent does not close it.
        name: Agents of different names on one backend are independent; those of one name call each
            other.
        timeout: Seconds for calls without a limit of their own; None is the backend's.
        workers: Calls that run at once (nested ones apart).
        max_in_flight: Calls to one rank that wait for a reply; further ones wait, then fail with
            ``OverloadedError``. Threads that call at the same moment may pass it together.
        max_queued: Incoming calls that wait for a worker; further ones are refused.
        max_queued_nbytes: Bytes of incoming calls of more than 64 KiB that wait for a worker.
            Callers of further ones wait before they send them, until their deadline. One call of
            any size always has room, and each rank may have 8 MiB more in flight. Nested calls and
            those of ``async def`` functions do not wait for workers, so they do not count.
        max_nested: Calls made by functions being served here that run at once.
        codec: How values travel; register your dataclasses, enums and Structs on it.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        name: str = "rpc",
        timeout: float | None = None,
        workers: int = 16,
        max_in_flight: int = 1024,
        max_queued: int = 4096,
        max_queued_nbytes: float = DEFAULT_QUEUED_NBYTES,
        max_nested: int = 256,
        codec: Codec | None = None,
    ) -> None:
        _check_limits(workers, max_in_flight, max_queued, max_queued_nbytes, max_nested)
        self.backend = backend
        self._clock = backend.clock
        self.name = name
        service = _service_number(name)
        self.timeout = (
            backend.timeout if timeout is None else Deadline(timeout, backend.clock).limit
        )
        self.codec = codec if codec is not None else Codec()
        check_pickle(backend, self.codec.allows_pickle)
        self._registry = Registry()
        self._closed = False
        self._close_lock = threading.RLock()  # a callback of closing may close
        self._port = backend.open_calls(service)
        self._server = Server(
            backend,
            self._port,
            self._registry,
            self.codec,
            Limits(workers, max_queued, max_queued_nbytes, max_nested, MAX_DEPTH),
            on_look=lambda: self._caller.look(),
            on_end=self._ended_by_itself,
        )
        self._caller = Caller(
            backend, self._port, self.codec, self._server, max_in_flight=max_in_flight
        )
        self._server.pool.start()
        guard(self)
        close_at_exit(self)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.backend.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.backend.world_size

    # -- registering -------------------------------------------------------------------------------

    @overload
    def register(
        self, name: str, function: F, *, replace: bool = False, copy: bool = False
    ) -> F: ...
    @overload
    def register(self, name: F, *, replace: bool = False, copy: bool = False) -> F: ...
    @overload
    def register(
        self, name: str | None = None, *, replace: bool = False, copy: bool = False
    ) -> Callable[[F], F]: ...
    def register(
        self, name: Any = None, function: Any = None, *, replace: bool = False, copy: bool = False
    ) -> Any:
        """Let other ranks call a function.

        Written ``register("add", add)``, ``@agent.register`` or ``@agent.register("add")``.

        A result is sent from where it is: arrays and long byte strings in it are read after the
        function has returned, until the caller has them. If they change meanwhile, the caller may
        get some of the old and some of the new. So return what nothing changes any more. An array
        that goes on changing is returned as ``array.copy()``, made under the lock that guards it.

        Args:
            name: What callers call it; the function's own name if left out.
            function: The function; it may be an ``async def``.
            replace: Whether a function of that name is replaced; without it that is an error.
            copy: Whether the result is copied as soon as the function has returned, before anything
                is sent. After that nobody's changes reach the caller: enough for an ``async def``
                whose array changes on the event loop alone, as nothing else runs there between its
                return and the copy. Not enough where other threads change the array: a lock that
                the function lets go as it returns does not cover the copy, which takes about
                a millisecond for 10 MB. There, copy under the lock.

        Returns:
            The function, or a decorator.
        """
        if callable(name):
            name, function = name.__name__, name
        if function is None:
            return lambda target: self.register(
                name or target.__name__, target, replace=replace, copy=copy
            )
        self._registry.add(name, function, replace=replace, copies=copy)
        return function

    def unregister(self, name: str) -> None:
        """Let nobody call that function any more; calls that run go on."""
        self._registry.remove(name)

    def functions(self) -> list[str]:
        """Return the registered names, sorted."""
        return self._registry.names()

    def lookup(self, name: str) -> Callable[..., Any] | None:
        """Return the function registered under a name, or None."""
        function = self._registry.functions.get(name)
        return None if function is None else function.target

    # -- calling -----------------------------------------------------------------------------------

    def rpc_sync(
        self,
        dst: int,
        function: str | Callable[..., Any],
        /,
        *args: Any,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a function of another rank, or of this one, and return its result.

        Args:
            dst: The rank to call.
            function: A name registered there, or a function registered here under the same name.
            *args: Positional arguments. Arrays are sent from where they are, uncopied.
            timeout: Seconds for all of it; it travels along and bounds the calls that the function
                makes in turn.
            **kwargs: Keyword arguments.

        Raises:
            RemoteError: The function raised; type, message and remote traceback are attributes.
            FunctionNotFoundError: There is no such function.
            DeadlineExceededError: No result in time; ``may_have_run`` tells whether it may have
                run.
            PeerLostError: The peer is gone; the same attribute.
            CircularCallError: While serving a call: this one and others wait for each other.
            CallCancelledError: While serving a call: its caller does not want the result any more.
            OverloadedError: A limit was reached; it did not run.
            UnsupportedTypeError: An argument cannot be sent.
        """
        call = serving.get()
        if call is None:
            deadline = Deadline(self.timeout if timeout is None else timeout, self._clock)
        else:
            deadline = call.deadline_of_nested(Deadline.of(timeout, self.timeout, self._clock))
        name = function if type(function) is str else self._registry.name_of(function)
        return self._caller.call(dst, name, deadline, call, args, kwargs)

    def rpc_async(
        self,
        dst: int,
        function: str | Callable[..., Any],
        /,
        *args: Any,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> RpcFuture:
        """Start a call and return its future.

        It has ``result``, ``exception``, ``cancel``, ``add_done_callback`` and ``await``. Arguments
        are encoded, and large ones sent, before this returns: they may be changed afterwards. Wrong
        arguments raise here; what the network or the callee does ends the future. This waits, until
        the deadline, while too many calls to that rank are in flight (``max_in_flight``), or too
        many large ones wait there (``max_queued_nbytes``).
        """
        call = serving.get()
        if call is None:
            deadline = Deadline(self.timeout if timeout is None else timeout, self._clock)
        else:
            deadline = call.deadline_of_nested(Deadline.of(timeout, self.timeout, self._clock))
        name = function if type(function) is str else self._registry.name_of(function)
        return self._caller.start(dst, name, deadline, call, args, kwargs)

    # -- serving by hand ---------------------------------------------------------------------------

    def handle_request(self, call: IncomingCall) -> None:
        """Serve one request on the calling thread and send the reply.

        The serving threads do this by themselves.

        Args:
            call: As a port has given it. One whose ``origin`` is ``OWN`` is a call to oneself.

        Raises:
            ConfigurationError: It does not say where the reply goes.
        """
        if call.origin is None:
            raise ConfigurationError("an incoming call says where its reply goes (origin)")
        self._server.handle(call)

    # -- ending ------------------------------------------------------------------------------------

    def close(self, grace: float = _GRACE) -> None:
        """Stop.

        New calls are refused; running ones, in both directions, have ``grace`` seconds to finish;
        the rest fails. Idempotent.
        """
        self._close(grace)

    def _close(self, grace: float, patience: float | None = None) -> None:
        with self._close_lock:
            if self._closed:
                return
            deadline = Deadline(grace, self._clock)
            self._closed = self._caller.closed = True
            self._server.drain(deadline, lambda: not self._caller.is_waiting)
            try:
                self._server.stop(patience)
            finally:
                self._port.close()
                self._caller.end_all()

    def leave_at_exit(self, error: BaseException | None) -> None:
        """Close when the interpreter ends. Functions that still run are not waited for.

        After an error the backend tells the others, and ends this agent too: a farewell would come
        before the reason.
        """
        if error is None:
            self._close(_EXIT_GRACE, _EXIT_GRACE)

    def forsake(self) -> None:
        """Let a forked child refuse to use it."""
        self._caller.forsake()
        disown(self)

    def _ended_by_itself(self) -> None:
        """The backend is closed, or this rank was given up, and nobody has closed this agent."""
        self._server.end(patience=0.0)
        self._port.close()
        self._caller.end_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # By an error: others are told soon, and should not wait for calls that run here.
        self.close(grace=_GRACE if error is None else 0.0)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._port.in_flight()} calls in flight"
        return (
            f"<RpcAgent {self.name!r} on rank {self.rank} of {self.world_size}, "
            f"{len(self.functions())} functions, {state}>"
        )


def _check_limits(*limits: float) -> None:
    if not all(isinstance(limit, Real) and limit >= 1 for limit in limits):
        raise ConfigurationError("workers and limits are numbers, 1 or more")


def _service_number(name: str) -> int:
    """Return the number by which agents of one name find each other.

    Raises:
        ConfigurationError: The name is no text, or none that can be encoded.
    """
    try:
        encoded = str.encode(name)
    except (TypeError, UnicodeEncodeError) as error:
        raise ConfigurationError(f"an agent's name is text, not {name!r}: {error}") from error
    return int.from_bytes(hashlib.sha256(b"rankwire agent " + encoded).digest()[:8], "little")
