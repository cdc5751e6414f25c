"""Encode and send replies: every request gets exactly one, unless its caller is gone.

If the connection does not take a reply now, and the sending thread must not wait, a serving thread
sends it later, in order. Lock: ``_lock`` guards the kept replies; nothing is sent under it.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from rankwire import runtime
from rankwire.backends.base import Backend
from rankwire.codec.codec import Codec
from rankwire.codec.values import PLAIN
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import DeadlineExceededError, MessageTooLargeError, RankwireError
from rankwire.mesh.calls import OWN, CallPort, IncomingCall
from rankwire.rpc.messages import (
    MAX_REASON,
    Outcome,
    copied,
    encode_failure,
    encode_reply,
    encode_result,
)
from rankwire.texts import printable
from rankwire.wire.frames import Message

_log = logging.getLogger("rankwire")

# Seconds that sending a reply may take, also if the caller's deadline is close.
_PATIENCE = 1.0
_SHORT_TEXT = 200
# Kept for one rank that does not read: twice what its calls in flight can need, a refusal or small
# result each. More are dropped, and their callers wait until their deadlines.
_MOST_KEPT_NBYTES = 128 << 20
_OVERHEAD_NBYTES = 1024


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
    ) -> None:
        self._port = port
        self._codec = codec
        self._names = names
        self._run_soon = run_soon
        self._rank = backend.rank
        self._clock = backend.clock
        self._max_nbytes = backend.max_message_nbytes
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
        """Return the reply that carries a result, or the one that says why it cannot be sent.

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
        """Return the reply for a call whose caller has given up."""
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
        self, call: IncomingCall, message: Message, deadline: Deadline | None, hold: bool = False
    ) -> None:
        """Send a reply; this may wait for the caller.

        The ``deadline`` of a reply that was kept is None. With ``hold``, it may be sent together
        with replies that follow at once.
        """
        if deadline is None or (left := deadline.remaining()) < _PATIENCE:
            if deadline is not None and left <= 0.0:  # so has the caller's
                self.discard(message)
                self.send_at_once(call, self.late("it ended after its limit", began=True))
                return
            deadline = Deadline(_PATIENCE, self._clock)
        try:
            self._port.reply(call, message, deadline, hold)
        except RankwireError as error:
            self._not_sent(call, message, error)

    def send_at_once(self, call: IncomingCall, message: Message) -> None:
        """Send a reply from a thread that must not wait for one caller: poller or event loop.

        If the connection does not take it now, a serving thread sends it later, in order.
        """
        with self._lock:
            must_wait = call.origin in self._kept
            is_kept = must_wait and self._keep(call, message)
        if must_wait:
            if not is_kept:
                self._drop(call, message)
            return
        try:
            self._port.reply(call, message, AT_ONCE)
        except DeadlineExceededError:
            with self._lock:  # another thread may have kept a reply meanwhile
                is_first = call.origin not in self._kept
                is_kept = self._keep(call, message)
            if is_first:
                self._run_soon(lambda: self._send_kept(call.origin))
            if not is_kept:
                self._drop(call, message)
        except RankwireError as error:
            self._not_sent(call, message, error)

    def discard(self, message: Message) -> None:
        """Undo the effects of hooks on a reply that is not sent. Does not raise."""
        try:
            self._codec.undo(message)
        except Exception:
            _log.exception("a hook could not undo a reply that was not sent")

    def _not_sent(self, call: IncomingCall, message: Message, error: RankwireError) -> None:
        _log.debug("a reply to rank %d was not sent: %s", call.src, error)
        if not (isinstance(error, DeadlineExceededError) and error.may_have_arrived):
            self.discard(message)

    def _drop(self, call: IncomingCall, message: Message) -> None:
        _log.debug(
            "a reply to rank %d was dropped, because that rank does not read its replies", call.src
        )
        self.discard(message)

    def _keep(self, call: IncomingCall, message: Message) -> bool:
        """Keep a reply for later; return False if too many are kept for its caller. Lock held."""
        assert call.origin is not OWN  # calls to oneself never wait
        kept = self._kept.setdefault(call.origin, deque())
        nbytes = message[1] + _OVERHEAD_NBYTES
        if self._kept_nbytes[call.src] + nbytes > _MOST_KEPT_NBYTES:
            return False
        self._kept_nbytes[call.src] += nbytes
        kept.append((call, message))
        return True

    def _send_kept(self, origin: Any) -> None:
        while True:
            with self._lock:
                if not self._kept[origin]:
                    del self._kept[origin]
                    return
                call, message = self._kept[origin].popleft()
                self._kept_nbytes[call.src] -= message[1] + _OVERHEAD_NBYTES
            self.send(call, message, None)
