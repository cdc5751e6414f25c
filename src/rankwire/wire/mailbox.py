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
from collections.abc import Callable, Iterable
from itertools import starmap
from operator import attrgetter

from rankwire.errors import RankwireError, SizeMismatchError
from rankwire.wire.frames import Envelope, Payload
from rankwire.wire.loans import whole_of

# Tags that differ only in so many lower bits are of one family: the steps of a collective.
FAMILY_BITS = 16
_MOST_REFUSED = 256
# Kept for later, however short: an empty one takes 1 KB of memory.
_MOST_UNMATCHED = 1 << 20

# ``map(payload_of, starmap(frames.popleft, ONCE))`` takes the first frame when it is consumed, and
# not before: the payload leaves one place and enters the next in one step.
ONCE = ((),)
payload_of = attrgetter("payload")


class Receive:
    """One message that somebody wants.

    Attributes:
        envelope: The one it must have.
        nbytes: The size it must have, if that is fixed; a message of another size ends the receive
            with an error and stays for the next one.
        done: Whether ``payload`` or ``error`` is set.
        posted: Whether somebody still wants it; False again once it was withdrawn.
        on_done: Called by the owner of the mailbox, outside its locks, once it is done.
    """

    __slots__ = ("_cell", "done", "envelope", "error", "nbytes", "on_done", "posted")

    def __init__(
        self,
        envelope: Envelope,
        on_done: Callable[[Receive], None] | None = None,
        *,
        nbytes: int | None = None,
    ) -> None:
        self.envelope = envelope
        self.nbytes = nbytes
        self.done = False
        self.posted = False
        self._cell: list[Payload] = []
        self.error: RankwireError | None = None
        self.on_done = on_done

    @property
    def payload(self) -> Payload | None:
        """The message, if it has come."""
        return self._cell[0] if self._cell else None

    def take(self) -> Payload:
        """Return the payload or raise the error. Only when ``done``."""
        if not self._cell:
            assert self.error is not None
            raise self.error.copy()
        return self._cell[0]

    def fetch(self) -> None:
        """Bring the payload here, if it lies with its sender; it is gone if that took it back."""
        try:
            self._cell[:] = map(whole_of, self._cell)
        except RankwireError:
            self._cell.clear()

    def result(self) -> bytearray:
        """Return the payload in memory of the caller's own, or raise the error likewise."""
        return whole_of(self.take())

    def complete(self, payload: Iterable[Payload]) -> None:
        """End it with the message, which ``payload`` gives."""
        self._cell.extend(payload)
        self.done = True

    def fail(self, error: RankwireError) -> None:
        """End it with an error, unless it has ended."""
        if not self._cell and not self.done:
            self.error = error
            self.done = True


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
        self.unmatched = 0
        self.unmatched_nbytes = 0
        self.full = False

    @property
    def wanted(self) -> int:
        """How many receives are posted and not done."""
        return sum(map(len, self.wanted_by.values()))

    def _count(self, messages: int, nbytes: int) -> None:
        """Count what is kept for later."""
        self.unmatched += messages
        self.unmatched_nbytes += nbytes
        is_full = self.unmatched_nbytes >= self._unmatched_limit
        self.full = is_full or self.unmatched >= _MOST_UNMATCHED

    def would_take(self, key: Envelope, nbytes: int) -> bool:
        """Whether somebody waits for a message of this key and size."""
        for receive in self.wanted_by.get(key, ()):
            if receive.posted and not receive.done:
                return receive.nbytes in (None, nbytes)
        return False

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

    def withdraw(self, receive: Receive) -> bool:
        """Take back a receive; return False if it is done already."""
        wanted = self.wanted_by.get(receive.envelope)
        if receive.done or wanted is None or receive not in wanted:
            return False
        receive.posted = False
        wanted.remove(receive)
        if not wanted:
            del self.wanted_by[receive.envelope]
        return True

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
            waiting = deque(r for r in wanted if r.posted and not r.done)
            if waiting:
                self.wanted_by[key] = waiting
            else:
                del self.wanted_by[key]
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
        for receive in ended:
            receive.fail(self.failure)
        self._note_due(ended)
        self.wanted_by.clear()
        return ended

    def fail_group(self, group: int, error: RankwireError) -> list[Receive]:
        """End the receives of one group, and forget what has arrived for it."""
        ended = [r for key, wanted in self.wanted_by.items() if key[0] == group for r in wanted]
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
