"""The items of a queue, where each of them is, and which of them may be taken. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rankwire.services.queue_order import Versions, order_of
from rankwire.services.queue_settings import QueueSettings, QueueStats

_MANY = 1 << 62
_ROUNDING = 1e-6


@dataclass(slots=True, eq=False)
class Item:
    """One item: opaque bytes with a version and a key."""

    payload: Any
    nbytes: int
    version: float | None = None
    key: float = 0.0
    number: int = 0
    uses: int = 0  # how often it may still be taken
    leases: int = 0
    is_dropped: bool = False  # or stale


class Supply:
    """The queued items of a queue. It counts in ``stats``; not safe from several threads."""

    def __init__(self, settings: QueueSettings, stats: QueueStats) -> None:
        self._settings = settings
        self._stats = stats
        self.items: OrderedDict[int, Item] = OrderedDict()  # oldest first
        self._order = order_of(settings.order, settings.seed, self.items)
        self._versions = Versions(self.items)
        self._uses = 0  # of all queued items
        self.inserted = 0  # items that were not dropped at once

    # -- what may be put and taken -----------------------------------------------------------------

    @property
    def runs_ahead(self) -> bool:
        """Whether the next put must wait for gets, by the ratio."""
        ratio, stats = self._settings.ratio, self._stats
        if ratio is None:
            return False
        return ratio * (self.inserted + 1) - stats.sampled > self._settings.tolerance + _ROUNDING

    def has_place(self, slots: int, nbytes: int) -> bool:
        """Return whether there is a place for an item, beside so many slots."""
        if len(self.items) + slots >= self._settings.capacity:
            return False
        return not self.items or self._stats.nbytes + nbytes <= self._settings.capacity_nbytes

    def available(self, has_ended: bool) -> int:
        """Return how many times an item may be taken now."""
        if self._settings.uses is None:  # such items would never end
            available = _MANY if self.items and not has_ended else 0
        else:
            available = self._uses
        ratio, stats = self._settings.ratio, self._stats
        if ratio is not None:
            allowed = math.floor(ratio * self.inserted - stats.sampled + _ROUNDING)
            available = min(available, allowed)
        return max(available, 0)

    # -- items that come ---------------------------------------------------------------------------

    def insert(self, item: Item) -> None:
        """Queue a new item."""
        self._stats.produced += 1
        self.inserted += 1
        item.number = self._stats.produced
        item.uses = self._settings.uses or _MANY
        self._add(item)

    def drop_for(self, item: Item, slots: int) -> None:
        """Drop the oldest items for a new one, or the new one, as the settings say."""
        if self._settings.when_full == "drop_newest" or slots >= self._settings.capacity:
            item.is_dropped = True
            self._stats.produced += 1
            self._stats.dropped += 1
            return
        while not self.has_place(slots, item.nbytes):
            self._drop(next(iter(self.items.values())))
            self._stats.dropped += 1

    def drop_stale(self, version: float) -> None:
        """Drop all items of lower versions."""
        while (number := self._versions.below(version)) is not None:
            self._drop(self.items[number])
            self._stats.stale += 1

    def put_back(self, items: Sequence[Item], is_lease: bool) -> None:
        """Take back what a delivery had, to the front."""
        for item in reversed(items):
            was_leased = item.leases > 0
            item.leases -= is_lease
            item.uses += self._settings.uses is not None
            self._stats.sampled -= 1
            if item.number in self.items:
                self._uses += self._settings.uses is not None
            elif not item.is_dropped:
                self._stats.leased -= was_leased
                self._stats.consumed -= not was_leased
                self._add(item)
                self.items.move_to_end(item.number, last=False)

    # -- items that go -----------------------------------------------------------------------------

    def take(self, count: int, is_lease: bool) -> list[Item]:
        """Take items in order; so many are available."""
        return [self._take(is_lease) for _ in range(count)]

    def _take(self, is_lease: bool) -> Item:
        item = self.items[self._order.next()]
        item.leases += is_lease
        self._stats.sampled += 1
        if self._settings.uses is not None:
            item.uses -= 1
            self._uses -= 1
            if item.uses == 0:
                self._remove(item)
                self._stats.leased += item.leases > 0
                self._stats.consumed += item.leases == 0
        return item

    def consume(self, items: Sequence[Item]) -> None:
        """End the leases of items: they were acknowledged."""
        for item in items:
            item.leases -= 1
            if item.leases == 0 and not item.is_dropped and item.number not in self.items:
                self._stats.leased -= 1
                self._stats.consumed += 1

    def _add(self, item: Item) -> None:
        self.items[item.number] = item
        self._stats.nbytes += item.nbytes
        self._uses += item.uses if self._settings.uses is not None else 0
        self._order.add(item.number, item.key)
        if item.version is not None:
            self._versions.add(item.number, item.version)

    def _remove(self, item: Item) -> None:
        del self.items[item.number]
        self._stats.nbytes -= item.nbytes
        self._order.remove(item.number)
        if item.version is not None:
            self._versions.remove(item.number)

    def _drop(self, item: Item) -> None:
        self._uses -= item.uses if self._settings.uses is not None else 0
        item.is_dropped = True
        self._remove(item)
