"""Receive handles: what a receiver holds until its message has arrived and was read.

``PeerReceive`` receives from one peer, ``FirstReceive`` from the first of several that sends a
message. A large message may arrive while still in the sender's memory; ``take`` releases that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from rankwire import runtime
from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError, PeerLostError, RankwireError, SizeMismatchError
from rankwire.links.inbox import ALONE, Inbox
from rankwire.links.lender import Meanwhile
from rankwire.override import override
from rankwire.transports.byte_stream import ByteStream
from rankwire.transports.poller import Waiter
from rankwire.wire.frames import Envelope, Payload
from rankwire.wire.receive import Destination, MessageWithdrawnError, PostedReceive, Receive

T = TypeVar("T")


def drop(payload: Payload) -> None:
    """Release the sender of a message that was not read."""
    if not isinstance(payload, bytearray):
        with suppress(MessageWithdrawnError):
            payload.release()


class ReceiveHandle(ABC):
    """A message to receive, perhaps in a given place. Used by one thread at a time.

    Nothing happens before ``post`` or ``take``. After them it must be taken or given up.

    Attributes:
        index: The index of its sender among several, once it has arrived.
        explain: As for ``SendHandle``.
    """

    __slots__ = ("_result", "explain", "index")

    def __init__(self) -> None:
        self.index = 0
        self.explain: Callable[[RankwireError], RankwireError] | None = None
        self._result: list[Any] = []  # of a message whose release may have to be repeated

    @abstractmethod
    def post(self) -> None:
        """Post the receive, so that the message can arrive in its place. Does not wait."""

    @abstractmethod
    def give_up(self) -> None:
        """Leave the message to the next receive; its place is free on return. Idempotent."""

    @abstractmethod
    def _wait(self, deadline: Deadline) -> Payload:
        """Return the message; raises as ``take`` does."""

    def take(self, deadline: Deadline, read: Callable[[Payload], T]) -> T:
        """Wait for the message and return ``read(message)``. Safe to repeat after an interrupt.

        ``read`` may be called again until the sender has been released. After a
        ``DeadlineExceededError`` the receive stays posted. After a ``MessageWithdrawnError``, post
        another one for the next message. After other errors nothing is written to its place any
        more.
        """
        try:
            payload = self._wait(deadline)
            if isinstance(payload, bytearray):
                return read(payload)
            result = self._result
            try:
                if not result:
                    result[:] = (read(payload),)
            except MessageWithdrawnError:
                raise
            except RankwireError:
                payload.release()  # an unreadable message is dropped
                raise
            payload.release()
            return result[0]  # type: ignore[no-any-return]
        except RankwireError as error:
            raise self._explained(error) from error.__cause__

    def take_now(self, deadline: Deadline, read: Callable[[Payload], T]) -> T:
        """Take it as ``take`` does, but once: give it up if it is late or cannot be read."""
        try:
            try:
                payload = self._wait(deadline)
            except BaseException:
                try:
                    self.give_up()
                finally:
                    self.give_up()  # a second interrupt may have stopped the first
                raise
            try:
                result = read(payload)
                if not isinstance(payload, bytearray):
                    payload.release()
                return result
            except BaseException:
                drop(payload)
                raise
        except RankwireError as error:
            raise self._explained(error) from error.__cause__

    def _explained(self, error: RankwireError) -> RankwireError:
        if self.explain is None or isinstance(error, MessageWithdrawnError):
            return error
        return self.explain(error)


class PeerReceive(ReceiveHandle):
    """A message to receive from one peer, in ``into`` if that is given."""

    __slots__ = ("_inbox", "_is_posted", "_receive")

    def __init__(
        self,
        inbox: Inbox,
        envelope: Envelope,
        nbytes: int | None = None,
        into: Destination | None = None,
    ) -> None:
        # Not by the base class: a round trip of 8 bytes takes 13 us.
        self.index = 0
        self.explain = None
        self._result = []
        self._inbox = inbox
        self._receive = PostedReceive(envelope, nbytes=nbytes, into=into)
        self._is_posted = False

    @override
    def post(self) -> None:
        if not self._is_posted:
            self._is_posted = True
            self._inbox.post(self._receive)

    @override
    def _wait(self, deadline: Deadline) -> Payload:
        self.post()
        inbox, receive = self._inbox, self._receive
        if not inbox.drive_posted(receive, deadline):
            raise inbox.too_late(deadline)
        if receive.payload is None:
            inbox.vacate(receive)
        return receive.take()

    @override
    def give_up(self) -> None:
        if self._is_posted:
            self._inbox.give_up(self._receive)


_LONGEST_SLEEP = 0.1  # seconds; an interrupted thread may not have released the waiter


class FirstReceive(ReceiveHandle):
    """A receive in several inboxes. For one thread at a time, but others may read for it.

    It is posted in all of them. The thread that reads the first message withdraws it elsewhere; a
    second message that has arrived by then returns to the head of its queue. The waiting thread
    reads what no other thread reads, in the given order, and after a while also ``lookout``. It
    sleeps on all connections, and parks a waiter in each inbox, which is released when the message
    was read, a connection is added, or a reading role is left.

    Lock: ``_lock`` guards the choice alone; no other lock is taken under it.
    """

    def __init__(
        self,
        inboxes: Sequence[Inbox],
        envelope: Envelope,
        nbytes: int | None,
        new_waiter: Callable[[], Waiter],
        successor_of: Callable[[Inbox], Inbox] = lambda inbox: inbox,
        lookout: Meanwhile | None = None,
    ) -> None:
        super().__init__()
        receives = (PostedReceive(envelope, self._came, nbytes=nbytes) for _ in inboxes)
        self._receives = list(zip(inboxes, receives, strict=True))
        self._envelope = envelope
        self._nbytes = nbytes
        self._new_waiter = new_waiter
        self._successor_of = successor_of
        self._lookout = lookout
        self._lock = runtime.Lock()
        self._first: Receive | None = None
        self._is_posted = False

    @override
    def post(self) -> None:
        if self._is_posted:
            return
        for number, (inbox, receive) in enumerate(self._receives):
            if inbox.has_arrived(receive.envelope):
                self._read(number)  # earlier inboxes come first, even if unread
            if self._first is not None:
                break
            if not receive.posted:
                inbox.post(receive)
            if receive.done:
                self._came(receive)
        self._is_posted = True
        if self._first is not None:
            self._take_back_others()

    @override
    def _wait(self, deadline: Deadline) -> Payload:
        self.post()
        for _, receive in self._receives:
            receive.is_awaited = True
        try:
            self._wait_for_first(deadline)
        finally:
            if self._first is None:
                for inbox, receive in self._receives:
                    inbox.leave_alone(receive)
        if not self._has_come():
            missing = [inbox.peer for inbox, r in self._receives if not r.done]
            raise DeadlineExceededError(deadline.limit, waiting_for=missing)
        self._take_back_others()
        assert self._first is not None
        receives = [receive for _, receive in self._receives]
        self.index = receives.index(self._first)  # type: ignore[arg-type]
        return self._first.take()

    def _wait_for_first(self, deadline: Deadline) -> None:
        lookout: Meanwhile | None = None  # set after it has waited for a while
        longest = ALONE
        while not self._has_come():
            self._ask_successors()
            if all(receive.done for _, receive in self._receives):
                raise self._why_nobody()
            self._read(len(self._receives))
            if self._first is None and not self._has_come():
                if deadline.expired:
                    return
                if lookout is not None:
                    lookout.read()
                self._sleep(min(deadline.sleep_limit(), longest), lookout)
                lookout, longest = self._lookout, _LONGEST_SLEEP

    @override
    def give_up(self) -> None:
        for inbox, receive in self._receives:
            _take_back(inbox, receive)

    def _read(self, count: int) -> None:
        for inbox, _ in self._receives[:count]:
            if self._first is not None:
                break
            inbox.read_available()

    def _ask_successors(self) -> None:
        for number, (inbox, receive) in enumerate(self._receives):
            if receive.error is None or (successor := self._successor_of(inbox)) is inbox:
                continue
            receive = PostedReceive(self._envelope, self._came, nbytes=self._nbytes)
            receive.is_awaited = True
            self._receives[number] = successor, receive
            successor.post(receive)

    def _has_come(self) -> bool:
        """Whether a message has arrived, also if its reader was interrupted before noting it."""
        if self._first is None:
            for _, receive in self._receives:
                if receive.done:
                    self._came(receive)
        return self._first is not None

    def _came(self, receive: Receive) -> None:
        """Choose this receive if it has a message and none is chosen yet. Any thread."""
        if receive.payload is None and not isinstance(receive.error, SizeMismatchError):
            return
        with self._lock:
            if self._first is None and receive.posted:
                self._first = receive
        self._take_back_others()

    def _take_back_others(self) -> None:
        for inbox, receive in self._receives:
            if receive is not self._first:
                _take_back(inbox, receive)

    def _sleep(self, seconds: float, lookout: Meanwhile | None) -> None:
        waiter = self._new_waiter()
        try:
            for inbox, receive in self._receives:
                inbox.park(receive, waiter)
            # After that: a thread that reads one of these and leaves it releases the waiter.
            streams: list[ByteStream] = []
            for inbox, _ in self._receives:
                streams.extend(inbox.watch())
            if lookout is not None:
                streams.extend(lookout.watch())
            if not self._has_come():
                waiter.wait(list(dict.fromkeys(streams)), seconds)
        finally:
            for inbox, receive in self._receives:
                inbox.leave(receive, waiter)
            waiter.close()

    def _why_nobody(self) -> RankwireError:
        errors = [receive.error for _, receive in self._receives if receive.error is not None]
        lost = (error for error in errors if isinstance(error, PeerLostError))
        return next(lost, errors[0]).copy()


def _take_back(inbox: Inbox, receive: Receive) -> None:
    """Cancel a receive; put back its message, if it has one. Safe to repeat."""
    receive.on_done = None
    if receive.posted:
        inbox.withdraw(receive)
    if receive.payload is not None:  # also if another thread is about to put it back
        inbox.give_up(receive)
