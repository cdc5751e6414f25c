"""A rank's side of the roll: reports its collectives, and keeps the coordinator's notices.

The coordinator keeps the roll (``rendezvous.roll``). All groups of a rank share one client, which
keeps notices until their group takes them, also if the group is not made yet.

Lock: ``_lock`` guards both tables; it is a leaf.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from rankwire import runtime
from rankwire.wire.control_messages import Notice

_SENDING_PATIENCE = 1.0  # seconds until a failure is sent; mostly it takes some microseconds
_MOST_GROUPS = 256  # with untaken notices; beyond it, those of the oldest group are dropped
_MOST_NOTICES = 1024  # of one group; later ones are dropped


class Group(Protocol):
    """The backend of one group, on this rank."""

    def leave_roll(self) -> None:
        """Report that this rank leaves the world, and so will not join the next operation."""


class RollClient:
    """Reports to the coordinator, and keeps its notices. Safe from any thread.

    ``send`` sends a report, and waits at most that many seconds until it is sent.

    Attributes:
        untaken: The notices, by group. May be checked for emptiness without a lock.
        is_kept: Whether a coordinator keeps the roll. If not, no notices arrive.
        keeper: The rank whose process runs the coordinator; -1 if it is a process of its own.
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
        """Report to the coordinator. A failure is sent when this returns."""
        if self._send is not None and self.is_kept:
            self._send(notice, _SENDING_PATIENCE if notice.is_failure else 0.0)

    def take(self, group: int) -> list[Notice]:
        """Return the notices for a group since the last call."""
        with self._lock:
            return self.untaken.pop(group, [])

    def add(self, group: Group) -> None:
        """Have a group report when this rank leaves, if it keeps the roll."""
        with self._lock:
            self._groups[group] = None

    # -- for the backend ---------------------------------------------------------------------------

    def deliver(self, notice: Notice) -> None:
        """Keep a notice of the coordinator."""
        with self._lock:
            told = self.untaken.setdefault(notice.group, [])
            if len(told) < _MOST_NOTICES:
                told.append(notice)
            if len(self.untaken) > _MOST_GROUPS:
                del self.untaken[next(iter(self.untaken))]

    def leave(self) -> None:
        """Have all groups report that this rank leaves: after that, no roll is kept."""
        with self._lock:
            groups = list(self._groups)
        for group in groups:
            group.leave_roll()

    def note_gone(self, rank: int) -> None:
        """Note that the coordinator has reported a rank of the world as gone."""
        self._gone.add(rank)

    def note_back(self, rank: int) -> None:
        """Note that a rank of the world was restarted."""
        self._gone.discard(rank)

    def has_heard_last_of(self, rank: int) -> bool:
        """Whether no more reports of a rank of the world can arrive."""
        return not self.is_kept or rank in self._gone
