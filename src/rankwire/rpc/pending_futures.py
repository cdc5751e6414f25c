"""The futures of an agent's calls that have not ended, and how each of them ends.

The thread that reads the reply ends its future, or the thread that waits in ``result`` at the
deadline. The standby (``check``) finds late futures for which no thread waits, and serving threads
end them, because callbacks may take long. A rank is asked once about all its late calls.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from rankwire import runtime
from rankwire.codec.codec import Codec
from rankwire.deadline import Deadline
from rankwire.errors import (
    CallCancelledError,
    ChannelClosedError,
    DeadlineExceededError,
    PeerLostError,
    RankwireError,
)
from rankwire.rpc.call_inquiries import CallInquiries, Explain
from rankwire.rpc.future import OnEnd, RpcFuture
from rankwire.rpc.messages import decode_reply
from rankwire.rpc.reservations import Allowance
from rankwire.wire.control_messages import ActiveCall
from rankwire.wire.frames import whole_of
from rankwire.wire.receive import Receive

if TYPE_CHECKING:
    from rankwire.rpc.caller import Caller

_CHECK_EVERY = 0.05  # seconds
_ASK_AGAIN = 0.25  # seconds, if a callee did not say whether a function has begun


class PendingFutures:
    """Ends the futures of one agent. Every method is safe from any thread."""

    def __init__(
        self, caller: Caller, codec: Codec, allowance: Allowance, inquiries: CallInquiries
    ) -> None:
        self.pending: dict[int, RpcFuture[Any]] = {}  # by request id
        # Guards whether a future has a condition, and the end of one that has none. A leaf.
        self.lock = runtime.RLock()
        self.drive = caller.drive
        self._caller = caller
        self.port = inquiries.port
        self._codec = codec
        self._allowance = allowance
        self._inquiries = inquiries
        self._clock = inquiries.backend.clock
        self._run_soon = inquiries.server.run_soon
        self._next_check = Deadline(0.0, self._clock)
        self._expiring: set[int] = set()  # late, and their callees are being asked

    def replied(self, future: RpcFuture[Any], receive: Receive) -> None:
        """End a future with the reply that has come."""
        try:
            payload = receive.take()
            if type(payload) is not bytearray:
                payload = whole_of(payload)
        except RankwireError as error:
            if isinstance(error, (PeerLostError, ChannelClosedError)):
                error.may_have_run = True
            self.fail(future, self.port.in_own_ranks(future.dst, error))
            return
        if future.raw:
            future.resolve(payload)
            return
        try:
            value = decode_reply(self._codec, payload, future.dst, future.deadline.limit)
        except RankwireError as error:
            self.fail(future, error)
        else:
            future.resolve(value)

    def fail(self, future: RpcFuture[Any], error: Exception) -> None:
        """End a future with an error."""
        deadline, call = future.deadline, future.call
        # The frames of the thread that read the reply refer to the future, which holds the error.
        error = error.with_traceback(None)
        # The program gave up these calls itself, so their errors are not logged.
        is_news = not (self._caller.closed or isinstance(error, CallCancelledError))
        if isinstance(error, RankwireError):  # a fault plan may raise the program's own
            error = self._caller.explained(
                error, "rpc_async", future.name, future.dst, deadline, call
            )
        future.fail(error, is_news=is_news)

    def settled(self, future: RpcFuture[Any]) -> None:
        """Remove a future that is done."""
        self.pending.pop(future.request_id, None)
        if self._allowance.taken:
            self._allowance.give_back(future.request_id)
        if future.call is not None:
            future.call.ended(future.request_id)

    def expire(self, future: RpcFuture[Any], explain: Explain | None = None) -> None:
        """End a future at the deadline; without ``explain``, ask the callee why it is late."""
        if future.done():
            self.settled(future)  # the thread that ended it may have been interrupted before this
        elif future.reply is None or future.reply.withdraw():
            dst, number, limit = future.dst, future.request_id, future.deadline.limit
            if explain is None:
                explain = self._inquiries.explain_late(dst, [number], limit)
            error = DeadlineExceededError(limit, waiting_for=[dst])
            error.may_have_run = True
            explain(error, number, future.name)
            self.port.cancel(dst, number, expired=True)
            self.fail(future, error)
            if future.reply is not None:
                future.reply.on_done = None  # as in ``RpcFuture.on_reply``

    def check(self) -> bool:
        """End late futures, and read replies no thread waits for; return whether any is pending."""
        if not (self.pending or self._caller.open_streams):
            return False
        self._expire_late()
        self.port.attend(patiently=True)
        return True

    def cancel_of(self, on_end: OnEnd) -> None:
        """Cancel the calls that were started with ``on_end``."""
        for future in list(self.pending.values()):
            if future.calls_at_end(on_end):
                future.disregard()
                future.cancel()

    def fail_all(self) -> None:
        """Fail all futures: this agent or its backend is closed."""
        cause = ChannelClosedError("this agent is closed")
        for future in list(self.pending.values()):
            self.fail(future, cause.copy())

    def _expire_late(self) -> None:
        if not self._next_check.expired:
            return
        self._next_check = Deadline(_CHECK_EVERY, self._clock)
        for feed in list(self._caller.open_streams.values()):
            if feed.is_late:
                self._run_soon(feed.expire)
        late: dict[int, list[RpcFuture[Any]]] = {}
        for number, future in list(self.pending.items()):
            if future.deadline.expired and number not in self._expiring:
                self._expiring.add(number)
                late.setdefault(future.dst, []).append(future)
        for dst, of_one_rank in late.items():
            self._run_soon(partial(self._expire_all, dst, of_one_rank))

    def _expire_all(self, dst: int, futures: list[RpcFuture[Any]]) -> None:
        try:
            late = self._without_extended(dst, futures)
            if late:
                numbers = [future.request_id for future in late]
                limit = max(future.deadline.limit for future in late)
                explain = self._inquiries.explain_late(dst, numbers, limit)
                for future in late:
                    self._run_soon(partial(self.expire, future, explain))
        finally:
            self._expiring.difference_update(future.request_id for future in futures)

    def _without_extended(self, dst: int, futures: list[RpcFuture[Any]]) -> list[RpcFuture[Any]]:
        """Extend the deadlines that count from the function's begin; return the other futures."""
        patient = [each for each in futures if each.total is not None and not each.total.expired]
        if not patient:
            return futures
        numbers = [future.request_id for future in patient]
        answer = self._inquiries.ask_about(dst, numbers)
        extended = [future for future in patient if self._extend(future, answer)]
        return [future for future in futures if future not in extended]

    def _extend(self, future: RpcFuture[Any], answer: dict[int, ActiveCall] | None) -> bool:
        deadline = future.deadline
        if answer is None:
            began = max(0.0, deadline.limit - _ASK_AGAIN)
        elif (call := answer.get(future.request_id)) is None:
            return False  # it has ended there, or did not arrive
        else:
            began = 0.0 if call.workers else call.ran
        if began < deadline.limit:
            future.deadline = deadline.begun(began)
        return began < deadline.limit
