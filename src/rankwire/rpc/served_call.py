"""One call in service, from the request that arrived to its one reply.

A serving thread runs it, or the event loop if its function is an ``async def``. No exception of the
function, ``SystemExit`` included, and no oversized or unsendable result can harm that thread.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import CallCancelledError
from rankwire.fork import guard
from rankwire.mesh.calls import IncomingCall
from rankwire.rpc.call import Call, MadeCall, serving
from rankwire.rpc.item_sender import SMALL_REPLY
from rankwire.rpc.messages import Outcome, Request, describe_error
from rankwire.rpc.pool import SLOW
from rankwire.rpc.registry import Function
from rankwire.rpc.reservations import SMALL_NBYTES
from rankwire.texts import one_of
from rankwire.wire.frames import Message

if TYPE_CHECKING:
    import asyncio

    from rankwire.rpc.pool import Worker
    from rankwire.rpc.replies import DeferredReply
    from rankwire.rpc.server import Server
    from rankwire.rpc.stream import Stream

_FAST = 0.0002
_CLOSE_PATIENCE = 1.0  # seconds for the tasks of the event loop to end


class ServedCall(Call):
    """An accepted call, which is one of ``server.active``; a ``pool.Job``."""

    task: asyncio.Task[None] | None = None  # runs it on the event loop
    deferred: DeferredReply | None = None  # if the function has returned a future
    begin: float | None = None  # of its function, if it goes on without a worker
    awaited: Mapping[int, MadeCall] | None = None  # what that future waits for, if known
    lost_caller = False  # it was cancelled because its caller is gone
    _holds_space = False

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
            self._holds_space = True
        server.active[src, incoming.request_id] = self

    @property
    def seconds(self) -> float:
        """How long its function has run; if it has not begun, the time since the call came."""
        worker = self.worker
        began = self.begin if worker is None else worker.began
        return self.deadline.waited if began is None else self._server.clock.now() - began

    @property
    def is_suspended(self) -> bool:
        """Whether it is a stream whose reader grants no credit."""
        return False

    @property
    def needs_event_loop(self) -> bool:
        """Whether it is a coroutine that has not ended."""
        return self.function.is_async and self._request is not None

    def items_of(self, src: int, place: tuple[int, int]) -> Stream[Any]:
        """Request the items of an iterator that is an argument of this call."""
        return self._server.items_of(self, src, place)

    def run(self, worker: Worker | None) -> None:
        """Run the function and reply. Does not raise."""
        request = self._request  # before ``cancelled`` is read: a cancelling thread clears it last
        if self._holds_space:
            self.release_space()
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
                # It must not end this thread; the caller gets it.
                message = self._failure_reply(error)
            else:
                if isinstance(value, Future):
                    message = self._defer(value)
                else:
                    message = self._server.replies.value(
                        value, peer=self.src, copies=function.copies
                    )
        finally:
            serving.reset(token)
            # Other threads may still hold the context of this call.
            self.worker = None
        if message is None:
            return
        server = self._server
        # The poller sends the replies of several short calls together: it holds them back while
        # more calls are at hand, and sends them when it polls, or here if it has lost the role.
        hold = worker is not None and bool(server.pool.arrived) and server.pool.has_more(worker)
        try:
            server.replies.send(self.incoming, message, self.deadline, hold)
            if hold and not server.pool.is_poller(worker):
                server.port.flush()
        finally:
            server.active.pop((self.src, self.incoming.request_id), None)

    def _run_otherwise(self, request: Request | None) -> None:
        replies = self._server.replies
        if request is None or self.cancelled:
            refusal = self._cancelled_reply(began=False)
        elif self.deadline.expired:
            waited, worker = self.deadline.waited, one_of(self._server.active.workers, "worker")
            detail = f"it waited {waited:.3g} s there for {worker}, and was not run"
            refusal = replies.late(detail, began=False)
        else:
            self.begin = self._server.clock.now()
            if self._server.event_loop.run(partial(self._run_async, request), self):
                return
            refusal = replies.closed(began=False)
        self._answer_at_once(refusal)

    def _defer(self, future: Future[Any]) -> Message | None:
        self._request = None  # free the arguments
        self.incoming.payload = bytearray()
        if self.worker is not None:
            self.begin = self.worker.began
        try:
            if future.done():
                return self._outcome_of(future)
            self._server.replies.deferred.begin(self, future)
        except BaseException as error:  # a user's class may raise anything
            return self._failure_reply(error)
        return None

    def answer_deferred(self, future: Future[Any]) -> None:
        """Reply with a future's outcome, or that it was cut short, without waiting.

        Called again after an interrupt.
        """
        self._reply_without_waiting(self._outcome_of(future))

    def _outcome_of(self, future: Future[Any]) -> Message:
        if not future.done() or future.cancelled():
            return self._cancelled_reply(began=True)
        error = future.exception()
        if error is not None:
            return self._failure_reply(error)
        # An interrupt (only the main thread gets one) is for this program, not for the caller.
        is_main = runtime.current_thread() is runtime.main_thread()
        return self._server.replies.value(
            future.result(), peer=self.src, copies=self.function.copies, is_patient=not is_main
        )

    def _reply_without_waiting(self, message: Message) -> None:
        if message[1] <= SMALL_REPLY:
            self._answer_at_once(message)
        else:
            self._server.run_soon(partial(self._send, message))

    def _send(self, message: Message) -> None:
        try:
            self._server.replies.send(self.incoming, message, self.deadline)
        finally:
            self._server.active.pop((self.src, self.incoming.request_id), None)

    def _answer_at_once(self, message: Message) -> None:
        self._server.replies.send_at_once(self.incoming, message)
        self.release_space()
        self._server.active.pop((self.src, self.incoming.request_id), None)

    def release_space(self) -> None:
        """Free its queue space. Idempotent."""
        if self._holds_space:
            self._holds_space = False
            self._server.reservations.release(self.src, self.incoming.request_id)

    def _failure_reply(self, error: BaseException) -> Message:
        if isinstance(error, CallCancelledError) and self._server.is_stopping:
            return self._cancelled_reply(began=True)
        if self.deadline.expired:
            doing = f"failed too late with {describe_error(error)}"
            self._server.active.remember_late(self, doing)
        return self._server.replies.error(error)

    def _cancelled_reply(self, *, began: bool) -> Message:
        if self._server.is_stopping:
            return self._server.replies.closed(began=began)
        if self.expired:
            detail = "it was cut short there by its limit" if began else "it was not run"
            if self.deferred is not None and hasattr(self.deferred.future, "doing"):
                doing = self.deferred.future.doing
                detail += f"; it {doing}"
                self._server.active.remember_late(self, doing)
            return self._server.replies.late(detail, began=began)
        return self._server.replies.unwanted()

    async def _run_async(self, request: Request) -> None:
        import asyncio  # the event loop has imported it

        serving.set(self)
        message: Message | None
        try:
            if self.cancelled:  # before the task existed
                message = self._cancelled_reply(began=False)
            else:
                value = await self.function.target(*request.args, **request.kwargs)
                if isinstance(value, Future):
                    message = self._defer(value)
                else:
                    message = self._server.replies.value(
                        value, peer=self.src, copies=self.function.copies
                    )
        except asyncio.CancelledError:
            message = self._cancelled_reply(began=True)
        except BaseException as error:  # as in ``run``
            message = self._failure_reply(error)
        self._request = None
        if message is not None:
            self._reply_without_waiting(message)

    def refuse(self, reason: str) -> None:
        """Notify the caller that the function will not run. Does not raise."""
        self._answer_at_once(self._server.replies.refusal(Outcome.OVERLOADED, reason))

    def note_pace(self, seconds: float) -> None:
        """Note whether the function is slow."""
        if seconds > SLOW:
            self.function.is_slow = True
        elif seconds < _FAST:
            self.function.is_slow = False

    def cancel(self, *, expired: bool = False) -> None:
        """Set ``cancelled`` and cancel the task; ``cancel_pending`` may take longer."""
        if not self.cancelled:
            self.was_late = expired or self.deadline.expired
            self.cancelled = True
        if self._holds_space:  # it has not begun: free the arguments
            self._request = None
            self.incoming.payload = bytearray()
            self.release_space()
        if self.task is not None:
            with suppress(RuntimeError):  # the event loop has ended
                self.task.get_loop().call_soon_threadsafe(self.task.cancel)

    def cancel_pending(self) -> None:
        """Cancel the future that the function returned, and the calls it made."""
        if self.deferred is not None:
            self.deferred.give_up()
        self.give_up_nested()


class EventLoop:
    """One event loop in one thread, for ``async def`` functions. Safe from any thread.

    The first call starts it and imports asyncio, which takes as long as importing this package.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = runtime.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: runtime.Thread | None = None
        self._closed = False
        self._is_in_child = False
        guard(self)

    @property
    def ident(self) -> int | None:
        """The identifier of its thread, once it runs."""
        return None if self._thread is None else self._thread.ident

    def run(self, make: Callable[[], Coroutine[Any, Any, None]], call: ServedCall) -> bool:
        """Start a coroutine and set ``call.task``; return False if the loop is closed."""
        loop = self._running_loop()
        if loop is None:
            return False

        def start() -> None:
            call.task = loop.create_task(make())

        try:
            loop.call_soon_threadsafe(start)
        except RuntimeError:  # the loop has just closed
            return False
        return True

    def _running_loop(self) -> asyncio.AbstractEventLoop | None:
        with self._lock:
            if self._closed:
                return None
            if self._loop is None:
                self._loop = runtime.new_event_loop()
                self._thread = runtime.Thread(
                    target=self._run_loop,
                    args=(self._loop,),
                    name="rankwire-event-loop",
                    daemon=True,
                )
                self._thread.start()
            return self._loop

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        import asyncio

        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            if not self._is_in_child:
                _end(loop)

    def close_in_child(self) -> None:
        """Stop in a forked child, where the loop shares its selector with the parent's."""
        self._is_in_child = True
        if self._loop is not None:
            self._loop.stop()

    def close(self, patience: float = _CLOSE_PATIENCE) -> None:
        """Cancel all tasks and end the thread; wait up to ``patience`` s for it. Idempotent."""
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
            self._loop = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            # A coroutine may close the agent that serves it.
            if thread is not runtime.current_thread():
                self._clock.join(thread, patience)


def _end(loop: asyncio.AbstractEventLoop) -> None:
    import asyncio

    loop.run_until_complete(asyncio.sleep(0))  # starts tasks that were submitted before the stop
    while tasks := sorted(asyncio.all_tasks(loop), key=_order):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def _order(task: asyncio.Task[Any]) -> tuple[int, str]:
    # By age, as their names sort: Task-9, Task-10.
    return len(task.get_name()), task.get_name()
