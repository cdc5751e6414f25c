"""RpcAgent: call functions of other ranks by name, and serve them.

This module is the user's side: registering, calling, futures, closing. How a request is served is
``incoming``, by which threads ``serving``, what travels ``messages``. The agent knows ``Backend``
and ``CallPort``, and no concrete one.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Iterable
from functools import partial
from numbers import Real
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from rankwire.backends.arguments import check_pickle, check_rank
from rankwire.backends.base import Backend
from rankwire.backends.calls import IncomingCall
from rankwire.codec.codec import Codec
from rankwire.deadline import Deadline
from rankwire.errors import (
    CallCancelledError,
    ChannelClosedError,
    CircularCallError,
    ConfigurationError,
    DeadlineExceededError,
    MessageTooLargeError,
    OverloadedError,
    PeerLostError,
    RankwireError,
)
from rankwire.fork import disown, guard
from rankwire.links.reply import Reply
from rankwire.rpc.accounts import QUESTION
from rankwire.rpc.call import Call, MadeCall, describe_chain, serving
from rankwire.rpc.circles import ActiveCall, Key, unpack
from rankwire.rpc.future import RpcFuture
from rankwire.rpc.messages import Chain, decode_reply, encode_request
from rankwire.rpc.nested import Nested
from rankwire.rpc.registry import Registry
from rankwire.rpc.room import DEFAULT_QUEUED_NBYTES, ROOM, SMALL_NBYTES, Allowance
from rankwire.rpc.server import Limits, Server
from rankwire.shutdown import close_at_exit
from rankwire.wire.mailbox import Receive

__all__ = ["MAX_DEPTH", "RpcAgent"]

_log = logging.getLogger("rankwire")

MAX_DEPTH = 32
_ASK_LIMIT = 0.2  # seconds for asking what became of a call whose deadline has passed
_EXIT_GRACE = 0.1  # seconds
_MOST_EXPLAINED = 4  # futures that are late at the same moment
_GRACE = 5.0
_EXPIRY_CHECK_EVERY = 0.05  # seconds; a thread that waits in result() is exact

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
        self.name = name
        service = _service_number(name)
        self.timeout = backend.timeout if timeout is None else Deadline(timeout).limit
        self.codec = codec if codec is not None else Codec()
        check_pickle(backend, self.codec.allows_pickle)
        self._max_in_flight = max_in_flight
        self._allowance = Allowance()
        self._registry = Registry()
        self._closed = False
        self._close_lock = threading.RLock()  # a callback of closing may close
        # The upper half tells this agent's calls from those of any other, also of one that had its
        # place before.
        self._ids = itertools.count(secrets.randbits(31) << 32)
        self._futures: dict[int, RpcFuture] = {}
        self._next_expiry_check = Deadline(0.0)
        self._port = backend.open_calls(service)
        self._server = Server(
            backend,
            self._port,
            self._registry,
            self.codec,
            Limits(workers, max_queued, max_queued_nbytes, max_nested, MAX_DEPTH),
            on_look=self._look,
            on_end=self._ended_by_itself,
        )
        self._nested = Nested(self._server, self._ask)
        self._server.start()
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
            deadline = Deadline(self.timeout if timeout is None else timeout)
        else:
            deadline = self._nested_deadline(timeout, call)
        name = function if type(function) is str else self._registry.name_of(function)
        try:
            if type(dst) is not int or not 0 <= dst < self.backend.world_size:
                dst = check_rank(dst, self.backend.world_size)
            reply = self._call(dst, next(self._ids), name, deadline, call, args, kwargs)
            try:
                if call is not None:
                    made = MadeCall(self._port, dst, name, reply)
                    call.began(made)
                    self._nested.drive(call, made, deadline, patient=True)
                payload = reply.wait(deadline)
            except (CircularCallError, CallCancelledError):
                raise  # given up by another thread or another look, which has told the callee
            except BaseException as error:
                self._give_up(reply, error, dst, name)
                raise
            finally:
                if call is not None:
                    call.ended(reply.request_id)
                if self._allowance.taken:
                    self._allowance.give_back(reply.request_id)
            return decode_reply(self.codec, payload, dst, deadline.limit)
        except RankwireError as error:
            raise self._explained(error, "rpc_sync", name, dst, deadline, call) from error.__cause__

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
            deadline = Deadline(self.timeout if timeout is None else timeout)
        else:
            deadline = self._nested_deadline(timeout, call)
        name = function if type(function) is str else self._registry.name_of(function)
        try:
            if type(dst) is not int or not 0 <= dst < self.backend.world_size:
                dst = check_rank(dst, self.backend.world_size)
        except RankwireError as error:
            raise self._explained(error, "rpc_async", name, dst, deadline, call) from None
        future = RpcFuture(self, self._port, dst, next(self._ids), name, deadline, call)
        try:
            reply = self._call(dst, future.request_id, name, deadline, call, args, kwargs, future)
            future.sent(reply)
            if reply.done:
                self.replied(future, reply)
            elif call is not None:
                call.began(MadeCall(self._port, dst, name, reply))
                if future.done():  # at this moment
                    call.ended(future.request_id)
        except BaseException as error:
            if not isinstance(error, RankwireError):  # an interrupt: nobody will have the future
                self.settled(future)
                self._port.cancel(dst, future.request_id)
                raise
            cause = error.__cause__
            error = self._explained(error, "rpc_async", name, dst, deadline, call)
            if future.request_id not in self._futures:  # it did not come to a call
                raise error from cause
            future.fail(error)
        return future

    def _call(
        self,
        dst: int,
        request_id: int,
        name: str,
        deadline: Deadline,
        call: Call | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        future: RpcFuture | None = None,
    ) -> Reply:
        """Send a request; a future is known from the moment on when its reply may come."""
        if self._closed:
            raise ChannelClosedError("this agent is closed")
        chain = [] if call is None else self._chain(call)
        if call is not None:
            self._before_waiting(call)
        on_reply = None
        has_room = False
        while True:
            message = encode_request(self.codec, name, deadline.remaining(), chain, args, kwargs)
            if message[1] > self.backend.max_message_nbytes:
                raise MessageTooLargeError(message[1], self.backend.max_message_nbytes)
            if future is not None:
                self._track(future)
                on_reply = future.on_reply
            if message[1] > SMALL_NBYTES and not has_room:
                has_room = True
                if self._make_room(dst, request_id, message[1], deadline, call):
                    continue  # that took time, which the request must not promise again
            try:
                reply = self._port.call(
                    dst,
                    request_id,
                    message,
                    deadline,
                    on_reply,
                    hold=future is not None,
                    limit=self._max_in_flight,
                )
            except BaseException:
                if message[1] > SMALL_NBYTES:
                    self._leave_room(dst, request_id)
                raise
            if reply is not None:
                return reply
            self._futures.pop(request_id, None)
            self._wait_for_room(dst, name, deadline, call)

    def _give_up(self, reply: Reply, error: BaseException, dst: int, name: str) -> None:
        """Tell the callee of a call whose caller stops waiting that it need not go on."""
        if isinstance(error, DeadlineExceededError):
            error.may_have_run = True
            self._explain_delay(error, dst, reply.request_id, name)
        elif isinstance(error, (PeerLostError, ChannelClosedError)):
            error.may_have_run = True
        else:  # an interrupt
            try:
                reply.withdraw()
            finally:
                reply.withdraw()  # another one may have fallen into the first
        self._port.cancel(dst, reply.request_id)

    def _nested_deadline(self, timeout: float | None, call: Call) -> Deadline:
        """Return the deadline of a call made now, while serving another one."""
        deadline = Deadline.of(timeout, self.timeout)
        left = call.deadline.remaining()
        return Deadline(left) if left < deadline.limit else deadline

    def _chain(self, call: Call) -> Chain:
        """Return the chain of a call that is made while serving ``call``."""
        return [*call.links, self.backend.rank, call.name]

    def _wait_for_room(self, dst: int, name: str, deadline: Deadline, call: Call | None) -> None:
        limit = self._max_in_flight
        if call is None:
            has_room = self._port.wait_for_room(dst, limit, deadline)
        else:
            has_room = self._nested.wait_for_room(call, self._port, dst, name, limit, deadline)
        if not has_room:
            raise OverloadedError(f"{limit} calls to rank {dst} are in flight (max_in_flight)")

    # -- room for large calls ----------------------------------------------------------------------

    def _make_room(
        self, dst: int, request_id: int, nbytes: int, deadline: Deadline, call: Call | None
    ) -> bool:
        """See to it that the callee has room for a large call; return whether that took time.

        Raises:
            DeadlineExceededError: It had none in time, or did not say. The call was not sent.
        """
        if call is not None or self._allowance.take(dst, request_id, nbytes):
            return False
        left = deadline.remaining()
        ask = encode_request(self.codec, ROOM, left, [], (request_id, nbytes), {})
        try:
            reply = self._port.call(dst, next(self._ids), ask, deadline)
            assert reply is not None  # there is no limit on questions
            try:
                decode_reply(self.codec, reply.wait(deadline), dst, deadline.limit)
            except RankwireError:
                raise
            except BaseException:  # an interrupt, perhaps before anyone waited
                reply.withdraw()
                raise
        except BaseException as error:
            if isinstance(error, DeadlineExceededError):
                error.explain(
                    f"it had no room for another {nbytes} bytes of calls that wait for a worker "
                    "(max_queued_nbytes)"
                )
            self._leave_room(dst, request_id)
            raise
        return True

    def _leave_room(self, dst: int, request_id: int) -> None:
        """A large call was not sent: what was kept for it, here and there, is free again."""
        self._allowance.give_back(request_id)
        self._port.cancel(dst, request_id)

    # -- calls of functions that are being served --------------------------------------------------

    def _before_waiting(self, call: Call) -> None:
        """Let another thread serve while a function waits; not if nobody wants its result."""
        if call.cancelled:
            raise call.cancellation()
        if call.worker is not None:
            self._server.about_to_block(call.worker)

    def drive(self, future: RpcFuture, reply: Reply, deadline: Deadline) -> bool:
        """Wait for the reply of a future; False if the deadline passes first."""
        call = serving.get()
        if call is None:
            return reply.drive(deadline)
        self._before_waiting(call)
        # A function that waits for less than the call may take can go on without it.
        patient = deadline is future.deadline
        made = MadeCall(self._port, future.dst, future.name, reply)
        return self._nested.drive(call, made, deadline, patient=patient)

    def _ask(
        self, rank: int, keys: Iterable[Key], deadline: Deadline
    ) -> dict[Key, ActiveCall] | None:
        """Ask a rank about calls that it serves; None if it does not say."""
        if rank == self.backend.rank:
            return self._server.account(keys)
        try:
            arguments = tuple(list(key) for key in keys)
            left = float(deadline.remaining())
            question = encode_request(self.codec, QUESTION, left, [], arguments, {})
            reply = self._port.call(rank, next(self._ids), question, deadline)
            assert reply is not None  # there is no limit on questions
            told = decode_reply(self.codec, reply.wait(deadline), rank, deadline.limit)
            return unpack(told, rank, self.backend.world_size)
        except RankwireError as error:
            _log.debug("rank %d did not say what it is doing: %s", rank, error)
            return None

    def _explain_delay(
        self, error: DeadlineExceededError, dst: int, request_id: int, name: str
    ) -> None:
        """Add what the callee is doing with a call, if it says so soon."""
        patience = min(_ASK_LIMIT, error.limit / 4)
        if patience <= 0.0:
            return
        key = Key(dst, self.backend.rank, request_id)
        answer = self._ask(dst, [key], Deadline(patience))
        if answer is None:
            error.explain(f"rank {dst} does not say what it is doing")
        elif key in answer:  # else its reply is on the way, or the request has not arrived
            call = answer[key]
            error.explain(f"rank {dst} has had {name!r} for {call.seconds:.3g} s; it {call.doing}")

    def _explained(
        self,
        error: RankwireError,
        op: str,
        name: str,
        dst: int,
        deadline: Deadline,
        call: Call | None,
    ) -> RankwireError:
        if call is not None and isinstance(error, DeadlineExceededError):
            error.explain(f"the calls are {describe_chain([*self._chain(call), dst, name])}")
        return error.during(
            op=f"{op} {name!r}", rank=self.backend.rank, peer=dst, waited=deadline.waited
        )

    # -- futures -----------------------------------------------------------------------------------

    def _track(self, future: RpcFuture) -> None:
        self._futures[future.request_id] = future
        self._server.expect_work()

    def replied(self, future: RpcFuture, receive: Receive) -> None:
        """End a future with the reply that has come."""
        try:
            payload = receive.result()
        except RankwireError as error:
            if isinstance(error, (PeerLostError, ChannelClosedError)):
                error.may_have_run = True
            self._fail(future, error)
            return
        try:
            value = decode_reply(self.codec, payload, future.dst, future.deadline.limit)
        except RankwireError as error:
            self._fail(future, error)
        else:
            future.resolve(value)

    def _fail(self, future: RpcFuture, error: RankwireError) -> None:
        future.fail(self._explained_future(error, future))

    def _explained_future(self, error: RankwireError, future: RpcFuture) -> RankwireError:
        return self._explained(
            error, "rpc_async", future.name, future.dst, future.deadline, future.call
        )

    def settled(self, future: RpcFuture) -> None:
        """Forget a future that is done."""
        self._futures.pop(future.request_id, None)
        self._allowance.give_back(future.request_id)
        if future.call is not None:
            future.call.ended(future.request_id)

    def too_late(self, future: RpcFuture, *, explain: bool) -> RankwireError:
        """Return the error of a future whose deadline has passed; ``explain`` takes a moment."""
        error = DeadlineExceededError(future.deadline.limit, waiting_for=[future.dst])
        error.may_have_run = True
        if explain:
            self._explain_delay(error, future.dst, future.request_id, future.name)
        return self._explained_future(error, future)

    def look_after_replies(self) -> None:
        """Have replies read although no thread waits for them."""
        self._port.attend()

    def _look(self) -> bool:
        """End late futures, and look after replies that nobody waits for.

        Called every now and then by the standby; returns whether any future is outstanding.
        """
        if not self._futures:
            return False
        if self._next_expiry_check.expired:
            self._next_expiry_check = Deadline(_EXPIRY_CHECK_EVERY)
            late = [f for f in list(self._futures.values()) if f.deadline.expired]
            explain = len(late) <= _MOST_EXPLAINED
            for future in late:  # not here: it may have callbacks
                self._server.run_soon(partial(future.expire, explain=explain))
        self._port.attend(patiently=True)
        return True

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
            deadline = Deadline(grace)
            self._closed = True
            self._server.drain(deadline, lambda: not self._futures and not self._port.in_flight())
            try:
                self._server.stop(patience)
            finally:
                self._port.close()
                self._end_all()

    def leave_at_exit(self, error: BaseException | None) -> None:
        """See ``Leaving``. Functions that still run are not waited for.

        After an error the backend tells the others, and ends this agent too: a farewell would come
        before the reason.
        """
        if error is None:
            self._close(_EXIT_GRACE, _EXIT_GRACE)

    def forsake(self) -> None:
        """See ``Forkable``."""
        for future in list(self._futures.values()):
            disown(future)
        disown(self)

    def _ended_by_itself(self) -> None:
        """The backend is closed, or this rank was given up, and nobody has closed this agent."""
        self._server.end(patience=0.0)
        self._port.close()
        self._end_all()

    def _end_all(self) -> None:
        """End what still waits: this agent is closed, or its backend is."""
        cause = ChannelClosedError("this agent is closed")
        for future in list(self._futures.values()):
            self._fail(future, cause.copy())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
