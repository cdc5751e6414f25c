"""Lanes and inboxes: one way of a simulated network, and where it ends.

A *lane* is one FIFO way from one rank to another for one kind of traffic (messages, requests of a
service, its replies). It is bounded: bytes that are under way, or have arrived and nobody has
taken, are its load, and a sender waits its turn until there is room. An *inbox* is where messages
and replies land: a ``wire.mailbox`` and the threads that wait in it.

Everything here needs the network's one lock held; every condition variable stands on it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Protocol

from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError, RankwireError
from rankwire.wire.frames import Envelope
from rankwire.wire.mailbox import Mailbox, Receive

__all__ = ["Inbox", "Lane", "Landing", "Wanted"]

Landing = Callable[[], None]


class _Network(Protocol):
    """What an inbox needs of the network."""

    lock: threading.Lock

    def call_back(self, receive: Receive) -> None: ...


class Wanted(Receive):
    """A receive that threads can sleep on. Its ``home`` is the inbox where it was posted."""

    __slots__ = ("ended",)

    def __init__(
        self,
        envelope: Envelope,
        *,
        nbytes: int | None = None,
        on_done: Callable[[Receive], None] | None = None,
    ) -> None:
        super().__init__(envelope, on_done, nbytes=nbytes)
        self.ended: threading.Condition | None = None  # made by the first thread that sleeps


class Lane:
    """One FIFO way from ``src`` to ``dst``. Everything needs the lock held."""

    __slots__ = (
        "_delays",
        "_turns",
        "dst",
        "failure",
        "kept_nbytes",
        "src",
        "under_way",
        "under_way_nbytes",
    )

    def __init__(self, src: int, dst: int, delays: Iterator[float] | None) -> None:
        self.src = src
        self.dst = dst
        self.failure: RankwireError | None = None
        # What has arrived and is not taken; set by whoever keeps it.
        self.kept_nbytes: Callable[[], int] = int
        self.under_way: deque[tuple[float, int, Landing]] = deque()
        self.under_way_nbytes = 0
        self._delays = delays
        self._turns: deque[threading.Condition] = deque()

    @property
    def load_nbytes(self) -> int:
        """Bytes that were sent and not taken."""
        return self.under_way_nbytes + self.kept_nbytes()

    def wait_for_room(
        self,
        nbytes: int,
        limit: int,
        lock: threading.Lock,
        deadline: Deadline,
        check: Callable[[], object],
    ) -> None:
        """Return when ``nbytes`` may be sent, in order of asking. An empty message always may."""
        self._raise_failure()
        if nbytes == 0 or (not self._turns and self._has_room(nbytes, limit)):
            return
        turn = threading.Condition(lock)
        self._turns.append(turn)
        try:
            while not (self._turns[0] is turn and self._has_room(nbytes, limit)):
                if deadline.expired:
                    detail = f"{self.load_nbytes} bytes wait there, the limit is {limit}"
                    raise DeadlineExceededError(
                        deadline.limit, waiting_for=[self.dst], detail=detail
                    )
                turn.wait(deadline.sleep_limit())
                check()
                self._raise_failure()
        finally:
            self._turns.remove(turn)
            self.room_made()

    def room_made(self) -> None:
        """Wake the sender whose turn it is."""
        if self._turns:
            self._turns[0].notify()

    def next_arrival(self) -> float | None:
        """Return when a message sent now may arrive, after those before it; None if at once."""
        return None if self._delays is None else monotonic() + next(self._delays)

    def abort(self, error: RankwireError) -> None:
        """Lose what is under way; senders, now and later, get ``error``."""
        self.under_way.clear()
        self.under_way_nbytes = 0
        self.refuse(error)

    def refuse(self, error: RankwireError) -> None:
        """Give senders, now and later, ``error``; what is under way still arrives."""
        if self.failure is None:
            self.failure = error
        self.wake_senders()

    def wake_senders(self) -> None:
        """Have all blocked senders look again whether they still may send."""
        for turn in self._turns:
            turn.notify()

    def _has_room(self, nbytes: int, limit: int) -> bool:
        load = self.load_nbytes
        return load == 0 or load + nbytes <= limit

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure.copy()


class Inbox:
    """What came over one lane, and who waits for it. Everything needs the lock held.

    Args:
        network: Whose lock guards it.
        lane: Where the messages come from.
        mailbox: Where they are matched.
    """

    def __init__(self, network: _Network, lane: Lane, mailbox: Mailbox) -> None:
        self.lane = lane
        self._network = network
        self._mailbox = mailbox
        self._posted: set[Wanted] = set()
        self._fewer = threading.Condition(network.lock)
        lane.kept_nbytes = lambda: mailbox.unmatched_nbytes

    @property
    def in_flight(self) -> int:
        """How many receives wait for a message."""
        return len(self._posted)

    def wanted(self) -> list[Envelope]:
        """Return what is waited for. Lock held."""
        return self._mailbox.wanted_keys()

    @property
    def dropped(self) -> int:
        """How many messages came for which nobody waited any more."""
        return self._mailbox.dropped

    def has_arrived(self, envelope: Envelope) -> bool:
        """Whether a message of this envelope was not taken yet."""
        return self._mailbox.has_arrived(envelope)

    def post(self, wanted: Wanted) -> None:
        """Ask for a message; it may be done on return. One of a wrong size keeps its place."""
        wanted.home = self
        self._posted.add(wanted)
        self._mailbox.post(wanted)
        if wanted.done:
            self._end(wanted)
            self.lane.room_made()

    def land(self, envelope: Envelope, payload: bytearray) -> None:
        """Give a message to the first receive of that key which it fits, else keep it."""
        self._landed(self._mailbox.deliver(envelope, payload))

    def _landed(self, wanted: Receive | None) -> None:
        misfits, self._mailbox.misfits = self._mailbox.misfits, []
        for ended in (*misfits, *([] if wanted is None else [wanted])):
            assert isinstance(ended, Wanted)
            self._end(ended)

    def wait(self, wanted: Wanted, deadline: Deadline) -> bytearray:
        """Return the message of a posted receive. The lock is free while waiting.

        Raises:
            DeadlineExceededError: The receive is taken back; a later one still gets the message.
            RankwireError: The source is gone, or the message has the wrong size.
        """
        try:
            in_time = self.drive(wanted, deadline)
        except BaseException:  # an interrupt: the message must not go with this thread
            if not self.withdraw(wanted) and wanted.payload is not None:
                self._landed(self._mailbox.put_back(wanted))
            raise
        if not in_time:
            self.withdraw(wanted)
            raise DeadlineExceededError(deadline.limit, waiting_for=[self.lane.src])
        return wanted.result()

    def drive(self, wanted: Wanted, deadline: Deadline) -> bool:
        """Sleep until a receive is done; False if the deadline passes, and then it stays posted."""
        while not wanted.done:
            if deadline.expired:
                return False
            if wanted.ended is None:
                wanted.ended = threading.Condition(self._network.lock)
            wanted.ended.wait(deadline.sleep_limit())
        return True

    def withdraw(self, wanted: Wanted) -> bool:
        """Take back a receive; False if it is done already."""
        self._posted.discard(wanted)
        self._fewer.notify_all()
        return self._mailbox.withdraw(wanted)

    def abort(self, wanted: Wanted, error: RankwireError) -> bool:
        """End a receive with an error; False if it is done already."""
        if not self._mailbox.withdraw(wanted):
            return False
        wanted.fail(error)
        self._end(wanted)
        return True

    def tags_wanted(self) -> list[int]:
        """Return the tags of the receives that wait."""
        return self._mailbox.tags_wanted()

    def wait_for_fewer(self, limit: int, deadline: Deadline) -> bool:
        """Sleep until fewer than ``limit`` receives wait; False if the deadline passes."""
        while len(self._posted) >= limit:
            if deadline.expired:
                return False
            self._fewer.wait(deadline.sleep_limit())
        return True

    def fail(self, error: RankwireError) -> None:
        """End all receives, now and later; what has arrived can still be taken."""
        for wanted in self._mailbox.fail(error):
            assert isinstance(wanted, Wanted)
            self._end(wanted)

    def abandon(self, group: int, error: RankwireError) -> None:
        """End the receives of one group and forget what has arrived for it."""
        for wanted in self._mailbox.fail_group(group, error):
            assert isinstance(wanted, Wanted)
            self._end(wanted)
        self.lane.room_made()

    def refuse(self, envelope: Envelope) -> None:
        """Drop the messages of a family of tags, now and later."""
        self._mailbox.refuse(envelope)
        self.lane.room_made()

    def _end(self, wanted: Wanted) -> None:
        self._posted.discard(wanted)
        self._fewer.notify_all()
        if wanted.ended is not None:
            wanted.ended.notify_all()
        self._network.call_back(wanted)
