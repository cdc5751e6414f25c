"""Receives what one peer sends on one connection: a waiting thread reads it.

Any number of threads wait at once. One of them has the *reading role* (``reading_role``): it reads
the connection, completes other threads' receives as their messages arrive, and passes the role on
when its own is complete. A hand-over costs 60-100 us, a whole call without one 12-28 us.

After a millisecond a waiting thread also reads what other ranks have sent (``lookout``), so that
every posted operation of this rank makes progress. The first receive may be before the connection:
the peer dials when it first sends.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError, RankwireError
from rankwire.links.connection import Connection
from rankwire.links.lender import Meanwhile
from rankwire.links.reading_role import ReadingRole
from rankwire.transports.byte_stream import ByteStream
from rankwire.wire.frames import Envelope, Payload, whole_of
from rankwire.wire.mailbox import Mailbox
from rankwire.wire.receive import PostedReceive, Receive

_log = logging.getLogger("rankwire")

_CLOSE_PATIENCE = 1.0  # a woken reader leaves within microseconds
# A thread reads only its own connection for so long: most messages arrive sooner.
ALONE = 1e-3
_LONGEST_NAP = 0.1  # of a thread that sleeps without a connection


class Inbox(ReadingRole):
    """Receives from one peer. Every method is safe from any thread.

    ``connection`` is None until the peer has connected. With ``fetch``, the reader fetches lent
    messages, and not the receiver. A thread that has waited for a while reads ``lookout``.
    """

    def __init__(
        self,
        peer: int,
        mailbox: Mailbox,
        clock: Clock,
        connection: Connection | None = None,
        *,
        fetch: bool = False,
        lookout: Meanwhile | None = None,
    ) -> None:
        super().__init__(peer, mailbox, clock, connection, fetch=fetch)
        self._attended = deque()
        self._lookout = lookout
        # The streams on which a thread also sleeps at first; None limits that to a millisecond.
        self._beside: Sequence[ByteStream] | None = () if lookout is None else None

    def attach(self, connection: Connection) -> bool:
        """Take the connection; return False if there is one already, or the peer has failed."""
        with self._mutex:
            if self.connection is not None or self._mailbox.failure is not None:
                return False
            self.connection = connection
            connection.parser.find_place = self._find_place
            self._parked.wake_one()
        return True

    def take(self, receive: Receive, deadline: Deadline) -> Payload:
        """Post a receive and return its message: ``post`` and ``wait`` in one."""
        try:
            with self._mutex:  # as ``post`` does
                self._mailbox.post(receive)
                if self._reader is None:
                    if self._asleep:
                        self._parked.wake_one()
                    elif not receive.done and self.connection and not self._arrived.full:
                        self._reader = receive
                        self.turns += 1
            if self._reader is receive:
                self._read_until(receive, deadline, receive, self._beside)
            is_done = receive.done or self.drive(receive, deadline)
            if not is_done or receive.error is not None:
                self._end_in_vain(receive, deadline)
            return receive.take()
        except RankwireError:
            raise
        except BaseException:
            try:
                self.give_up(receive)
            finally:
                self.give_up(receive)
            raise

    def wait(self, receive: Receive, deadline: Deadline) -> Payload:
        """Return the message of a posted receive, reading for other threads meanwhile.

        A ``DeadlineExceededError`` cancels the receive, and the message stays receivable.
        """
        try:
            if not self.drive(receive, deadline) or receive.error is not None:
                self._end_in_vain(receive, deadline)
            return receive.take()
        except RankwireError:
            raise
        except BaseException:
            try:
                self.give_up(receive)
            finally:
                self.give_up(receive)
            raise

    def _end_in_vain(self, receive: Receive, deadline: Deadline) -> None:
        is_in_time = not self.withdraw(receive)
        if receive.payload is None:
            self.vacate(receive)
        if not is_in_time:
            raise self.too_late(deadline)

    def drive(self, receive: Receive, deadline: Deadline) -> bool:
        """Read until a posted receive is done; False at the deadline, and then it stays posted."""
        token = object()
        beside = self._beside
        nap = ALONE
        try:
            while not receive.done and receive.posted:
                with self._mutex:  # one step: no wake-up is lost between the look and the sleep
                    if self._reader is None and self.connection and not self._arrived.full:
                        self._reader = token
                        self.turns += 1
                    else:
                        lock = self._parked.park(receive)
                        is_led = self._reader is not None  # the reader reads the others too
                if self._reader is token:
                    is_silent = self._read_until(receive, deadline, token, beside)
                elif is_led or self._lookout is None:
                    is_silent = not self._sleep(receive, lock, deadline)
                else:
                    is_silent = not self._sleep(receive, lock, deadline.sooner(nap))
                    nap = min(2.0 * nap, _LONGEST_NAP)
                if receive.done:
                    break
                if deadline.expired:
                    with self._mutex:
                        self._wake_next()  # another waiting thread may have to read now
                    break
                if is_silent:
                    beside = self._read_others()
            if self.due:  # the thread that read it may have been interrupted before its callback
                self.call_back_due()
            return receive.done
        except BaseException:
            try:
                self._recover(token)
            finally:
                self._recover(token)
            self.call_back_due()
            raise

    def _read_others(self) -> Sequence[ByteStream]:
        if self._lookout is None:
            return ()
        self._lookout.read()
        return self._lookout.watch()

    def drive_posted(self, receive: PostedReceive, deadline: Deadline) -> bool:
        """Wait as ``drive`` does, for a thread that takes the message, and fetches a lent one."""
        is_done = False
        receive.is_awaited = True
        try:
            is_done = self.drive(receive, deadline)
        finally:
            if not is_done:
                self.leave_alone(receive)
        return receive.done

    def leave_alone(self, receive: PostedReceive) -> None:
        """Stop waiting for a posted receive: the reader then fetches a lent message for it."""
        with self._mutex:
            receive.is_awaited = False

    def send_held(self, deadline: Deadline) -> None:
        """Flush the connection; if that fails, so do the receives."""
        try:
            if self.connection is not None and self.connection.outbox.is_holding:
                self.connection.outbox.flush(deadline, self)
        except RankwireError as error:
            _log.debug("requests to rank %d were not sent: %s", self.peer, error)
        finally:
            if self.due:
                self.call_back_due()

    def wait_until(self, condition: Callable[[], bool], deadline: Deadline) -> bool:
        """Read until ``condition()`` holds; False at the deadline. Raises if the peer failed."""
        beside = self._beside
        while not condition():
            if deadline.expired:
                return False
            if self._mailbox.failure is not None:
                raise self._mailbox.failure.copy()
            came: list[int] = []
            try:
                is_read = self._read_alone(partial(self._read_for, deadline, beside, came))
            finally:
                self.call_back_due()
            if not is_read:
                # Another thread reads and completes receives; check again soon.
                self._clock.sleep(min(0.001, deadline.sleep_limit()))
            if not any(came):
                beside = self._read_others()
        # As in ``_read_until``.
        if self.wanted_by and self.connection and self.connection.stream.before_sleep():
            self.read_available()
        return True

    def _read_for(
        self,
        deadline: Deadline,
        beside: Sequence[ByteStream] | None,
        came: list[int],
        connection: Connection,
    ) -> None:
        frames = connection.receive(deadline, beside)
        came.append(len(frames))
        self._deliver(frames)

    def close(self, cause: RankwireError) -> None:
        """Fail all receives, and close the connection once its reader has left it."""
        if self.connection is not None:
            self.connection.fail(cause)
        patience = Deadline(_CLOSE_PATIENCE, self._clock)
        while self._reader is not None and not patience.expired:
            self._clock.sleep(0.0005)  # the reader delivers what had arrived, and leaves
        self.fail(cause)
        if self.connection is not None:
            self.connection.close()

    def too_late(self, deadline: Deadline) -> DeadlineExceededError:
        """Return the error of a receive whose message has not arrived in time."""
        arrived, detail = self._arrived, ""
        if arrived.full:
            kept = f"{arrived.nbytes} bytes of other messages from it"
            detail = f"{kept} ({arrived.count}) wait to be received, no more are read"
        elif self.connection is None:
            detail = "it has not sent anything yet"
        return DeadlineExceededError(deadline.limit, waiting_for=[self.peer], detail=detail)


class Reply(Receive):
    """The pending reply of one call, which knows its inbox. Every method is safe from any thread.

    Attributes:
        inbox: Receives it.
        translate: Puts group ranks into an error, if the call is a group's.
    """

    __slots__ = ("inbox", "request_id", "translate")

    def __init__(
        self, envelope: Envelope, on_done: Callable[[Receive], None] | None, inbox: Inbox
    ) -> None:
        self.envelope = envelope
        self.nbytes = None
        self.into = None
        self.done = False
        self.posted = False
        self._cell = []
        self.error = None
        self.on_done = on_done
        self.inbox = inbox
        self.request_id = envelope[2]
        self.translate: Callable[[RankwireError], None] | None = None

    def wait(self, deadline: Deadline) -> bytearray:
        """Return the reply, reading for other threads meanwhile; withdraw it at the deadline."""
        try:
            payload = self.inbox.wait(self, deadline)
            return payload if type(payload) is bytearray else whole_of(payload)
        except RankwireError as error:
            if self.translate is not None:
                self.translate(error)
            raise

    def outcome(self) -> bytearray:
        """Return the reply or raise its error, when ``done``; an interrupt does not lose it."""
        try:
            return whole_of(self.take())
        except RankwireError as error:
            if self.translate is not None:
                self.translate(error)
            raise

    def drive(self, deadline: Deadline) -> bool:
        """Wait until it is done; False at the deadline, and then it may still arrive."""
        if self.done:
            self.inbox.call_back_due()  # its reader may have been interrupted before that
            return True
        self.inbox.send_held(deadline)
        return self.inbox.drive(self, deadline)

    def withdraw(self) -> bool:
        """Cancel the reply; return False if it has arrived already."""
        return self.inbox.withdraw(self)

    def abort(self, error: RankwireError) -> bool:
        """Fail the reply at this end, within 0.1 s for a waiting thread; False if it is done."""
        return self.inbox.abort(self, error)
