"""The orders in which the items of a queue are taken: pure data structures.

The queue keeps its items by number, oldest first. An order says which number is next. It may
remember numbers that are no longer queued; it skips these.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Any, Protocol

from rankwire import runtime
from rankwire.override import override

Items = OrderedDict[int, Any]  # the queued items, by number

_SLACK = 64  # numbers in a heap that are no longer queued, beside one for each queued item


class Order(Protocol):
    """Which of the queued items is taken next."""

    def add(self, number: int, key: float) -> None:
        """Note an item that was queued, also one that came back."""

    def remove(self, number: int) -> None:
        """Note that an item is no longer queued."""

    def next(self) -> int:
        """Return the number of the item to take; there is one."""
        ...


class Fifo:
    """The oldest item. The items are in this order already."""

    def __init__(self, items: Items) -> None:
        self._items = items

    def add(self, number: int, key: float) -> None:
        """Do nothing."""

    def remove(self, number: int) -> None:
        """Do nothing."""

    def next(self) -> int:
        """Return the first number."""
        return next(iter(self._items))


class Uniform:
    """Any item, all with the same probability; the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = runtime.Random(seed)
        self._numbers: list[int] = []
        self._places: dict[int, int] = {}  # in the list

    def add(self, number: int, key: float) -> None:
        """Append the number."""
        self._places[number] = len(self._numbers)
        self._numbers.append(number)

    def remove(self, number: int) -> None:
        """Move the last number to the place of this one."""
        place, last = self._places.pop(number), self._numbers.pop()
        if last != number:
            self._numbers[place] = last
            self._places[last] = place

    def next(self) -> int:
        """Draw a number."""
        return self._numbers[int(self._random.random() * len(self._numbers))]


class Lowest:
    """The item with the lowest key, and of these the oldest."""

    def __init__(self, items: Items) -> None:
        self._items = items
        self._heap: list[tuple[float, int]] = []

    def add(self, number: int, key: float) -> None:
        """Note the key of an item."""
        heapq.heappush(self._heap, (key, number))
        if len(self._heap) > 2 * len(self._items) + _SLACK:
            self._heap = [entry for entry in dict.fromkeys(self._heap) if entry[1] in self._items]
            heapq.heapify(self._heap)

    def remove(self, number: int) -> None:
        """Do nothing: ``lowest`` skips what is no longer queued."""

    def next(self) -> int:
        """Return the number of the lowest key."""
        return self.lowest()[1]

    def lowest(self) -> tuple[float, int]:
        """Return the lowest key with its number."""
        while self._heap[0][1] not in self._items:
            heapq.heappop(self._heap)
        return self._heap[0]


class Versions(Lowest):
    """The versions of the queued items that have one."""

    count = 0

    @override
    def add(self, number: int, key: float) -> None:
        super().add(number, key)
        self.count += 1

    @override
    def remove(self, number: int) -> None:
        self.count -= 1

    def below(self, version: float) -> int | None:
        """Return the number of an item with a lower version, or None."""
        if not self.count:
            return None
        lowest, number = self.lowest()
        return number if lowest < version else None


def order_of(name: str, seed: int, items: Items) -> Order:
    """Return the order of that name: ``"fifo"``, ``"uniform"`` or ``"key"``."""
    if name == "uniform":
        return Uniform(seed)
    return Lowest(items) if name == "key" else Fifo(items)
