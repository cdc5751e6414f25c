"""The mailbox: which arrived message belongs to which receive.

One mailbox holds what one peer sent. Arrivals and receives meet by key, the envelope
``(group, channel, tag)``; messages of one key are taken in the order in which they came, receives
of one key are served in the order in which they were posted.

A ``Receive`` ends exactly once, with a payload or with an error: in ``post`` when its message is
here already, in ``deliver`` when it comes, or in ``fail``. Pure state: no lock and no waiting; the
owner guards it and wakes whoever waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from rankwire.errors import RankwireError, SizeMismatchError
from rankwire.wire.frames import Payload
from rankwire.wire.loans import whole_of

__all__ = ["FAMILY_BITS", "Key", "Mailbox", "Receive"]

# Tags that differ only in so many lower bits are of one family: the steps of a collective.
FAMILY_BITS = 16
_MOST_REFUSED = 256

Key = tuple[int, int, int]  # group, channel, tag


class Receive:
    """One message that somebody wants.

    Attributes:
        key: The envelope it must have.
        nbytes: The size it must have, if that is fixed; a message of another size ends the receive
            with an error and stays for the next one.
        done: Whether ``payload`` or ``error`` is set.
        posted: Whether somebody still wants it; False again once it was withdrawn.
        on_done: Called by the owner of the mailbox, outside its locks, once it is done.
        home: The owner's note of where it is posted.
    """

    __slots__ = ("done", "error", "home", "key", "nbytes", "on_done", "payload", "posted")

    def __init__(
        self,
        key: Key,
        on_done: Callable[[Receive], None] | None = None,
        *,
        nbytes: int | None = None,
    ) -> None:
        self.key = key
        self.nbytes = nbytes
        self.done = False
        self.posted = False
        self.payload: Payload | None = None
        self.error: RankwireError | None = None
        self.on_done = on_done
        self.home: Any = None

    def take(self) -> Payload:
        """Return the payload or raise the error. Only when ``done``."""
        if self.payload is None:
            assert self.error is not None
            raise self.error.copy()
        return self.payload

    def result(self) -> bytearray:
        """Return the payload in memory of the caller's own, or raise the error likewise."""
        return whole_of(self.take())

    def complete(self, payload: Payload) -> None:
        """End it with the message."""
        self.payload = payload
        self.done = True

    def fail(self, error: RankwireError) -> None:
        """End it with an error."""
        self.error = error
        self.done = True


class Mailbox:
    """What one peer sent and nobody has taken, and what is wanted from it.

    Args:
        keep_unmatched: Whether a message that nobody wants yet is kept (messages) or counted and
            dropped (replies whose caller has given up).
        unmatched_limit: Bytes kept for later at which ``full`` turns true.
    """

    __slots__ = (
        "_arrived",
        "_keep_unmatched",
        "_refused",
        "_unmatched_limit",
        "_wanted",
        "dropped",
        "failure",
        "misfits",
        "unmatched_nbytes",
    )

    def __init__(self, *, keep_unmatched: bool = True, unmatched_limit: int = 1 << 30) -> None:
        self._keep_unmatched = keep_unmatched
        self._unmatched_limit = unmatched_limit
        self._arrived: dict[Key, deque[Payload]] = {}
        self._wanted: dict[Key, deque[Receive]] = {}
        self._refused: deque[Key] = deque(maxlen=_MOST_REFUSED)
        self.failure: RankwireError | None = None
        self.dropped = 0
        self.misfits: list[Receive] = []
        self.unmatched_nbytes = 0

    @property
    def wanted(self) -> int:
        """How many receives are posted and not done."""
        return sum(map(len, self._wanted.values()))

    def wanted_keys(self) -> list[Key]:
        """Return what is wanted."""
        return list(self._wanted)

    @property
    def keys_wanted(self) -> int:
        """How many different keys are wanted.

        For request ids that is the number of calls in flight.
        """
        return len(self._wanted)

    def tags_wanted(self) -> list[int]:
        """Return the tags that are wanted: for replies, the ids of the calls in flight."""
        return [tag for _, _, tag in self._wanted]

    @property
    def full(self) -> bool:
        """Whether so much is kept for later that nothing more should be read."""
        return self.unmatched_nbytes >= self._unmatched_limit

    def would_take(self, key: Key, nbytes: int) -> bool:
        """Whether somebody waits for a message of this key and size."""
        wanted = self._wanted.get(key)
        return wanted is not None and wanted[0].nbytes in (None, nbytes)

    def has_arrived(self, key: Key) -> bool:
        """Whether a message of this key is kept for later."""
        return key in self._arrived

    def post(self, receive: Receive) -> None:
        """Ask for a message. Ends at once if it is here, or if the peer has failed."""
        receive.posted = True
        arrived = self._arrived.get(receive.key)
        if arrived is not None:
            if receive.nbytes is not None and receive.nbytes != len(arrived[0]):
                receive.fail(SizeMismatchError(receive.nbytes, len(arrived[0])))
                return
            payload = arrived.popleft()
            if not arrived:
                del self._arrived[receive.key]
            self.unmatched_nbytes -= len(payload)
            receive.complete(payload)
        elif self.failure is not None:
            receive.fail(self.failure)
        else:
            wanted = self._wanted.get(receive.key)
            if wanted is None:
                self._wanted[receive.key] = deque((receive,))
            else:
                wanted.append(receive)

    def withdraw(self, receive: Receive) -> bool:
        """Take back a receive; return False if it is done already."""
        wanted = self._wanted.get(receive.key)
        if wanted is None or receive not in wanted:
            return False
        wanted.remove(receive)
        if not wanted:
            del self._wanted[receive.key]
        receive.posted = False
        return True

    def deliver(self, key: Key, payload: Payload) -> Receive | None:
        """Take a message; return the receive that gets it, if one was waiting.

        Receives that wanted another size are ended too and left in ``misfits`` for the owner.
        """
        wanted = self._wanted.get(key)
        while wanted:
            receive = wanted.popleft()
            if not wanted:
                del self._wanted[key]
            if receive.nbytes is None or receive.nbytes == len(payload):
                receive.complete(payload)
                return receive
            receive.fail(SizeMismatchError(receive.nbytes, len(payload)))
            self.misfits.append(receive)
        if not self._keep_unmatched or (self._refused and _family(key) in self._refused):
            self.dropped += 1
        else:
            self._arrived.setdefault(key, deque()).append(payload)
            self.unmatched_nbytes += len(payload)
        return None

    def refuse(self, group: int, channel: int, tag: int) -> None:
        """Drop what has arrived and nobody wants of a family of tags, and what still comes.

        Only the last 256 families are remembered.
        """
        family = _family((group, channel, tag))
        self._refused.append(family)
        for key in [key for key in self._arrived if _family(key) == family]:
            dropped = self._arrived.pop(key)
            self.dropped += len(dropped)
            self.unmatched_nbytes -= sum(map(len, dropped))

    def put_back(self, receive: Receive) -> Receive | None:
        """Take a delivered message back, as if it had not been taken; return who gets it instead.

        That is a receive which waits for the same key, if there is one; otherwise the message goes
        to the head of its queue.
        """
        assert receive.payload is not None
        if not self._keep_unmatched or receive.key in self._wanted:
            return self.deliver(receive.key, receive.payload)
        self._arrived.setdefault(receive.key, deque()).appendleft(receive.payload)
        self.unmatched_nbytes += len(receive.payload)
        return None

    def fail(self, error: RankwireError) -> list[Receive]:
        """End every receive, now and later, with ``error``.

        Messages that have arrived can still be taken.
        """
        if self.failure is None:
            self.failure = error
        ended = [receive for wanted in self._wanted.values() for receive in wanted]
        self._wanted.clear()
        for receive in ended:
            receive.fail(self.failure)
        return ended

    def fail_group(self, group: int, error: RankwireError) -> list[Receive]:
        """End the receives of one group, and forget what has arrived for it."""
        ended: list[Receive] = []
        for key in [key for key in self._wanted if key[0] == group]:
            ended += self._wanted.pop(key)
        for key in [key for key in self._arrived if key[0] == group]:
            self.unmatched_nbytes -= sum(map(len, self._arrived.pop(key)))
        for receive in ended:
            receive.fail(error)
        return ended


def _family(key: Key) -> Key:
    group, channel, tag = key
    return group, channel, tag >> FAMILY_BITS
