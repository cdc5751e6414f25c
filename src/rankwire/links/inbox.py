"""The inbox: the thread that waits is the thread that reads.

One inbox holds what one peer sends on one connection. Any number of threads wait in it at once; one
of them at a time has the *reading role*: it reads the connection, ends other threads' receives as
their messages pass by, and when its own has come it leaves the role to one of those that still
wait. So no thread stands between the socket and the thread that wants the message; a hand-over
costs 60-100 us, a whole call 12-28 us without one.

Locks: one *mutex* guards the mailbox, the role and the list of parked threads; it is never held
while reading, sleeping or calling back. The connection may come later than the first receive (the
peer dials when it first sends).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import sleep

from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError, PeerLostError, RankwireError
from rankwire.links.connection import Connection
from rankwire.wire.frames import Frame
from rankwire.wire.mailbox import Mailbox, Receive

__all__ = ["Inbox"]

_CLOSE_PATIENCE = 1.0  # a reader that was woken up leaves within microseconds


class Inbox:
    """Receives from one peer. Every method is safe from any thread.

    Args:
        peer: The rank whose messages these are, for errors.
        mailbox: Where they are matched.
        connection: Where they come from, if it is known yet.
    """

    def __init__(self, peer: int, mailbox: Mailbox, connection: Connection | None = None) -> None:
        self.peer = peer
        self.connection = connection
        self._mailbox = mailbox
        self._mutex = threading.Lock()
        self._being_read = False
        self.due: deque[Receive] = deque()
        self.turns = 0  # how often the reading role was taken: does not change while nobody reads
        self._parked: dict[Receive, list[threading.Lock]] = {}

    def attach(self, connection: Connection) -> bool:
        """Take the connection; False if there is one already, or if the peer has been given up."""
        with self._mutex:
            if self.connection is not None or self._mailbox.failure is not None:
                return False
            self.connection = connection
            self._wake_a_parked()
        return True

    def post(self, receive: Receive) -> None:
        """Ask for a message; it may be done on return."""
        receive.home = self
        with self._mutex:
            self._mailbox.post(receive)
            # Taking a message may have made room for reading on, for which parked threads wait.
            if self._parked and not self._being_read:
                self._wake_a_parked()

    def wait(self, receive: Receive, deadline: Deadline) -> bytearray:
        """Return the message of a posted receive, reading for others on the way.

        Raises:
            DeadlineExceededError: It did not come in time; the receive is taken back, and the
                message stays receivable.
            RankwireError: The peer has failed.
        """
        try:
            in_time = self.drive(receive, deadline)
        except BaseException:
            self._abandon(receive)
            raise
        if not in_time and self.withdraw(receive):
            raise self._too_late(deadline)
        return receive.result()

    def drive(self, receive: Receive, deadline: Deadline) -> bool:
        """Read until a posted receive is done; False if the deadline passes first.

        After the deadline it stays posted.
        """
        while not receive.done and receive.posted:
            lock = self._take_role_or_park(receive)
            if lock is None:
                self._read_until(receive, deadline)
            else:
                self._sleep(receive, lock, deadline)
            if not receive.done and deadline.expired:
                self._pass_on()
                break
        return receive.done

    def withdraw(self, receive: Receive) -> bool:
        """Take back a receive; False if it is done already. Whoever waits for it stops waiting."""
        with self._mutex:
            withdrawn = self._mailbox.withdraw(receive)
            self._wake(receive)
        return withdrawn

    def read_available(self) -> None:
        """Read what is there without waiting, unless another thread reads already."""
        self.read_quietly()
        if self.due:
            self.call_back_due()

    def read_quietly(self) -> None:
        """Do the same, but leave those it ends in ``due``: nobody is called back yet."""
        if not self._take_role():
            return
        try:
            assert self.connection is not None
            while (frames := self.connection.read_ready()) is not None:
                self.due += self._deliver(frames)
        except RankwireError as error:
            self.due += self._ended(error)
        except BaseException:
            self._interrupted()
            raise
        finally:
            self._leave_role()

    def call_back_due(self) -> None:
        """Call back those that ``read_quietly`` left; each once, whoever comes first."""
        while self.due:
            try:
                receive = self.due.popleft()
            except IndexError:
                return  # another thread was faster
            _call_back([receive])

    def wait_until(self, condition: Callable[[], bool], deadline: Deadline) -> bool:
        """Read until ``condition()`` holds; False if the deadline passes first.

        Raises when the peer has failed.
        """
        while not condition():
            if deadline.expired:
                return False
            if self._mailbox.failure is not None:
                raise self._mailbox.failure.copy()
            if self._take_role():
                self._read_once(deadline)
            else:
                # Somebody else reads and will end receives; look again when that may have happened.
                sleep(min(0.001, deadline.sleep_limit()))
        return True

    def fail(self, cause: RankwireError) -> None:
        """End all receives, now and later; what has arrived can still be taken."""
        _call_back(self._end_all(cause))

    def _ended(self, error: RankwireError) -> list[Receive]:
        """The connection has ended: so do all receives, unless it was never used.

        A peer that gave up dialling at the last moment leaves such a connection; it dials again.
        """
        with self._mutex:
            connection = self.connection
            if connection is not None and connection.was_given_up:
                self.connection = None
                connection.close()
                return []
        return self._end_all(error)

    def drop_given_up(self) -> None:
        """Let go of a connection that the peer dialled and gave up, if nobody reads it."""
        with self._mutex:
            if self.connection is not None and not self._being_read:
                if self.connection.was_given_up:
                    self.connection.close()
                    self.connection = None

    def _end_all(self, cause: RankwireError) -> list[Receive]:
        with self._mutex:
            ended = self._mailbox.fail(cause)
            for receive in ended:
                self._wake(receive)
        return ended

    def abandon(self, group: int, cause: RankwireError) -> None:
        """End the receives of one group, because this rank has left it."""
        with self._mutex:
            ended = self._mailbox.fail_group(group, cause)
            for receive in ended:
                self._wake(receive)
            if self._parked and not self._being_read:
                self._wake_a_parked()  # there is room again
        _call_back(ended)

    def close(self, cause: RankwireError) -> None:
        """End all receives and close the connection, once its reader has left it."""
        if self.connection is not None:
            self.connection.fail(cause)
        patience = Deadline(_CLOSE_PATIENCE)
        while self._being_read and not patience.expired:
            sleep(0.0005)  # it delivers what had arrived, and leaves
        self.fail(cause)
        if self.connection is not None:
            self.connection.close()

    @property
    def in_flight(self) -> int:
        """How many receives wait for a message."""
        return self._mailbox.keys_wanted

    @property
    def is_read(self) -> bool:
        """Whether some thread has the reading role."""
        return self._being_read

    @property
    def dropped(self) -> int:
        """How many messages came for which nobody waited any more."""
        return self._mailbox.dropped

    @property
    def unmatched_nbytes(self) -> int:
        """Bytes that have come and nobody has asked for yet."""
        return self._mailbox.unmatched_nbytes

    # -- the reading role --------------------------------------------------------------------------

    def _take_role(self) -> bool:
        with self._mutex:
            if self._being_read or self.connection is None or self._mailbox.failure is not None:
                return False
            self._being_read = True
            self.turns += 1
            return True

    def _take_role_or_park(self, receive: Receive) -> threading.Lock | None:
        """Take the role, or return what to sleep on.

        Both in one step, so that no wake-up falls between the look at the role and the sleep.
        """
        with self._mutex:
            if not self._being_read and self.connection is not None and not self._mailbox.full:
                self._being_read = True
                self.turns += 1
                return None
            lock = threading.Lock()
            if not receive.done and receive.posted:
                lock.acquire()
                self._parked.setdefault(receive, []).append(lock)
            return lock

    def _leave_role(self) -> None:
        with self._mutex:
            self._being_read = False
            if self._parked:
                self._wake_a_parked()

    def _read_until(self, receive: Receive, deadline: Deadline) -> None:
        """Read, with the role, until one's own is done or somebody has to be called back."""
        assert self.connection is not None
        ended: list[Receive] = []
        try:
            while not (receive.done or ended or self._mailbox.full):
                frames = self.connection.read(deadline)
                if not frames:
                    break
                ended = self._deliver(frames)
        except RankwireError as error:
            ended = self._ended(error)
        except BaseException:
            self._interrupted()
            raise
        finally:
            self._leave_role()
        # Without the role: a callback may make a call to this very peer and wait for its reply.
        if ended:
            _call_back(ended)

    def _read_once(self, deadline: Deadline) -> None:
        assert self.connection is not None
        ended: list[Receive] = []
        try:
            ended = self._deliver(self.connection.read(deadline))
        except RankwireError as error:
            ended = self._ended(error)
        except BaseException:
            self._interrupted()
            raise
        finally:
            self._leave_role()
        _call_back(ended)

    def _interrupted(self) -> None:
        """A signal ended the reading: what was read and not delivered is lost, and may not be."""
        assert self.connection is not None
        if self.connection.unclaimed:
            self.connection.fail(PeerLostError(self.peer, "receiving from it was interrupted"))

    def _deliver(self, frames: list[Frame]) -> list[Receive]:
        """Match frames to receives; return those to be called back."""
        to_call_back = []
        with self._mutex:
            for channel, group, tag, payload in frames:
                receive = self._mailbox.deliver((group, channel, tag), payload)
                if receive is not None:
                    if self._parked:
                        self._wake(receive)
                    if receive.on_done is not None:
                        to_call_back.append(receive)
            while self._mailbox.misfits:
                self._wake(self._mailbox.misfits.pop())
            self.connection.claim()  # type: ignore[union-attr]
        return to_call_back

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
            locks = self._parked.get(receive)
            if locks is not None and lock in locks:
                locks.remove(lock)
                if not locks:
                    del self._parked[receive]
        self._pass_on()

    def _pass_on(self) -> None:
        """Leave the waiting; whoever still waits may have to read now."""
        with self._mutex:
            if self._parked and not self._being_read:
                self._wake_a_parked()

    def _wake(self, receive: Receive) -> None:
        for lock in self._parked.pop(receive, ()):
            lock.release()

    def _wake_a_parked(self) -> None:
        """Whoever wakes up finds its receive not done and takes the role."""
        for receive in self._parked:
            self._wake(receive)
            return

    def _abandon(self, receive: Receive) -> None:
        """Let a waiting thread leave by an exception.

        Nothing may wait for it, and no wake-up may be lost with it.
        """
        with self._mutex:
            self._mailbox.withdraw(receive)
            self._wake(receive)
            if receive.payload is not None:
                next_receive = self._mailbox.put_back(receive)
                if next_receive is not None:
                    self._wake(next_receive)
            if not self._being_read:
                self._wake_a_parked()

    def _too_late(self, deadline: Deadline) -> DeadlineExceededError:
        kept = self._mailbox.unmatched_nbytes
        detail = ""
        if self._mailbox.full:
            detail = f"{kept} bytes of other messages from it wait to be received, no more are read"
        elif self.connection is None:
            detail = "it has not sent anything yet"
        return DeadlineExceededError(deadline.limit, waiting_for=[self.peer], detail=detail)


def _call_back(receives: list[Receive]) -> None:
    """Tell those who asked to be told that their receive is done. Without any lock held."""
    for receive in receives:
        if receive.on_done is not None:
            receive.on_done(receive)
