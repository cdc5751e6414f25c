"""Reserve queue space at a callee for large calls, so that the bytes that wait there are bounded.

A caller has at most ``UNRESERVED_NBYTES`` of large calls in flight to one rank without a
reservation. Before it sends more, its thread requests one (``RESERVE``) and waits until its
deadline; the callee grants requests in order, when there is space.

A large call is *requested*, then *granted* when there is space. The space is *released* when a
worker takes the call, or its caller gives it up or is gone. A large call that arrives without a
reservation is counted for its caller alone.

Nested calls neither reserve nor count: they do not wait for workers, and the functions that free
space may wait for it themselves, which would deadlock.

Locks: ``Reservations._lock``, then ``Allowance._lock``. No thread waits or sends under them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, NamedTuple

from rankwire import runtime
from rankwire.errors import InvalidMessageError

# A request with this name has the id and the size of the large call as arguments.
RESERVE = "\0room"

DEFAULT_QUEUED_NBYTES = 256 << 20
SMALL_NBYTES = 64 << 10  # of smaller calls only the number is limited
# Enough to keep a callee busy: a round trip of some 25 us is short compared with sending more.
UNRESERVED_NBYTES = 8 << 20
# Calls that their caller has cancelled may still wait here, while the cancel is on its way.
_MOST_UNRESERVED_NBYTES = 4 * UNRESERVED_NBYTES

_MAX_ID = 1 << 64

_Key = tuple[int, int]  # the caller's rank, and its number for the call


class _Reservation(NamedTuple):
    nbytes: int
    link: Any
    answer: Callable[[bool], None]


class Allowance:
    """Bytes in flight to or from each rank without a reservation. Safe from any thread.

    An interrupt may leave bytes taken; the caller then makes more reservations.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = runtime.Lock()
        self.taken: dict[Hashable, tuple[int, int]] = {}  # rank and size, by id
        self._nbytes: Counter[int] = Counter()  # by rank

    def take(self, rank: int, call: Hashable, nbytes: int) -> bool:
        """Count a call; return False if it needs a reservation because the limit is reached."""
        with self._lock:
            if self._nbytes[rank] + nbytes > self._limit:
                return False
            self.taken[call] = rank, nbytes
            self._nbytes[rank] += nbytes
            return True

    def give_back(self, call: Hashable) -> None:
        """Stop counting a call. Idempotent."""
        if self.taken:
            with self._lock:
                rank, nbytes = self.taken.pop(call, (0, 0))
                self._nbytes[rank] -= nbytes


class Reservations:
    """The queue space of a callee for large calls that wait for a worker. Safe from any thread."""

    def __init__(self, limit: float, max_requests: int) -> None:
        self._limit = limit  # bytes of granted calls; one call of any size is always granted
        self._max_requests = max_requests
        self._lock = runtime.Lock()
        self._requested: dict[_Key, _Reservation] = {}  # in order of arrival
        self._granted: dict[_Key, _Reservation] = {}
        self._arrived: set[_Key] = set()  # granted calls
        self._granted_nbytes = 0
        self._unnotified: deque[tuple[_Reservation, bool]] = deque()  # decided, not yet sent
        self._closed = False
        self._unreserved = Allowance(_MOST_UNRESERVED_NBYTES)

    def request(
        self, src: int, request_id: int, nbytes: int, link: Any, answer: Callable[[bool], None]
    ) -> bool:
        """Call ``answer(True)`` once there is space; return False if too many requests wait.

        It may call it at once, twice, or never if the caller gives up; ``False`` means closing.
        """
        key = (src, request_id)
        with self._lock:
            if (
                len(self._requested) >= self._max_requests
                or key in self._requested
                or key in self._granted
            ):
                return False
            self._requested[key] = _Reservation(nbytes, link, answer)
            self._grant_next()
        self._notify()
        return True

    def close(self) -> None:
        """Refuse all requests from now on. Idempotent."""
        with self._lock:
            self._closed = True
            self._grant_next()
        self._notify()

    def admit(self, src: int, request_id: int, nbytes: int) -> bool:
        """Count a large call that has arrived; return False if it needed a reservation."""
        key = (src, request_id)
        with self._lock:
            if key in self._arrived or key in self._unreserved.taken:
                return False  # request ids are unique
            if key in self._granted and nbytes <= self._granted[key].nbytes:
                self._arrived.add(key)
                return True
            return self._unreserved.take(src, key, nbytes)

    def release(self, src: int, request_id: int) -> None:
        """Free the space of a call: a worker runs it, or it will not come. Idempotent."""
        if not (self._requested or self._granted or self._unreserved.taken):
            return
        with self._lock:
            self._forget((src, request_id))
            self._grant_next()
        self._notify()

    def caller_gone(self, src: int, link: Any) -> None:
        """Free the space that a caller reserved over ``link``, or, if None, over any connection."""
        with self._lock:
            for key, reservation in [*self._requested.items(), *self._granted.items()]:
                if key[0] == src and link in (None, reservation.link):
                    self._forget(key)
            self._grant_next()
        self._notify()

    def _forget(self, key: _Key) -> None:
        self._requested.pop(key, None)
        self._arrived.discard(key)
        reservation = self._granted.pop(key, None)
        if reservation is not None:
            self._granted_nbytes -= reservation.nbytes
        self._unreserved.give_back(key)

    def _grant_next(self) -> None:
        while self._requested:
            key, next_one = next(iter(self._requested.items()))
            if not self._closed:
                if self._granted_nbytes and self._granted_nbytes + next_one.nbytes > self._limit:
                    return
                self._granted[key] = next_one
                self._granted_nbytes += next_one.nbytes
            del self._requested[key]
            self._unnotified.append((next_one, not self._closed))

    def _notify(self) -> None:
        # A decision is removed after the caller was notified: if an interrupt comes before that,
        # the next thread that comes here notifies it.
        for decision in list(self._unnotified):
            reservation, is_granted = decision
            reservation.answer(is_granted)
            with suppress(ValueError):  # another thread has notified it too
                self._unnotified.remove(decision)


def unpack_reservation(args: list[Any], max_nbytes: float) -> tuple[int, int]:
    """Return the id and the size of a requested call; raises ``InvalidMessageError``."""
    match args:
        case [int(request_id), int(nbytes)] if (
            0 <= request_id < _MAX_ID and SMALL_NBYTES < nbytes <= max_nbytes
        ):
            return request_id, nbytes
    raise InvalidMessageError(
        "space for a large call is requested with [request id, bytes], within the size limit"
    )
