"""The inbox: the thread that waits is the thread that reads.

One inbox holds what one peer sends on one connection. Any number of threads wait in it at once; one
of them at a time has the *reading role*: it reads the connection, ends other threads' receives as
their messages pass by, and when its own has come it leaves the role to one of those that still
wait. So no thread stands between the socket and the thread that wants the message; a hand-over
costs 60-100 us, a whole call 12-28 us without one.

A message that is lent (``single_copy``) is fetched by the thread that wants it, straight to where
it wants it. One that nobody wants yet is fetched by the reader, so that its sender can go on;
replies always are, and one that nobody wants any more is given back unread.

Locks: one *mutex* guards the mailbox, the role and the list of parked threads; it is never held
while reading, sleeping or calling back. The connection may come later than the first receive (the
peer dials when it first sends).

A signal (Ctrl-C) may end a thread in here between any two bytecodes. Messages are safe by
themselves: they are in the connection, in the mailbox or with their receive, and move in one step
(``wire.mailbox``). Roles, lists and sleepers are put in order by the thread on its way out
(``_recover``), twice: a second interrupt may fall into the first time.

Size: see ``Inbox``; what could leave has left (``parked``, ``reply``, ``wire.mailbox``).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import starmap
from time import sleep

from rankwire.deadline import Deadline
from rankwire.errors import (
    DeadlineExceededError,
    ForkedProcessError,
    RankwireError,
)
from rankwire.fork import guard
from rankwire.links.borrower import Borrowed
from rankwire.links.connection import Connection
from rankwire.links.parked import ParkedThreads
from rankwire.links.stream import Stream
from rankwire.wire.frames import Envelope, Frame, Payload
from rankwire.wire.mailbox import ONCE, Mailbox, Receive, payload_of

__all__ = ["Inbox"]

_log = logging.getLogger("rankwire")

_CLOSE_PATIENCE = 1.0  # a reader that was woken up leaves within microseconds
# After the deadline: what has come by then may lie behind other messages. But a peer that goes on
# sending those must not hold the reader for ever.
_LATE_READS = 16


class Inbox:
    """Receives from one peer. Every method is safe from any thread.

    Args:
        peer: The rank whose messages these are, for errors.
        mailbox: Where they are matched.
        connection: Where they come from, if it is known yet.
        fetch: Whether what is lent is fetched by whoever reads it, and not by whoever wants it.

    Attributes:
        was_interrupted: Whether a thread was interrupted in here since the last ``read_quietly``:
            what it has read may lie in the connection, where no poller sees it, or in ``due``.

    Size: a thread that waits here reads, matches, sleeps and may be interrupted in any of that; the
    steps share one mutex and one recovery, and are understood together or not at all.
    """

    def __init__(
        self,
        peer: int,
        mailbox: Mailbox,
        connection: Connection | None = None,
        *,
        fetch: bool = False,
    ) -> None:
        self.peer = peer
        self._fetch = fetch
        self.connection = connection
        self._mailbox = mailbox
        self._mutex = threading.Lock()
        # Who has the reading role: a token of one visit. Not the receive, for which several threads
        # may wait.
        self._reader: object | None = None
        self.due: deque[Receive] = deque()  # done, and to be called back
        mailbox.due = self.due
        self.wanted_by = mailbox.wanted_by
        self.turns = 0  # how often the reading role was taken: does not change while nobody reads
        self._parked = ParkedThreads()
        self._asleep = self._parked.asleep
        self.was_interrupted = False
        guard(self)

    def attach(self, connection: Connection) -> bool:
        """Take the connection; False if there is one already, or if the peer has been given up."""
        with self._mutex:
            if self.connection is not None or self._mailbox.failure is not None:
                return False
            self.connection = connection
            self._parked.wake_one()
        return True

    def post(self, receive: Receive) -> None:
        """Ask for a message; it may be done on return."""
        with self._mutex:
            self._mailbox.post(receive)
            # Taking a message may have made room for reading on, for which parked threads wait.
            if self._asleep and self._reader is None:
                self._parked.wake_one()

    def expect(self, reply: Receive) -> None:
        """Ask for a message that cannot have come yet: the reply of a call that is being made."""
        with self._mutex:
            if self._mailbox.failure is None:
                reply.posted = True
                self.wanted_by[reply.envelope] = deque((reply,))
                return
        self.post(reply)

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
            if not receive.done and not self.drive(receive, deadline) and self.withdraw(receive):
                raise self._too_late(deadline)
            return receive.take()
        except RankwireError:
            raise
        except BaseException:
            try:
                self._abandon(receive)
            finally:
                self._abandon(receive)
            raise

    def wait(self, receive: Receive, deadline: Deadline) -> Payload:
        """Return the message of a posted receive, reading for others on the way.

        Raises:
            DeadlineExceededError: It did not come in time; the receive is taken back, and the
                message stays receivable.
            RankwireError: The peer has failed.
        """
        try:
            if not self.drive(receive, deadline) and self.withdraw(receive):
                raise self._too_late(deadline)
            return receive.take()
        except RankwireError:
            raise
        except BaseException:
            try:
                self._abandon(receive)
            finally:
                self._abandon(receive)
            raise

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
                    self._pass_on()
                    break
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

    def put(self, envelope: Envelope, payload: Payload) -> None:
        """Deliver a message that came over no connection: this rank's own."""
        with self._mutex:
            receive = self._mailbox.deliver(envelope, payload)
            if receive is not None:
                self._parked.wake(receive)
        self.call_back_due()

    def withdraw(self, receive: Receive) -> bool:
        """Take back a receive; False if it is done already. Whoever waits for it stops waiting."""
        with self._mutex:
            try:
                withdrawn = self._mailbox.withdraw(receive)
                self._parked.wake(receive)
            except BaseException:
                self._mailbox.tidy()  # interrupted: nobody else would come to it
                raise
        return withdrawn

    def abort(self, receive: Receive, error: RankwireError) -> bool:
        """End a receive with an error; False if it is done already.

        A thread that waits for it and has the reading role notices when it looks up.
        """
        with self._mutex:
            try:
                if not self._mailbox.withdraw(receive):
                    return False
                receive.fail(error)
                if receive.on_done is not None:
                    self.due.append(receive)
                self._parked.wake(receive)
            except BaseException:
                self._mailbox.tidy()  # as in ``withdraw``
                raise
        self.call_back_due()
        return True

    def has_arrived(self, envelope: Envelope) -> bool:
        """Whether a message of this envelope was read and not taken."""
        return envelope in self._mailbox.arrived

    def tags_wanted(self) -> list[int]:
        """Return the tags of the receives that wait."""
        with self._mutex:
            return self._mailbox.tags_wanted()

    def watch(self) -> list[Stream]:
        """Return what a thread that cannot send now may read from this peer."""
        connection = self.connection
        if connection is None or connection.failure is not None or self._reader is not None:
            return []
        return [] if self._mailbox.full else [connection.stream]

    def read(self) -> None:
        """Read what is there, for a thread that cannot send now."""
        if self.connection is not None and not self._mailbox.full:
            self.read_quietly()

    def read_available(self) -> None:
        """Read what is there without waiting, unless another thread reads already."""
        self.read_quietly()
        if self.due:
            self.call_back_due()

    def read_quietly(self) -> None:
        """Read what is there without waiting; those to be called back are left in ``due``."""
        token = object()
        try:
            if not self._take_role(token):
                return
            assert self.connection is not None
            self.was_interrupted = False
            try:
                self._deliver(self.connection.undelivered)
                while not self._mailbox.full:
                    frames = self.connection.receive_ready()
                    if frames is None:
                        break
                    self._deliver(frames)
            except RankwireError as error:
                self._ended(error)
            with self._mutex:
                self._pass_role(token)
        except BaseException:
            try:
                self._recover(token)
            finally:
                self._recover(token)
            raise

    def call_back_due(self) -> None:
        """Call back those that are due; each once, whoever comes first."""
        while self.due:
            hand: list[Receive] = []
            try:
                hand.extend(starmap(self.due.popleft, ONCE))
                for receive in hand:
                    _call_back(receive)
            except IndexError:
                if hand:
                    raise  # a callback's
                break  # another thread was faster
            except Exception:
                raise
            except BaseException:
                self.due.extend(hand)  # first of all: another interrupt may fall into the rest
                self.was_interrupted = True
                for receive in hand:
                    _call_back(receive)  # what was done of it already is not done twice
                    with suppress(ValueError):
                        self.due.remove(receive)
                raise

    def wait_until(self, condition: Callable[[], bool], deadline: Deadline) -> bool:
        """Read until ``condition()`` holds; False if the deadline passes first.

        Raises when the peer has failed.
        """
        while not condition():
            if deadline.expired:
                return False
            if self._mailbox.failure is not None:
                raise self._mailbox.failure.copy()
            if not self._read_once(deadline):
                # Somebody else reads and will end receives; look again when that may have happened.
                sleep(min(0.001, deadline.sleep_limit()))
        return True

    def fail(self, cause: RankwireError) -> None:
        """End all receives, now and later; what has arrived can still be taken."""
        self._end_all(cause)
        self.call_back_due()

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

    def _end_all(self, cause: RankwireError) -> None:
        with self._mutex:
            for receive in self._mailbox.fail(cause):
                self._parked.wake(receive)

    def abandon(self, group: int, cause: RankwireError) -> None:
        """End the receives of one group, because this rank has left it."""
        with self._mutex:
            for receive in self._mailbox.fail_group(group, cause):
                self._parked.wake(receive)
            if self._asleep and self._reader is None:
                self._parked.wake_one()  # there is room again
        self.call_back_due()

    def refuse(self, envelope: Envelope) -> None:
        """Drop the messages of a family of tags, now and later: nobody will ask for them."""
        with self._mutex:
            self._mailbox.refuse(envelope)
            if self._asleep and self._reader is None:
                self._parked.wake_one()  # there is room again

    def close(self, cause: RankwireError) -> None:
        """End all receives and close the connection, once its reader has left it."""
        if self.connection is not None:
            self.connection.fail(cause)
        patience = Deadline(_CLOSE_PATIENCE)
        while self._reader is not None and not patience.expired:
            sleep(0.0005)  # it delivers what had arrived, and leaves
        self.fail(cause)
        if self.connection is not None:
            self.connection.close()

    def forsake(self) -> None:
        """End all receives in a forked child: a callback may have forked, and goes on in here."""
        self._mutex = threading.Lock()
        self._mailbox.fail(ForkedProcessError("this inbox"))

    @property
    def in_flight(self) -> int:
        """How many receives wait for a message."""
        return len(self.wanted_by)

    def wanted(self) -> list[Envelope]:
        """Return what is waited for."""
        return self._mailbox.wanted_keys()

    @property
    def is_read(self) -> bool:
        """Whether some thread has the reading role."""
        return self._reader is not None

    @property
    def dropped(self) -> int:
        """How many messages came for which nobody waited any more."""
        return self._mailbox.dropped

    @property
    def unmatched_nbytes(self) -> int:
        """Bytes that have come and nobody has asked for yet."""
        return self._mailbox.unmatched_nbytes

    # -- the reading role --------------------------------------------------------------------------

    def _take_role(self, token: object) -> bool:
        with self._mutex:
            if (
                self._reader is not None
                or self.connection is None
                or self._mailbox.failure is not None
            ):
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
                    self._deliver_parcels(frames)
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
        # Without the role: a callback may make a call to this very peer and wait for its reply.
        if self.due:
            self.call_back_due()

    def _read_once(self, deadline: Deadline) -> bool:
        """Read once, if nobody reads; return whether that was so."""
        token = object()
        try:
            if not self._take_role(token):
                return False
            assert self.connection is not None
            try:
                self._deliver(self.connection.receive(deadline))
            except RankwireError as error:
                self._ended(error)
            with self._mutex:
                self._pass_role(token)
        except BaseException:
            try:
                self._recover(token)
            finally:
                self._recover(token)
            self.call_back_due()
            raise
        self.call_back_due()
        return True

    def _recover(self, token: object | None) -> None:
        """Put in order what a thread that was interrupted in here has left. Safe to repeat.

        Whoever sleeps wakes up: its message may have been delivered without a word.
        """
        self.was_interrupted = True
        with self._mutex:
            self._mailbox.tidy()
            if self._reader is token:
                self._reader = None
            self._parked.wake_all()

    def _deliver(self, frames: deque[Frame]) -> None:
        """Match the frames to receives, and take them from the connection one by one."""
        assert self.connection is not None
        if self.connection.has_parcels:
            self._deliver_parcels(frames)
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

    def _wake_misfits(self) -> None:
        """Wake those whom a message of another size has ended. Mutex held."""
        while self._mailbox.misfits:
            self._parked.wake(self._mailbox.misfits.pop())

    def _deliver_parcels(self, frames: deque[Frame]) -> None:
        """Match frames of which some are lent.

        One that a receive waits for is matched as it is, and fetched by whoever waits; another one
        is fetched here, if there is room for it. If there is not, it stays with the connection, and
        all that came after it, until there is.
        """
        assert self.connection is not None
        while frames:
            if not self._deliver_first(frames):
                return
        self.connection.has_parcels = False

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

    # -- parked threads ----------------------------------------------------------------------------

    def _sleep(self, receive: Receive, lock: threading.Lock, deadline: Deadline) -> None:
        woken = False
        try:
            woken = lock.acquire(timeout=deadline.sleep_limit())
        finally:
            if not woken:
                self._unpark(receive, lock)

    def _unpark(self, receive: Receive, lock: threading.Lock) -> None:
        """Leave without having been woken; a wake-up that comes at this moment is for another."""
        with self._mutex:
            self._parked.leave(receive, lock)
        self._pass_on()

    def _pass_on(self) -> None:
        """Leave the waiting; whoever still waits may have to read now."""
        with self._mutex:
            if self._asleep and self._reader is None:
                self._parked.wake_one()

    def _abandon(self, receive: Receive) -> None:
        """Let a waiting thread leave by an exception. Safe to repeat.

        Nothing may wait for it, no wake-up may be lost with it, and its message is for others.
        """
        receive.posted = False
        self._recover(receive)
        receive.fetch()
        with self._mutex:
            self._mailbox.withdraw(receive)
            self._parked.wake(receive)
            if receive.payload is not None:
                next_receive = self._mailbox.put_back(receive)
                if next_receive is not None:
                    self._parked.wake(next_receive)
                self._wake_misfits()
            if self._reader is None:
                self._parked.wake_one()
        self.call_back_due()

    def _too_late(self, deadline: Deadline) -> DeadlineExceededError:
        kept, count = self._mailbox.unmatched_nbytes, self._mailbox.unmatched
        detail = ""
        if self._mailbox.full:
            detail = (
                f"{kept} bytes of other messages from it ({count}) wait to be received, no more are"
                " read"
            )
        elif self.connection is None:
            detail = "it has not sent anything yet"
        return DeadlineExceededError(deadline.limit, waiting_for=[self.peer], detail=detail)


def _call_back(receive: Receive) -> None:
    """Tell who asked to be told that a receive is done. Without any lock held."""
    if receive.on_done is not None:
        receive.on_done(receive)
