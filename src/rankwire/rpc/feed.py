"""What arrives of one stream, and what its reader grants and waits for.

The first request grants the producer a *window* of items and bytes, and the reader grants more when
it has taken half of it. Items that came are kept in the inbox of the call until the reader takes
them; the reply ends the stream, and comes after the last item. A thread that waits for an item
reads the connection itself. While none waits, the standby has the poller read every few ms.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import ChannelClosedError, DeadlineExceededError, RankwireError
from rankwire.links.inbox import Reply
from rankwire.rpc.call import Call, MadeCall
from rankwire.wire.credit import Window
from rankwire.wire.frames import Channel, Envelope, Payload
from rankwire.wire.receive import Receive

if TYPE_CHECKING:
    from rankwire.rpc.argument_streams import Offer
    from rankwire.rpc.caller import Caller

_ITEM = int(Channel.ITEM)


class StreamLimits(NamedTuple):
    """The limits of a stream, apart from the one in all."""

    timeout: float  # seconds for each item
    unread: float  # seconds that the reader may take nothing
    items: int  # on their way or unread
    nbytes: int


# Of all but the time for an item, which is the agent's timeout.
WINDOW, WINDOW_NBYTES, UNREAD = 64, 64 << 20, 3600.0


class UnreadLimit:
    """Ends when the program has taken no item for a time; the standby looks."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._deadline = Deadline(seconds, clock)
        self._count = 0  # at the last look

    @property
    def seconds(self) -> float:
        """The limit."""
        return self._deadline.limit

    def is_over(self, count: int) -> bool:
        """Return whether it has ended, if so many items were taken until now."""
        if count != self._count:
            self._count = count
            self._deadline = Deadline(self._deadline.limit, self._deadline.clock)
        return self._deadline.expired

    def renew(self) -> None:
        """Begin again at the next look."""
        self._count = -1


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
        self._unread = UnreadLimit(limits.unread, total.clock)
        # What is awaited, and until when, if that is in an event loop: the standby ends the wait.
        self._wait: tuple[Receive | None, Deadline | None] = (None, None)
        self.count = 0  # items that the program has taken

    @property
    def made(self) -> MadeCall:
        """The stream as a call in flight."""
        return MadeCall(self.caller.port, self.target.dst, self.target.name, self.reply)

    @property
    def _envelope(self) -> Envelope:
        return self.reply.envelope[0], _ITEM, self.target.request_id

    def on_reply(self, reply: Receive) -> None:
        """Wake the thread that waits for an item: none will come."""
        awaited, _ = self._wait
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
        self._unread.renew()
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
        receive = Receive(self._envelope)
        self._wait = receive, None
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
            self._wait = None, None

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
        receive = Receive(self._envelope, arrived)
        self._wait = receive, None
        try:
            if inbox.take_kept(receive, self.taken):
                return True
            if reply.done or receive.done:
                inbox.withdraw(receive)
            else:
                self._wait = receive, deadline
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
            self._wait = None, None

    @property
    def is_late(self) -> bool:
        """Whether ``expire`` has to end a wait in an event loop, or the stream."""
        awaited, until = self._wait
        if awaited is not None:
            return until is not None and until.expired
        return not self.reply.done and self._unread.is_over(self.count)

    def expire(self) -> None:
        """End a late wait in an event loop, or a stream that is not read."""
        awaited, until = self._wait
        if not self.is_late:  # an item has come since
            return
        if awaited is None:
            error = DeadlineExceededError(self._unread.seconds, detail="the reader took no item")
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
