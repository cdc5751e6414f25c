"""Owned objects: what this rank keeps because other ranks have handles of it.

Handles are counted by who gave them to whom. A rank holds an object as often as it was given a
handle, and lets go of one with each release; when every rank has let go, the object is forgotten
here, and is garbage unless the program has it too. When a rank is lost, all that it held is let go:
the failure detector is the lease, and there are no timers. A rank can only count handles that it
gave or was given, and only if it knows the key of the object's id.

Handles travel by several ways at once, so what is told of them may come in another order than it
was done in:

- A rank that passes a handle on tells the owner, in order with its own release
  (``handle_updates``), but the receiver's update may come before it. So counts
  may be below zero for a moment, and an object is forgotten only when all are zero.
- A handle that is sent back to the owner may still be on its way when its sender has released it.
  So a release says how many were sent back, and the object is kept until these have come.
- A handle may be used before the call that makes its object has come. Then the object is
  *expected*: who asks for it waits, until the deadline of the call. Whether it will ever be made is
  not known, so each rank may have this one expect ``MOST_EXPECTED`` objects, calls that wait for
  one included. Beyond that it is refused.

Lock: ``_lock`` guards the table and all counts; nothing is called under it. A leaf.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from rankwire.errors import ConfigurationError, OverloadedError

# For each rank. A rank has 1,024 calls to another one in flight at most, so an honest one comes to
# this if it uses handles of 16 ranks all of whose calls are still on their way.
MOST_EXPECTED = 16_384

_NEVER_MADE = (
    "this object was never made: the call of rank {0} that should make it did not begin, and rank "
    "{0} was told why"
)


class ObjectId(NamedTuple):
    """What an object is called everywhere.

    Attributes:
        creator: The rank that made its first handle.
        number: Counted by that rank.
        key: Drawn at random by that rank. A rank that knows it was given a handle.
    """

    creator: int
    number: int
    key: int


class OwnedObject:
    """An object that others may have handles of, or one that is still being made.

    Attributes:
        id: What it is called.
        is_expected: Whether the call that makes it has not come yet.
        is_ready: Whether it has a value or an error.
        value: What it is, once it is ready.
        error: What making it has raised instead.
        held: How many handles one rank was given by another, as (giver, holder); without zeros.
        claimant: The rank that is charged for it, while it is not known whether it will be made.
        returning: For each rank, how many handles it has sent back that have not come yet.
    """

    __slots__ = (
        "__weakref__",
        "_waiters",
        "claimant",
        "error",
        "held",
        "id",
        "is_expected",
        "is_ready",
        "returning",
        "value",
    )

    def __init__(self, id: ObjectId) -> None:
        self.id = id
        self.is_expected = True
        self.is_ready = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.held: Counter[tuple[int, int]] = Counter()
        self.claimant: int | None = None
        self.returning: Counter[int] = Counter()
        self._waiters: list[Future[Any]] = []

    @property
    def is_waited_for(self) -> bool:
        """Whether a call waits until it is ready."""
        return not all(waiter.cancelled() for waiter in self._waiters)

    def get(self) -> Any:
        """Return its value or raise its error; only once it is ready."""
        if self.error is not None:
            raise self.error
        return self.value

    def resolve(self, value: Any, error: BaseException | None = None) -> None:
        """Give it its value, or the error of making it, and tell those who wait."""
        self.value, self.error = value, error
        self.is_expected = False
        self.is_ready = True
        while self._waiters:  # whoever adds himself looks afterwards whether it is ready
            _settle(self._waiters.pop(), self)

    def when_ready(self) -> Future[Any]:
        """Return a new future of its value."""
        waiter: Future[Any] = Future()
        if not self.is_ready:
            self._waiters.append(waiter)
        if self.is_ready:
            _settle(waiter, self)
        return waiter


def _settle(waiter: Future[Any], owned: OwnedObject) -> None:
    """End a future with what an object is, unless that was done, or it was cancelled."""
    with suppress(InvalidStateError):
        if owned.error is not None:
            waiter.set_exception(owned.error)
        else:
            waiter.set_result(owned.value)


_Place = tuple[int, int]


class OwnedObjects:
    """The objects of this rank that others hold. Every method is safe from any thread.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        # Both by creator and number. ``_own`` has those that handles of this rank itself have, for
        # as long as they have them.
        self._objects: dict[_Place, OwnedObject] = {}
        self._own: WeakValueDictionary[_Place, OwnedObject] = WeakValueDictionary()
        self._expected: dict[ObjectId, OwnedObject] = {}  # by the whole id, as they were asked for
        self._claims: Counter[int] = Counter()
        self._lost: dict[int, BaseException] = {}

    def expect(self, id: ObjectId, src: int) -> OwnedObject:
        """Return an object that a rank has a handle of; if it is not here yet, one to wait for.

        Raises:
            PermissionError: The rank has no handle of it.
            OverloadedError: It is not here yet, and the rank has too many such objects.
        """
        with self._lock:
            return self._expect(id, src) or self._never_made(id)

    def begin(self, id: ObjectId) -> OwnedObject:
        """Return an object that its creator is going to make, and count the creator's handle.

        Raises:
            ConfigurationError: It was made before.
        """
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
        """Have an object found as long as this rank's own handle of it is there."""
        with self._lock:
            self._own[owned.id[:2]] = owned

    def give(self, owned: OwnedObject, rank: int) -> None:
        """Count a handle that is given to a rank."""
        with self._lock:
            if rank not in self._lost:
                owned.held[self._rank, rank] += 1
                self._tidy(owned)

    def pass_on(self, id: ObjectId, giver: int, rank: int, count: int) -> None:
        """Count handles that one holder has given to another rank, or has not after all."""
        with self._lock:
            owned = None if rank in self._lost else self._expect(id, giver)
            if owned is not None:
                owned.held[giver, rank] += count
                self._tidy(owned)

    def release(self, id: ObjectId, rank: int, giver: int, sent_back: int = 0) -> None:
        """Count a handle that a rank has let go, and how often it has sent that back before."""
        with self._lock:
            owned = None if rank in self._lost else self._find(id, rank)
            if owned is not None and giver in self._lost and owned.held[giver, rank] <= 0:
                return  # that it was given will not be told any more
            if owned is None and self._may_be_untold(id, rank, giver):
                owned = self._expect(id, rank)
            if owned is not None:
                owned.held[giver, rank] -= 1
                owned.returning[rank] += sent_back
                self._tidy(owned)

    def _may_be_untold(self, id: ObjectId, rank: int, giver: int) -> bool:
        """Tell whether a rank may have a handle of an object of which nothing is known here.

        Then the call that makes it, or what its giver says of it, is still on its way.
        """
        if rank in self._lost:
            return False
        return rank == id.creator or (giver != self._rank and giver not in self._lost)

    def came_back(self, id: ObjectId, rank: int) -> OwnedObject:
        """Return the object of a handle that a rank has sent back."""
        with self._lock:
            owned = self._expect(id, rank)
            if owned is None:
                return self._never_made(id)
            owned.returning[rank] -= 1
            self._tidy(owned)
            return owned

    def lose(self, rank: int, error: BaseException) -> None:
        """Let go of all that a lost rank held, and of what it was going to tell or make."""
        with self._lock:
            self._lost[rank] = error
            for owned in [*self._objects.values(), *self._expected.values()]:
                for giver, holder in list(owned.held):
                    if holder == rank or (giver == rank and owned.held[giver, holder] < 0):
                        del owned.held[giver, holder]
                owned.returning.pop(rank, None)
                self._tidy(owned)
            waiting = [*self._expected.values(), *self._own.values()]
            unmade = [each for each in waiting if each.is_expected and each.id.creator == rank]
            for owned in waiting:
                is_unknown = not owned.held and not owned.is_waited_for
                if owned.id.creator == rank or (owned.claimant in self._lost and is_unknown):
                    self._stop_expecting(owned)
            del self._claims[rank]
        for owned in unmade:
            owned.resolve(None, error)

    def not_made(self, id: ObjectId) -> None:
        """End an object whose creator knows that the call which makes it was refused.

        It is one that could not be made: its creator has a handle of it, and may have passed it on.
        Its creator remains charged for it.
        """
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

    def begin_waiting(self, rank: int) -> None:
        """Count a call of a rank that waits until an object is made, until ``end_waiting``.

        Raises:
            OverloadedError: It has too many.
        """
        with self._lock:
            self._charge(rank)

    def end_waiting(self, rank: int) -> None:
        """Do not count such a call any more."""
        with self._lock:
            self._discharge(rank)

    def abandon(self, owned: OwnedObject) -> None:
        """Forget an object that a call has waited for in vain, if no other rank knows of it."""
        with self._lock:
            if owned.is_expected and not owned.held and not owned.is_waited_for:
                self._stop_expecting(owned)

    def tidy(self, owned: OwnedObject) -> None:
        """Forget an object if no rank holds it: one that has just been made, or could not be."""
        with self._lock:
            self._tidy(owned)

    def clear(self) -> int:
        """Forget all objects; return how many there were."""
        with self._lock:
            count = len(self._objects) + len(self._expected)
            self._objects.clear()
            self._expected.clear()
            return count

    def count(self) -> tuple[int, int]:
        """Return how many objects others hold, and how many handles of these they have."""
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
        """Return an object that is here or may come; None if its creator is lost."""
        owned = self._find(id, src)
        if owned is None and id.creator not in self._lost:
            self._charge(src)
            owned = self._expected[id] = OwnedObject(id)
            owned.claimant = src
        return owned

    def _never_made(self, id: ObjectId) -> OwnedObject:
        """Return what stands for an object whose creator was lost before it was made."""
        owned = OwnedObject(id)
        owned.resolve(None, self._lost[id.creator])
        return owned

    def _stop_expecting(self, owned: OwnedObject) -> None:
        """Discharge the rank that is charged for an object, which is made or forgotten now."""
        self._expected.pop(owned.id, None)
        if owned.claimant is not None:
            self._discharge(owned.claimant)
            owned.claimant = None

    def _charge(self, rank: int) -> None:
        if rank != self._rank and self._claims[rank] >= MOST_EXPECTED:
            raise OverloadedError(
                f"rank {rank} has handles of {MOST_EXPECTED} objects here that are not made, or "
                "calls that wait for such"
            )
        self._claims[rank] += 1

    def _discharge(self, rank: int) -> None:
        if rank not in self._lost:
            self._claims[rank] -= 1

    def _tidy(self, owned: OwnedObject) -> None:
        """Keep what is held, or has a handle on its way here; forget what is there and is not."""
        owned.held = Counter({pair: count for pair, count in owned.held.items() if count})
        if owned.is_expected:
            return
        if owned.held or any(count > 0 for count in owned.returning.values()):
            self._objects[owned.id[:2]] = owned
        elif owned.is_ready:
            self._objects.pop(owned.id[:2], None)
            self._stop_expecting(owned)
