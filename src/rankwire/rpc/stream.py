"""``Stream``: the items of a generator on another rank, as they come.

The first request grants the producer a *window* of items and bytes, and the reader grants more when
it has taken half of it. Items that came are kept in the inbox of the call until the reader takes
them; the reply ends the stream, and comes after the last item. A thread that waits for an item
reads the connection itself. While none waits, the standby has the poller read every few ms.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, Self, TypeVar

from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    InvalidMessageError,
    PeerLostError,
    RankwireError,
)
from rankwire.finalizers import hand_over
from rankwire.links.inbox import Reply
from rankwire.public_dir import PublicDir
from rankwire.rpc.call import Call, MadeCall
from rankwire.rpc.messages import decode_items, decode_reply
from rankwire.wire.credit import Window
from rankwire.wire.frames import Channel, Envelope, Payload, whole_of
from rankwire.wire.receive import Receive

if TYPE_CHECKING:
    from rankwire.rpc.argument_streams import Offer
    from rankwire.rpc.caller import Caller

_ITEM = int(Channel.ITEM)
T = TypeVar("T")


class StreamLimits(NamedTuple):
    """The limits of a stream, apart from the one in all."""

    timeout: float  # seconds for each item
    unread: float  # seconds that the reader may take nothing
    items: int  # on their way or unread
    nbytes: int


# Of all but the time for an item, which is the agent's timeout.
WINDOW, WINDOW_NBYTES, UNREAD = 64, 64 << 20, 3600.0


class Target(NamedTuple):
    """Which call a stream is."""

    dst: int
    name: str
    request_id: int


class Feed:
    """What arrives of one stream. For one reader at a time; ``on_reply`` runs in any thread.

    The inbox and the caller know it, so it must not know the ``Stream``, which the program may
    drop.

    Attributes:
        total: For all items.
        taken: The messages that were taken out of the inbox.
        reply: The reply that ends the stream; set once the request is sent.
        offer: The iterators among the arguments.
    """

    reply: Reply
    offer: Offer | None = None

    def __init__(
        self,
        caller: Caller,
        target: Target,
        call: Call | None,
        total: Deadline,
        limits: StreamLimits,
    ) -> None:
        self.caller = caller
        self.target = target
        self.call = call  # the call that was being served when this one was made
        self.total = total
        self.taken: deque[Payload] = deque()
        self._limits = limits
        self.window = Window(limits.items, limits.nbytes)
        self._unread = Deadline(limits.unread, total.clock)
        self._awaited: Receive | None = None
        self._until: Deadline | None = None  # of a wait in an event loop, which the standby ends
        self.count = 0  # items that the program has taken
        self._seen = 0  # the same, when the standby looked

    @property
    def made(self) -> MadeCall:
        """The stream as a call in flight."""
        return MadeCall(self.caller.port, self.target.dst, self.target.name, self.reply)

    @property
    def _envelope(self) -> Envelope:
        return self.reply.envelope[0], _ITEM, self.target.request_id

    def on_reply(self, reply: Receive) -> None:
        """Wake the thread that waits for an item: none will come."""
        awaited = self._awaited
        if awaited is not None:
            assert isinstance(reply, Reply)
            reply.inbox.abort(awaited, ChannelClosedError("the stream has ended"))

    # -- credit ------------------------------------------------------------------------------------

    def grant(self, deadline: Deadline) -> None:
        """Grant the producer what the window allows now."""
        window = self.window
        credit = window.next_grant
        if credit == window.granted:
            return
        try:
            self.caller.port.grant(self.reply, credit, deadline)
        except RankwireError:
            return  # the next grant includes it; if the connection has failed, so does the reply
        window.granted = credit

    def begin_wait(self) -> Deadline:
        """Grant more once half of the window is taken; return the deadline of the next item.

        A producer without credit has a reader that has taken all of the window.
        """
        deadline = self.total.sooner(self._limits.timeout)
        self._seen = -1
        if self.window.is_half_taken:
            self.grant(deadline)
        return deadline

    # -- waiting -----------------------------------------------------------------------------------

    def receive(self, deadline: Deadline) -> bool:
        """Wait for the next items; return False if none will come.

        Raises ``DeadlineExceededError``.
        """
        reply = self.reply
        inbox = reply.inbox
        receive = self._awaited = Receive(self._envelope)
        try:
            # The reply comes after the items: if it was here before the look, so were they.
            if inbox.take_kept(receive, self.taken):
                return True
            is_late = False
            if reply.done:
                inbox.withdraw(receive)
            else:
                inbox.send_held(deadline)
                drive = partial(inbox.drive, receive)
                is_late = not self.caller.wait_for_item(self, drive, deadline)
            if is_late and inbox.withdraw(receive):
                raise DeadlineExceededError(deadline.limit, waiting_for=[self.target.dst])
            return receive.move_to(self.taken)
        except RankwireError:
            inbox.withdraw(receive)
            receive.move_to(self.taken)  # if one came just now
            raise
        except BaseException:  # an interrupt: a message that came is kept
            try:
                inbox.give_up(receive)
            finally:
                inbox.give_up(receive)
            raise
        finally:
            self._awaited = None

    async def receive_async(self, deadline: Deadline) -> bool:
        """Wait as ``receive`` does, in an event loop of the program; the standby reads."""
        import asyncio  # the program has imported it

        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not done.done():
                done.set_result(None)

        def arrived(_: Receive) -> None:
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(settle)

        reply = self.reply
        inbox = reply.inbox
        receive = self._awaited = Receive(self._envelope, arrived)
        try:
            if inbox.take_kept(receive, self.taken):
                return True
            if reply.done or receive.done:
                inbox.withdraw(receive)
            else:
                self._until = deadline
                self.caller.port.attend_to(self.target.dst, reply)
                await done
            if type(receive.error) is DeadlineExceededError:
                raise receive.error
            return receive.move_to(self.taken)
        except RankwireError:
            raise
        except BaseException:  # the task was cancelled: a message that came is kept
            inbox.give_up(receive)
            raise
        finally:
            self._awaited = self._until = None

    @property
    def is_late(self) -> bool:
        """Whether ``expire`` has to end a wait in an event loop, or the stream."""
        until = self._until
        if until is not None:
            return until.expired
        if self._awaited is not None or self.reply.done:
            return False
        if self.count != self._seen:
            self._seen = self.count
            self._unread = Deadline(self._limits.unread, self.total.clock)
        return self._unread.expired

    def expire(self) -> None:
        """End a late wait in an event loop, or a stream that is not read."""
        until, awaited = self._until, self._awaited
        if not self.is_late:  # an item has come since
            return
        if awaited is None:
            error = DeadlineExceededError(self._unread.limit, detail="the reader took no item")
            error.is_explained = True
            self.made.give_up(error)
        elif until is not None:
            error = DeadlineExceededError(until.limit, waiting_for=[self.target.dst])
            self.reply.inbox.abort(awaited, error)

    def end(self, *, expired: bool = False) -> None:
        """Take nothing more; cancel the producer unless it has ended. Idempotent."""
        reply: Reply | None = getattr(self, "reply", None)  # the request may have failed
        if reply is not None:
            reply.withdraw()
            reply.inbox.keep_no_more(self._envelope)
        self.taken.clear()
        self.caller.stream_ended(self)
        if reply is not None and not reply.done:
            self.caller.port.cancel(self.target.dst, self.target.request_id, expired=expired)


class Stream(PublicDir, Generic[T]):
    """The items of a stream: iterate over it, with ``for`` or ``async for``.

    Leaving the loop early ends the stream once this object is dropped; ``close``, or using it in a
    ``with`` or ``async with`` block, ends it at once. Then the generator on the other rank gets
    ``GeneratorExit``. For one thread or task at a time.

    Attributes:
        dst: The rank whose function yields the items.
        name: The function.
        closed: Whether the stream has ended.
    """

    closed = True  # until it is made
    _SHOWN = ("aclose", "close", "closed", "count", "dst", "name")

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.dst = feed.target.dst
        self.name = feed.target.name
        self._items: deque[T] = deque()
        self._nbytes = 0  # of the messages that were decoded
        self.closed = False

    @property
    def count(self) -> int:
        """How many items were taken."""
        return self._feed.count

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if not self._items:
            feed = self._next_of_feed()
            try:
                if self.closed or not (feed.taken or feed.receive(feed.begin_wait())):
                    self._finish()
                    raise StopIteration
            except RankwireError as error:
                raise self._failed(error) from error.__cause__
            self._decode_next()
        self._feed.count += 1
        return self._items.popleft()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if not self._items:
            feed = self._next_of_feed()
            try:
                if self.closed or not (feed.taken or await feed.receive_async(feed.begin_wait())):
                    self._finish()
                    raise StopAsyncIteration
            except RankwireError as error:
                raise self._failed(error) from error.__cause__
            self._decode_next()
        self._feed.count += 1
        return self._items.popleft()

    def _next_of_feed(self) -> Feed:
        """Count what the program has taken; grant more once that is half of the window."""
        feed = self._feed
        window = feed.window
        window.items = feed.count
        window.nbytes = self._nbytes
        if feed.taken and window.is_half_taken:
            feed.grant(AT_ONCE)
        return feed

    def _decode_next(self) -> None:
        feed = self._feed
        taken = feed.taken
        nbytes = len(taken[0])
        try:
            decoded = decode_items(feed.caller.codec, whole_of(taken[0]), self.dst)
        except RankwireError as error:
            raise self._failed(error) from error.__cause__
        items = deque(decoded)
        # Without a call, so that no interrupt comes between.
        self._items = items
        del taken[0]
        self._nbytes += nbytes

    def _finish(self) -> None:
        """End with the reply, or raise its error."""
        if self.closed:
            return
        feed = self._feed
        payload = feed.reply.outcome()
        count = decode_reply(feed.caller.codec, payload, self.dst, feed.total.limit)
        if count != self.count:
            raise InvalidMessageError(f"the producer has sent {count} items, {self.count} came")
        self.close()

    def _failed(self, error: RankwireError) -> RankwireError:
        if isinstance(error, (DeadlineExceededError, PeerLostError, ChannelClosedError)):
            error.may_have_run = True
        feed = self._feed
        try:
            return feed.caller.stream_failed(feed, error, self.count)
        finally:  # after the callee was asked why it is late
            self._end(expired=isinstance(error, DeadlineExceededError))

    def _end(self, *, expired: bool = False) -> None:
        self._items = deque()
        self._feed.end(expired=expired)
        self.closed = True  # last: an interrupted end is repeated

    def close(self) -> None:
        """End the stream: the generator gets ``GeneratorExit`` at its ``yield``. Idempotent."""
        if not self.closed:
            self._end()

    async def aclose(self) -> None:
        """End the stream as ``close`` does."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self.closed:
            hand_over(self._feed.end)

    def __repr__(self) -> str:
        state = "ended" if self.closed else "open"
        return f"<Stream of {self.name!r} on rank {self.dst}, {self.count} items taken, {state}>"
