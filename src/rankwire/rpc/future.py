"""The future of an asynchronous call.

A ``concurrent.futures.Future`` in every respect, so ``wait``, ``as_completed`` and callbacks work;
``await`` works too. What differs is inside: a thread that waits in ``result()`` reads the
connection itself, and ``cancel()`` reaches the callee.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any

from rankwire.backends.calls import CallPort
from rankwire.conditions import SafeCondition
from rankwire.deadline import Deadline
from rankwire.links.reply import Reply
from rankwire.wire.receive import Receive

if TYPE_CHECKING:
    from rankwire.rpc.call import Call
    from rankwire.rpc.caller import Caller

_log = logging.getLogger("rankwire")

# What the base class calls them.
_PENDING, _FINISHED = "PENDING", "FINISHED"
_DONE = frozenset((_FINISHED, "CANCELLED", "CANCELLED_AND_NOTIFIED"))


class RpcFuture(Future[Any]):
    """The result of ``rpc_async``. Safe from any thread."""

    def __init__(
        self,
        caller: Caller,
        port: CallPort,
        dst: int,
        request_id: int,
        name: str,
        deadline: Deadline,
        call: Call | None,
    ) -> None:
        # As the base class does (a test compares), but for the condition.
        self._state = _PENDING
        self._result: Any = None
        self._exception: BaseException | None = None
        self._made: SafeCondition | None = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []
        self.caller = caller
        self.reply: Reply | None = None  # what will end it, once the request is sent
        self.call = call  # what was served when it was made
        self._port = port
        self.dst = dst
        self.request_id = request_id
        self.name = name
        self.deadline = deadline

    @property
    def _condition(self) -> SafeCondition:  # type: ignore[override]
        """The base class's, made for the first who uses it.

        Most futures end before anyone waits, cancels or asks to be called back, and a condition
        takes as long as encoding the call. Its lock is its own: ``concurrent.futures.wait`` takes
        those of many futures, in an order that no shared one could be part of.
        """
        if self._made is None:
            made = SafeCondition()
            with self.caller.lock:
                if self._made is None:
                    self._made = made
        return self._made

    def result(self, timeout: float | None = None) -> Any:
        """Return the value, or raise the call's error.

        After ``timeout`` seconds this raises ``TimeoutError``, and the call goes on.
        """
        if self._state != _FINISHED:
            timeout = self._drive(timeout)
        if self._state == _FINISHED and self._exception is None:
            return self._result
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the call's error or None; waits as ``result`` does."""
        return super().exception(self._drive(timeout))

    def done(self) -> bool:
        """Whether it has a result, an error, or was cancelled."""
        return self._state in _DONE

    def cancel(self) -> bool:
        """Give up the call and tell the callee; False if it is done."""
        try:
            if not super().cancel():
                return False
            self._take_back()
        except BaseException:  # an interrupt: a reply of which nobody knows would not be read
            if self.cancelled():
                self._take_back()
            raise
        return True

    def _take_back(self) -> None:
        """Let go of the call and of its reply. Safe to repeat."""
        self.caller.settled(self)
        if self.reply is not None:
            self.reply.withdraw()
            self._port.cancel(self.dst, self.request_id)

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Call ``fn(self)`` when it is done, in whatever thread that happens."""
        super().add_done_callback(fn)
        if not self.done():
            self._port.attend()  # for replies that no thread waits for

    def __await__(self) -> Generator[Any, None, Any]:
        import asyncio  # here, because it takes as long to load as all of this package

        return asyncio.wrap_future(self).__await__()

    def on_reply(self, receive: Receive) -> None:
        """End it: the reply, or the peer's failure, is known."""
        self.caller.replied(self, receive)

    def resolve(self, value: Any) -> None:
        """End with the call's value, unless it was cancelled."""
        self.caller.settled(self)
        with self.caller.lock:
            # Whoever waits, cancels or wants to be called back takes the condition first.
            if self._made is None and self._state == _PENDING:
                self._result = value
                self._state = _FINISHED
                return
        self._settle(self.set_result, value)

    def fail(self, error: BaseException) -> None:
        """End with an error, unless it was cancelled."""
        self.caller.settled(self)
        self._settle(self.set_exception, error)

    def _settle(self, settle: Callable[[Any], None], outcome: Any) -> None:
        """End it, and tell all who wait for that."""
        try:
            settle(outcome)
        except InvalidStateError:
            return  # it was cancelled
        except KeyboardInterrupt:
            raise
        except BaseException:  # a callback's, in whatever thread this happens to be
            _log.exception("a callback of %r raised", self)

    def expire(self, *, explain: bool = True) -> None:
        """The call's own deadline has passed; ``explain`` takes a moment to ask the callee why."""
        if self.done():
            self.caller.settled(self)  # by a thread that was interrupted before it came to that
        elif self.reply is None or self.reply.withdraw():
            self.caller.expire(self, explain=explain)

    def _drive(self, timeout: float | None) -> float | None:
        """Read the connection until the reply is there; return what is left of ``timeout``.

        The reply may have been read by another thread, which is about to end the future with it.
        That is waited for here, by the clock of the call; then nothing is left.
        """
        if self.done():
            return timeout
        clock = self.deadline.clock
        limit = Deadline(math.inf if timeout is None else timeout, clock)
        if self.reply is not None:
            self.caller.drive(self, self.reply, self.deadline.sooner(limit.remaining()))
            if self.deadline.expired and not self.reply.done:
                self.expire()
        if not self.done():
            with self._condition:
                left = None if timeout is None else limit.sleep_limit()
                clock.wait_for(self._condition, self.done, left)
        return 0.0

    def __repr__(self) -> str:
        if self.done():
            state = "cancelled" if self.cancelled() else "done"
        else:
            state = f"{self.deadline.remaining():.1f} s left"
        return f"<RpcFuture of {self.name!r} on rank {self.dst}, {state}>"
