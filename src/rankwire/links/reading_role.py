"""The reading role: one of the waiting threads at a time reads the connection of an inbox.

The mutex of ``shared_mailbox`` guards the role, and is not held while reading.

A thread that waits for a lent message fetches it, directly to its destination. The reader fetches
all others, so that their senders can continue: to the memory of a posted receive, or to new memory.
It always fetches replies, and releases those unread that no caller wants any more.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import starmap
from typing import Any

from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import RankwireError
from rankwire.interrupts import ONCE
from rankwire.links.borrower import Borrowed
from rankwire.links.connection import Connection
from rankwire.links.shared_mailbox import SharedMailbox
from rankwire.transports.byte_stream import ByteStream
from rankwire.wire.frames import Envelope, Frame
from rankwire.wire.mailbox import Mailbox, payload_of
from rankwire.wire.receive import Destination, MessageWithdrawnError, Receive


class DeliveryMailbox(SharedMailbox):
    """A mailbox to which a connection delivers; see ``Inbox`` for the arguments."""

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

        A lent message for which there is no room stays with the connection, as do all later frames.
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
        except RankwireError:  # revoked, or its sender is gone, which the next read raises
            with self._mutex:
                self._mailbox.displaced(frame.envelope)
                frames.popleft()
            return True

    def _deliver_lent(self, frames: deque[Frame], envelope: Envelope, payload: Borrowed) -> bool:
        if payload.is_revoked:
            raise MessageWithdrawnError("the sender took the message back")
        with self._mutex:
            receive = self._mailbox.taker_of(envelope, len(payload))
            is_wanted = receive is not None or envelope in self._arrived.kept
            if not self._fetch and payload.place is None:
                if receive is not None and receive.is_awaited:
                    self._match(frames, only_first=True)
                    return True
                if receive is None and self._arrived.full:
                    return False
        if self._fetch:
            if not is_wanted:
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


# After the deadline: a message that arrived in time may be behind others.
_LATE_READS = 16
_MOST_READS = 16  # of a rank other than the awaited one, which may always have more


class ReadingRole(DeliveryMailbox):
    """A mailbox whose connection is read by one of the waiting threads.

    Attributes:
        on_unread: Called with this inbox, without locks, when a thread has left the role and no
            other took it, while a receive is attended to.
        is_armed: Whether a poller watches the connection; set by its owner.
        turns: How often the role was taken.
    """

    on_unread: Callable[[Any], None] | None = None
    is_armed = False
    turns = 0
    _attended: deque[Envelope]

    def watch(self) -> list[ByteStream]:
        """Return the stream, if a thread that waits for something else may read it."""
        connection = self.connection
        if connection is None or connection.failure is not None or self._reader is not None:
            return []
        return [] if self._arrived.full else [connection.stream]

    def read(self) -> bool:
        """Read some of what has arrived, for a thread that waits elsewhere; False if it cannot."""
        if self.connection is None or self._arrived.full:
            return False
        return self._read_alone(partial(self._read_ready, most=_MOST_READS))

    @property
    def is_over(self) -> bool:
        """Whether nothing more can arrive here, unless the peer connects again."""
        return self.connection is None or self._mailbox.failure is not None

    def read_available(self) -> None:
        """Read what has arrived without waiting, unless another thread reads."""
        self.read_quietly()
        if self.due:
            self.call_back_due()

    def read_quietly(self) -> None:
        """Read as ``read_available`` does, but leave the callbacks in ``due``."""
        self._read_alone(self._read_ready)

    def _ended(self, error: RankwireError) -> None:
        """End all receives, unless the peer gave up dialling: then it dials again."""
        with self._mutex:
            connection = self.connection
            if connection is not None and connection.was_given_up:
                self.connection = None
                connection.close()
                return
        if connection is not None and self._mailbox.wanted:
            error = connection.explain_end(error)
        self._end_all(error)

    def drop_given_up(self) -> None:
        """Close a connection that the peer dialled and gave up, if no thread reads it."""
        with self._mutex:
            if self.connection is not None and self._reader is None:
                if self.connection.was_given_up:
                    self.connection.close()
                    self.connection = None

    def attend_to(self, receive: Receive) -> None:
        """Have the reader call ``on_unread`` when it leaves, until a receive is done.

        Call it before checking for a reader: a reader leaves before it checks for attended
        receives.
        """
        with self._mutex:
            self._attended.append(receive.envelope)
            if len(self._attended) > 2 * len(self.wanted_by) + 8:  # most of them are done
                self._attended = deque(e for e in self._attended if e in self.wanted_by)

    def _say_unread(self) -> None:
        with self._mutex:
            attended = self._attended
            while attended and attended[0] not in self.wanted_by:
                attended.popleft()
            is_unread = bool(attended) and self._reader is None
        if is_unread and self.on_unread is not None:
            self.on_unread(self)

    def _take_role(self, token: object) -> bool:
        with self._mutex:
            if self._reader is not None or self.connection is None or self._mailbox.failure:
                return False
            self._reader = token
            self.turns += 1
            return True

    def _pass_role(self, token: object) -> None:
        """Pass the role to one of the waiting threads. Mutex held."""
        if self._reader is token:
            self._reader = None
        if self._asleep:
            self._parked.wake_one()

    def _read_until(
        self,
        receive: Receive,
        deadline: Deadline,
        token: object,
        beside: Sequence[ByteStream] | None,
    ) -> bool:
        """Read, with the role, until the receive is done or a callback is due; else return True.

        That is after a silence, or for one of the streams ``beside``.
        """
        connection, arrived = self.connection, self._arrived
        assert connection is not None
        late_reads = 0
        is_silent = False
        try:
            while not (receive.done or self.due or arrived.full):
                frames = connection.receive(deadline, beside)
                if not frames:
                    is_silent = True
                    break
                if connection.has_parcels:
                    self._deliver(frames)
                else:
                    with self._mutex:
                        self._match(frames)
                        if receive.done:  # mostly: then the role is left in the same step
                            self._reader = None  # as ``_pass_role`` does, without a call
                            if self._asleep:
                                self._parked.wake_one()
                if not receive.done and deadline.expired:
                    late_reads += 1
                    if late_reads >= _LATE_READS:
                        break
        except RankwireError as error:
            self._ended(error)
        if self._reader is token:
            with self._mutex:
                self._pass_role(token)
        if self._fetch and self.wanted_by:
            self._leave_unread(connection)
        # Without the role: a callback may call this peer and wait for its reply.
        if self.due:
            self.call_back_due()
        return is_silent

    def _leave_unread(self, connection: Connection) -> None:
        # Other replies may arrive that no thread waits for, and a poller does not see rings.
        if connection.stream.before_sleep():
            self.read_quietly()
        if self._attended:
            self._say_unread()

    def _read_alone(self, read: Callable[[Connection], None]) -> bool:
        token = object()
        try:
            if not self._take_role(token):
                return False
            assert self.connection is not None
            try:
                read(self.connection)
            except RankwireError as error:
                self._ended(error)
            with self._mutex:
                self._pass_role(token)
            if self._attended:
                self._say_unread()
        except BaseException:
            try:
                self._recover(token)
            finally:
                self._recover(token)
            raise
        return True

    def _read_ready(self, connection: Connection, most: int | None = None) -> None:
        self.was_interrupted = False
        self._deliver(connection.parser.frames)
        for _ in itertools.repeat(None) if most is None else range(most):
            frames = None if self._arrived.full else connection.receive_ready()
            if frames is None:
                break
            self._deliver(frames)
