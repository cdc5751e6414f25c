"""The reading role: one thread at a time reads the connection of an inbox.

It ends other threads' receives as their messages pass by, and leaves the role to one of those that
still wait. The mutex of ``shared_mailbox`` guards the role, and is not held while reading.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rankwire.deadline import Deadline
from rankwire.errors import RankwireError
from rankwire.links.connection import Connection
from rankwire.links.delivery import DeliveryMailbox
from rankwire.transports.byte_stream import ByteStream
from rankwire.wire.frames import Envelope
from rankwire.wire.receive import Receive

# After the deadline: what has come by then may lie behind other messages. But a peer that goes on
# sending those must not hold the reader for ever.
_LATE_READS = 16
_MOST_READS = 16  # of a rank that is not the one waited for: it may always have more


class ReadingRole(DeliveryMailbox):
    """A mailbox whose connection is read by one of the threads that wait.

    Attributes:
        on_unread: Called with this inbox, without locks, when a thread has left the role and no
            other took it, while a receive is attended to.
        is_armed: Whether a poller watches the connection; set by its owner.
        turns: How often the role was taken; it does not change while no thread reads.
    """

    on_unread: Callable[[Any], None] | None = None
    is_armed = False
    turns = 0
    _attended: deque[Envelope]

    def watch(self) -> list[ByteStream]:
        """Return what a thread that waits for something else may read from this peer."""
        connection = self.connection
        if connection is None or connection.failure is not None or self._reader is not None:
            return []
        return [] if self._arrived.full else [connection.stream]

    def read(self) -> bool:
        """Read some of what is there, for a thread that waits for something else.

        Returns whether that was done.
        """
        if self.connection is None or self._arrived.full:
            return False
        return self._read_alone(partial(self._read_ready, most=_MOST_READS))

    @property
    def is_over(self) -> bool:
        """Whether nothing can be read here any more, unless the peer connects again."""
        return self.connection is None or self._mailbox.failure is not None

    def read_available(self) -> None:
        """Read what is there without waiting, unless another thread reads already."""
        self.read_quietly()
        if self.due:
            self.call_back_due()

    def read_quietly(self) -> None:
        """Read what is there without waiting; those to be called back are left in ``due``."""
        self._read_alone(self._read_ready)

    def _ended(self, error: RankwireError) -> None:
        """The connection has ended: so do all receives, unless it was never used.

        A peer that gave up dialling at the last moment leaves such a connection; it dials again.
        """
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
        """Let go of a connection that the peer dialled and gave up, if nobody reads it."""
        with self._mutex:
            if self.connection is not None and self._reader is None:
                if self.connection.was_given_up:
                    self.connection.close()
                    self.connection = None

    def attend_to(self, receive: Receive) -> None:
        """Have ``on_unread`` called by whoever leaves the reading role, until a receive is done.

        Before the look whether anybody reads: a reader leaves first, and looks for this second.
        """
        with self._mutex:
            self._attended.append(receive.envelope)
            if len(self._attended) > 2 * len(self.wanted_by) + 8:  # most of them are done
                self._attended = deque(e for e in self._attended if e in self.wanted_by)

    def _say_unread(self) -> None:
        """Say that nobody reads any more, if a receive that is attended to is not done."""
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
        """Leave the reading role to one of those that still wait. Mutex held."""
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
        """Read, with the role, until one's own is done or somebody has to be called back.

        Returns:
            Whether it ended before, because nothing has come for a while, or one of the streams
            ``beside`` can be read.
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
        # Without the role: a callback may make a call to this very peer and wait for its reply.
        if self.due:
            self.call_back_due()
        return is_silent

    def _leave_unread(self, connection: Connection) -> None:
        # Other replies may come that no thread waits for, and a poller does not see rings.
        if connection.stream.before_sleep():
            self.read_quietly()
        if self._attended:
            self._say_unread()

    def _read_alone(self, read: Callable[[Connection], None]) -> bool:
        """Take the role and read, if nobody reads; return whether that was so."""
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
