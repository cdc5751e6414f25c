"""``Stream``: the items of a generator on another rank, as they come.

The first request grants the producer a *window* of items and bytes, and the reader grants more when
it has taken half of it. Items that came are kept in the inbox of the call until the reader takes
them; the reply ends the stream, and comes after the last item. A thread that waits for an item
reads the connection itself. While none waits, the standby has the poller read every few ms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Self, TypeVar

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
    from rankwire.rpc.caller import Caller

_ITEM = int(Channel.ITEM)
T = TypeVar("T")


class Feed:
    """What arrives of one stream. For one reader at a time; ``on_reply`` runs in any thread.

    The inbox knows it, so it must not know the ``Stream``, which the program may drop.
    """

    def __init__(
        self,
        caller: Caller,
        dst: int,
        request_id: int,
        name: str,
        call: Call | None,
        total: Deadline,
    ) -> None:
        self.caller = caller
        self.dst = dst
        self.request_id = request_id
        self.name = name
        self.call = call  # the call that was being served when this one was made
        self.total = total  # for all items
        self.taken: deque[Payload] = deque()
        self._awaited: Receive | None = None
        self.reply: Reply  # set once the request is sent

    @property
    def made(self) -> MadeCall:
        """The stream as a call in flight."""
        return MadeCall(self.caller.port, self.dst, self.name, self.reply)

    @property
    def envelope(self) -> Envelope:
        """The envelope of its items."""
        return self.reply.envelope[0], _ITEM, self.request_id

    def on_reply(self, reply: Receive) -> None:
        """Wake the thread that waits for an item: none will come."""
        awaited = self._awaited
        if awaited is not None:
            assert isinstance(reply, Reply)
            reply.inbox.abort(awaited, ChannelClosedError("the stream has ended"))

    def receive(
        self,
        wait: Callable[[Callable[[Deadline], bool], Deadline], bool],
        deadline: Deadline,
    ) -> bool:
        """Wait for the next items; return False if none will come.

        ``wait`` drives the inbox. Raises ``DeadlineExceededError``.
        """
        reply = self.reply
        inbox = reply.inbox
        receive = self._awaited = Receive(self.envelope)
        try:
            # The reply comes after the items: if it was here before the look, so were they.
            if inbox.take_kept(receive, self.taken):
                return True
            is_late = False
            if reply.done:
                inbox.withdraw(receive)
            else:
                inbox.send_held(deadline)
                is_late = not wait(lambda patience: inbox.drive(receive, patience), deadline)
            if is_late and inbox.withdraw(receive):
                raise DeadlineExceededError(deadline.limit, waiting_for=[self.dst])
        except RankwireError:
            raise
        except BaseException:  # an interrupt: a message that came is kept
            try:
                inbox.give_up(receive)
            finally:
                inbox.give_up(receive)
            raise
        finally:
            self._awaited = None
        if receive.payload is None:
            return False
        self.taken.append(receive.payload)
        return True

    async def receive_async(self, deadline: Deadline) -> bool:
        """Wait as ``receive`` does, in an event loop of the program."""
        import asyncio  # the program has imported it

        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not done.done():
                done.set_result(None)

        def arrived(_: Receive) -> None:
            loop.call_soon_threadsafe(settle)

        reply = self.reply
        inbox = reply.inbox
        receive = self._awaited = Receive(self.envelope, arrived)
        try:
            if inbox.take_kept(receive, self.taken):
                return True
            if reply.done or receive.done:
                inbox.withdraw(receive)
            else:
                self.caller.port.attend_to(self.dst, reply)
                await asyncio.wait_for(done, deadline.sleep_limit())
        except TimeoutError:
            if inbox.withdraw(receive):
                error = DeadlineExceededError(deadline.limit, waiting_for=[self.dst])
                raise error from None
        except BaseException:  # the task was cancelled: a message that came is kept
            inbox.give_up(receive)
            raise
        finally:
            self._awaited = None
        if receive.payload is None:
            return False
        self.taken.append(receive.payload)
        return True

    def end(self, *, expired: bool = False) -> None:
        """Take nothing more; cancel the producer unless it has ended. Idempotent."""
        reply = self.reply
        is_cancelled = reply.withdraw()
        reply.inbox.keep_no_more(self.envelope)
        self.taken.clear()
        self.caller.stream_ended(self)
        if is_cancelled:
            self.caller.port.cancel(self.dst, self.request_id, expired=expired)


class Stream(PublicDir, Generic[T]):
    """The items of a stream: iterate over it, with ``for`` or ``async for``.

    Leaving the loop early ends the stream once this object is dropped; ``close``, or using it in a
    ``with`` or ``async with`` block, ends it at once. Then the generator on the other rank gets
    ``GeneratorExit``. For one thread or task at a time.

    Attributes:
        dst: The rank whose function yields the items.
        name: The function.
        count: How many items were taken.
    """

    _SHOWN = ("aclose", "close", "closed", "count", "dst", "name")

    def __init__(self, feed: Feed, window: Window, limit: float) -> None:
        self._feed = feed
        self._window = window
        self._limit = limit
        self.dst = feed.dst
        self.name = feed.name
        self._items: deque[T] = deque()
        self.count = 0
        self.closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if not self._items:
            self._fill()
        self.count += 1
        return self._items.popleft()

    def _fill(self) -> None:
        if self.closed:
            raise StopIteration
        feed = self._feed
        if not feed.taken:
            deadline = self._before_waiting()
            try:
                if not feed.receive(self._wait, deadline):
                    self._finish()
                    raise StopIteration
            except RankwireError as error:
                raise self._failed(error) from error.__cause__
        self._decode_next()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if not self._items:
            await self._fill_async()
        self.count += 1
        return self._items.popleft()

    async def _fill_async(self) -> None:
        if self.closed:
            raise StopAsyncIteration
        feed = self._feed
        if not feed.taken:
            deadline = self._before_waiting()
            try:
                if not await feed.receive_async(deadline):
                    self._finish()
                    raise StopAsyncIteration
            except RankwireError as error:
                raise self._failed(error) from error.__cause__
        self._decode_next()

    def _before_waiting(self) -> Deadline:
        deadline = self._feed.total.sooner(self._limit)
        self.grant(deadline)
        return deadline

    def _decode_next(self) -> None:
        feed = self._feed
        payload = feed.taken.popleft()
        nbytes = len(payload)
        try:
            items = decode_items(feed.caller.codec, whole_of(payload), self.dst)
        except RankwireError as error:
            raise self._failed(error) from error.__cause__
        self._items.extend(items)
        if self._window.take(len(items), nbytes):
            self.grant(AT_ONCE)

    def grant(self, deadline: Deadline) -> None:
        """Grant the producer what the window allows now."""
        window = self._window
        credit = window.next_grant
        if credit == window.granted:
            return
        try:
            self._feed.caller.port.grant(self._feed.reply, credit, deadline)
        except RankwireError:
            return  # the next grant includes it; if the connection has failed, so does the reply
        window.granted = credit

    def _wait(self, drive: Callable[[Deadline], bool], deadline: Deadline) -> bool:
        return self._feed.caller.wait_for_item(self._feed, drive, deadline)

    def _finish(self) -> None:
        """End with the reply, or raise its error."""
        feed = self._feed
        payload = feed.reply.wait(AT_ONCE)
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
        self.closed = True
        self._items.clear()
        self._feed.end(expired=expired)

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
        if not getattr(self, "closed", True):
            hand_over(self._feed.end)

    def __repr__(self) -> str:
        state = "ended" if self.closed else "open"
        return f"<Stream of {self.name!r} on rank {self.dst}, {self.count} items taken, {state}>"
