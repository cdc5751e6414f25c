"""The inbox: the thread that waits is the thread that reads.

One inbox holds what one peer sends on one connection. Any number of threads wait in it at once; one
of them at a time has the *reading role*: it reads the connection, ends other threads' receives as
their messages pass by, and when its own has come it leaves the role to one of those that still
wait. So no thread stands between the socket and the thread that wants the message; a hand-over
costs 60-100 us, a whole call 12-28 us without one.

A message that is lent (``single_copy``) is fetched by the thread that wants it, straight to where
it wants it. One that nobody wants yet is fetched by the reader, so that its sender can go on;
replies always are, and one that nobody wants any more is given back unread.

The connection may come later than the first receive (the peer dials when it first sends). Waiting
threads, the mutex and what an interrupt leaves are the business of ``shared_mailbox``; the mutex is
not held while reading either.

Size: who waits, who reads and what is delivered are one protocol around one role and one mutex.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from itertools import starmap

from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError, RankwireError
from rankwire.links.borrower import Borrowed
from rankwire.links.connection import Connection
from rankwire.links.shared_mailbox import SharedMailbox
from rankwire.links.stream import Stream
from rankwire.wire.destinations import Destination
from rankwire.wire.frames import Envelope, Frame, Payload
from rankwire.wire.mailbox import ONCE, Mailbox, payload_of
from rankwire.wire.receive import Receive

_log = logging.getLogger("rankwire")

_CLOSE_PATIENCE = 1.0  # a reader that was woken up leaves within microseconds
# After the deadline: what has come by then may lie behind other messages. But a peer that goes on
# sending those must not hold the reader for ever.
_LATE_READS = 16


class Inbox(SharedMailbox):
    """Receives from one peer. Every method is safe from any thread.

    Args:
        peer: The rank whose messages these are, for errors.
        mailbox: Where they are matched.
        clock: By which its threads wait.
        connection: Where they come from, if it is known yet.
        fetch: Whether what is lent is fetched by whoever reads it, and not by whoever wants it.

    Attributes:
        on_unread: Called, without locks, when a thread has left the reading role to nobody while a
            receive is attended to.
        is_armed: Whether a poller says when there is something to read; set by its owner.

    Size: as for its module.
    """

    def __init__(
        self,
        peer: int,
        mailbox: Mailbox,
        clock: Clock,
        connection: Connection | None = None,
        *,
        fetch: bool = False,
    ) -> None:
        super().__init__(peer, mailbox, clock)
        self._fetch = fetch
        self.connection = connection
        if connection is not None:
            connection.place_by(self._find_place)
        self.on_unread: Callable[[Inbox], None] | None = None
        self.is_armed = False
        self._attended: deque[Envelope] = deque()
        self.turns = 0  # how often the reading role was taken: does not change while nobody reads

    def attach(self, connection: Connection) -> bool:
        """Take the connection; False if there is one already, or if the peer has been given up."""
        with self._mutex:
            if self.connection is not None or self._mailbox.failure is not None:
                return False
            self.connection = connection
            connection.place_by(self._find_place)
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
                    elif not receive.done and self.connection and not self._mailbox.full:
                        self._reader = receive
                        self.turns += 1
            if self._reader is receive:
                self._read_until(receive, deadline, receive)
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
        """Return the message of a posted receive, reading for others on the way.

        Raises:
            DeadlineExceededError: It did not come in time; the receive is taken back, and the
                message stays receivable.
            RankwireError: The peer has failed.
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
        """End a receive whose time is up or that has failed, unless it comes at this moment."""
        is_in_time = not self.withdraw(receive)
        if receive.payload is None:
            self.vacate(receive)
        if not is_in_time:
            raise self.too_late(deadline)

    def drive(self, receive: Receive, deadline: Deadline) -> bool:
        """Read until a posted receive is done; False if the deadline passes first.

        After the deadline it stays posted.
        """
        token = object()
        try:
            while not receive.done and receive.posted:
                # Both in one step, so that no wake-up falls between the look at the role and the
                # sleep.
                with self._mutex:
                    if self._reader is None and self.connection and not self._mailbox.full:
                        self._reader = token
                        self.turns += 1
                    else:
                        lock = self._parked.park(receive)
                if self._reader is token:
                    self._read_until(receive, deadline, token)
                else:
                    self._sleep(receive, lock, deadline)
                if not receive.done and deadline.expired:
                    with self._mutex:
                        self._wake_next()  # whoever still waits may have to read now
                    break
            if self.due:  # one that has read it may have been interrupted before it came to that
                self.call_back_due()
            return receive.done
        except BaseException:
            try:
                self._recover(token)
            finally:
                self._recover(token)
            self.call_back_due()
            raise

    def send_held(self, deadline: Deadline) -> None:
        """Send what was held back; if that fails, so does the connection, and with it receives."""
        try:
            if self.connection is not None and self.connection.is_holding:
                self.connection.flush(deadline, meanwhile=self)
        except RankwireError as error:
            _log.debug("requests to rank %d were not sent: %s", self.peer, error)
        finally:
            if self.due:
                self.call_back_due()

    def watch(self) -> list[Stream]:
        """Return what a thread that cannot send now may read from this peer."""
        connection = self.connection
        if connection is None or connection.failure is not None or self._reader is not None:
            return []
        return [] if self._mailbox.full else [connection.stream]

    def read(self) -> bool:
        """Read what is there, for a thread that cannot send now; return whether that was done."""
        if self.connection is None or self._mailbox.full:
            return False
        return self._read_alone(self._read_ready)

    def read_available(self) -> None:
        """Read what is there without waiting, unless another thread reads already."""
        self.read_quietly()
        if self.due:
            self.call_back_due()

    def read_quietly(self) -> None:
        """Read what is there without waiting; those to be called back are left in ``due``."""
        self._read_alone(self._read_ready)

    def wait_until(self, condition: Callable[[], bool], deadline: Deadline) -> bool:
        """Read until ``condition()`` holds; False if the deadline passes first.

        Raises when the peer has failed.
        """
        while not condition():
            if deadline.expired:
                return False
            if self._mailbox.failure is not None:
                raise self._mailbox.failure.copy()
            try:
                is_read = self._read_alone(lambda link: self._deliver(link.receive(deadline)))
            finally:
                self.call_back_due()
            if not is_read:
                # Somebody else reads and will end receives; look again when that may have happened.
                self._clock.sleep(min(0.001, deadline.sleep_limit()))
        # As in ``_read_until``.
        if self.wanted_by and self.connection and self.connection.stream.look_away():
            self.read_available()
        return True

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

    def close(self, cause: RankwireError) -> None:
        """End all receives and close the connection, once its reader has left it."""
        if self.connection is not None:
            self.connection.fail(cause)
        patience = Deadline(_CLOSE_PATIENCE, self._clock)
        while self._reader is not None and not patience.expired:
            self._clock.sleep(0.0005)  # it delivers what had arrived, and leaves
        self.fail(cause)
        if self.connection is not None:
            self.connection.close()

    # -- the reading role --------------------------------------------------------------------------

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

    def _read_until(self, receive: Receive, deadline: Deadline, token: object) -> None:
        """Read, with the role, until one's own is done or somebody has to be called back."""
        connection, mailbox = self.connection, self._mailbox
        assert connection is not None
        late_reads = 0
        try:
            while not (receive.done or self.due or mailbox.full):
                frames = connection.receive(deadline)
                if not frames:
                    break
                if connection.has_parcels:
                    self._deliver(frames)
                else:
                    with self._mutex:
                        self._match(frames)
                        if receive.done:  # mostly: then the role is left in the same step
                            self._pass_role(token)
                if not receive.done and deadline.expired:
                    late_reads += 1
                    if late_reads >= _LATE_READS:
                        break
        except RankwireError as error:
            self._ended(error)
        if self._reader is token:
            with self._mutex:
                self._pass_role(token)
        # Other replies may come that no thread waits for, and a poller does not see rings.
        if self._fetch and self.wanted_by:
            if connection.stream.look_away():
                self.read_quietly()
            if self._attended:
                self._say_unread()
        # Without the role: a callback may make a call to this very peer and wait for its reply.
        if self.due:
            self.call_back_due()

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

    def _read_ready(self, connection: Connection) -> None:
        self.was_interrupted = False
        self._deliver(connection.undelivered)
        while not self._mailbox.full:
            frames = connection.receive_ready()
            if frames is None:
                break
            self._deliver(frames)

    def _deliver(self, frames: deque[Frame]) -> None:
        """Match the frames to receives, and take them from the connection one by one.

        Some may be lent. One that a receive waits for is matched as it is, and fetched by whoever
        waits; another one is fetched here, if there is room for it. If there is not, it stays with
        the connection, and all that came after it, until there is.
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
        """Deliver the first frame, or drop it; False if there is no room for it now."""
        frame = frames[0]
        payload = frame.payload
        if not isinstance(payload, Borrowed):
            with self._mutex:
                self._match(frames, only_first=True)
            return True
        if payload.is_revoked:
            frames.popleft()
            return True
        with self._mutex:
            is_wanted = self._mailbox.would_take(frame.envelope, len(payload))
            if is_wanted and not self._fetch:
                self._match(frames, only_first=True)
                return True
            if not is_wanted and not self._fetch and self._mailbox.full:
                return False
        try:
            if self._fetch and not is_wanted:
                payload.give_back()
                self._mailbox.dropped += 1
                frames.popleft()
                return True
            frames[0] = frame._replace(payload=payload.whole())
        except RankwireError:
            frames.popleft()  # revoked, or its sender is gone, which the next read says
            return True
        with self._mutex:
            self._match(frames, only_first=True)
        return True

    # -- messages that come straight to where they are wanted --------------------------------------

    def _find_place(self, envelope: Envelope, nbytes: int, first: memoryview) -> Destination | None:
        with self._mutex:
            return self._mailbox.find_place(envelope, nbytes, first)

    def give_up(self, receive: Receive) -> None:
        """Take back a receive: its message, if it has come or comes, is for others."""
        super().give_up(receive)
        self.vacate(receive)

    def vacate(self, receive: Receive) -> None:
        """See to it that nothing comes into the memory of a receive any more. Safe to repeat."""
        connection = self.connection
        if receive.into is None or connection is None:
            return
        with connection.filling, self._mutex:
            connection.vacate(receive.into)
            self._mailbox.vacated(receive)

    def too_late(self, deadline: Deadline) -> DeadlineExceededError:
        """Return the error of a receive whose message has not come in time."""
        mailbox, detail = self._mailbox, ""
        if mailbox.full:
            kept = f"{mailbox.unmatched_nbytes} bytes of other messages from it"
            detail = f"{kept} ({mailbox.unmatched}) wait to be received, no more are read"
        elif self.connection is None:
            detail = "it has not sent anything yet"
        return DeadlineExceededError(deadline.limit, waiting_for=[self.peer], detail=detail)
