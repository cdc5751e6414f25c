"""A stream in service: threads continue its generator while its reader grants credit.

A serving thread runs the generator and sends its items. When the credit is spent, the generator is
*suspended* at its ``yield`` and occupies no thread; a grant has a serving thread continue it. An
async generator runs as one task of the event loop. The reply ends the stream; it has the number of
items, or an error. If the reader gives up, the generator gets ``GeneratorExit``.

Lock: ``ServedStream._lock`` guards the phase, and nothing else is done under it. Only the thread
that has set the phase to RUNNING touches the generator.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import RankwireError
from rankwire.override import override
from rankwire.rpc.call import serving
from rankwire.rpc.item_sender import SMALL_REPLY, ItemSender
from rankwire.rpc.messages import Outcome, Request
from rankwire.rpc.registry import Function
from rankwire.rpc.served_call import ServedCall
from rankwire.wire.credit import Credit
from rankwire.wire.frames import Message

if TYPE_CHECKING:
    import asyncio

    from rankwire.mesh.calls import IncomingCall
    from rankwire.rpc.pool import Worker
    from rankwire.rpc.server import Server

_log = logging.getLogger("rankwire")

# An item that came sooner than this may leave with the next: the standby sends it after 1 to 3 ms.
_PROMPT = 50e-6
_CHECK_EVERY = 0.05  # seconds


class Phase(Enum):
    """Who continues a generator."""

    SUSPENDED = "suspended"  # no thread, until there is credit or it must end
    DUE = "due"  # the next serving thread
    RUNNING = "running"  # a thread, or the event loop
    ENDED = "ended"


class ServedStream(ServedCall):
    """An accepted request for a stream; a ``pool.Job`` each time that it continues."""

    def __init__(
        self, server: Server, incoming: IncomingCall, request: Request, function: Function
    ) -> None:
        # First what is its own: the last step makes it known to other threads.
        self._lock = runtime.Lock()
        self._phase = Phase.SUSPENDED
        self._wake: Callable[[], None] | None = None  # continues the task of an async generator
        self._granted = Credit()
        self.sender = ItemSender(incoming, server.port, server.replies)
        self._items: Iterator[Any] | None = None
        super().__init__(server, incoming, request, function)
        server.streams.add(self)

    @property
    @override
    def is_suspended(self) -> bool:
        return self._phase is Phase.SUSPENDED

    @property
    @override
    def needs_event_loop(self) -> bool:
        return self._wake is not None and not self.is_suspended

    def grant(self, credit: Credit) -> bool:
        """Take a grant; return whether a serving thread must continue the generator now."""
        with self._lock:
            self._granted = self._granted.later(credit)
            is_due = self.is_suspended and self.sender.may_send(self._granted)
            if is_due:
                self._phase = Phase.DUE
        if self._wake is None:
            return is_due
        self._wake()
        return False

    @override
    def run(self, worker: Worker | None) -> None:
        if worker is None:  # a cancelled one, which was queued: its generator may take long to end
            self._server.run_soon(self.cancel_pending)
            return
        with self._lock:
            if self._phase is not Phase.DUE:
                return  # a thread that cancelled it ends it
            self._phase = Phase.RUNNING
        self.release_space()
        while True:
            self.worker = worker
            token = serving.set(self)
            try:
                reply = self._continue()
            finally:
                serving.reset(token)
                self.worker = None
            if reply is not None:
                self._end(reply)
                return
            if self._wake is not None or self._suspend():
                return

    def _suspend(self) -> bool:
        with self._lock:
            # A grant or a cancel may have come since the last item.
            may_send = self.sender.may_send(self._granted)
            if may_send or self.cancelled or self.deadline.expired:
                return False
            self._phase = Phase.SUSPENDED
        # After the phase: a cancelling thread sets ``cancelled`` first, then reads the phase.
        if self.cancelled:
            self.cancel_pending()
        return True

    def _continue(self) -> Message | None:
        """Send items while there is credit; return the reply if the stream ends."""
        if self._items is None:
            if (refusal := self._begin()) is not None or self._wake is not None:
                return refusal
        items, sender, deadline = self._items, self.sender, self.deadline
        assert items is not None
        now = before = self._server.clock.now()
        try:
            while sender.may_send(self._granted):
                if self.cancelled or deadline.expired:
                    return self._cut_short()
                try:
                    value = next(items)
                except StopIteration:
                    return self._complete()
                before, now = now, self._server.clock.now()
                sender.add(value, deadline, is_prompt=now - before < _PROMPT)
                if sender.is_holding:
                    self._server.pool.expect_work()  # the standby may sleep
            sender.flush(deadline)
        except BaseException as error:  # it must not end this thread; the reader gets it
            self._close()
            return self._failure_reply(error)
        return self._cut_short() if self.cancelled or deadline.expired else None

    def _begin(self) -> Message | None:
        request = self._request
        if request is None or self.cancelled:
            return self._cancelled_reply(began=False)
        if self.deadline.expired:
            return self._server.replies.late("it was not run", began=False)
        try:
            made = self.function.target(*request.args, **request.kwargs)
            self._request = None
            self.incoming.payload = bytearray()
            if isinstance(made, AsyncIterator):
                return self._begin_async(made)
            if not isinstance(made, Iterator):
                raise TypeError(
                    f"{self.name!r} is no stream: it returned {type(made).__name__}, no generator"
                )
        except BaseException as error:  # as in ``_continue``
            return self._failure_reply(error)
        self._items = made
        return None

    def _complete(self) -> Message:
        return self._server.replies.value(self.sender.items)

    def _cut_short(self) -> Message:
        self._close()
        if self.cancelled:
            return self._cancelled_reply(began=True)
        return self._late()

    def _close(self) -> None:
        """Raise ``GeneratorExit`` where the generator is suspended."""
        close = getattr(self._items, "close", None)
        if close is not None:
            try:
                close()
            except BaseException:  # no caller is left that could get it
                _log.warning("%r raised while its stream was ended", self.name, exc_info=True)

    def _end(self, reply: Message) -> None:
        with self._lock:
            self._phase = Phase.ENDED
        self._server.streams.remove(self)
        try:
            self.sender.flush(self.deadline)
        except RankwireError as error:  # the reply fails for the same reason
            _log.debug("items for rank %d were not sent: %s", self.src, error)
            self.sender.discard()
        self._server.port.flush()
        if reply[1] > SMALL_REPLY:
            self._send(reply)
        else:
            self._answer_at_once(reply)

    @override
    def refuse(self, reason: str) -> None:
        with self._lock:
            if self._phase is not Phase.DUE:
                return
            self._phase = Phase.RUNNING
        refusal = self._server.replies.refusal(Outcome.OVERLOADED, reason)

        def end() -> None:  # the generator may take long to end
            self._close()
            self._end(refusal)

        self._server.run_soon(end)

    @override
    def cancel_pending(self) -> None:
        """End it, if its generator is suspended or due; cancel the calls it made."""
        super().cancel_pending()
        if self._wake is not None:  # its task looks whether it is late
            self._wake()
            return
        with self._lock:
            if self._phase not in (Phase.SUSPENDED, Phase.DUE):
                return
            self._phase = Phase.RUNNING
        token = serving.set(self)
        try:
            has_begun = self._items is not None
            reply = self._cut_short() if has_begun else self._cancelled_reply(began=False)
        finally:
            serving.reset(token)
        self._end(reply)

    # -- async generators --------------------------------------------------------------------------

    def _begin_async(self, items: AsyncIterator[Any]) -> Message | None:
        self._wake = _do_nothing
        if self._server.event_loop.run(partial(self._run_items, items), self):
            return None
        return self._server.replies.closed(began=False)

    async def _run_items(self, items: AsyncIterator[Any]) -> None:
        import asyncio  # the event loop has imported it

        serving.set(self)
        loop, more = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(more.set)

        self._wake = wake
        try:
            reply = await self._send_items(items, more)
        except asyncio.CancelledError:
            reply = self._cancelled_reply(began=True)
        except BaseException as error:  # as in ``_continue``
            reply = self._failure_reply(error)
        close = getattr(items, "aclose", None)
        if close is not None:
            try:
                await close()
            except BaseException:  # as in ``_close``
                _log.warning("%r raised while its stream was ended", self.name, exc_info=True)
        self._server.run_soon(partial(self._end, reply))

    async def _send_items(self, items: AsyncIterator[Any], more: asyncio.Event) -> Message:
        while True:
            while True:
                more.clear()  # before the look: a grant sets it afterwards
                if self.cancelled:  # before the task existed
                    return self._cancelled_reply(began=True)
                if self.deadline.expired:
                    return self._late()
                if self.sender.may_send(self._granted):
                    break
                self._phase = Phase.SUSPENDED
                await more.wait()
                self._phase = Phase.RUNNING
            try:
                value = await anext(items)
            except StopAsyncIteration:
                return self._complete()
            if not self.sender.add_at_once(value):
                await self._flush()

    async def _flush(self) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def send() -> None:
            error: BaseException | None = None
            try:
                self.sender.flush(self.deadline)
            except BaseException as caught:  # the task raises it
                error = caught
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(_settle, done, error)

        self._server.run_soon(send)
        await done

    def _late(self) -> Message:
        detail = f"its limit in all passed after {self.sender.items} items"
        return self._server.replies.late(detail, began=True)


def _do_nothing() -> None:
    pass


def _settle(done: asyncio.Future[None], error: BaseException | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


class ServedStreams:
    """The streams of an agent that have not ended. Safe from any thread."""

    MOST = 1024  # from one rank

    def __init__(
        self,
        clock: Clock,
        run_soon: Callable[[Callable[[], None]], None],
        expect_work: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._run_soon = run_soon
        self._expect_work = expect_work
        self._open: dict[ServedStream, None] = {}
        self._next_check = Deadline(0.0, clock)

    def has_room(self, src: int) -> bool:
        """Return whether a rank may request another stream."""
        if len(self._open) < self.MOST:
            return True
        return sum(stream.src == src for stream in list(self._open)) < self.MOST

    def add(self, stream: ServedStream) -> None:
        """Note a stream."""
        self._open[stream] = None
        self._expect_work()

    def remove(self, stream: ServedStream) -> None:
        """Forget a stream that has ended."""
        self._open.pop(stream, None)

    def end(self, streams: list[ServedStream], patience: float) -> None:
        """End generators in a thread of their own, since their ``finally`` may take long."""
        if not streams:
            return

        def end() -> None:
            for stream in streams:
                stream.cancel_pending()

        thread = runtime.Thread(target=end, name="rankwire-streams", daemon=True)
        thread.start()
        self._clock.join(thread, patience)

    def check(self) -> bool:
        """End suspended streams whose limit has passed; return whether any may still be late.

        The standby calls this.
        """
        if not self._open:
            return False
        if self._next_check.expired:
            self._next_check = Deadline(_CHECK_EVERY, self._clock)
            for stream in list(self._open):
                if stream.is_suspended and stream.deadline.expired:
                    self._run_soon(stream.cancel_pending)
        left = [stream.sender.flush_late() for stream in list(self._open)]
        return any(left) or any(s.deadline.limit < math.inf for s in list(self._open))
