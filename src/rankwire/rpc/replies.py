"""Encode and send replies: every request gets exactly one, unless its caller is gone.

If the connection does not take a reply now, and the sending thread must not wait, a serving thread
sends it later, in order.

The reply of a function that returned a future is deferred, and occupies no thread. The caller gets
the future's result or error. It gets ``DeadlineExceededError`` if its deadline passes first,
``ChannelClosedError`` if the agent closes, a ``RemoteError`` of ``CancelledError`` if this rank
cancels the future, and nothing if the caller cancels the call or is gone. In all these cases the
future is cancelled; if it cannot be, its result is dropped. The standby checks for deadlines, and
for futures whose callback was interrupted.

Locks: ``Replies._lock`` guards the kept replies; nothing is sent under it. ``DeferredReply._turn``
is tried by threads that answer, and kept once one has answered.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from rankwire import runtime
from rankwire.backends.base import Backend
from rankwire.clock import Clock
from rankwire.codec.codec import Codec
from rankwire.codec.values import PLAIN
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import DeadlineExceededError, MessageTooLargeError, RankwireError
from rankwire.interrupts import call_and_note
from rankwire.mesh.call_port import CallPort
from rankwire.mesh.calls import OWN, IncomingCall
from rankwire.rpc.messages import (
    MAX_REASON,
    Outcome,
    copied,
    encode_failure,
    encode_items,
    encode_reply,
    encode_result,
)
from rankwire.texts import printable
from rankwire.wire.frames import Message

if TYPE_CHECKING:
    from rankwire.rpc.served_call import ServedCall

_log = logging.getLogger("rankwire")

# Seconds that sending a reply may take, also if the caller's deadline is close.
_PATIENCE = 1.0
_SHORT_TEXT = 200
# Kept for one rank that does not read: twice what its calls in flight can need, a refusal or small
# result each. More are dropped, and their callers wait until their deadlines.
_MOST_KEPT_NBYTES = 128 << 20
_OVERHEAD_NBYTES = 1024
_CHECK_EVERY = 0.05  # seconds; a waiting caller cancels by itself at its deadline


class Replies:
    """The replies of an agent. Every method is safe from any thread."""

    def __init__(
        self,
        backend: Backend,
        port: CallPort,
        codec: Codec,
        *,
        names: Callable[[], list[str]],
        run_soon: Callable[[Callable[[], None]], None],
        expect_work: Callable[[], None],
    ) -> None:
        self._port = port
        self._codec = codec
        self._names = names
        self._run_soon = run_soon
        self._rank = backend.rank
        self._clock = backend.clock
        self._max_nbytes = backend.max_message_nbytes
        self.deferred = DeferredReplies(backend.clock, run_soon, expect_work)
        self._lock = runtime.Lock()
        self._kept: dict[Any, deque[tuple[IncomingCall, Message]]] = {}  # by connection
        self._kept_nbytes: Counter[int] = Counter()  # by rank

    # -- encoding ----------------------------------------------------------------------------------

    def value(
        self,
        value: Any,
        *,
        peer: int | None = None,
        copies: bool = False,
        is_patient: bool = True,
    ) -> Message:
        """Return the reply that carries a result, or that says why it cannot be sent.

        With ``copies``, it shares no memory with the result. Unless ``is_patient``, an interrupt
        (Ctrl-C) is raised and not sent.
        """
        message: Message | None = None
        try:
            encoded = self._codec.encode_flat((0, value)) if type(value) in PLAIN else None
            message = encode_result(self._codec, value, peer) if encoded is None else encoded
            if message[1] > self._max_nbytes:
                raise MessageTooLargeError(message[1], self._max_nbytes)
            return copied(message) if copies else message
        except BaseException as error:  # a value's own methods may raise anything
            if message is not None:
                self.discard(message)
            if isinstance(error, KeyboardInterrupt) and not is_patient:
                raise
            return self.error(error)

    def items(self, values: list[Any], peer: int) -> Message:
        """Return items of a stream as one message. Raises what their encoding raises."""
        message = encode_items(self._codec, values, peer)
        if message[1] > self._max_nbytes:
            self.discard(message)
            raise MessageTooLargeError(message[1], self._max_nbytes)
        return message

    def error(self, error: BaseException) -> Message:
        """Return the reply for a function that raised, shortened to fit a message."""
        for longest in (None, _SHORT_TEXT, 0):
            message = encode_failure(self._codec, error, longest)
            if message[1] <= self._max_nbytes:
                break
        return message

    def refusal(self, outcome: Outcome, reason: str) -> Message:
        """Return the reply for a call that will not run."""
        return encode_reply(self._codec, outcome, reason)

    def unwanted(self) -> Message:
        """Return the reply for a call that its caller has given up."""
        return encode_reply(self._codec, Outcome.CANCELLED, "not wanted any more")

    def late(self, detail: str, *, began: bool) -> Message:
        """Return the reply for a call whose deadline has passed."""
        return encode_reply(self._codec, Outcome.EXPIRED, [detail, began])

    def closed(self, *, began: bool) -> Message:
        """Return the reply for a call that ends with this agent."""
        reason = f"the agent of rank {self._rank} is closing"
        return encode_reply(self._codec, Outcome.CLOSED, [reason, began])

    def not_found(self, name: str, reason: str = "") -> Message:
        """Return the reply for a missing function, with the registered names or ``reason``."""
        known = [] if reason else self._names()
        short = reason[:_SHORT_TEXT] or "it is not registered"  # if the names do not fit
        for details in ([name, known, printable(reason, MAX_REASON)], [name, [], short]):
            message = encode_reply(self._codec, Outcome.NOT_FOUND, details)
            if message[1] <= self._max_nbytes:
                break
        return message

    # -- sending -----------------------------------------------------------------------------------

    def send(
        self, call: IncomingCall, message: Message, deadline: Deadline, hold: bool = False
    ) -> None:
        """Send a reply; this may wait for the caller. With ``hold``, it may leave with the next."""
        left = deadline.remaining()
        if left <= 0.0 or not call.is_wanted:
            self.discard(message)
            late = self.late("it ended after its limit", began=True)
            self.send_at_once(call, late if call.is_wanted else self.unwanted())
            return
        if left < _PATIENCE:
            deadline = Deadline(_PATIENCE, self._clock)
        try:
            self._port.reply(call, message, deadline, hold)
        except RankwireError as error:
            self._not_sent(call, message, error)

    def send_at_once(self, call: IncomingCall, message: Message) -> None:
        """Send a reply without waiting, or let a serving thread send it later, in order."""
        with self._lock:
            must_wait = call.origin in self._kept
        try:
            if not must_wait:
                self._port.reply(call, message, AT_ONCE)
                return
        except DeadlineExceededError:
            pass
        except RankwireError as error:
            self._not_sent(call, message, error)
            return
        self._keep(call, message)

    def discard(self, message: Message) -> None:
        """Undo the effects of hooks on a reply that is not sent; log errors of hooks."""
        try:
            self._codec.undo(message)
        except Exception:
            _log.exception("a hook could not undo a reply that was not sent")

    def _not_sent(self, call: IncomingCall, message: Message, error: RankwireError) -> None:
        _log.debug("a reply to rank %d was not sent: %s", call.src, error)
        if not (isinstance(error, DeadlineExceededError) and error.may_have_arrived):
            self.discard(message)

    def _keep(self, call: IncomingCall, message: Message) -> None:
        assert call.origin is not OWN  # calls to oneself never wait
        nbytes = message[1] + _OVERHEAD_NBYTES
        with self._lock:
            is_first = call.origin not in self._kept
            kept = self._kept.setdefault(call.origin, deque())
            has_room = self._kept_nbytes[call.src] + nbytes <= _MOST_KEPT_NBYTES
            if has_room:
                self._kept_nbytes[call.src] += nbytes
                kept.append((call, message))
        if is_first:
            self._run_soon(partial(self._send_kept, call.origin))
        if not has_room:
            _log.debug("a reply to rank %d, which does not read its replies, was dropped", call.src)
            self.discard(message)

    def _send_kept(self, origin: Any) -> None:
        while True:
            with self._lock:
                if not self._kept[origin]:
                    del self._kept[origin]
                    return
                call, message = self._kept[origin].popleft()
                self._kept_nbytes[call.src] -= message[1] + _OVERHEAD_NBYTES
            try:
                self._port.reply(call, message, Deadline(_PATIENCE, self._clock))
            except RankwireError as error:
                self._not_sent(call, message, error)


class DeferredReply:
    """The reply of one call, due when a future is done. Safe from any thread."""

    def __init__(
        self, call: ServedCall, future: Future[Any], unsent: dict[DeferredReply, None]
    ) -> None:
        self._call = call
        self.future = future
        self._unsent = unsent  # those that need checks
        self._turn = runtime.Lock()
        self._is_answered = False

    @property
    def is_due(self) -> bool:
        """Whether the reply should have been sent by now."""
        return self.future.done() or self._call.deadline.expired

    def answer(self) -> None:
        """Send the reply, unless another thread does or has. Repeatable after an interrupt."""
        grip: list[bool] = []
        try:
            call_and_note(grip, self._turn.acquire, False)
            if grip[0] and not self._is_answered:
                self._call.answer_deferred(self.future)
                self._is_answered = True
                self._unsent.pop(self, None)
        finally:
            if grip == [True] and not self._is_answered:
                self._turn.release()

    def give_up(self) -> None:
        """Answer now, and cancel the future."""
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
        run_soon: Callable[[Callable[[], None]], None],
        expect_work: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._run_soon = run_soon
        self._expect_work = expect_work
        self._unsent: dict[DeferredReply, None] = {}
        self._next_check = Deadline(0.0, clock)

    def begin(self, call: ServedCall, future: Future[Any]) -> None:
        """Answer a call when a future is done."""
        reply = DeferredReply(call, future, self._unsent)
        # Before the callback can forget it, and before ``cancelled`` is read: a cancelling thread
        # sets that and then reads ``call.deferred``.
        self._unsent[reply] = None
        call.deferred = reply
        try:
            future.add_done_callback(lambda _: reply.answer())
        except BaseException:
            self._unsent.pop(reply, None)
            raise
        if call.cancelled:
            reply.give_up()
        elif reply in self._unsent:
            self._expect_work()

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
