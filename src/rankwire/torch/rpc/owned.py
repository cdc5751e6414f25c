"""Owned objects: what this rank keeps because other ranks have handles of it.

Holders are counted by rank. A rank holds an object as often as it was given a handle, and lets go
of as many as it says in a release; when every rank has let go, the object is forgotten here, and is
garbage unless the program has it too. When a rank is lost, all that it held is let go: the failure
detector is the lease, and there are no timers.

Handles travel by several ways at once, so what is told of them may come in another order than it
was done in:

- A rank that passes a handle on says so to the owner, in order with its own release (``held``), but
  what the receiver says may come before it. So counts may be below zero for a moment, and an object
  is forgotten only when all are zero.
- A handle that is sent back to the owner may still be on its way when its sender has released it.
  So a release says how many were sent back, and the object is kept until these have come.
- A handle may be used before the call that makes its object has come. Then the object is
  *expected*: who asks for it waits, until the deadline of the call.

Lock: ``_lock`` guards the table and all counts; nothing is called under it. A leaf.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

_NEVER_MADE = (
    "this object was never made: the call of rank {0} that should make it was refused, and rank "
    "{0} was told why"
)


class ObjectId(NamedTuple):
    """What an object is called everywhere: who made its first handle, and that one's number."""

    creator: int
    number: int


class OwnedObject:
    """An object that others may have handles of, or one that is still being made.

    Attributes:
        id: What it is called.
        is_expected: Whether the call that makes it has not come yet.
        is_ready: Whether it has a value or an error.
        value: What it is, once it is ready.
        error: What making it has raised instead.
        held: How many handles each rank has, those without left out.
        returning: For each rank, how many handles it has sent back that have not come yet.
    """

    __slots__ = (
        "__weakref__",
        "_waiters",
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
        self.held: Counter[int] = Counter()
        self.returning: Counter[int] = Counter()
        self._waiters: list[Future[Any]] = []

    @property
    def is_waited_for(self) -> bool:
        """Whether somebody waits until it is ready."""
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


class OwnedObjects:
    """The objects of this rank that others hold. Every method is safe from any thread.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._objects: dict[ObjectId, OwnedObject] = {}
        # Those that handles of this rank itself have, for as long as they have them.
        self._own: WeakValueDictionary[ObjectId, OwnedObject] = WeakValueDictionary()
        self._lost: set[int] = set()

    def expect(self, id: ObjectId) -> OwnedObject:
        """Return an object that others know; if it is not here yet, one to wait for."""
        with self._lock:
            return self._expect(id)

    def keep_own(self, owned: OwnedObject) -> None:
        """Have an object found as long as this rank's own handle of it is there."""
        with self._lock:
            self._own[owned.id] = owned

    def give(self, owned: OwnedObject, rank: int) -> None:
        """Count a handle that is given to a rank."""
        with self._lock:
            if rank not in self._lost:
                owned.held[rank] += 1
                self._tidy(owned)

    def pass_on(self, id: ObjectId, rank: int, count: int) -> None:
        """Count handles that one holder has given to another rank, or has not after all."""
        with self._lock:
            if rank not in self._lost:
                owned = self._expect(id)
                owned.held[rank] += count
                self._tidy(owned)

    def release(self, id: ObjectId, rank: int, count: int, sent_back: int = 0) -> None:
        """Count handles that a rank has let go, and those that it has sent back before."""
        with self._lock:
            owned = self._objects.get(id)
            if owned is None and id.creator == rank:  # the call that makes it is still on its way
                owned = self._expect(id)
            if owned is not None:
                owned.held[rank] -= count
                owned.returning[rank] += sent_back
                self._tidy(owned)

    def came_back(self, id: ObjectId, rank: int) -> OwnedObject:
        """Return the object of a handle that a rank has sent back."""
        with self._lock:
            owned = self._expect(id)
            owned.returning[rank] -= 1
            self._tidy(owned)
            return owned

    def lose(self, rank: int, error: BaseException) -> None:
        """Let go of all that a lost rank held, and of what it was going to tell or make."""
        unmade = []
        with self._lock:
            self._lost.add(rank)
            for owned in list(self._objects.values()):
                owned.held.pop(rank, None)
                owned.returning.pop(rank, None)
                for other in [rank for rank, count in owned.held.items() if count < 0]:
                    del owned.held[other]
                if owned.id.creator == rank and owned.is_expected:
                    unmade.append(owned)
                self._tidy(owned)
        for owned in unmade:
            owned.resolve(None, error)
            self.tidy(owned)

    def not_made(self, id: ObjectId) -> None:
        """End an object whose creator knows that the call which makes it was refused.

        It is one that could not be made: its creator has a handle of it, and may have passed it on.
        """
        with self._lock:
            owned = self._expect(id)
            if not owned.is_expected:
                return
            owned.is_expected = False
            if id.creator not in self._lost:
                owned.held[id.creator] += 1
            self._tidy(owned)
        owned.resolve(None, RuntimeError(_NEVER_MADE.format(id.creator)))
        self.tidy(owned)

    def abandon(self, owned: OwnedObject) -> None:
        """Forget an object that somebody has waited for in vain, if nobody else knows of it."""
        with self._lock:
            if owned.is_expected and not owned.held and not owned.is_waited_for:
                self._objects.pop(owned.id, None)

    def tidy(self, owned: OwnedObject) -> None:
        """Forget an object if nobody holds it: one that has just been made, or could not be."""
        with self._lock:
            self._tidy(owned)

    def clear(self) -> int:
        """Forget all objects; return how many there were."""
        with self._lock:
            count = len(self._objects)
            self._objects.clear()
            return count

    def count(self) -> tuple[int, int]:
        """Return how many objects others hold, and how many handles of these they have."""
        with self._lock:
            handles = sum(sum(owned.held.values()) for owned in self._objects.values())
            return len(self._objects), handles

    def _expect(self, id: ObjectId) -> OwnedObject:
        owned = self._objects.get(id) or self._own.get(id)
        if owned is None:
            owned = self._objects[id] = OwnedObject(id)
        return owned

    def _tidy(self, owned: OwnedObject) -> None:
        """Keep what is held, or has a handle on its way here; forget what is there and is not."""
        owned.held = Counter({rank: count for rank, count in owned.held.items() if count})
        if owned.held or any(count > 0 for count in owned.returning.values()):
            self._objects[owned.id] = owned
        elif owned.is_ready:
            self._objects.pop(owned.id, None)
