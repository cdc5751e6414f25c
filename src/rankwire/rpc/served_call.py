"""One call in service, from the request that arrived to its one reply.

It is the job of a serving thread, or of the event loop if its function is an ``async def``; if that
returns a future, the reply waits for it without a thread (``deferred``). Nothing that a function
does (any exception, ``SystemExit`` included, an unsendable or oversized result) harms the thread
that runs it.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from rankwire.deadline import Deadline
from rankwire.errors import CallCancelledError
from rankwire.mesh.calls import IncomingCall
from rankwire.rpc.call import Call, MadeCall, serving
from rankwire.rpc.future import RpcFuture
from rankwire.rpc.messages import Outcome, Request
from rankwire.rpc.registry import Function
from rankwire.rpc.room import SMALL_NBYTES
from rankwire.texts import one_of
from rankwire.wire.frames import Message

if TYPE_CHECKING:
    from asyncio import Task

    from rankwire.rpc.deferred import DeferredReply
    from rankwire.rpc.server import Server
    from rankwire.rpc.worker import Worker

_SLOW = 0.001
_FAST = 0.0002
_SMALL_REPLY = 65536


class ServedCall(Call):
    """A call that has been accepted. See ``pool.Job`` for what a worker does with it.

    Args:
        server: Knows where it belongs; it is one of its ``active`` calls from now on.
        incoming: The request as it came.
        request: What it says.
        function: What to run.

    Attributes:
        incoming: The request as it came.
        function: What it runs.
        task: What runs it on the event loop.
        deferred: Its reply, if the function has returned a future.
    """

    task: Task[None] | None = None
    deferred: DeferredReply | None = None
    _has_result = False
    _is_in_room = False

    def __init__(
        self, server: Server, incoming: IncomingCall, request: Request, function: Function
    ) -> None:
        self.src = src = incoming.src
        self.name = request.name
        self.deadline = Deadline(request.timeout, server.clock)
        self.outgoing = {}
        self._server = server
        self._request: Request | None = request
        self.function = function
        self.incoming = incoming
        if request.chain:
            self.links = request.chain
            self.depth = len(request.chain) // 2
        elif len(incoming.payload) > SMALL_NBYTES:
            self._is_in_room = True
        server.active[src, incoming.request_id] = self

    @property
    def seconds(self) -> float:
        """How long its function has run; where no worker runs it, how long ago the call came."""
        worker = self.worker
        return self.deadline.waited if worker is None else self._server.clock.now() - worker.began

    @property
    def needs_event_loop(self) -> bool:
        """Whether it is a coroutine that has not ended."""
        return self.function.is_async and not self._has_result

    def run(self, worker: Worker | None) -> None:
        """Run the function and reply. Does not raise."""
        request = self._request  # before the look: whoever cancels lets go of it afterwards
        if self._is_in_room:
            self.leave_room()
        function = self.function
        if request is None or self.cancelled or function.is_async or self.deadline.expired:
            self._run_otherwise(request)
            return
        self.worker = worker
        token = serving.set(self)
        message: Message | None
        try:
            try:
                value = function.target(*request.args, **request.kwargs)
            except BaseException as error:
                # Whatever it raises is the caller's business, and must not end this thread.
                message = self._say_raised(error)
            else:
                if isinstance(value, Future):
                    message = self._defer(value)
                else:
                    message = self._server.answers.value(
                        value, peer=self.src, copies=function.copies
                    )
        finally:
            serving.reset(token)
            # Whoever still holds the context of this call is not this thread's function.
            self.worker = None
        if message is not None:
            self._reply(message, worker)

    def _run_otherwise(self, request: Request | None) -> None:
        """Answer without running it, or leave it to the event loop."""
        answers = self._server.answers
        if request is None or self.cancelled:
            refusal = self._say_cut_short(began=False)
        elif self.deadline.expired:
            waited, worker = self.deadline.waited, one_of(self._server.workers, "worker")
            detail = f"it waited {waited:.3g} s there for {worker}, and was not run"
            refusal = answers.late(detail, began=False)
        elif self._server.event_loop.run(partial(self._run_async, request), self):
            return
        else:
            refusal = answers.closed(began=False)
        self._answer_at_once(refusal)

    def _defer(self, future: Future[Any]) -> Message | None:
        """Have the reply sent when a future is done; return it if that is so now."""
        self._request = None  # the arguments are the function's now
        self.incoming.payload = bytearray()
        try:
            if future.done():
                return self._outcome_of(future)
            self._server.deferred.begin(self, future)
        except BaseException as error:  # a user's class may raise anything, as in ``run``
            return self._say_raised(error)
        return None

    def answer_deferred(self, future: Future[Any]) -> None:
        """Reply with what has become of a future; if nothing has, it is not waited for any more.

        Does not wait for the caller.
        """
        if future.done():
            message = self._outcome_of(future)
        else:
            message = self._say_cut_short(began=True)
        self._reply_without_waiting(message)

    def _outcome_of(self, future: Future[Any]) -> Message:
        """Return the reply for a future that is done."""
        if future.cancelled():
            return self._say_cut_short(began=True)
        error = future.exception()
        if error is not None:
            return self._say_raised(error)
        # An interrupt is not the caller's business. It falls on the main thread alone.
        is_main = threading.current_thread() is threading.main_thread()
        return self._server.answers.value(
            future.result(), peer=self.src, copies=self.function.copies, is_patient=not is_main
        )

    def _reply_without_waiting(self, message: Message) -> None:
        """Reply from a thread that must not wait for the caller."""
        if message[1] <= _SMALL_REPLY:
            self._answer_at_once(message)
        else:
            self._server.run_soon(partial(self._reply, message))

    def _answer_at_once(self, message: Message) -> None:
        """Reply without waiting for the caller, and be done."""
        self._server.answers.send_at_once(self.incoming, message)
        self.leave_room()
        self._server.active.pop((self.src, self.incoming.request_id), None)

    def leave_room(self) -> None:
        """Do not wait any more: a worker has it, or nobody wants it. Idempotent."""
        if self._is_in_room:
            self._is_in_room = False
            self._server.room.release(self.src, self.incoming.request_id)

    def _say_raised(self, error: BaseException) -> Message:
        """Return the reply for a function that raised."""
        if isinstance(error, CallCancelledError) and self._server.is_stopping:
            return self._say_cut_short(began=True)
        if self.deadline.expired:
            self._server.remember_late(self, error)
        return self._server.answers.error(error)

    def _say_cut_short(self, *, began: bool) -> Message:
        """Return the reply for a function that was cancelled: by whom or what, as far as known."""
        if self._server.is_stopping:
            return self._server.answers.closed(began=began)
        if self.expired:
            detail = "it was cut short there by its limit" if began else "it was not run"
            return self._server.answers.late(detail, began=began)
        return self._server.answers.unwanted()

    async def _run_async(self, request: Request) -> None:
        """Run on the event loop."""
        serving.set(self)
        message = await self._run_coroutine(request)
        self._has_result = True
        if message is not None:
            self._reply_without_waiting(message)

    async def _run_coroutine(self, request: Request) -> Message | None:
        if self.cancelled:  # before there was a task to cancel
            return self._say_cut_short(began=False)
        try:
            value = await self.function.target(*request.args, **request.kwargs)
        except self._server.event_loop.cancelled:
            return self._say_cut_short(began=True)
        except BaseException as error:  # as in ``run``
            return self._say_raised(error)
        if isinstance(value, Future):
            return self._defer(value)
        return self._server.answers.value(value, peer=self.src, copies=self.function.copies)

    def refuse(self, reason: str) -> None:
        """Tell the caller that it will not be done. Does not raise."""
        self._answer_at_once(self._server.answers.refusal(Outcome.OVERLOADED, reason))

    def finished(self, seconds: float) -> None:
        """Learn how long it took."""
        if seconds > _SLOW:
            self.function.is_slow = True
        elif seconds < _FAST:
            self.function.is_slow = False

    def cancel(self, *, expired: bool = False) -> None:
        """Let the function know that it need not go on; ``expired`` if that is for lack of time.

        What it waits for is ended by ``let_go``, which may take longer.
        """
        if not self.cancelled:
            self.was_late = expired or self.deadline.expired
            self.cancelled = True
        if self._is_in_room:  # it has not begun, and its arguments need not wait
            self._request = None
            self.incoming.payload = bytearray()
            self.leave_room()
        if self.task is not None:
            with suppress(RuntimeError):  # the event loop has ended, and all tasks with it
                self.task.get_loop().call_soon_threadsafe(self.task.cancel)

    def made_for(self, future: Future[Any]) -> MadeCall | None:
        """Return the call that a future is of, if the function has made it and it is in flight."""
        return self.outgoing.get(future.request_id) if isinstance(future, RpcFuture) else None

    @property
    def has_ties(self) -> bool:
        """Whether it waits for something that ends with it."""
        return bool(self.outgoing) or self.deferred is not None

    def let_go(self) -> None:
        """End what a cancelled call waits for: the future it returned, and the calls it made."""
        if self.deferred is not None:
            self.deferred.give_up()
        self.give_up_nested()

    def _reply(self, message: Message, worker: Worker | None = None) -> None:
        """Send the reply, and be done.

        A worker that has further short requests at hand sends their replies together: it polls
        right after them, and polling sends what was held back. If it loses the polling role
        meanwhile it does so itself.
        """
        server, incoming = self._server, self.incoming
        try:
            if not incoming.is_wanted:
                server.answers.discard(message)
                server.answers.send_at_once(incoming, server.answers.unwanted())
            elif worker is None or not server.pool.arrived or not server.pool.has_more(worker):
                server.answers.send(incoming, message, self.deadline)
            else:
                server.answers.send(incoming, message, self.deadline, hold=True)
                if not server.pool.is_poller(worker):
                    server.flush()
        finally:
            if self._is_in_room:
                self.leave_room()
            server.active.pop((self.src, incoming.request_id), None)
