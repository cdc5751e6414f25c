"""A rank's side of the roll: what it reports about its collectives, and what it is told.

The coordinator keeps the roll (``rendezvous.roll``). All groups of a rank share one client, which
keeps what the coordinator tells until the group looks for it, also if the group is not made yet.

Lock: ``_lock`` guards both tables; it is a leaf.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from rankwire import runtime
from rankwire.wire.control_messages import Notice

_SENDING_PATIENCE = 1.0  # seconds until a failure is on its way; mostly it takes some microseconds
_MOST_GROUPS = 256  # with untaken notices; of more, those of the oldest group are dropped
_MOST_NOTICES = 1024  # of one group; later ones are dropped


class Group(Protocol):
    """The backend of one group, on this rank."""

    def leave_roll(self) -> None:
        """Report that this rank leaves the world, and so will not come to the next operation."""


class RollClient:
    """Reports to the coordinator, and keeps what it tells. Safe from any thread.

    Args:
        send: Sends a report, and waits for so many seconds until it has left.

    Attributes:
        untaken: What was told, by group. To look whether there is something, without a lock.
        is_kept: Whether a coordinator keeps the roll. If not, ranks learn nothing here.
        keeper: The rank in whose process the coordinator is; -1 if it is a process of its own.
    """

    def __init__(self, send: Callable[[Notice, float], object] | None = None) -> None:
        self._send = send
        self._lock = runtime.Lock()
        self._gone: set[int] = set()
        self._groups: weakref.WeakKeyDictionary[Group, None] = weakref.WeakKeyDictionary()
        self.untaken: dict[int, list[Notice]] = {}
        self.is_kept = send is not None
        self.keeper = -1

    def report(self, notice: Notice) -> None:
        """Report to the coordinator. A failure is on its way when this returns."""
        if self._send is not None and self.is_kept:
            self._send(notice, _SENDING_PATIENCE if notice.is_failure else 0.0)

    def take(self, group: int) -> list[Notice]:
        """Return what was told of a group since the last time."""
        with self._lock:
            return self.untaken.pop(group, [])

    def add(self, group: Group) -> None:
        """Have a group report when this rank leaves, if the roll is kept here."""
        with self._lock:
            self._groups[group] = None

    # -- for the backend ---------------------------------------------------------------------------

    def deliver(self, notice: Notice) -> None:
        """Keep what the coordinator tells."""
        with self._lock:
            told = self.untaken.setdefault(notice.group, [])
            if len(told) < _MOST_NOTICES:
                told.append(notice)
            if len(self.untaken) > _MOST_GROUPS:
                del self.untaken[next(iter(self.untaken))]

    def leave(self) -> None:
        """Have all groups report that this rank leaves: the roll is not kept after that."""
        with self._lock:
            groups = list(self._groups)
        for group in groups:
            group.leave_roll()

    def note_gone(self, rank: int) -> None:
        """Note that the coordinator has said that a rank of the world is gone."""
        self._gone.add(rank)

    def note_back(self, rank: int) -> None:
        """Note that a rank of the world was started anew."""
        self._gone.discard(rank)

    def has_heard_last_of(self, rank: int) -> bool:
        """Whether no report of a rank of the world can come any more."""
        return not self.is_kept or rank in self._gone
