"""Room for large calls that wait for a worker: bounded in bytes, with the callers held back.

A call that waits for a worker is kept with its arguments. Small ones are bounded by their number.
Of larger ones a caller has at most ``UNASKED_NBYTES`` in flight to one rank without asking; before
it sends more it asks for room (``ROOM``), and its thread waits for the answer until its deadline.
The callee answers when there is room, in the order of asking.

================  ===========================  =============================
a large call is   event                        next
================  ===========================  =============================
asked             there is room                granted: the caller sends it
granted           it arrives                   granted
asked, granted    a worker takes it; its       released: others get the room
                  caller gives up or is gone
not asked         it arrives                   counted for its caller alone
================  ===========================  =============================

Nested calls neither ask nor count. They do not wait for workers, and one that waited for room could
close a circle: room is made by functions that may themselves wait for it. A program that waits is
part of no circle, since nothing waits for a program. Requests, replies and cancels flow meanwhile:
nothing is left unread.

This module knows neither connections nor functions. Locks: ``Room._lock`` and ``Allowance._lock``
guard the tables; nobody is told and nothing waits under them. A room's is taken before that of its
allowance.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, NamedTuple

from rankwire.errors import InvalidMessageError

# Called like a function, but no function can be registered by such a name. Its arguments are the
# id of the call to come, and its size.
ROOM = "\0room"

DEFAULT_QUEUED_NBYTES = 256 << 20
SMALL_NBYTES = 64 << 10  # up to here only the number of calls counts
# Enough to keep a callee busy: whoever sends more at once waits for a round trip, some 25 us, which
# is nothing beside what is sent.
UNASKED_NBYTES = 8 << 20
# A caller may believe a call ended that still waits here, because its cancel is on the way.
_MOST_UNASKED_NBYTES = 4 * UNASKED_NBYTES

_MAX_ID = 1 << 64

_Key = tuple[int, int]  # the caller's rank, and its number for the call


class _Ask(NamedTuple):
    nbytes: int
    link: Any
    answer: Callable[[bool], None]


class Allowance:
    """What is in flight without having been asked for, of one caller or at one callee.

    Safe from any thread. If an interrupt falls between taking and noting it, so much less is left:
    then the caller asks more.

    Args:
        limit: Bytes of calls to, or from, one rank.

    Attributes:
        taken: The rank and the size of each such call, by what names it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self.taken: dict[Hashable, tuple[int, int]] = {}
        self._nbytes: Counter[int] = Counter()  # by rank

    def take(self, rank: int, call: Hashable, nbytes: int) -> bool:
        """Count a call, unless that is too much; then it has to ask, or to have asked."""
        with self._lock:
            if self._nbytes[rank] + nbytes > self._limit:
                return False
            self.taken[call] = rank, nbytes
            self._nbytes[rank] += nbytes
            return True

    def give_back(self, call: Hashable) -> None:
        """Note that a call has ended, if it was counted. Idempotent."""
        if self.taken:
            with self._lock:
                rank, nbytes = self.taken.pop(call, (0, 0))
                self._nbytes[rank] -= nbytes


class Room:
    """What a callee keeps of large calls that wait for a worker. Safe from any thread.

    Args:
        limit: Bytes of calls that were granted room. One call is always granted it.
        most_asks: How many callers may wait for room.
    """

    def __init__(self, limit: float, most_asks: int) -> None:
        self._limit = limit
        self._most_asks = most_asks
        self._lock = threading.Lock()
        self._asked: dict[_Key, _Ask] = {}  # in order of asking
        self._granted: dict[_Key, _Ask] = {}
        self._arrived: set[_Key] = set()  # of those that were granted room
        self._granted_nbytes = 0
        self._untold: deque[tuple[_Ask, bool]] = deque()  # answered; its caller does not know yet
        self._closed = False
        self._unasked = Allowance(_MOST_UNASKED_NBYTES)

    def ask(
        self, src: int, request_id: int, nbytes: int, link: Any, answer: Callable[[bool], None]
    ) -> bool:
        """Have ``answer(True)`` called once there is room for a call; False if too many have asked.

        It may be called at once, twice, or never if the caller gives up; and with False once this
        room is closed. To ask twice for one call is one too many.
        """
        key = (src, request_id)
        with self._lock:
            if len(self._asked) >= self._most_asks or key in self._asked or key in self._granted:
                return False
            self._asked[key] = _Ask(nbytes, link, answer)
            self._grant_next()
        self._tell()
        return True

    def close(self) -> None:
        """Grant nothing any more. Idempotent."""
        with self._lock:
            self._closed = True
            self._grant_next()
        self._tell()

    def admit(self, src: int, request_id: int, nbytes: int) -> bool:
        """Count a large call that has arrived; False if its caller should have asked."""
        key = (src, request_id)
        with self._lock:
            if key in self._arrived or key in self._unasked.taken:
                return False  # no caller uses a number twice
            if key in self._granted and nbytes <= self._granted[key].nbytes:
                self._arrived.add(key)
                return True
            return self._unasked.take(src, key, nbytes)

    def release(self, src: int, request_id: int) -> None:
        """Forget a call: a worker has taken it, or it will not be made. Idempotent."""
        if not (self._asked or self._granted or self._unasked.taken):
            return
        with self._lock:
            self._forget((src, request_id))
            self._grant_next()
        self._tell()

    def caller_gone(self, src: int, link: Any) -> None:
        """Forget what a caller asked for over ``link``, or over any if that is None."""
        with self._lock:
            for key, ask in [*self._asked.items(), *self._granted.items()]:
                if key[0] == src and link in (None, ask.link):
                    self._forget(key)
            self._grant_next()
        self._tell()

    def _forget(self, key: _Key) -> None:
        self._asked.pop(key, None)
        self._arrived.discard(key)
        ask = self._granted.pop(key, None)
        if ask is not None:
            self._granted_nbytes -= ask.nbytes
        self._unasked.give_back(key)

    def _grant_next(self) -> None:
        while self._asked:
            key, ask = next(iter(self._asked.items()))
            if not self._closed:
                if self._granted_nbytes and self._granted_nbytes + ask.nbytes > self._limit:
                    return
                self._granted[key] = ask
                self._granted_nbytes += ask.nbytes
            del self._asked[key]
            self._untold.append((ask, not self._closed))

    def _tell(self) -> None:
        """Answer those who have asked. One leaves the list when it has been told.

        So an interrupt loses nobody: the next thread that comes by tells them.
        """
        for answered in list(self._untold):
            ask, is_granted = answered
            ask.answer(is_granted)
            with suppress(ValueError):  # another thread has told it too
                self._untold.remove(answered)


def unpack_ask(args: list[Any], max_nbytes: float) -> tuple[int, int]:
    """Return the id and the size of the call for which room is asked.

    Args:
        args: Of the request.
        max_nbytes: The largest call that may come.

    Raises:
        InvalidMessageError: That is not what the arguments are.
    """
    match args:
        case [int(request_id), int(nbytes)] if (
            0 <= request_id < _MAX_ID and SMALL_NBYTES < nbytes <= max_nbytes
        ):
            return request_id, nbytes
    raise InvalidMessageError("room is asked for by [request id, bytes], for a call that may come")
