"""The future of an asynchronous call, which is a ``concurrent.futures.Future`` and awaitable.

Unlike the base class, a thread that waits in ``result()`` reads the connection itself, and
``cancel()`` reaches the callee.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from rankwire import runtime
from rankwire.clock import SafeCondition
from rankwire.deadline import Deadline
from rankwire.finalizers import hand_over
from rankwire.links.inbox import Reply
from rankwire.public_dir import PublicDir
from rankwire.rpc.call import Call, serving
from rankwire.wire.receive import Receive

if TYPE_CHECKING:
    from rankwire.rpc.pending_futures import PendingFutures

_log = logging.getLogger("rankwire")
_UNRETRIEVED = "a call failed, and the program has not retrieved its result: %s"

R = TypeVar("R")
OnEnd: TypeAlias = "Callable[[RpcFuture[Any]], None]"

# The states of the base class.
_PENDING, _FINISHED = "PENDING", "FINISHED"
_DONE = frozenset((_FINISHED, "CANCELLED", "CANCELLED_AND_NOTIFIED"))


class UnretrievedError:
    """An error that the program has not retrieved; only a failed future has one."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def __del__(self) -> None:
        if self.error is not None:
            hand_over(_log.error, _UNRETRIEVED, self.error)


_DISREGARDED = UnretrievedError(None)


class LoggedFuture(PublicDir, Future[R]):
    """A future that logs its error when it is dropped, unless the program has retrieved the error.

    Its attributes are those of the base class (a test compares), except for the condition.
    """

    _state: str = _PENDING
    _result: Any = None
    _exception: BaseException | None = None
    _made: SafeCondition | None = None  # the condition, once a thread needs it
    _unretrieved: UnretrievedError | None = None

    def _mark_retrieved(self) -> None:
        unretrieved = self._unretrieved
        if unretrieved is not None and self.done():
            unretrieved.error = None

    def disregard(self) -> None:
        """Do not log its error, now or later: it is handled elsewhere."""
        unretrieved, self._unretrieved = self._unretrieved, _DISREGARDED
        if unretrieved is not None:
            unretrieved.error = None

    @property
    def failure(self) -> BaseException | None:
        """The error that it ended with, or None; reading it does not count as retrieving it."""
        return self._exception

    def _settle(self, settle: Callable[[Any], None], outcome: Any) -> None:
        try:
            settle(outcome)
        except InvalidStateError:
            if self.cancelled():
                self._mark_retrieved()
        except KeyboardInterrupt:
            raise
        except BaseException:  # raised by a callback
            _log.exception("a callback of %r raised", self)


class RpcFuture(LoggedFuture[R]):
    """The result of ``rpc_async``. Safe from any thread.

    If the call fails and the program neither calls ``result`` or ``exception`` nor awaits the
    future, the error is logged once, when the future is dropped.

    Attributes:
        dst: The rank that was called.
        name: The function that was called.
        deadline: When the call ends at the latest.
    """

    _SHOWN = ("deadline", "dst", "name")

    raw = False  # whether its result is the payload of the reply, which may be an error's
    _on_end: Sequence[OnEnd] = ()
    reply: Reply | None = None  # set once the request is sent
    # If set, ``deadline`` counts from when the function begins, and this from the start.
    total: Deadline | None = None

    def __init__(
        self,
        futures: PendingFutures,
        dst: int,
        request_id: int,
        name: str,
        deadline: Deadline,
        call: Call | None,
    ) -> None:
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []
        self._futures = futures
        self.call = call  # the call that was being served when this one was made
        self.dst = dst
        self.request_id = request_id
        self.name = name
        self.deadline = deadline

    def _attended_condition(self, *, attends: bool = True) -> SafeCondition:
        """Return the base class's condition, and have the reply read as soon as it comes.

        The first use makes it, which takes as long as encoding a call. It has its own lock, because
        ``concurrent.futures.wait`` takes those of many futures at once. Threads that use it do not
        read the connection, so the reply must be read early.
        """
        if self._made is None:
            made = SafeCondition()
            with self._futures.lock:
                if self._made is None:
                    self._made = made
            if attends:
                self.attend()
        return self._made

    # An attribute to type checkers, because ``as_completed`` needs a condition to be assignable.
    _condition: runtime.Condition = property(_attended_condition)  # type: ignore[assignment]

    def result(self, timeout: float | None = None) -> R:
        """Return the value, or raise the call's error.

        After ``timeout`` seconds this raises ``TimeoutError``; the call goes on.
        """
        if self._state != _FINISHED:
            timeout = self._drive(timeout)
        if self._state == _FINISHED and self._exception is None:
            return self._result  # type: ignore[no-any-return]
        try:
            return super().result(timeout)
        finally:
            self._mark_retrieved()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the call's error or None; waits as ``result`` does."""
        try:
            return super().exception(self._drive(timeout))
        finally:
            self._mark_retrieved()

    def done(self) -> bool:
        """Return whether it has a result or an error, or was cancelled."""
        return self._state in _DONE

    def cancel(self) -> bool:
        """Cancel the call and notify the callee; return False if it is already done."""
        try:
            self._attended_condition(attends=False)  # its reply need not be read early
            if not super().cancel():
                return False
            self._take_back()
            if self._on_end:
                self._call_on_end()
        except BaseException:  # an interrupt: withdraw the reply, which no thread would read
            if self.cancelled():
                self._take_back()
            raise
        return True

    def _take_back(self) -> None:
        self._futures.settled(self)
        if self.reply is not None:
            self.reply.withdraw()
            self._futures.port.cancel(self.dst, self.request_id)

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Call ``fn(self)`` when it is done, in the thread that ends it.

        If a function being served made the future, the callback is part of that call: calls that it
        makes have its deadline and its chain.
        """
        super().add_done_callback(fn)

    def when_ended(self, on_end: OnEnd) -> None:
        """Call ``on_end`` at the end, perhaps twice, without ``attend``; it must not raise."""
        self.__dict__.setdefault("_on_end", []).append(on_end)
        if self.done():
            self._call_on_end()

    def calls_at_end(self, on_end: OnEnd) -> bool:
        """Return whether ``on_end`` will be called at the end."""
        return on_end in self._on_end

    def _call_on_end(self) -> None:
        for on_end in list(self._on_end):
            on_end(self)
            # ``on_end`` refers to this future: without this, only the garbage collector frees both.
            with suppress(ValueError):  # another thread has called it too
                self.__dict__["_on_end"].remove(on_end)

    def attend(self) -> None:
        """Have the reply read as soon as it comes, though no thread waits for it."""
        if self.reply is not None and not self.reply.done:
            self._futures.port.attend_to(self.dst, self.reply)

    def _invoke_callbacks(self) -> None:
        token = serving.set(self.call)
        try:
            super()._invoke_callbacks()  # type: ignore[misc]
        finally:
            serving.reset(token)

    def __await__(self) -> Generator[Any, None, R]:
        import asyncio  # here, because importing it takes as long as all of this package

        return asyncio.wrap_future(self).__await__()

    def on_reply(self, receive: Receive) -> None:
        """End the future with its reply or the peer's failure.

        The caller and the reading thread may both call this; hooks have effects, so one decodes.
        """
        visit = object()
        try:
            # One step, which an interrupt cannot separate.
            if self.__dict__.setdefault("_decoder", visit) is visit:
                self._futures.replied(self, receive)
                # Last, because after an interrupt it is called again. It breaks a reference cycle,
                # so that a dropped future is freed without the garbage collector.
                receive.on_done = None
        except BaseException:  # an interrupt: this is called again
            try:
                _leave_undecoded(self, visit)
            except BaseException:
                _leave_undecoded(self, visit)  # after a second interrupt
                raise
            raise

    def resolve(self, value: Any) -> None:
        """End with the call's value, unless it was cancelled."""
        self._futures.settled(self)
        with self._futures.lock:
            # A thread that waits, cancels or adds a callback takes the condition first.
            is_alone = self._made is None and self._state == _PENDING
            if is_alone:
                self._result = value
                self._state = _FINISHED
        if not is_alone:
            self._settle(self.set_result, value)
        if self._on_end:
            self._call_on_end()

    def fail(self, error: BaseException, *, is_news: bool = True) -> None:
        """End with an error, unless it was cancelled; log it if ``is_news`` and never retrieved."""
        self._futures.settled(self)
        if is_news and self._unretrieved is None:
            self._unretrieved = UnretrievedError(error)  # before callbacks retrieve it
        self._settle(self.set_exception, error)
        if self._on_end:
            self._call_on_end()

    def _drive(self, timeout: float | None) -> float | None:
        """Read the connection until the reply is there; return what is left of ``timeout``."""
        if self.done():
            return timeout
        clock = self.deadline.clock
        limit = Deadline(math.inf if timeout is None else timeout, clock)
        if self.reply is not None:
            self._futures.drive(self, self.reply, self.deadline.sooner(limit.remaining()))
            if self.deadline.expired and not self.reply.done:
                self._futures.expire(self)
        if not self.done():  # another thread is about to end it
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


def _leave_undecoded(future: RpcFuture[Any], visit: object) -> None:
    if future.__dict__.get("_decoder") is visit:
        del future.__dict__["_decoder"]
