"""The mailbox: which arrived message belongs to which receive.

One mailbox holds what one peer sent. Arrivals and receives meet by key, the envelope
``(group, channel, tag)``; messages of one key are taken in the order in which they came, receives
of one key are served in the order in which they were posted.

A ``Receive`` ends exactly once, with a payload or with an error: in ``post`` when its message is
here already, in ``deliver`` when it comes, or in ``fail``. Pure state: no lock and no waiting; the
owner guards it and wakes whoever waits.

A signal may end the thread in here between any two bytecodes. So a payload moves from one place to
the next by one call of a C function (``extend`` of what pops it there): it is never in none of
them, nor in two. What is only counted or listed may be wrong after an interrupt, until ``tidy``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import starmap
from operator import attrgetter

from rankwire.errors import RankwireError, SizeMismatchError
from rankwire.wire.frames import Envelope, Payload
from rankwire.wire.loans import whole_of
from rankwire.wire.receive import Destination, Placed, Receive

# Tags that differ only in so many lower bits are of one family: the steps of a collective.
FAMILY_BITS = 16
_MOST_REFUSED = 256
# Kept for later, however short: an empty one takes 1 KB of memory.
_MOST_UNMATCHED = 1 << 20

# ``map(payload_of, starmap(frames.popleft, ONCE))`` takes the first frame when it is consumed, and
# not before: the payload leaves one place and enters the next in one step.
ONCE = ((),)
payload_of = attrgetter("payload")


class Mailbox:
    """What one peer sent and nobody has taken, and what is wanted from it.

    Args:
        keep_unmatched: Whether a message that nobody wants yet is kept (messages) or counted and
            dropped (replies whose caller has given up).
        unmatched_limit: Bytes kept for later at which ``full`` turns true; a million messages do
            the same.

    Attributes:
        misfits: Receives that a message of another size has ended, for the owner to wake.
        due: Receives that are done, for the owner to call ``on_done``; None if it does not ask.
        arrived: The messages that are kept for later, by envelope.
        unmatched: How many they are.
        unmatched_nbytes: Their bytes.
        wanted_by: The receives that are posted and not done, by envelope. For request ids, of which
            each is used once, its length is the number of calls in flight.
        full: Whether so much is kept for later that nothing more should be read.
        placing: The receive into whose memory a message is coming. From then on it gets that one
            and no other; and is remembered until it has, or its memory is not used any more.
    """

    __slots__ = (
        "_keep_unmatched",
        "_refused",
        "_unmatched_limit",
        "arrived",
        "dropped",
        "due",
        "failure",
        "full",
        "misfits",
        "placing",
        "unmatched",
        "unmatched_nbytes",
        "wanted_by",
    )

    def __init__(self, *, keep_unmatched: bool = True, unmatched_limit: int = 1 << 30) -> None:
        self._keep_unmatched = keep_unmatched
        self._unmatched_limit = unmatched_limit
        self.arrived: dict[Envelope, deque[Payload]] = {}
        self.wanted_by: dict[Envelope, deque[Receive]] = {}
        self._refused: deque[Envelope] | None = None  # made with the first
        self.failure: RankwireError | None = None
        self.dropped = 0
        self.misfits: list[Receive] = []
        self.due: deque[Receive] | None = None
        self.placing: Receive | None = None
        self.unmatched = 0
        self.unmatched_nbytes = 0
        self.full = False

    @property
    def wanted(self) -> int:
        """How many receives are posted and not done."""
        return sum(map(len, self.wanted_by.values())) + (self.placing is not None)

    def _count(self, messages: int, nbytes: int) -> None:
        """Count what is kept for later."""
        self.unmatched += messages
        self.unmatched_nbytes += nbytes
        is_full = self.unmatched_nbytes >= self._unmatched_limit
        self.full = is_full or self.unmatched >= _MOST_UNMATCHED

    def taker_of(self, key: Envelope, nbytes: int) -> Receive | None:
        """Return the receive that would get a message of this key and size."""
        receive = self._first_wanted(key)
        return receive if receive is not None and receive.nbytes in (None, nbytes) else None

    def post(self, receive: Receive) -> None:
        """Ask for a message. Ends at once if it is here, or if the peer has failed.

        Then it is not left in ``due``.
        """
        receive.posted = True
        arrived = self.arrived.get(receive.envelope)
        if arrived:
            nbytes = len(arrived[0])
            if receive.nbytes is not None and receive.nbytes != nbytes:
                receive.fail(SizeMismatchError(receive.nbytes, nbytes))
                return
            receive.complete(starmap(arrived.popleft, ONCE))
            if not arrived:
                del self.arrived[receive.envelope]
            self._count(-1, -nbytes)
        elif self.failure is not None:
            receive.fail(self.failure)
        else:
            wanted = self.wanted_by.get(receive.envelope)
            if wanted is None:
                self.wanted_by[receive.envelope] = deque((receive,))
            else:
                wanted.append(receive)

    def find_place(self, key: Envelope, nbytes: int, first: memoryview) -> Destination | None:
        """Return where a message that has begun to come is to go; None if nobody has said so.

        Only when all messages of its key before it were delivered, and none is placed. It may be
        asked again for the same message: its reader was interrupted.
        """
        receive = self.placing or self._first_wanted(key)
        if receive is None or receive.into is None or not receive.is_wanted:
            return None
        if receive.envelope != key:
            return None
        head_nbytes = receive.into.head_nbytes(nbytes, first)
        if head_nbytes is None or head_nbytes > len(first):  # some of the head is still to come
            return None
        self.placing = receive
        self._unlist(receive)
        return receive.into

    def _first_wanted(self, key: Envelope) -> Receive | None:
        return next((receive for receive in self.wanted_by.get(key, ()) if receive.is_wanted), None)

    def _unlist(self, receive: Receive) -> bool:
        """Take a receive off the list of those that wait; return whether it was there."""
        wanted = self.wanted_by.get(receive.envelope)
        if wanted is None or receive not in wanted:
            return False
        wanted.remove(receive)
        if not wanted:
            del self.wanted_by[receive.envelope]
        return True

    def withdraw(self, receive: Receive) -> bool:
        """Take back a receive; return False if it is done already.

        If a message is coming into its memory, that is to be vacated.
        """
        if receive.done or not (self._unlist(receive) or receive is self.placing):
            return False
        receive.posted = False
        return True

    def displaced(self, key: Envelope) -> None:
        """Have a receive wait again, because its sender has taken back the message of this key.

        Safe to repeat.
        """
        receive = self.placing
        if receive is not None and receive.envelope == key:
            if receive.is_wanted:
                wanted = self.wanted_by.setdefault(key, deque())
                if receive not in wanted:
                    wanted.appendleft(receive)
            self.placing = None

    def vacated(self, receive: Receive) -> None:
        """Note that nothing comes into a receive's memory any more."""
        if self.placing is receive:
            self.placing = None

    def _deliver_placed(self, payload: Placed, source: Iterable[Payload]) -> Receive | None:
        """Give a message to the one in whose memory it is; None if that does not want it."""
        receive = self.placing
        if receive is None or receive.into is not payload.destination:
            return None
        if receive.is_wanted:
            receive.complete(source)
            if receive.on_done is not None and self.due is not None:
                self.due.append(receive)
        self.placing = None
        return receive if receive.payload is not None else None

    def deliver(
        self, key: Envelope, payload: Payload, source: Iterable[Payload] | None = None
    ) -> Receive | None:
        """Take a message; return the receive that gets it, if one was waiting.

        That one is left in ``due`` if it is to be called back. Receives that wanted another size
        are ended too and left in ``misfits``.

        Args:
            key: Its envelope.
            payload: The message.
            source: Gives the payload when it is consumed, and removes it from where it was.
        """
        source = (payload,) if source is None else source
        if self.placing is not None and isinstance(payload, Placed):
            receive = self._deliver_placed(payload, source)
            if receive is not None:
                return receive
            source = map(whole_of, source)
        wanted = self.wanted_by.get(key)
        if wanted is not None and len(wanted) == 1:  # as below, for almost all messages
            receive = wanted[0]
            if receive.posted and not receive.done and receive.nbytes is None:
                receive._cell.extend(source)
                receive.done = True
                if receive.on_done is not None and self.due is not None:
                    self.due.append(receive)
                del self.wanted_by[key]
                return receive
        while wanted:
            receive = wanted[0]
            if not receive.posted or receive.done:
                pass  # given up or ended by a thread that was interrupted then
            elif receive.nbytes is None or receive.nbytes == len(payload):
                receive.complete(source)
                if receive.on_done is not None and self.due is not None:
                    self.due.append(receive)
                wanted.popleft()
                if not wanted:
                    del self.wanted_by[key]
                return receive
            else:
                receive.fail(SizeMismatchError(receive.nbytes, len(payload)))
                self.misfits.append(receive)
            wanted.popleft()
            if not wanted:
                del self.wanted_by[key]
        if not self._keep_unmatched or (self._refused and _family(key) in self._refused):
            deque(source, 0)
            self.dropped += 1
        else:
            self.arrived.setdefault(key, deque()).extend(source)
            self._count(1, len(payload))
        return None

    def refuse(self, envelope: Envelope) -> None:
        """Drop what has arrived and nobody wants of a tag's family, and what still comes.

        Only the last 256 families are remembered.
        """
        family = _family(envelope)
        if self._refused is None:
            self._refused = deque(maxlen=_MOST_REFUSED)
        self._refused.append(family)
        for key in [key for key in self.arrived if _family(key) == family]:
            dropped = self.arrived.pop(key)
            self.dropped += len(dropped)
            self._forget(dropped)

    def put_back(self, receive: Receive) -> Receive | None:
        """Take a delivered message back, as if it had not been taken; return who gets it instead.

        That is a receive which waits for the same key, if there is one; otherwise the message goes
        to the head of its queue.
        """
        payload = receive.payload
        assert payload is not None
        source = starmap(receive._cell.pop, ONCE)
        if not self._keep_unmatched or receive.envelope in self.wanted_by:
            return self.deliver(receive.envelope, payload, source)
        self.arrived.setdefault(receive.envelope, deque()).extendleft(source)
        self._count(1, len(payload))
        return None

    def tidy(self) -> None:
        """Put in order what a thread that was interrupted in here has left. Safe to repeat."""
        for key, wanted in list(self.wanted_by.items()):
            for receive in wanted:
                if receive._cell and not receive.done:
                    receive.done = True
                if receive.done:
                    self._note_due([receive])
            waiting = deque(r for r in wanted if r.is_wanted and r is not self.placing)
            if waiting:
                self.wanted_by[key] = waiting
            else:
                del self.wanted_by[key]
        if self.placing is not None and self.placing.payload is not None:
            self.placing.done = True
            self._note_due([self.placing])
            self.placing = None
        for key, arrived in list(self.arrived.items()):
            if not arrived:
                del self.arrived[key]
        self.unmatched = self.unmatched_nbytes = 0
        for queue in self.arrived.values():
            self._count(len(queue), sum(map(len, queue)))
        self._count(0, 0)
        if self.failure is not None:
            self.fail(self.failure)

    def fail(self, error: RankwireError) -> list[Receive]:
        """End every receive, now and later, with ``error``.

        Messages that have arrived can still be taken.
        """
        if self.failure is None:
            self.failure = error.kept()
        ended = [receive for wanted in self.wanted_by.values() for receive in wanted]
        if self.placing is not None:
            ended.append(self.placing)
        for receive in ended:
            receive.fail(self.failure)
        self._note_due(ended)
        self.wanted_by.clear()
        return ended

    def fail_group(self, group: int, error: RankwireError) -> list[Receive]:
        """End the receives of one group, and forget what has arrived for it."""
        ended = [r for key, wanted in self.wanted_by.items() if key[0] == group for r in wanted]
        if self.placing is not None and self.placing.envelope[0] == group:
            ended.append(self.placing)
        for receive in ended:
            receive.fail(error)
        self._note_due(ended)
        for key in [key for key in self.wanted_by if key[0] == group]:
            del self.wanted_by[key]
        for key in [key for key in self.arrived if key[0] == group]:
            self._forget(self.arrived.pop(key))
        return ended

    def _forget(self, messages: deque[Payload]) -> None:
        """Count messages no more that were dropped."""
        self._count(-len(messages), -sum(map(len, messages)))

    def _note_due(self, ended: list[Receive]) -> None:
        if self.due is not None:
            for receive in ended:
                if receive.on_done is not None and receive not in self.due:
                    self.due.append(receive)


def _family(envelope: Envelope) -> Envelope:
    group, channel, tag = envelope
    return group, channel, tag >> FAMILY_BITS
