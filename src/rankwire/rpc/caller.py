"""Send a request, wait for its reply, and give calls up.

The caller gives a call up when its deadline passes, its thread is interrupted, or the call that the
function serves is cancelled. It notifies the callee each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rankwire import runtime
from rankwire.backends.arguments import check_rank
from rankwire.backends.base import Backend
from rankwire.codec.codec import Codec
from rankwire.deadline import Deadline
from rankwire.errors import (
    CallCancelledError,
    ChannelClosedError,
    CircularCallError,
    DeadlineExceededError,
    OverloadedError,
    PeerLostError,
    RankwireError,
    RemoteError,
    UnsupportedTypeError,
)
from rankwire.links.inbox import Reply
from rankwire.mesh.call_port import CallPort
from rankwire.rpc.argument_streams import Offer, OfferedItems
from rankwire.rpc.call import Call, MadeCall, describe_chain, serving
from rankwire.rpc.call_cycles import NestedWaits
from rankwire.rpc.call_inquiries import CallInquiries
from rankwire.rpc.feed import Feed, StreamLimits, Target
from rankwire.rpc.future import OnEnd, RpcFuture
from rankwire.rpc.messages import Chain, decode_reply, encode_request
from rankwire.rpc.pending_futures import PendingFutures
from rankwire.rpc.reservations import RESERVE, SMALL_NBYTES, UNRESERVED_NBYTES, Allowance
from rankwire.rpc.stream import Stream
from rankwire.wire.frames import Message

if TYPE_CHECKING:
    from rankwire.rpc.server import Server


class Caller:
    """Makes calls. Every method is safe from any thread."""

    def __init__(
        self, backend: Backend, port: CallPort, codec: Codec, server: Server, *, max_in_flight: int
    ) -> None:
        self._backend = backend
        self.port = port
        self.codec = codec
        self._max_nbytes = backend.max_message_nbytes
        self._max_in_flight = max_in_flight
        self.closed = False  # set by the agent
        self.ended = False  # by itself, as its port did; set by the agent
        self._allowance = Allowance(UNRESERVED_NBYTES)
        # The random upper half distinguishes the calls of this agent from those of any other, also
        # of an agent that this rank had before.
        self._ids = itertools.count(runtime.randbits(31) << 32)
        self._server = server
        self._inquiries = CallInquiries(backend, port, server)
        self._nested_waits = NestedWaits(server, self._inquiries.ask)
        self.open_streams: dict[int, Feed] = {}  # by request id
        self.offered = OfferedItems(server)
        self.futures = PendingFutures(self, codec, self._allowance, self._inquiries)

    def activity(self) -> tuple[int, int]:
        """Return how many calls wait for a reply, and a number that every call increases."""
        return max(len(self.futures.pending), self.port.in_flight()), next(self._ids)

    # -- calls -------------------------------------------------------------------------------------

    def call(
        self,
        dst: int | str,
        name: str,
        deadline: Deadline,
        call: Call | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a function and return its result; ``call`` is the call being served, if any."""
        try:
            if type(dst) is not int or not 0 <= dst < self._backend.world_size:
                dst = check_rank(dst, self._backend.world_size, self._backend.roles)
            chain: Chain = [] if call is None else call.chain_of_nested(self._backend.rank)
            left, max_nbytes = deadline.limit, self._max_nbytes
            message = encode_request(self.codec, name, left, chain, args, kwargs, dst, max_nbytes)
            reply = self._send(dst, next(self._ids), name, deadline, call, args, kwargs, message)
            try:
                if call is not None:
                    made = MadeCall(self.port, dst, name, reply)
                    call.began(made)
                    self._nested_waits.drive(call, made, deadline, patient=True)
                payload = reply.wait(deadline)
            except (CircularCallError, CallCancelledError):
                raise  # the thread that gave it up has notified the callee
            except RankwireError as error:
                self._give_up(reply, error, dst, name)
                raise
            except BaseException:
                try:
                    self._take_back(reply, dst)
                finally:  # safe to repeat
                    self._take_back(reply, dst)  # a second interrupt may have ended the first
                raise
            finally:
                if call is not None:
                    call.ended(reply.request_id)
                if self._allowance.taken:
                    self._allowance.give_back(reply.request_id)
            return decode_reply(self.codec, payload, dst, deadline.limit)
        except RankwireError as error:
            if (offer := self._offer(error, dst, args, kwargs)) is not None:
                with offer:
                    return self.call(offer.dst, name, deadline, call, offer.args, offer.kwargs)
            raise self.explained(error, "rpc_sync", name, dst, deadline, call) from error.__cause__

    def start(
        self,
        dst: int | str,
        name: str,
        deadline: Deadline,
        call: Call | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        total: Deadline | None = None,
        on_end: OnEnd | None = None,
        *,
        raw: bool = False,
    ) -> RpcFuture[Any]:
        """Start a call and return its future; raises only if an argument is invalid.

        ``total`` is as in ``RpcFuture``; ``on_end`` is called as soon as it ends, perhaps twice.
        With ``raw``, the future's result is the payload of the reply.
        """
        try:
            if type(dst) is not int or not 0 <= dst < self._backend.world_size:
                dst = check_rank(dst, self._backend.world_size, self._backend.roles)
            message = self._encode(dst, name, (total or deadline).limit, call, args, kwargs)
        except RankwireError as error:
            if (offer := self._offer(error, dst, args, kwargs)) is not None:
                return self._start_with(offer, name, deadline, call, total, on_end)
            raise self.explained(error, "rpc_async", name, dst, deadline, call) from error.__cause__
        future: RpcFuture[Any] = RpcFuture(self.futures, dst, next(self._ids), name, deadline, call)
        if raw:
            future.raw = True
        request_id = future.request_id
        future.total = total
        if on_end is not None:
            future.when_ended(on_end)
        try:
            reply = self._send(dst, request_id, name, deadline, call, args, kwargs, message, future)
            future.reply = reply
            if reply.done:
                future.on_reply(reply)
            elif call is not None:
                call.began(MadeCall(self.port, dst, name, reply))
                if future.done():  # the reply came just now
                    call.ended(request_id)
            if on_end is not None:
                future.attend()
        except Exception as error:
            if not future.done():  # such as a peer that dies while the request is being sent
                self.futures.fail(future, error)
        except BaseException:  # an interrupt: the program does not get the future
            self.futures.settled(future)
            if future.reply is not None:
                future.reply.withdraw()
            self.port.cancel(dst, request_id)
            raise
        return future

    def _offer(
        self, error: RankwireError, dst: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Offer | None:
        """Offer the iterators among arguments that cannot be encoded; None if there are none."""
        is_about_types = isinstance(error, UnsupportedTypeError)  # then ``dst`` is a rank
        return self.offered.offer(dst, args, kwargs) if is_about_types else None

    def _start_with(
        self,
        offer: Offer,
        name: str,
        deadline: Deadline,
        call: Call | None,
        total: Deadline | None,
        on_end: OnEnd | None,
    ) -> RpcFuture[Any]:
        try:
            future = self.start(
                offer.dst, name, deadline, call, offer.args, offer.kwargs, total, on_end
            )
            future.when_ended(offer.end)
        except BaseException:
            offer.end()
            raise
        return future

    def stream(
        self,
        dst: int,
        name: str,
        limits: StreamLimits,
        total: Deadline,
        call: Call | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Stream[Any]:
        """Request a stream, all of it within ``total``."""
        request_id = next(self._ids)
        feed = Feed(self, Target(dst, name.lstrip("\0"), request_id), call, total, limits)
        first = total.sooner(limits.timeout)
        try:
            try:
                message = self._encode(dst, name, total.limit, call, args, kwargs)
            except UnsupportedTypeError:
                feed.offer = self.offered.offer(dst, args, kwargs)
                if feed.offer is None:
                    raise
                args, kwargs = feed.offer.args, feed.offer.kwargs
                message = self._encode(dst, name, total.limit, call, args, kwargs)
            feed.reply = self._send(
                dst, request_id, name, first, call, args, kwargs, message, None, feed
            )
            self.open_streams[request_id] = feed
            self._server.pool.expect_work()  # the standby looks after late and unread streams
            if call is not None:
                call.began(feed.made)
            feed.grant(first)
            return Stream(feed)
        except RankwireError as error:
            feed.end()
            if getattr(error, "may_have_run", False):  # the request may arrive
                self.port.cancel(dst, request_id)
            raise self.explained(
                error, "stream", feed.target.name, dst, first, call
            ) from error.__cause__
        except BaseException:  # an interrupt: the program does not get the stream
            try:
                feed.end()
            finally:  # safe to repeat
                feed.end()
                self.port.cancel(dst, request_id)
            raise

    def stream_ended(self, feed: Feed) -> None:
        """Forget a stream. Idempotent."""
        self.open_streams.pop(feed.target.request_id, None)
        if feed.offer is not None:
            feed.offer.end()
        self._allowance.give_back(feed.target.request_id)
        if feed.call is not None:
            feed.call.ended(feed.target.request_id)

    def wait_for_item(
        self, feed: Feed, drive: Callable[[Deadline], bool], deadline: Deadline
    ) -> bool:
        """Wait as ``drive`` does; return False if the deadline passes first."""
        call = serving.get()
        if call is None:
            return drive(deadline)
        self.before_waiting(call)
        return self._nested_waits.drive(call, feed.made, deadline, patient=True, drive=drive)

    def stream_failed(self, feed: Feed, error: RankwireError, count: int) -> RankwireError:
        """Return an error of a stream with what is known of it."""
        deadline = feed.total
        if isinstance(error, DeadlineExceededError) and not error.is_explained:
            deadline = Deadline(error.limit, deadline.clock)
            number = feed.target.request_id
            explain = self._inquiries.explain_late(feed.target.dst, [number], error.limit)
            explain(error, number, feed.target.name)
        error = self.explained(
            error, "stream", feed.target.name, feed.target.dst, deadline, feed.call
        )
        error.op = f"{error.op} after {count} items"
        return error

    def _encode(
        self,
        dst: int,
        name: str,
        left: float,
        call: Call | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Message:
        chain: Chain = [] if call is None else call.chain_of_nested(self._backend.rank)
        max_nbytes = self._max_nbytes
        return encode_request(self.codec, name, left, chain, args, kwargs, dst, max_nbytes)

    def _send(
        self,
        dst: int,
        request_id: int,
        name: str,
        deadline: Deadline,
        call: Call | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        message: Message,
        future: RpcFuture[Any] | None = None,
        feed: Feed | None = None,
    ) -> Reply:
        # The future is registered before the reply may come. A request that had to wait is encoded
        # again, because it states how much time is left.
        if self.closed or call is not None:
            self._check_may_send(call, message)
        waiting = future if feed is None else feed
        on_reply = None if waiting is None else waiting.on_reply
        total = (None if waiting is None else waiting.total) or deadline
        has_space = message[1] <= SMALL_NBYTES
        while True:
            if future is not None:
                self.futures.pending[request_id] = future
                self._server.pool.expect_work()
            if not has_space:
                has_space = True
                if self._reserve(dst, request_id, message, deadline, call):
                    left = total.remaining()
                    message = self._encode(dst, name, left, call, args, kwargs)
            try:
                reply = self.port.call(
                    dst,
                    request_id,
                    message,
                    deadline,
                    on_reply,
                    waiting is not None,
                    self._max_in_flight,
                    None if feed is None else feed.window.credit,
                )
            except BaseException as error:
                self._not_sent(dst, request_id, message, error)
                raise
            if reply is not None:
                return reply
            self.codec.undo(message)
            self.futures.pending.pop(request_id, None)
            limit = self._max_in_flight
            if not self._nested_waits.wait_for_room(call, self.port, dst, name, limit, deadline):
                raise OverloadedError(f"{limit} calls to rank {dst} are in flight (max_in_flight)")
            left = total.remaining()
            message = self._encode(dst, name, left, call, args, kwargs)

    def _not_sent(self, dst: int, request_id: int, message: Message, error: BaseException) -> None:
        if message[1] > SMALL_NBYTES:
            self._cancel_reservation(dst, request_id)
        if isinstance(error, Exception) and not getattr(error, "may_have_run", False):
            self.codec.undo(message)

    def _check_may_send(self, call: Call | None, message: Message) -> None:
        try:
            if self.closed:
                raise ChannelClosedError("this agent is closed")
            if call is not None:
                self.before_waiting(call)
        except BaseException:
            self.codec.undo(message)
            raise

    def _give_up(self, reply: Reply, error: RankwireError, dst: int, name: str) -> None:
        try:
            if isinstance(error, (DeadlineExceededError, PeerLostError, ChannelClosedError)):
                error.may_have_run = True
            if isinstance(error, DeadlineExceededError):
                number = reply.request_id
                self._inquiries.explain_late(dst, [number], error.limit)(error, number, name)
        finally:  # the callee may not answer, and an interrupt may come
            expired = isinstance(error, DeadlineExceededError)
            self.port.cancel(dst, reply.request_id, expired=expired)

    def _take_back(self, reply: Reply, dst: int) -> None:
        reply.withdraw()
        self.port.cancel(dst, reply.request_id)

    # -- reservations for large calls --------------------------------------------------------------

    def _reserve(
        self, dst: int, request_id: int, message: Message, deadline: Deadline, call: Call | None
    ) -> bool:
        """Reserve space at the callee; if that took time, undo the message and return True."""
        nbytes = message[1]
        is_nested = call is not None and bool(call.chain_of_nested(self._backend.rank))
        if is_nested or self._allowance.take(dst, request_id, nbytes):
            return False
        self.codec.undo(message)
        try:
            self._ask_for_space(dst, request_id, nbytes, deadline)
        except BaseException as error:
            if isinstance(error, DeadlineExceededError):
                error.explain(
                    f"it had no space to queue another {nbytes} bytes of calls for its workers "
                    "(max_queued_nbytes)"
                )
            self._cancel_reservation(dst, request_id)
            raise
        return True

    def _ask_for_space(self, dst: int, request_id: int, nbytes: int, deadline: Deadline) -> None:
        left, arguments = deadline.remaining(), (request_id, nbytes)
        message = encode_request(self.codec, RESERVE, left, [], arguments, {})
        reply = self.port.call(dst, next(self._ids), message, deadline)
        assert reply is not None  # such requests are not limited
        try:
            decode_reply(self.codec, reply.wait(deadline), dst, deadline.limit)
        except RankwireError:
            raise
        except BaseException:  # an interrupt, perhaps before ``wait`` began
            reply.withdraw()
            raise

    def _cancel_reservation(self, dst: int, request_id: int) -> None:
        self._allowance.give_back(request_id)
        self.port.cancel(dst, request_id)

    # -- calls of functions that are being served --------------------------------------------------

    def before_waiting(self, call: Call) -> None:
        """Let another thread poll; raise if the call is cancelled, in which this thread waits."""
        if call.cancelled:
            raise call.cancellation()
        if call.worker is not None:
            self._server.pool.about_to_block(call.worker)  # another thread polls meanwhile

    def wait_for_any(
        self,
        futures: Iterable[RpcFuture[Any]],
        drive: Callable[[Deadline], bool],
        deadline: Deadline,
    ) -> bool:
        """Wait as ``drive`` does, for the end of any of the futures; False if that is late."""
        call = serving.get()
        if call is None:
            return drive(deadline)
        self.before_waiting(call)
        pending = ((each, each.reply) for each in futures if not each.done())
        made = [MadeCall(self.port, each.dst, each.name, reply) for each, reply in pending if reply]
        if not made:
            return drive(deadline)
        first, *others = made
        return self._nested_waits.drive(
            call, first, deadline, patient=True, drive=drive, others=others
        )

    def drive(self, future: RpcFuture[Any], reply: Reply, deadline: Deadline) -> bool:
        """Wait for the reply of a future; return False if the deadline passes first."""
        call = serving.get()
        if call is None:
            return reply.drive(deadline)
        self.before_waiting(call)
        # A function that waits for less than the call's deadline can go on without the reply.
        patient = deadline is future.deadline
        made = MadeCall(self.port, future.dst, future.name, reply)
        return self._nested_waits.drive(call, made, deadline, patient=patient)

    def explained(
        self,
        error: RankwireError,
        op: str,
        name: str,
        dst: int | str,
        deadline: Deadline,
        call: Call | None,
    ) -> RankwireError:
        """Add to an error the function that was called, and how the calls are nested."""
        if call is not None and isinstance(error, DeadlineExceededError):
            chain = [*call.chain_of_nested(self._backend.rank), dst, name]
            error.explain(f"the calls are {describe_chain(chain)}")
        elif isinstance(error, RemoteError):
            error = self._server.registry.errors.typed(error)
        peer = None if isinstance(dst, str) else dst  # the name of no rank
        return self._backend.explained(error, f"{op} {name!r}", deadline, peer)
