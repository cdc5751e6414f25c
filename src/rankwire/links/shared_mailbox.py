"""A mailbox for many threads: a waiting thread sleeps, and is woken when its receive is done.

It knows no connection, only the holder of the *reading role*: a thread that leaves must wake
another thread that may have to take the role.

Locks: one *mutex* guards the mailbox, the role and the parked threads; it is never held while
sleeping, reading or calling back.

An interrupted thread restores roles, lists and sleepers (``_recover``) twice: a second interrupt
may stop the first time.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from itertools import starmap

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import ForkedProcessError, RankwireError
from rankwire.fork import guard
from rankwire.interrupts import ONCE
from rankwire.transports.wakeup import Sleeper, Sleepers, wake
from rankwire.wire.frames import Envelope, Payload
from rankwire.wire.mailbox import KeptMessages, Mailbox
from rankwire.wire.receive import Receive


class ParkedThreads:
    """The sleeping threads, by the receive that they wait for. ``asleep`` is read only."""

    def __init__(self) -> None:
        self.asleep: dict[Receive, Sleepers] = {}

    def park(self, receive: Receive) -> runtime.Lock:
        """Return a lock to sleep on; it is free already if there is nothing to wait for."""
        lock = runtime.Lock()
        if not receive.done and receive.posted:
            lock.acquire()
            self.asleep.setdefault(receive, []).append(lock)
        return lock

    def hang(self, receive: Receive, bell: Sleeper) -> None:
        """Park a waiter as if a thread slept here, if there is something to wait for."""
        if not receive.done and receive.posted:
            self.asleep.setdefault(receive, []).append(bell)

    def leave(self, receive: Receive, lock: Sleeper) -> None:
        """Remove a thread that continues without having been woken."""
        locks = self.asleep.get(receive)
        if locks is not None and lock in locks:
            locks.remove(lock)
            if not locks:
                del self.asleep[receive]

    def wake(self, receive: Receive) -> bool:
        """Wake all threads that wait for a receive; return whether there were any."""
        locks = self.asleep.get(receive, [])
        woken = bool(locks)
        wake(locks)
        self.asleep.pop(receive, None)
        return woken

    def wake_one(self) -> None:
        """Wake the threads of one receive: they find it not done, and one of them reads."""
        while self.asleep:
            if self.wake(next(iter(self.asleep))):
                return

    def wake_all(self) -> None:
        """Wake all threads."""
        for receive in list(self.asleep):
            self.wake(receive)


class SharedMailbox:
    """The receives from one peer. Every method is safe from any thread.

    Attributes:
        due: Receives that are done and whose callbacks are due.
        was_interrupted: Whether a thread was interrupted in here since the last ``read_quietly``;
            no poller sees what it has read.
    """

    def __init__(self, peer: int, mailbox: Mailbox, clock: Clock) -> None:
        self.peer = peer
        self._clock = clock
        self._mailbox = mailbox
        self._mutex = runtime.Lock()
        # The token of one visit; not the receive, for which several threads may wait.
        self._reader: object | None = None
        self.due = mailbox.due
        self.wanted_by = mailbox.wanted_by
        self._arrived = mailbox.arrived
        self._parked = ParkedThreads()
        self._asleep = self._parked.asleep
        self.was_interrupted = False
        guard(self)

    def post(self, receive: Receive) -> None:
        """Post a receive; it may be done on return."""
        with self._mutex:
            self._mailbox.post(receive)
            # Taking a message may have made room, for which parked threads wait.
            if self._asleep and self._reader is None:
                self._parked.wake_one()

    def expect(self, reply: Receive) -> None:
        """Post the receive of a reply that cannot have arrived yet."""
        with self._mutex:
            if self._mailbox.failure is None:
                reply.posted = True
                self.wanted_by[reply.envelope] = deque((reply,))
                return
        self.post(reply)

    def put(self, envelope: Envelope, payload: Payload) -> None:
        """Deliver a message of this rank to itself."""
        with self._mutex:
            receive = self._mailbox.deliver(envelope, payload)
            if receive is not None:
                self._parked.wake(receive)
        self.call_back_due()

    def keep(self, envelope: Envelope, most: int, most_nbytes: int) -> None:
        """Keep the messages of an envelope, at most so many, until ``take_kept`` takes them."""
        with self._mutex:
            self._arrived.kept[envelope] = KeptMessages(most, most_nbytes)

    def keep_no_more(self, envelope: Envelope) -> None:
        """Drop the kept messages of an envelope. Idempotent."""
        with self._mutex:
            self._arrived.kept.pop(envelope, None)

    def take_kept(self, receive: Receive, taken: deque[Payload]) -> bool:
        """Move the kept messages of an envelope to ``taken``; post the receive if there are none.

        Returns whether there were any.
        """
        with self._mutex:
            kept = self._arrived.kept.get(receive.envelope)
            if not kept:
                self._mailbox.post(receive)
                return False
            while kept:
                taken.extend(starmap(kept.popleft, ONCE))
        return True

    def withdraw(self, receive: Receive) -> bool:
        """Cancel a receive and wake its threads; return False if it is done already."""
        with self._mutex:
            try:
                withdrawn = self._mailbox.withdraw(receive)
                self._parked.wake(receive)
            except BaseException:
                self._mailbox.tidy()  # interrupted: no other thread would do it
                raise
        return withdrawn

    def abort(self, receive: Receive, error: RankwireError) -> bool:
        """Fail a receive; False if it is done already. Its reader notices within 0.1 s."""
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

    def park(self, receive: Receive, bell: Sleeper) -> None:
        """Release a waiter when a receive is done, or a thread has to read here."""
        with self._mutex:
            self._parked.hang(receive, bell)

    def leave(self, receive: Receive, bell: Sleeper) -> None:
        """Remove a waiter; another thread may have to read now."""
        with self._mutex:
            self._parked.leave(receive, bell)
            self._wake_next()

    def has_arrived(self, envelope: Envelope) -> bool:
        """Whether a message of this envelope was read and not taken."""
        return envelope in self._arrived

    def unreceived(self) -> dict[Envelope, int]:
        """Return how many messages of each envelope were read and not taken."""
        with self._mutex:
            return {key: len(messages) for key, messages in self._arrived.items()}

    def tags_wanted(self) -> list[int]:
        """Return the tags of the pending receives."""
        with self._mutex:
            return [tag for _, _, tag in self.wanted()]

    def call_back_due(self) -> None:
        """Run the callbacks that are due, each once."""
        while self.due:
            hand: list[Receive] = []
            try:
                hand.extend(starmap(self.due.popleft, ONCE))
                for receive in hand:
                    _call_back(receive)
            except IndexError:
                if hand:
                    raise  # a callback's
                break  # another thread took it first
            except Exception:
                raise
            except BaseException:
                self.due.extend(hand)  # first: another interrupt may stop the rest
                self.was_interrupted = True
                for receive in hand:
                    _call_back(receive)  # what was done of it already is not repeated
                    with suppress(ValueError):
                        self.due.remove(receive)
                raise

    def fail(self, cause: RankwireError) -> None:
        """Fail all receives, now and later; messages that have arrived can still be taken."""
        self._end_all(cause)
        self.call_back_due()

    def _end_all(self, cause: RankwireError) -> None:
        with self._mutex:
            for receive in self._mailbox.fail(cause):
                self._parked.wake(receive)

    def abandon(self, group: int, cause: RankwireError) -> None:
        """Fail the receives of a group that this rank has left."""
        with self._mutex:
            for receive in self._mailbox.fail_group(group, cause):
                self._parked.wake(receive)
            self._wake_next()  # there is room again
        self.call_back_due()

    def refuse(self, envelope: Envelope) -> None:
        """Drop the messages of a family of tags, now and later."""
        with self._mutex:
            self._arrived.refuse(envelope)
            self._wake_next()  # there is room again

    def close_in_child(self) -> None:
        """Fail all receives in a forked child: a callback that forked continues in here."""
        self._mutex = runtime.Lock()
        self._mailbox.fail(ForkedProcessError("this inbox"))

    @property
    def in_flight(self) -> int:
        """How many receives wait for a message."""
        return len(self.wanted_by)

    def wanted(self) -> list[Envelope]:
        """Return the envelopes of the pending receives."""
        placing = self._mailbox.placing
        return list(self.wanted_by) if placing is None else [*self.wanted_by, placing.envelope]

    @property
    def is_read(self) -> bool:
        """Whether some thread has the reading role."""
        return self._reader is not None

    def _recover(self, token: object | None) -> None:
        """Restore the state after an interrupt in this thread; wake all threads. Safe to repeat."""
        self.was_interrupted = True
        with self._mutex:
            self._mailbox.tidy()
            if self._reader is token:
                self._reader = None
            self._parked.wake_all()

    def _sleep(self, receive: Receive, lock: runtime.Lock, deadline: Deadline) -> bool:
        woken = False
        try:
            woken = self._clock.acquire(lock, True, deadline.sleep_limit())
        finally:
            if not woken:  # a wake-up at this moment is for another thread
                with self._mutex:
                    self._parked.leave(receive, lock)
                    self._wake_next()
        return woken

    def _wake_next(self) -> None:
        """Wake a thread that may have to read now. Mutex held."""
        if self._asleep and self._reader is None:
            self._parked.wake_one()

    def give_up(self, receive: Receive) -> None:
        """Cancel the receive of a thread that leaves by an exception. Safe to repeat."""
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

    def _wake_misfits(self) -> None:
        """Wake the threads whose receive a message of another size has failed. Mutex held."""
        while self._mailbox.misfits:
            self._parked.wake(self._mailbox.misfits.pop())


def _call_back(receive: Receive) -> None:
    if receive.on_done is not None:
        receive.on_done(receive)
