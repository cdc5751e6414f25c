"""Credit: how much of a stream its reader takes, as totals of items and bytes.

The reader grants a window at first, and more when it has taken half of it. Both totals only grow,
so a grant may be sent late, twice, or not at all if a later one follows. The producer may send
while both totals are above what it has sent, so the last item may exceed the bytes.

A grant on the wire is two u64, little-endian.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from rankwire.errors import InvalidMessageError

_TOTALS = struct.Struct("<QQ")
CREDIT_NBYTES = _TOTALS.size
MOST_ITEMS = 1 << 16  # of a window
MOST_NBYTES = 1 << 30  # of a window; one item may exceed it


class Credit(NamedTuple):
    """Totals of items and bytes since a stream began."""

    items: int = 0
    nbytes: int = 0

    def later(self, other: Credit) -> Credit:
        """Return the larger of both totals: a grant never takes anything back."""
        return Credit(max(self.items, other.items), max(self.nbytes, other.nbytes))

    def pack(self) -> bytes:
        """Return the payload of a grant."""
        return _TOTALS.pack(*self)


def unpack_credit(payload: bytes | bytearray) -> Credit:
    """Return the totals in a payload, or raise ``InvalidMessageError``."""
    if len(payload) != CREDIT_NBYTES:
        raise InvalidMessageError(f"a grant has {CREDIT_NBYTES} bytes, not {len(payload)}")
    return Credit(*_TOTALS.unpack(payload))


class Window:
    """A reader's credit: what it has taken, and what it has granted. For one thread at a time.

    Attributes:
        credit: What may be under way or unread; one item always may.
        items: How many items were taken.
        nbytes: Their bytes.
        granted: What the producer was granted.
    """

    __slots__ = ("credit", "granted", "items", "nbytes")

    def __init__(self, items: int, nbytes: int) -> None:
        self.credit = Credit(items, nbytes)
        self.items = 0  # taken
        self.nbytes = 0
        self.granted = Credit()

    @property
    def next_grant(self) -> Credit:
        """What the reader can grant now."""
        return Credit(self.items + self.credit.items, self.nbytes + self.credit.nbytes)

    @property
    def is_half_taken(self) -> bool:
        """Whether half of the window, or more, can be granted."""
        (items, nbytes), granted = self.credit, self.granted
        left, left_nbytes = granted.items - self.items, granted.nbytes - self.nbytes
        return 2 * left <= items or 2 * left_nbytes <= nbytes
