"""The inbox: the thread that waits is the thread that reads.

One inbox holds what one peer sends on one connection. Any number of threads wait in it at once; one
of them at a time has the *reading role*: it reads the connection, ends other threads' receives as
their messages pass by, and when its own has come it leaves the role to one of those that still
wait. So no thread stands between the socket and the thread that wants the message; a hand-over
costs 60-100 us, a whole call 12-28 us without one.

A message that is lent (``single_copy``) is fetched by the thread that waits for it, straight to
where it wants it. The reader fetches all others, so that their senders can go on: to where a posted
receive wants it, or to new memory. It always fetches replies, and gives one that no caller wants
any more back unread.

A thread that has waited here for a millisecond also reads what other ranks have sent (``lookout``):
so every operation that this rank has posted moves on, whatever it waits for.

The connection may come later than the first receive (the peer dials when it first sends). Waiting
threads, the mutex and what an interrupt leaves are the business of ``shared_mailbox``; the mutex is
not held while reading either.

Size: who waits, who reads and what is delivered are one protocol around one role and one mutex.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import starmap

from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError, RankwireError
from rankwire.interrupts import ONCE
from rankwire.links.borrower import Borrowed
from rankwire.links.connection import Connection
from rankwire.links.lender import Meanwhile
from rankwire.links.shared_mailbox import SharedMailbox
from rankwire.transports.byte_stream import ByteStream
from rankwire.wire.frames import Envelope, Frame, Payload
from rankwire.wire.mailbox import Mailbox, payload_of
from rankwire.wire.receive import Destination, MessageWithdrawnError, PostedReceive, Receive

_log = logging.getLogger("rankwire")

_CLOSE_PATIENCE = 1.0  # a reader that was woken up leaves within microseconds
# After the deadline: what has come by then may lie behind other messages. But a peer that goes on
# sending those must not hold the reader for ever.
_LATE_READS = 16
# So long a thread reads its own connection only, because most messages come sooner; then it looks
# at those of other ranks as well.
ALONE = 1e-3
_MOST_READS = 16  # of a rank that is not the one waited for: it may always have more
_LONGEST_NAP = 0.1  # of a thread that sleeps where it sees no connection


class Inbox(SharedMailbox):
    """Receives from one peer. Every method is safe from any thread.

    Args:
        peer: The rank whose messages these are, for errors.
        mailbox: Where they are matched.
        clock: By which its threads wait.
        connection: Where they come from, if it is known yet.
        fetch: Whether what is lent is fetched by whoever reads it, and not by whoever wants it.
        lookout: What a thread reads that has waited here for a while.

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
        lookout: Meanwhile | None = None,
    ) -> None:
        super().__init__(peer, mailbox, clock)
        self._fetch = fetch
        self._lookout = lookout
        # The streams at which a thread sleeps too when it begins to wait; None is for a millisecond
        # only, after which it looks at them.
        self._beside: Sequence[ByteStream] | None = () if lookout is None else None
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
        beside = self._beside
        nap = ALONE
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
                        is_led = self._reader is not None  # the reader looks at the others too
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
                        self._wake_next()  # whoever still waits may have to read now
                    break
                if is_silent:
                    beside = self._read_others()
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

    def _read_others(self) -> Sequence[ByteStream]:
        """Read what other ranks have sent; return the streams where more may come."""
        if self._lookout is None:
            return ()
        self._lookout.read()
        return self._lookout.watch()

    def drive_posted(self, receive: PostedReceive, deadline: Deadline) -> bool:
        """``drive``, for a thread that takes the message then: what is lent is left to it."""
        is_done = False
        receive.is_awaited = True
        try:
            is_done = self.drive(receive, deadline)
        finally:
            if not is_done:
                self.leave_alone(receive)
        return receive.done

    def leave_alone(self, receive: PostedReceive) -> None:
        """Wait for a posted receive no more: from now on the reader fetches what is lent for it."""
        with self._mutex:
            receive.is_awaited = False

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

    def watch(self) -> list[ByteStream]:
        """Return what a thread that waits for something else may read from this peer."""
        connection = self.connection
        if connection is None or connection.failure is not None or self._reader is not None:
            return []
        return [] if self._mailbox.full else [connection.stream]

    def read(self) -> bool:
        """Read some of what is there, for a thread that waits for something else.

        Returns whether that was done.
        """
        if self.connection is None or self._mailbox.full:
            return False
        return self._read_alone(self._read_some)

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

    def wait_until(self, condition: Callable[[], bool], deadline: Deadline) -> bool:
        """Read until ``condition()`` holds; False if the deadline passes first.

        Raises when the peer has failed.
        """
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
                # Somebody else reads and will end receives; look again when that may have happened.
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
        """Read once, and note how many frames have come."""
        frames = connection.receive(deadline, beside)
        came.append(len(frames))
        self._deliver(frames)

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
        connection, mailbox = self.connection, self._mailbox
        assert connection is not None
        late_reads = 0
        is_silent = False
        try:
            while not (receive.done or self.due or mailbox.full):
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
        # Other replies may come that no thread waits for, and a poller does not see rings.
        if self._fetch and self.wanted_by:
            if connection.stream.before_sleep():
                self.read_quietly()
            if self._attended:
                self._say_unread()
        # Without the role: a callback may make a call to this very peer and wait for its reply.
        if self.due:
            self.call_back_due()
        return is_silent

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
        self._deliver(connection.undelivered)
        for _ in itertools.repeat(None) if most is None else range(most):
            frames = None if self._mailbox.full else connection.receive_ready()
            if frames is None:
                break
            self._deliver(frames)

    def _read_some(self, connection: Connection) -> None:
        self._read_ready(connection, _MOST_READS)

    def _deliver(self, frames: deque[Frame]) -> None:
        """Match the frames to receives, and take them from the connection one by one.

        Some may be lent. One that a thread waits for is matched as it is, and that thread fetches
        it. Another one is fetched here, to where a posted receive wants it, or to new memory if
        there is room. If there is not, it stays with the connection, and all that came after it,
        until there is.
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
        try:
            return self._deliver_lent(frames, frame.envelope, payload)
        except RankwireError:  # revoked, or its sender is gone, which the next read says
            with self._mutex:
                self._mailbox.displaced(frame.envelope)
                frames.popleft()
            return True

    def _deliver_lent(self, frames: deque[Frame], envelope: Envelope, payload: Borrowed) -> bool:
        """Deliver the first frame, which is lent; raises if its sender has taken it back."""
        if payload.is_revoked:
            raise MessageWithdrawnError("the sender took the message back")
        with self._mutex:
            receive = self._mailbox.taker_of(envelope, len(payload))
            if not self._fetch and payload.place is None:
                if receive is not None and _is_awaited(receive):
                    self._match(frames, only_first=True)
                    return True
                if receive is None and self._mailbox.full:
                    return False
        if self._fetch:
            if receive is None:
                payload.release()
                self._mailbox.dropped += 1
                frames.popleft()
                return True
        elif self._bring(frames, envelope, payload):
            return True
        frames[0] = Frame(envelope, payload.whole())
        with self._mutex:
            self._match(frames, only_first=True)
        return True

    def _bring(self, frames: deque[Frame], envelope: Envelope, payload: Borrowed) -> bool:
        """Copy what is lent to where a posted receive wants it; False if none has said where."""
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
            for _, payload in connection.undelivered:
                if isinstance(payload, Borrowed) and payload.place is receive.into:
                    payload.vacate()
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


def _is_awaited(receive: Receive) -> bool:
    """Whether a thread waits for a receive, and takes its message as soon as that has come."""
    return not isinstance(receive, PostedReceive) or receive.is_awaited
