"""The future of an asynchronous call.

A ``concurrent.futures.Future`` in every respect, so ``wait``, ``as_completed`` and callbacks work;
``await`` works too. What differs is inside: a thread that waits in ``result()`` reads the
connection itself, and ``cancel()`` reaches the callee. An error that nobody has asked for is logged
when the future is dropped.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from threading import Condition
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from rankwire.clock import SafeCondition
from rankwire.deadline import Deadline
from rankwire.finalizers import hand_over
from rankwire.links.reply import Reply
from rankwire.mesh.calls import CallPort
from rankwire.public_dir import PublicDir
from rankwire.rpc.call import Call, serving
from rankwire.wire.receive import Receive

if TYPE_CHECKING:
    from rankwire.rpc.caller import Caller

_log = logging.getLogger("rankwire")
_UNHEARD = "a call failed, and nobody has asked for its result: %s"

R = TypeVar("R")
OnEnd: TypeAlias = "Callable[[RpcFuture[Any]], None]"

# What the base class calls them.
_PENDING, _FINISHED = "PENDING", "FINISHED"
_DONE = frozenset((_FINISHED, "CANCELLED", "CANCELLED_AND_NOTIFIED"))


class Unheard:
    """An error that nobody has asked for; logged when the future that has it is dropped.

    Only futures that fail have one, so the others are dropped as quickly as without it.
    """

    __slots__ = ("error",)

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def __del__(self) -> None:
        if self.error is not None:
            hand_over(_log.error, _UNHEARD, self.error)


_DISREGARDED = Unheard(None)


class RpcFuture(PublicDir, Future[R]):
    """The result of ``rpc_async``. Safe from any thread.

    If the call fails and neither ``result`` nor ``exception`` is asked for, nor the future awaited,
    the error is logged once, when the future is dropped.

    Attributes:
        dst: The rank that was called.
        name: The function that was called.
        deadline: By when it ends.

    Size: a third of its attributes are those of the base class.
    """

    _SHOWN = ("deadline", "dst", "name")

    _unheard: Unheard | None = None
    _decoder: object  # the visit that decodes the reply, if there is one
    _on_end: Sequence[OnEnd] = ()

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

    def _attended_condition(self) -> SafeCondition:
        """Return the base class's condition, made for the first who uses it.

        Most futures end before anyone waits, cancels or asks to be called back, and a condition
        takes as long as encoding the call. Its lock is its own: ``concurrent.futures.wait`` takes
        those of many futures, in an order that no shared one could be part of.

        Whoever comes for it may wait without reading the connection, or want to be called back. So
        from now on the reply is read as soon as it comes.
        """
        if self._made is not None:
            return self._made
        made = self._make_condition()
        if self.reply is not None and not self.reply.done:
            self._port.attend_to(self.dst, self.reply)
        return made

    # An attribute to type checkers, as in the base class: ``as_completed`` is declared to take only
    # futures with one that can be assigned.
    _condition: Condition = property(_attended_condition)  # type: ignore[assignment]

    def _make_condition(self) -> SafeCondition:
        made = SafeCondition()
        with self.caller.lock:
            if self._made is None:
                self._made = made
        return self._made

    def result(self, timeout: float | None = None) -> R:
        """Return the value, or raise the call's error.

        After ``timeout`` seconds this raises ``TimeoutError``, and the call goes on.
        """
        if self._state != _FINISHED:
            timeout = self._drive(timeout)
        if self._state == _FINISHED and self._exception is None:
            return self._result  # type: ignore[no-any-return]
        try:
            return super().result(timeout)
        finally:
            self._heard()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the call's error or None; waits as ``result`` does."""
        try:
            return super().exception(self._drive(timeout))
        finally:
            self._heard()

    def _heard(self) -> None:
        """Somebody has asked for the outcome, if it was there."""
        unheard = self._unheard
        if unheard is not None and self.done():
            unheard.error = None

    def done(self) -> bool:
        """Whether it has a result, an error, or was cancelled."""
        return self._state in _DONE

    def cancel(self) -> bool:
        """Give up the call and tell the callee; False if it is done."""
        try:
            self._make_condition()  # the reply need not be attended to
            if not super().cancel():
                return False
            self._take_back()
            if self._on_end:
                self._tell_end()
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
        """Call ``fn(self)`` when it is done, in whatever thread that happens.

        If the future was made by a function being served, the callback is part of that call, as the
        function is: calls that it makes have its deadline and its chain.
        """
        super().add_done_callback(fn)

    def when_ended(self, on_end: OnEnd) -> None:
        """Call something once it is done, but have nobody look for its reply.

        For what stands for this future elsewhere, and is waited for there by waiting for this one.
        It must not raise, and may be called twice.
        """
        self.__dict__.setdefault("_on_end", []).append(on_end)
        if self.done():
            self._tell(on_end)

    def _tell_end(self) -> None:
        for on_end in list(self._on_end):
            self._tell(on_end)

    def _tell(self, on_end: OnEnd) -> None:
        on_end(self)
        # What stands for this future refers to it: without this, only the collector frees both.
        with suppress(ValueError):  # another thread has told it too
            self.__dict__["_on_end"].remove(on_end)

    def disregard(self) -> None:
        """Do not log its error, which is dealt with elsewhere, if it has or comes to one."""
        unheard, self._unheard = self._unheard, _DISREGARDED
        if unheard is not None:
            unheard.error = None

    @property
    def failure(self) -> BaseException | None:
        """The error that it has ended with, if it has; looking at it is not asking for it."""
        return self._exception

    def attend(self) -> None:
        """Have the reply read as soon as it comes, although no thread waits for it."""
        if self.reply is not None and not self.reply.done:
            self._port.attend_to(self.dst, self.reply)

    def _invoke_callbacks(self) -> None:
        """Call those who asked for it; the thread may serve another call, which is not theirs."""
        token = serving.set(self.call)
        try:
            super()._invoke_callbacks()  # type: ignore[misc]
        finally:
            serving.reset(token)

    def __await__(self) -> Generator[Any, None, R]:
        import asyncio  # here, because it takes as long to load as all of this package

        return asyncio.wrap_future(self).__await__()

    def on_reply(self, receive: Receive) -> None:
        """End it: the reply, or the peer's failure, is known.

        The thread that has made the call and the one that reads the reply may both come here. One
        of them decodes it, as that has effects of its own: what hooks do.
        """
        visit = object()
        try:
            # In one step, which an interrupt cannot part: either it is known who decodes, or not.
            if self.__dict__.setdefault("_decoder", visit) is visit:
                self.caller.replied(self, receive)
                # Last: who was interrupted before is called back again. With it, the two hold each
                # other, and a future that is dropped would be there until the collector comes.
                receive.on_done = None
        except BaseException:  # an interrupt: it is looked at again
            try:
                self._leave_undecoded(visit)
            except BaseException:
                self._leave_undecoded(visit)  # another one
                raise
            raise

    def _leave_undecoded(self, visit: object) -> None:
        """Let another thread decode the reply, if that was this visit's business."""
        if self.__dict__.get("_decoder") is visit:
            del self._decoder

    def resolve(self, value: Any) -> None:
        """End with the call's value, unless it was cancelled."""
        self.caller.settled(self)
        with self.caller.lock:
            # Whoever waits, cancels or wants to be called back takes the condition first.
            is_alone = self._made is None and self._state == _PENDING
            if is_alone:
                self._result = value
                self._state = _FINISHED
        if not is_alone:
            self._settle(self.set_result, value)
        if self._on_end:
            self._tell_end()

    def fail(self, error: BaseException, *, is_news: bool = True) -> None:
        """End with an error, unless it was cancelled; ``is_news`` if somebody should hear of it."""
        self.caller.settled(self)
        if is_news and self._unheard is None:
            self._unheard = Unheard(error)  # before callbacks ask for it
        self._settle(self.set_exception, error)
        if self._on_end:
            self._tell_end()

    def _settle(self, settle: Callable[[Any], None], outcome: Any) -> None:
        """End it, and tell all who wait for that."""
        try:
            settle(outcome)
        except InvalidStateError:
            if self.cancelled():
                self._heard()
        except KeyboardInterrupt:
            raise
        except BaseException:  # a callback's, in whatever thread this happens to be
            _log.exception("a callback of %r raised", self)

    def expire(self, end: Callable[[RpcFuture[Any]], None] | None = None) -> None:
        """End it because the call's own deadline has passed, unless it has ended otherwise.

        Args:
            end: Ends it; the caller does if this is left out, and asks the callee why.
        """
        if self.done():
            self.caller.settled(self)  # by a thread that was interrupted before it came to that
        elif self.reply is None or self.reply.withdraw():
            (end or self.caller.expire)(self)
            if self.reply is not None:
                self.reply.on_done = None  # as in ``on_reply``

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
