"""The mailbox: matches the messages of one peer with receives, by envelope, in order.

It has no lock and never waits: its owner guards it and wakes waiting threads.

One call of a C function (``extend`` with an iterator that pops) moves a payload from one place to
the next, so an interrupt never loses or duplicates it. Counts and lists may be wrong after an
interrupt, until ``tidy``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import starmap
from operator import attrgetter

from rankwire.errors import RankwireError, SizeMismatchError
from rankwire.interrupts import ONCE
from rankwire.wire.frames import Envelope, Payload, whole_of
from rankwire.wire.receive import Destination, Placed, Receive

# Tags that differ only in these lower bits are one family: the steps of a collective.
FAMILY_BITS = 16
_MOST_REFUSED = 256
# Of any size: an empty message takes 1 KB of memory.
_MOST_UNMATCHED = 1 << 20

payload_of = attrgetter("payload")


class KeptMessages(deque[Payload]):
    """The messages of one envelope, within the credit that their sender has.

    Credit allows one message to exceed the bytes. What is sent beyond it is dropped.
    """

    def __init__(self, most: int, most_nbytes: int) -> None:
        super().__init__(maxlen=most)
        self._most_nbytes = most_nbytes
        self.nbytes = 0  # of those that came since it was empty

    @property
    def has_room(self) -> bool:
        """Whether the sender may send another message."""
        if not self:
            self.nbytes = 0
        return self.nbytes < self._most_nbytes


class ArrivedMessages(dict[Envelope, deque[Payload]]):
    """The messages that wait for a receive, by envelope; ``full`` at ``limit`` bytes or a million.

    Without ``keep``, messages are counted and dropped, such as replies to cancelled calls.

    Attributes:
        kept: The messages of some envelopes, such as the items of a stream, by envelope.
    """

    __slots__ = ("_keep", "_limit", "_refused", "count", "dropped", "full", "kept", "nbytes")

    def __init__(self, *, keep: bool, limit: int) -> None:
        self._keep = keep
        self._limit = limit
        self._refused: deque[Envelope] | None = None  # made with the first
        self.kept: dict[Envelope, KeptMessages] = {}
        self.count = self.nbytes = self.dropped = 0
        self.full = False

    def add(
        self, key: Envelope, payload: Payload, source: Iterable[Payload], *, first: bool = False
    ) -> None:
        """Keep a message without a receive, as the first or last of its key, or drop it."""
        kept = self.kept.get(key)
        if kept is not None and (kept.has_room or first):
            (kept.extendleft if first else kept.extend)(source)
            kept.nbytes += len(payload)
        elif (
            kept is not None or not self._keep or (self._refused and _family(key) in self._refused)
        ):
            deque(source, 0)
            self.dropped += 1
        else:
            queue = self.setdefault(key, deque())
            (queue.extendleft if first else queue.extend)(source)
            self.change_by(1, len(payload))

    def _drops(self, key: Envelope) -> bool:
        return not self._keep or bool(self._refused and _family(key) in self._refused)

    def change_by(self, messages: int, nbytes: int) -> None:
        """Count messages that were added or taken."""
        self.count += messages
        self.nbytes += nbytes
        self.full = self.nbytes >= self._limit or self.count >= _MOST_UNMATCHED

    def refuse(self, envelope: Envelope) -> None:
        """Drop the arrived and all later messages of a tag's family, for the last 256 families."""
        family = _family(envelope)
        if self._refused is None:
            self._refused = deque(maxlen=_MOST_REFUSED)
        self._refused.append(family)
        self.dropped += self.discard(lambda key: _family(key) == family)

    def discard(self, is_unwanted: Callable[[Envelope], bool]) -> int:
        """Drop the messages of some envelopes; return their number."""
        before = self.count
        for key in list(filter(is_unwanted, self)):
            messages = self.pop(key)
            self.change_by(-len(messages), -sum(map(len, messages)))
        return before - self.count

    def tidy(self) -> None:
        """Repair the counts and lists after an interrupt."""
        for key in [key for key, queue in self.items() if not queue]:
            del self[key]
        self.count = self.nbytes = 0
        self.change_by(sum(map(len, self.values())), sum(sum(map(len, q)) for q in self.values()))


class Mailbox:
    """The messages of one peer that were not received yet, and the receives that wait."""

    __slots__ = ("_abandoned", "arrived", "due", "failure", "misfits", "placing", "wanted_by")

    def __init__(self, *, keep_unmatched: bool = True, unmatched_limit: int = 1 << 30) -> None:
        self.arrived = ArrivedMessages(keep=keep_unmatched, limit=unmatched_limit)
        self.wanted_by: dict[Envelope, deque[Receive]] = {}  # posted and not done
        self._abandoned: dict[int, RankwireError] = {}  # groups whose receives have ended
        self.failure: RankwireError | None = None
        self.misfits: list[Receive] = []  # a message had another size; the owner wakes them
        self.due: deque[Receive] = deque()  # done; the owner calls ``on_done``
        # Its memory receives a message now. It gets that message and no other, and stays here until
        # it has it or its memory is no longer in use.
        self.placing: Receive | None = None

    @property
    def wanted(self) -> int:
        """The number of receives that are posted and not done."""
        return sum(map(len, self.wanted_by.values())) + (self.placing is not None)

    def taker_of(self, key: Envelope, nbytes: int) -> Receive | None:
        """Return the receive that would get a message of this key and size."""
        receive = self._first_wanted(key)
        return receive if receive is not None and receive.nbytes in (None, nbytes) else None

    def post(self, receive: Receive) -> None:
        """Post a receive. If its message or an error is here, it ends now, outside ``due``."""
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
            self.arrived.change_by(-1, -nbytes)
        elif self.failure is not None:
            receive.fail(self.failure)
        elif receive.envelope[0] in self._abandoned:  # its group was closed meanwhile
            receive.fail(self._abandoned[receive.envelope[0]])
        else:
            wanted = self.wanted_by.get(receive.envelope)
            if wanted is None:
                self.wanted_by[receive.envelope] = deque((receive,))
            else:
                wanted.append(receive)

    def find_place(self, key: Envelope, nbytes: int, first: memoryview) -> Destination | None:
        """Return the memory for a message whose first bytes have come; None if no receive has any.

        All earlier messages of its key must be delivered, and no other placed. Repeatable.
        """
        receive = self.placing or self._first_wanted(key)
        if receive is None or receive.into is None or not receive.is_wanted:
            return None
        if receive.envelope != key:
            return None
        head_nbytes = receive.into.head_nbytes(nbytes, first)
        if head_nbytes is None or head_nbytes > len(first):  # the head is incomplete
            return None
        self.placing = receive
        self._unlist(receive)
        return receive.into

    def _first_wanted(self, key: Envelope) -> Receive | None:
        return next((receive for receive in self.wanted_by.get(key, ()) if receive.is_wanted), None)

    def _unlist(self, receive: Receive) -> bool:
        wanted = self.wanted_by.get(receive.envelope)
        if wanted is None or receive not in wanted:
            return False
        wanted.remove(receive)
        if not wanted:
            del self.wanted_by[receive.envelope]
        return True

    def withdraw(self, receive: Receive) -> bool:
        """Withdraw a receive, whose memory must then be vacated; return False if it is done."""
        if receive.done or not (self._unlist(receive) or receive is self.placing):
            return False
        receive.posted = False
        return True

    def displaced(self, key: Envelope) -> None:
        """Let a receive wait again after the sender has revoked its message. Repeatable."""
        receive = self.placing
        if receive is not None and receive.envelope == key:
            if receive.is_wanted:
                wanted = self.wanted_by.setdefault(key, deque())
                if receive not in wanted:
                    wanted.appendleft(receive)
            self.placing = None

    def vacated(self, receive: Receive) -> None:
        """Note that a receive's memory is not in use any more."""
        if self.placing is receive:
            self.placing = None

    def _deliver_placed(self, payload: Placed, source: Iterable[Payload]) -> Receive | None:
        receive = self.placing
        if receive is None or receive.into is not payload.destination:
            return None
        if receive.is_wanted:
            receive.complete(source)
            self._note_due([receive])
        self.placing = None
        return receive if receive.payload is not None else None

    def deliver(
        self, key: Envelope, payload: Payload, source: Iterable[Payload] | None = None
    ) -> Receive | None:
        """Deliver a message; return the receive that gets it, if one was waiting.

        ``source`` yields and removes the payload. Receives for another size become ``misfits``.
        """
        source = (payload,) if source is None else source
        if self.placing is not None and isinstance(payload, Placed):
            receive = self._deliver_placed(payload, source)
            if receive is not None:
                return receive
            source = map(whole_of, source)
        wanted = self.wanted_by.get(key)
        if wanted:
            receive = wanted[0]
            if len(wanted) == 1 and receive.nbytes is None and receive.posted and not receive.done:
                # As ``_deliver_in_turn`` does, without a call: so are almost all messages.
                receive._cell.extend(source)
                receive.done = True
                if receive.on_done is not None:
                    self.due.append(receive)
                del self.wanted_by[key]
                return receive
            receive = self._deliver_in_turn(key, wanted, len(payload), source)
            if receive is not None:
                return receive
        self.arrived.add(key, payload, source)
        return None

    def _deliver_in_turn(
        self, key: Envelope, wanted: deque[Receive], nbytes: int, source: Iterable[Payload]
    ) -> Receive | None:
        """Deliver a message to the first receive that it fits; fail those before it."""
        taker = None
        while wanted and taker is None:
            receive = wanted[0]
            if not receive.is_wanted:
                pass  # withdrawn or ended by a thread that was interrupted then
            elif receive.nbytes is None or receive.nbytes == nbytes:
                receive.complete(source)
                self._note_due([receive])
                taker = receive
            else:
                receive.fail(SizeMismatchError(receive.nbytes, nbytes))
                self.misfits.append(receive)
            wanted.popleft()
            if not wanted:
                del self.wanted_by[key]
        return taker

    def put_back(self, receive: Receive) -> Receive | None:
        """Take a delivered message back; return the waiting receive that gets it, or queue it."""
        payload = receive.payload
        assert payload is not None
        source = starmap(receive._cell.pop, ONCE)
        if receive.envelope in self.wanted_by:
            return self.deliver(receive.envelope, payload, source)
        self.arrived.add(receive.envelope, payload, source, first=True)
        return None

    def tidy(self) -> None:
        """Repair the state after an interrupt. Safe to repeat."""
        for key, wanted in list(self.wanted_by.items()):
            self._tidy_wanted(key, wanted)
        if self.placing is not None and self.placing.payload is not None:
            self.placing.done = True
            self._note_due([self.placing])
            self.placing = None
        self.arrived.tidy()
        if self.failure is not None:
            self.fail(self.failure)

    def _tidy_wanted(self, key: Envelope, wanted: deque[Receive]) -> None:
        for receive in wanted:
            receive.done = receive.done or bool(receive._cell)
        self._note_due([receive for receive in wanted if receive.done])
        waiting = deque(r for r in wanted if r.is_wanted and r is not self.placing)
        if waiting:
            self.wanted_by[key] = waiting
        else:
            del self.wanted_by[key]

    def fail(self, error: RankwireError) -> list[Receive]:
        """End every receive, now and later, with ``error``; arrived messages can still be taken."""
        if self.failure is None:
            self.failure = error.kept()
        return self._end(self.failure, list(self.wanted_by), self.placing)

    def fail_group(self, group: int, error: RankwireError) -> list[Receive]:
        """End the receives of one group, now and later, and drop its arrived messages."""
        self._abandoned[group] = error
        if len(self._abandoned) > _MOST_REFUSED:
            del self._abandoned[next(iter(self._abandoned))]
        placing = self.placing
        if placing is not None and placing.envelope[0] != group:
            placing = None
        ended = self._end(error, [key for key in self.wanted_by if key[0] == group], placing)
        self.arrived.discard(lambda key: key[0] == group)
        return ended

    def _end(
        self, error: RankwireError, keys: list[Envelope], placing: Receive | None
    ) -> list[Receive]:
        ended = [receive for key in keys for receive in self.wanted_by[key]]
        if placing is not None:
            ended.append(placing)
        for receive in ended:
            receive.fail(error)
        self._note_due(ended)
        for key in keys:
            del self.wanted_by[key]
        return ended

    def _note_due(self, ended: list[Receive]) -> None:
        for receive in ended:
            if receive.on_done is not None and receive not in self.due:
                self.due.append(receive)


def _family(envelope: Envelope) -> Envelope:
    group, channel, tag = envelope
    return group, channel, tag >> FAMILY_BITS
