"""Deliver the frames of a connection to receives, lent messages included.

A thread that waits for a lent message fetches it, straight to its destination. The reader fetches
all others, so that their senders can continue: to the memory of a posted receive, or to new memory.
It always fetches replies, and releases those unread that no caller wants any more.
"""

from __future__ import annotations

from collections import deque
from itertools import starmap

from rankwire.clock import Clock
from rankwire.errors import RankwireError
from rankwire.interrupts import ONCE
from rankwire.links.borrower import Borrowed
from rankwire.links.connection import Connection
from rankwire.links.shared_mailbox import SharedMailbox
from rankwire.wire.frames import Envelope, Frame
from rankwire.wire.mailbox import Mailbox, payload_of
from rankwire.wire.receive import Destination, MessageWithdrawnError, Receive


class DeliveryMailbox(SharedMailbox):
    """A mailbox to which a connection delivers.

    Args:
        connection: None until the peer has connected.
        fetch: Whether the reader fetches lent messages, and not the receiver.
    """

    def __init__(
        self,
        peer: int,
        mailbox: Mailbox,
        clock: Clock,
        connection: Connection | None,
        *,
        fetch: bool,
    ) -> None:
        super().__init__(peer, mailbox, clock)
        self._fetch = fetch
        self.connection = connection
        if connection is not None:
            connection.parser.find_place = self._find_place

    def _deliver(self, frames: deque[Frame]) -> None:
        """Match the frames to receives, and take them from the connection one by one.

        A lent message for which there is no room stays with the connection until there is, and so
        do all frames after it.
        """
        assert self.connection is not None
        if self.connection.has_parcels:
            while frames:
                if not self._deliver_first(frames):
                    return
            self.connection.has_parcels = False
        elif frames:
            with self._mutex:
                self._match(frames)

    def _match(self, frames: deque[Frame], *, only_first: bool = False) -> None:
        """Match frames. Mutex held."""
        mailbox = self._mailbox
        while frames:
            envelope, payload = frames[0]
            source = map(payload_of, starmap(frames.popleft, ONCE))
            receive = mailbox.deliver(envelope, payload, source)
            if receive is not None and self._asleep:
                self._parked.wake(receive)
            if mailbox.misfits:
                self._wake_misfits()
            if only_first:
                return

    def _deliver_first(self, frames: deque[Frame]) -> bool:
        """Deliver or drop the first frame; False if there is no room for it now."""
        frame = frames[0]
        payload = frame.payload
        if not isinstance(payload, Borrowed):
            with self._mutex:
                self._match(frames, only_first=True)
            return True
        try:
            return self._deliver_lent(frames, frame.envelope, payload)
        except RankwireError:  # revoked, or its sender is gone, which the next read says
            with self._mutex:
                self._mailbox.displaced(frame.envelope)
                frames.popleft()
            return True

    def _deliver_lent(self, frames: deque[Frame], envelope: Envelope, payload: Borrowed) -> bool:
        if payload.is_revoked:
            raise MessageWithdrawnError("the sender took the message back")
        with self._mutex:
            receive = self._mailbox.taker_of(envelope, len(payload))
            if not self._fetch and payload.place is None:
                if receive is not None and receive.is_awaited:
                    self._match(frames, only_first=True)
                    return True
                if receive is None and self._arrived.full:
                    return False
        if self._fetch:
            if receive is None:
                payload.release()
                self._arrived.dropped += 1
                frames.popleft()
                return True
        elif self._bring(frames, envelope, payload):
            return True
        frames[0] = Frame(envelope, payload.whole())
        with self._mutex:
            self._match(frames, only_first=True)
        return True

    def _bring(self, frames: deque[Frame], envelope: Envelope, payload: Borrowed) -> bool:
        """Copy a lent message to the memory of a posted receive; False if none gives memory."""
        assert self.connection is not None
        with self.connection.filling:
            place = self._find_place(envelope, len(payload), payload.beginning())
            if place is None:
                payload.vacate()  # a receive was given up after a reader was interrupted here
                return False
            frames[0] = Frame(envelope, payload.bring_to(place))
            with self._mutex:
                self._match(frames, only_first=True)
        return True

    def _find_place(self, envelope: Envelope, nbytes: int, first: memoryview) -> Destination | None:
        with self._mutex:
            return self._mailbox.find_place(envelope, nbytes, first)

    def give_up(self, receive: Receive) -> None:
        """Cancel a receive; its message is left to other receives."""
        super().give_up(receive)
        self.vacate(receive)

    def vacate(self, receive: Receive) -> None:
        """Ensure that nothing is written to the memory of a receive any more. Safe to repeat."""
        connection = self.connection
        if receive.into is None or connection is None:
            return
        with connection.filling, self._mutex:
            for _, payload in connection.parser.frames:
                if isinstance(payload, Borrowed) and payload.place is receive.into:
                    payload.vacate()
            connection.parser.vacate(receive.into)
            self._mailbox.vacated(receive)
