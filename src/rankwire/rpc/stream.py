"""``Stream``: the items of a generator on another rank, as they come."""

from __future__ import annotations

from collections import deque
from typing import Generic, Self, TypeVar

from rankwire.deadline import AT_ONCE
from rankwire.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    InvalidMessageError,
    PeerLostError,
    RankwireError,
)
from rankwire.finalizers import hand_over
from rankwire.public_dir import PublicDir
from rankwire.rpc.feed import Feed
from rankwire.rpc.messages import decode_items, decode_reply
from rankwire.wire.frames import whole_of

T = TypeVar("T")


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
