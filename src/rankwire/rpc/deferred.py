"""Deferred replies: a function has returned a future, and its call waits for that without a thread.

The call stays in service until whatever comes first:

==============================  ===============================  ==============
what comes first                what the caller gets             the future is
==============================  ===============================  ==============
the future is done              its result or error              done
somebody here cancels it        ``RemoteError`` of a             cancelled
                                ``CancelledError``
the call's deadline passes      ``DeadlineExceededError``        cancelled
the caller cancels or is gone   nothing, it does not wait        cancelled
the agent closes                ``ChannelClosedError``           cancelled
==============================  ===============================  ==============

A future that cannot be cancelled, because it runs, goes on; nobody hears of its end. The thread
that ends a future encodes the result and sends the reply, as far as the caller takes it at once;
the rest is left to a serving thread. Looking for deadlines, and for futures whose end was cut short
by an interrupt before anybody was told, is the standby's business (``look``).

This module knows when a reply is due, not what is in it (``served_call``).

Lock: ``DeferredReply._turn`` is taken by the thread that answers, and kept when it has. Nothing
waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from rankwire.clock import Clock
from rankwire.deadline import Deadline

if TYPE_CHECKING:
    from rankwire.rpc.served_call import ServedCall

_log = logging.getLogger("rankwire")

_CHECK_EVERY = 0.05  # seconds; a caller that waits knows its deadline itself, and cancels


class DeferredReply:
    """The reply of one call, which is due when a future is done. Safe from any thread.

    Args:
        call: What is in service.
        future: What its function has returned.
        forget: Called with this once there is nothing left to look after.
    """

    def __init__(
        self,
        call: ServedCall,
        future: Future[Any],
        forget: Callable[[DeferredReply], None],
    ) -> None:
        self._call = call
        self.future = future
        self._forget = forget
        self._turn = threading.Lock()
        self._is_answered = False

    @property
    def is_due(self) -> bool:
        """Whether it should have been sent by now."""
        return self.future.done() or self._call.deadline.expired

    def answer(self) -> None:
        """Send it, unless another thread does or has. One that is interrupted may be repeated."""
        grip: list[bool] = []
        try:
            grip.extend(map(self._turn.acquire, (False,)))  # taken and noted in one step
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
    """The deferred replies of an agent that are still to be sent. Safe from any thread.

    Args:
        clock: By which calls are late.
        run_soon: Has something done by a serving thread.
        expect_work: Has the standby look.
    """

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
        self._unsent: set[DeferredReply] = set()
        self._next_check = Deadline(0.0, clock)

    def begin(self, call: ServedCall, future: Future[Any]) -> None:
        """Answer a call when a future is done; if it is done now, at once."""
        reply = DeferredReply(call, future, self._unsent.discard)
        # Before it can be forgotten; and before the look at ``cancelled``, which whoever cancels
        # sets before it looks for this.
        self._unsent.add(reply)
        call.deferred = reply
        try:
            future.add_done_callback(lambda _: reply.answer())
        except BaseException:
            self._unsent.discard(reply)
            raise
        if call.cancelled:
            reply.give_up()
        elif reply in self._unsent:
            self._expect_work()

    def look(self) -> bool:
        """Give up those whose time has passed; return whether any reply is still to be sent.

        Called every now and then by the standby.
        """
        if not self._unsent:
            return False
        if self._next_check.expired:
            self._next_check = Deadline(_CHECK_EVERY, self._clock)
            for reply in list(self._unsent):
                if reply.is_due:  # not here: the future may have callbacks
                    self._run_soon(reply.give_up)
        return True
