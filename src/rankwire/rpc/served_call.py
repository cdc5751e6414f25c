"""One call in service, from the request that arrived to its one reply.

It is the job of a serving thread, or of the event loop if its function is an ``async def``. Nothing
that a function does (any exception, ``SystemExit`` included, an unsendable or oversized result)
harms the thread that runs it.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from rankwire.backends.calls import IncomingCall
from rankwire.deadline import Deadline
from rankwire.errors import CallCancelledError
from rankwire.rpc.call import Call, serving
from rankwire.rpc.messages import Outcome, Request
from rankwire.rpc.registry import Function
from rankwire.rpc.room import SMALL_NBYTES
from rankwire.wire.frames import Message

if TYPE_CHECKING:
    from asyncio import Task

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
    """

    task: Task[None] | None = None
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
        try:
            try:
                value = function.target(*request.args, **request.kwargs)
            except BaseException as error:
                # Whatever it raises is the caller's business, and must not end this thread.
                message = self._say_raised(error)
            else:
                message = self._server.answers.value(value, copies=function.copies)
        finally:
            serving.reset(token)
            # Whoever still holds the context of this call is not this thread's function.
            self.worker = None
        self._reply(message, worker)

    def _run_otherwise(self, request: Request | None) -> None:
        """Answer without running it, or leave it to the event loop."""
        answers = self._server.answers
        if request is None or self.cancelled:
            refusal = self._say_cut_short(began=False)
        elif self.deadline.expired:
            refusal = answers.late(began=False)
        elif self._server.event_loop.run(partial(self._run_async, request), self):
            return
        else:
            refusal = answers.closed(began=False)
        self._answer_at_once(refusal)

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
        """Return the reply for a function that was cancelled: by the agent's end or the caller."""
        if self._server.is_stopping:
            return self._server.answers.closed(began=began)
        return self._server.answers.unwanted()

    async def _run_async(self, request: Request) -> None:
        """Run on the event loop."""
        serving.set(self)
        message = await self._run_coroutine(request)
        self._has_result = True
        if message[1] <= _SMALL_REPLY:
            self._answer_at_once(message)
        else:  # sending may wait for the caller, and the event loop must not
            self._server.run_soon(partial(self._reply, message))

    async def _run_coroutine(self, request: Request) -> Message:
        if self.cancelled:  # before there was a task to cancel
            return self._say_cut_short(began=False)
        try:
            value = await self.function.target(*request.args, **request.kwargs)
        except self._server.event_loop.cancelled:
            return self._say_cut_short(began=True)
        except BaseException as error:  # as in ``run``
            return self._say_raised(error)
        return self._server.answers.value(value, copies=self.function.copies)

    def refuse(self, reason: str) -> None:
        """Tell the caller that it will not be done. Does not raise."""
        self._answer_at_once(self._server.answers.refusal(Outcome.OVERLOADED, reason))

    def finished(self, seconds: float) -> None:
        """Learn how long it took."""
        if seconds > _SLOW:
            self.function.is_slow = True
        elif seconds < _FAST:
            self.function.is_slow = False

    def cancel(self) -> None:
        """Let the function know that it need not go on."""
        self.cancelled = True
        if self._is_in_room:  # it has not begun, and its arguments need not wait
            self._request = None
            self.incoming.payload = bytearray()
            self.leave_room()
        if self.task is not None:
            with suppress(RuntimeError):  # the event loop has ended, and all tasks with it
                self.task.get_loop().call_soon_threadsafe(self.task.cancel)

    def _reply(self, message: Message, worker: Worker | None = None) -> None:
        """Send the reply, and be done.

        A worker that has further short requests at hand sends their replies together: it polls
        right after them, and polling sends what was held back. If it loses the polling role
        meanwhile it does so itself.
        """
        server, incoming = self._server, self.incoming
        try:
            if not incoming.is_wanted:
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
