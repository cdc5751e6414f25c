"""The calling side of an agent: a request out, its reply back, and what becomes of both.

A call is given up when its deadline passes, when its thread is interrupted, or when the function
that made it is not wanted any more; the callee is told each time. A future is ended by whoever
reads its reply, by the thread that waits for it, or by the standby of the serving threads, which
looks for late ones now and then.

It knows the call port and what the server tells of calls being served here, not how they are run.

Size: making, waiting for and ending a call are about one table of futures.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from typing import TYPE_CHECKING, Any

from rankwire.backends.arguments import check_rank
from rankwire.backends.base import Backend
from rankwire.codec.codec import Codec
from rankwire.deadline import Deadline
from rankwire.errors import (
    CallCancelledError,
    ChannelClosedError,
    CircularCallError,
    DeadlineExceededError,
    MessageTooLargeError,
    OverloadedError,
    PeerLostError,
    RankwireError,
    RemoteError,
)
from rankwire.fork import invalidate
from rankwire.links.reply import Reply
from rankwire.mesh.calls import CallPort
from rankwire.rpc.call import Call, MadeCall, describe_chain, serving
from rankwire.rpc.future import RpcFuture
from rankwire.rpc.late_futures import LateFutures
from rankwire.rpc.messages import Chain, decode_reply, encode_request
from rankwire.rpc.nested import Nested
from rankwire.rpc.questions import Questions
from rankwire.rpc.remote_errors import RemoteErrors
from rankwire.rpc.room import ROOM, SMALL_NBYTES, UNASKED_NBYTES, Allowance
from rankwire.wire.frames import Message
from rankwire.wire.loans import whole_of
from rankwire.wire.receive import Receive

if TYPE_CHECKING:
    from rankwire.rpc.server import Server


class Caller:
    """Makes calls. Every method is safe from any thread.

    Args:
        backend: Whose ranks are called.
        port: Carries the requests.
        codec: How values travel.
        server: Knows the calls being served here.
        max_in_flight: Calls to one rank that may wait for a reply.

    Attributes:
        closed: Whether no call can be made any more. Set by the agent.
        remote_errors: The classes that errors of callees may have here.
        lock: Guards whether a future has a condition, and the end of one that has none. A leaf.
    """

    def __init__(
        self, backend: Backend, port: CallPort, codec: Codec, server: Server, *, max_in_flight: int
    ) -> None:
        self._backend = backend
        self._port = port
        self._codec = codec
        self._max_nbytes = backend.max_message_nbytes
        self._max_in_flight = max_in_flight
        self.closed = False
        self._allowance = Allowance(UNASKED_NBYTES)
        # The upper half tells this agent's calls from those of any other, also of one that had its
        # place before.
        self._ids = itertools.count(secrets.randbits(31) << 32)
        self._futures: dict[int, RpcFuture[Any]] = {}
        self.lock = threading.RLock()
        self._server = server
        self.remote_errors = RemoteErrors()
        self._questions = Questions(backend, port, codec, self._ids, server)
        self._nested = Nested(server, self._questions.ask)
        self._late = LateFutures(
            backend.clock, self._questions, run_soon=server.run_soon, fail=self._fail_late
        )

    @property
    def is_waiting(self) -> bool:
        """Whether any call is in flight."""
        return bool(self._futures or self._port.in_flight())

    def activity(self) -> tuple[int, int]:
        """Return how many calls wait for a reply, and a number that calls and looks count up."""
        return max(len(self._futures), self._port.in_flight()), next(self._ids)

    # -- calls -------------------------------------------------------------------------------------

    def call(
        self,
        dst: int,
        name: str,
        deadline: Deadline,
        call: Call | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a function and return its result; ``call`` is the one that is being served."""
        try:
            if type(dst) is not int or not 0 <= dst < self._backend.world_size:
                dst = check_rank(dst, self._backend.world_size)
            message = self._encode(dst, name, deadline.limit, call, args, kwargs)
            reply = self._send(dst, next(self._ids), name, deadline, call, args, kwargs, message)
            try:
                if call is not None:
                    made = MadeCall(self._port, dst, name, reply)
                    call.began(made)
                    self._nested.drive(call, made, deadline, patient=True)
                payload = reply.wait(deadline)
            except (CircularCallError, CallCancelledError):
                raise  # given up by another thread or another look, which has told the callee
            except RankwireError as error:
                self._give_up(reply, error, dst, name)
                raise
            except BaseException:
                try:
                    self._take_back(reply, dst)
                finally:
                    self._take_back(reply, dst)  # a second interrupt may have fallen into the first
                raise
            finally:
                if call is not None:
                    call.ended(reply.request_id)
                if self._allowance.taken:
                    self._allowance.give_back(reply.request_id)
            return decode_reply(self._codec, payload, dst, deadline.limit)
        except RankwireError as error:
            raise self._explained(error, "rpc_sync", name, dst, deadline, call) from error.__cause__

    def start(
        self,
        dst: int,
        name: str,
        deadline: Deadline,
        call: Call | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> RpcFuture[Any]:
        """Start a call and return its future.

        Raises:
            RankwireError: An argument is wrong. Whatever else goes wrong ends the future.
        """
        try:
            if type(dst) is not int or not 0 <= dst < self._backend.world_size:
                dst = check_rank(dst, self._backend.world_size)
            message = self._encode(dst, name, deadline.limit, call, args, kwargs)
        except RankwireError as error:
            cause = error.__cause__
            raise self._explained(error, "rpc_async", name, dst, deadline, call) from cause
        future: RpcFuture[Any] = RpcFuture(
            self, self._port, dst, next(self._ids), name, deadline, call
        )
        request_id = future.request_id
        try:
            reply = self._send(dst, request_id, name, deadline, call, args, kwargs, message, future)
            future.reply = reply
            if reply.done:
                future.on_reply(reply)
            elif call is not None:
                call.began(MadeCall(self._port, dst, name, reply))
                if future.done():  # at this moment
                    call.ended(request_id)
        except Exception as error:
            if not future.done():  # as with a peer that dies while the request is being sent
                self._fail(future, error)
        except BaseException:  # an interrupt: nobody will have the future
            self.settled(future)
            self._port.cancel(dst, request_id)
            raise
        return future

    def _encode(
        self,
        dst: int,
        name: str,
        left: float,
        call: Call | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Message:
        """Return a request; ``left`` are the seconds that it tells the callee.

        Raises:
            RankwireError: An argument cannot be sent. What has been done for it is undone.
        """
        chain: Chain = [] if call is None else call.chain_of_nested(self._backend.rank)
        message = encode_request(self._codec, name, left, chain, args, kwargs, dst)
        nbytes = message[1]
        if nbytes > self._max_nbytes:
            self._codec.undo(message)
            raise MessageTooLargeError(nbytes, self._max_nbytes)
        return message

    def _send(
        self,
        dst: int,
        request_id: int,
        name: str,
        deadline: Deadline,
        call: Call | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        message: Message,
        future: RpcFuture[Any] | None = None,
    ) -> Reply:
        """Send a request; a future is known from the moment on when its reply may come.

        A request that has waited is encoded again: it says how much time the callee has.
        """
        try:
            if self.closed:
                raise ChannelClosedError("this agent is closed")
            if call is not None:
                self._before_waiting(call)
        except BaseException:
            self._codec.undo(message)
            raise
        on_reply = None
        has_room = False
        while True:
            nbytes = message[1]
            if future is not None:
                self._futures[request_id] = future
                self._server.pool.expect_work()
                on_reply = future.on_reply
            if nbytes > SMALL_NBYTES and not has_room:
                has_room = True
                if self._make_room(dst, request_id, message, deadline, call):
                    message = self._encode(dst, name, deadline.remaining(), call, args, kwargs)
                    continue
            try:
                reply = self._port.call(
                    dst,
                    request_id,
                    message,
                    deadline,
                    on_reply,
                    future is not None,
                    self._max_in_flight,
                )
            except BaseException as error:
                if nbytes > SMALL_NBYTES:
                    self._leave_room(dst, request_id)
                if isinstance(error, Exception) and not getattr(error, "may_have_run", False):
                    self._codec.undo(message)
                raise
            if reply is not None:
                return reply
            self._codec.undo(message)
            self._futures.pop(request_id, None)
            self._wait_for_room(dst, name, deadline, call)
            message = self._encode(dst, name, deadline.remaining(), call, args, kwargs)

    def _give_up(self, reply: Reply, error: RankwireError, dst: int, name: str) -> None:
        """Tell the callee of a call whose caller stops waiting that it need not go on."""
        try:
            if isinstance(error, (DeadlineExceededError, PeerLostError, ChannelClosedError)):
                error.may_have_run = True
            if isinstance(error, DeadlineExceededError):
                number = reply.request_id
                self._questions.about_late(dst, [number], error.limit)(error, number, name)
        finally:  # whoever is asked why may not say, and the asker may be interrupted
            expired = isinstance(error, DeadlineExceededError)
            self._port.cancel(dst, reply.request_id, expired=expired)

    def _take_back(self, reply: Reply, dst: int) -> None:
        """Give up a call whose caller was interrupted, and tell the callee. Safe to repeat."""
        reply.withdraw()
        self._port.cancel(dst, reply.request_id)

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
        self, dst: int, request_id: int, message: Message, deadline: Deadline, call: Call | None
    ) -> bool:
        """See to it that the callee has room for a large call; return whether that took time.

        If it did, the message has been undone: it says how much time was left before.

        Raises:
            DeadlineExceededError: It had none in time, or did not say. The call was not sent.
        """
        nbytes = message[1]
        if call is not None or self._allowance.take(dst, request_id, nbytes):
            return False
        self._codec.undo(message)
        try:
            self._questions.put(dst, ROOM, (request_id, nbytes), deadline)
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
            self._server.pool.about_to_block(call.worker)

    def drive(self, future: RpcFuture[Any], reply: Reply, deadline: Deadline) -> bool:
        """Wait for the reply of a future; False if the deadline passes first."""
        call = serving.get()
        if call is None:
            return reply.drive(deadline)
        self._before_waiting(call)
        # A function that waits for less than the call may take can go on without it.
        patient = deadline is future.deadline
        made = MadeCall(self._port, future.dst, future.name, reply)
        return self._nested.drive(call, made, deadline, patient=patient)

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
            chain = [*call.chain_of_nested(self._backend.rank), dst, name]
            error.explain(f"the calls are {describe_chain(chain)}")
        elif isinstance(error, RemoteError):
            error = self.remote_errors.typed(error)
        return self._backend.explained(error, f"{op} {name!r}", deadline, dst)

    # -- futures -----------------------------------------------------------------------------------

    def replied(self, future: RpcFuture[Any], receive: Receive) -> None:
        """End a future with the reply that has come."""
        try:
            payload = receive.take()
            if type(payload) is not bytearray:
                payload = whole_of(payload)
        except RankwireError as error:
            if isinstance(error, (PeerLostError, ChannelClosedError)):
                error.may_have_run = True
            self._fail(future, error)
            return
        try:
            value = decode_reply(self._codec, payload, future.dst, future.deadline.limit)
        except RankwireError as error:
            self._fail(future, error)
        else:
            future.resolve(value)

    def _fail(self, future: RpcFuture[Any], error: Exception) -> None:
        deadline, call = future.deadline, future.call
        # With the frames of whoever read the reply, it would hold the future that holds it.
        error = error.with_traceback(None)
        # What this rank has given up itself is no news to it.
        is_news = not (self.closed or isinstance(error, CallCancelledError))
        if isinstance(error, RankwireError):  # and not one of the program's own, of a fault plan
            error = self._explained(error, "rpc_async", future.name, future.dst, deadline, call)
        future.fail(error, is_news=is_news)

    def settled(self, future: RpcFuture[Any]) -> None:
        """Forget a future that is done."""
        self._futures.pop(future.request_id, None)
        if self._allowance.taken:
            self._allowance.give_back(future.request_id)
        if future.call is not None:
            future.call.ended(future.request_id)

    def expire(self, future: RpcFuture[Any]) -> None:
        """End a future whose deadline has passed. This takes a moment: the callee is asked why."""
        self._late.expire(future)

    def _fail_late(self, future: RpcFuture[Any], error: DeadlineExceededError) -> None:
        self._port.cancel(future.dst, future.request_id, expired=True)
        self._fail(future, error)

    def look(self) -> bool:
        """End late futures, and look after replies that nobody waits for.

        Called every now and then by the standby; returns whether any future is outstanding.
        """
        if not self._futures:
            return False
        self._late.look(self._futures)
        self._port.attend(patiently=True)
        return True

    # -- ending ------------------------------------------------------------------------------------

    def end_all(self) -> None:
        """End what still waits: this agent is closed, or its backend is."""
        cause = ChannelClosedError("this agent is closed")
        for future in list(self._futures.values()):
            self._fail(future, cause.copy())

    def close_in_child(self) -> None:
        """Disown the futures in a child of a fork."""
        for future in list(self._futures.values()):
            invalidate(future)
