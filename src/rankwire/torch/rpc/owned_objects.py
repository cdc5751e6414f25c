"""Objects that this rank keeps because other ranks have handles of them.

Handles are counted by giver and holder; an object that no rank holds is dropped here. A lost rank's
handles are released when the loss is detected, without timers. A rank can only count handles that
it gave or was given, and only if it knows the object's key.

Updates of handles travel on several connections and may arrive out of order:

- A rank that passes a handle on notifies the owner before its own release, but the receiver's
  update may arrive first. So counts may be below zero, and an object is dropped when all are zero.
- A handle that is sent back to the owner may still be in flight when its sender releases it. So a
  release says how many were sent back, and the object is kept until these arrive.
- A handle may be used before the call that creates its object arrives. Then the object is
  *expected*, and calls wait for it. It may never be created, so each rank may have
  ``MOST_EXPECTED`` such objects and waiting calls here.

``OwnedObjects._lock`` guards the table and all counts. Only the lock of ``Claims`` is taken in it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from rankwire import runtime
from rankwire.errors import ConfigurationError, OverloadedError

# For each rank. An honest one needs handles of 16 ranks with 1,024 calls in flight each.
MOST_EXPECTED = 16_384

_NEVER_MADE = (
    "this object was never made: the call of rank {0} that should make it did not begin, and rank "
    "{0} was told why"
)


class ObjectId(NamedTuple):
    """The id of an object on all ranks: its creator, a number there, and a key."""

    creator: int
    number: int
    key: int  # random: a rank that knows it was given a handle


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class OwnedObject:
    """An object that others may have handles of, possibly not created yet."""

    id: ObjectId
    is_expected: bool = True  # the call that creates it has not arrived
    is_ready: bool = False  # it has a value or an error
    value: Any = None
    error: BaseException | None = None
    held: Counter[tuple[int, int]] = field(default_factory=Counter)  # by giver and holder, no zeros
    claimant: int | None = None  # the rank that is charged for it until it is created
    returning: Counter[int] = field(default_factory=Counter)  # sent back by a rank, not arrived
    _waiters: list[Future[Any]] = field(default_factory=list)

    @property
    def is_waited_for(self) -> bool:
        """Whether a call is waiting until it is ready."""
        return not all(waiter.cancelled() for waiter in self._waiters)

    def get(self) -> Any:
        """Return its value or raise its error; only when it is ready."""
        if self.error is not None:
            raise self.error
        return self.value

    def resolve(self, value: Any, error: BaseException | None = None) -> None:
        """Set its value or error, and wake the waiting calls."""
        self.value, self.error = value, error
        self.is_expected = False
        self.is_ready = True
        while self._waiters:  # ``when_ready`` checks again after it adds a waiter
            self._settle(self._waiters.pop())

    def when_ready(self) -> Future[Any]:
        """Return a new future of its value."""
        waiter: Future[Any] = Future()
        if not self.is_ready:
            self._waiters.append(waiter)
        if self.is_ready:
            self._settle(waiter)
        return waiter

    def _settle(self, waiter: Future[Any]) -> None:
        with suppress(InvalidStateError):  # cancelled
            if self.error is not None:  # not raised: its traceback would grow with each waiter
                waiter.set_exception(self.error)
            else:
                waiter.set_result(self.value)


def _release_all(owned: OwnedObject, rank: int) -> None:
    for giver, holder in list(owned.held):
        if holder == rank or (giver == rank and owned.held[giver, holder] < 0):
            del owned.held[giver, holder]
    owned.returning.pop(rank, None)


class Claims:
    """Counts, for each rank, the objects and calls here that wait for an object to be created."""

    def __init__(self, own_rank: int) -> None:
        self._own_rank = own_rank
        self._lock = runtime.Lock()
        self._counts: Counter[int] = Counter()
        self._lost: set[int] = set()

    def charge(self, rank: int) -> None:
        """Increment a rank's count, or raise ``OverloadedError``."""
        with self._lock:
            if rank != self._own_rank and self._counts[rank] >= MOST_EXPECTED:
                raise OverloadedError(
                    f"rank {rank} has handles of {MOST_EXPECTED} objects here that are not made, "
                    "or calls that wait for such"
                )
            self._counts[rank] += 1

    def discharge(self, rank: int) -> None:
        """Decrement a rank's count."""
        with self._lock:
            if rank not in self._lost:
                self._counts[rank] -= 1

    def lose(self, rank: int) -> None:
        """Drop the count of a lost rank."""
        with self._lock:
            self._lost.add(rank)
            del self._counts[rank]

    def count(self, rank: int) -> int:
        """Return the count of a rank."""
        return self._counts[rank]


_Place = tuple[int, int]


class OwnedObjects:
    """The objects of this rank that others hold. Every method is safe from any thread."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = runtime.Lock()
        # Both by creator and number. ``_own`` has the objects of this rank's own handles.
        self._objects: dict[_Place, OwnedObject] = {}
        self._own: WeakValueDictionary[_Place, OwnedObject] = WeakValueDictionary()
        self._expected: dict[ObjectId, OwnedObject] = {}  # by the whole id
        self.claims = Claims(rank)
        self._lost: dict[int, BaseException] = {}
        self._numbers = itertools.count()

    def new_id(self) -> ObjectId:
        """Return an id for a new object or handle of this rank."""
        return ObjectId(self._rank, next(self._numbers), runtime.randbits(63))

    def expect(self, id: ObjectId, src: int) -> OwnedObject:
        """Return an object that a rank has a handle of; it may not have been created yet."""
        with self._lock:
            return self._expect(id, src) or self._never_made(id)

    def begin(self, id: ObjectId) -> OwnedObject:
        """Return an object that its creator is about to create, and count the creator's handle."""
        with self._lock:
            owned = self._find(id, id.creator) or OwnedObject(id)
            if not owned.is_expected:
                raise ConfigurationError(f"object {id.number} of rank {id.creator} was made before")
            self._stop_expecting(owned)
            owned.is_expected = False
            # An owner's handle has the object itself.
            if id.creator != self._rank and id.creator not in self._lost:
                owned.held[self._rank, id.creator] += 1
            self._objects[id[:2]] = owned
            return owned

    def keep_own(self, owned: OwnedObject) -> None:
        """Keep an object findable while this rank's own handle exists."""
        with self._lock:
            self._own[owned.id[:2]] = owned

    def give(self, owned: OwnedObject, rank: int) -> None:
        """Count a handle that is given to a rank."""
        with self._lock:
            if rank not in self._lost:
                owned.held[self._rank, rank] += 1
                self._tidy(owned)

    def pass_on(self, id: ObjectId, giver: int, rank: int, count: int) -> None:
        """Count handles that a holder gave to another rank; a count of -1 undoes that."""
        with self._lock:
            owned = None if rank in self._lost else self._expect(id, giver)
            if owned is not None:
                owned.held[giver, rank] += count
                self._tidy(owned)

    def release(self, id: ObjectId, rank: int, giver: int, sent_back: int = 0) -> None:
        """Count a handle that a rank released, and how often it was sent back before."""
        with self._lock:
            if rank in self._lost:
                return
            owned = self._find(id, rank)
            if owned is not None and giver in self._lost and owned.held[giver, rank] <= 0:
                return  # the lost giver's update will not arrive
            # The call that creates it, or its giver's update, may still be in flight.
            is_untold = giver != self._rank and giver not in self._lost
            if owned is None and (rank == id.creator or is_untold):
                owned = self._expect(id, rank)
            if owned is not None:
                owned.held[giver, rank] -= 1
                owned.returning[rank] += sent_back
                self._tidy(owned)

    def came_back(self, id: ObjectId, rank: int) -> OwnedObject:
        """Return the object of a handle that a rank sent back."""
        with self._lock:
            owned = self._expect(id, rank)
            if owned is None:
                return self._never_made(id)
            owned.returning[rank] -= 1
            self._tidy(owned)
            return owned

    def lose(self, rank: int, error: BaseException) -> None:
        """Release a lost rank's handles, and stop expecting its updates and objects."""
        with self._lock:
            self._lost[rank] = error
            for owned in [*self._objects.values(), *self._expected.values()]:
                _release_all(owned, rank)
                self._tidy(owned)
            waiting = [*self._expected.values(), *self._own.values()]
            unmade = [each for each in waiting if each.is_expected and each.id.creator == rank]
            for owned in waiting:
                is_unknown = not owned.held and not owned.is_waited_for
                if owned.id.creator == rank or (owned.claimant in self._lost and is_unknown):
                    self._stop_expecting(owned)
            self.claims.lose(rank)
        for owned in unmade:
            owned.resolve(None, error)

    def not_made(self, id: ObjectId) -> None:
        """Fail an object whose creating call was refused; its creator remains charged for it."""
        with self._lock:
            owned = self._expect(id, id.creator)
            if owned is None or not owned.is_expected:
                return
            owned.is_expected = False
            self._expected.pop(id, None)
            owned.held[self._rank, id.creator] += 1
            self._objects[id[:2]] = owned
            self._tidy(owned)
        owned.resolve(None, RuntimeError(_NEVER_MADE.format(id.creator)))
        self.tidy(owned)

    def abandon(self, owned: OwnedObject) -> None:
        """Drop an object for which a call waited in vain, if no other rank knows of it."""
        with self._lock:
            if owned.is_expected and not owned.held and not owned.is_waited_for:
                self._stop_expecting(owned)

    def tidy(self, owned: OwnedObject) -> None:
        """Drop a finished object if no rank holds it."""
        with self._lock:
            self._tidy(owned)

    def clear(self) -> None:
        """Drop all objects."""
        with self._lock:
            self._objects.clear()
            self._expected.clear()

    def count(self) -> tuple[int, int]:
        """Return the numbers of objects that others hold, and of their handles."""
        with self._lock:
            found = [*self._objects.values(), *self._expected.values()]
            return len(found), sum(sum(owned.held.values()) for owned in found)

    def _find(self, id: ObjectId, src: int) -> OwnedObject | None:
        owned = self._objects.get(id[:2]) or self._own.get(id[:2])
        if owned is None:
            return self._expected.get(id)
        if owned.id.key != id.key:
            raise PermissionError(
                f"rank {src} has no handle of object {id.number} of rank {id.creator}"
            )
        return owned

    def _expect(self, id: ObjectId, src: int) -> OwnedObject | None:
        """Return an object that exists or may be created; None if its creator is lost."""
        owned = self._find(id, src)
        if owned is None and id.creator not in self._lost:
            self.claims.charge(src)
            owned = self._expected[id] = OwnedObject(id)
            owned.claimant = src
        return owned

    def _never_made(self, id: ObjectId) -> OwnedObject:
        owned = OwnedObject(id)
        owned.resolve(None, self._lost[id.creator])
        return owned

    def _stop_expecting(self, owned: OwnedObject) -> None:
        self._expected.pop(owned.id, None)
        if owned.claimant is not None:
            self.claims.discharge(owned.claimant)
            owned.claimant = None

    def _tidy(self, owned: OwnedObject) -> None:
        owned.held = Counter({pair: count for pair, count in owned.held.items() if count})
        if owned.is_expected:
            return
        if owned.held or any(count > 0 for count in owned.returning.values()):
            self._objects[owned.id[:2]] = owned
        elif owned.is_ready:
            self._objects.pop(owned.id[:2], None)
            self._stop_expecting(owned)
