"""Deferred replies: a function has returned a future, and its call waits for it without a thread.

==============================  ===============================  ==============
what ends the wait              what the caller gets             the future is
==============================  ===============================  ==============
the future is done              its result or error              done
this rank cancels the future    ``RemoteError`` of a             cancelled
                                ``CancelledError``
the call's deadline passes      ``DeadlineExceededError``        cancelled
the caller cancels or is gone   nothing                          cancelled
the agent closes                ``ChannelClosedError``           cancelled
==============================  ===============================  ==============

The result of a future that cannot be cancelled is dropped. The thread that ends a future sends what
the connection takes at once; a serving thread sends the rest. The standby checks for deadlines, and
for futures whose callback was interrupted.

Lock: ``DeferredReply._turn`` is tried by threads that answer, and kept once one has answered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.interrupts import call_and_note

if TYPE_CHECKING:
    from rankwire.rpc.served_call import ServedCall

_log = logging.getLogger("rankwire")

_CHECK_EVERY = 0.05  # seconds; a waiting caller cancels by itself at its deadline


class DeferredReply:
    """The reply of one call, due when a future is done. Safe from any thread."""

    def __init__(
        self,
        call: ServedCall,
        future: Future[Any],
        forget: Callable[[DeferredReply], None],
    ) -> None:
        self._call = call
        self.future = future
        self._forget = forget  # called once it needs no more checks
        self._turn = runtime.Lock()
        self._is_answered = False

    @property
    def is_due(self) -> bool:
        """Whether the reply should have been sent by now."""
        return self.future.done() or self._call.deadline.expired

    def answer(self) -> None:
        """Send the reply, unless another thread does or has. Safe to repeat after an interrupt."""
        grip: list[bool] = []
        try:
            call_and_note(grip, self._turn.acquire, False)
            if grip[0] and not self._is_answered:
                self._call.answer_deferred(self.future)
                self._is_answered = True
                self._forget(self)
        finally:
            if grip == [True] and not self._is_answered:
                self._turn.release()

    def give_up(self) -> None:
        """Answer without waiting any longer, and cancel the future."""
        self.answer()
        try:
            self.future.cancel()
        except Exception:  # a user's class may raise anything
            _log.exception("cancelling the future of %r raised", self._call.name)


class DeferredReplies:
    """The deferred replies of an agent that are not sent yet. Safe from any thread."""

    def __init__(
        self,
        clock: Clock,
        *,
        run_soon: Callable[[Callable[[], None]], None],
        expect_work: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._run_soon = run_soon
        self._expect_work = expect_work
        self._unsent: dict[DeferredReply, None] = {}
        self._next_check = Deadline(0.0, clock)

    def begin(self, call: ServedCall, future: Future[Any]) -> None:
        """Answer a call when a future is done, or at once if it is."""
        reply = DeferredReply(call, future, self._forget)
        # Before the callback can forget it, and before ``cancelled`` is read: a cancelling thread
        # sets that and then reads ``call.deferred``.
        self._unsent[reply] = None
        call.deferred = reply
        try:
            future.add_done_callback(lambda _: reply.answer())
        except BaseException:
            self._forget(reply)
            raise
        if call.cancelled:
            reply.give_up()
        elif reply in self._unsent:
            self._expect_work()

    def _forget(self, reply: DeferredReply) -> None:
        self._unsent.pop(reply, None)

    def check(self) -> bool:
        """Give up late replies; return whether any is not sent yet. The standby calls this."""
        if not self._unsent:
            return False
        if self._next_check.expired:
            self._next_check = Deadline(_CHECK_EVERY, self._clock)
            for reply in list(self._unsent):
                if reply.is_due:  # on another thread: the future may have callbacks
                    self._run_soon(reply.give_up)
        return True
