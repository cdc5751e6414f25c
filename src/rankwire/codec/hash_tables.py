"""Keeps a sender from choosing keys whose hashes differ and yet collide in the table.

A dict or set looks for a place for a key at a sequence of slots that follows from its hash. Hashes
of numbers have no secret, so a sender can fill the slots of one such sequence with a third of the
keys, and choose the others to walk along it: n**2 slots are looked at, a million keys take minutes,
and all of it inside the interpreter where nothing can stop it. So where many keys arrive whose
hashes have no secret, the slots are counted here before the table is built.

The count is exact for CPython's tables. Inserting keys one by one, each at the first free slot of
its sequence, has the same outcome as if all asked at once and every slot took the earliest key that
asks, sending away a later one that it had: what Gale and Shapley call deferred acceptance, in which
the order of asking does not matter. So it can be done for all keys at a time by numpy. Elsewhere,
or if CPython changes its tables, it is an estimate.

Contract: time in proportion to the number of keys. Pure.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rankwire.errors import InvalidMessageError

# So many take 50 ms at worst.
MANY_KEYS = 8192
# How many slots a key looks at, on average. In dicts random hashes take 2, and numbers that are
# multiples of a high power of two, so that their lower bits are equal, up to 20. A set looks at
# nine neighbours of each, which costs little.
_MAX_SLOTS = 32
_MAX_SLOTS_OF_SET = 192
# How often all keys without a slot ask, mostly 40 times. Each time costs 20 us even for one key.
_MIN_ROUNDS = 500
_KEYS_PER_ROUND = 16

# Of CPython: Objects/dictobject.c and Objects/setobject.c.
_PERTURB_SHIFT = np.uint64(5)
_LINEAR_PROBES = 9

_Hashes: TypeAlias = npt.NDArray[np.uint64]
_Keys: TypeAlias = npt.NDArray[np.int32]


def check_table(hashes: npt.NDArray[np.int64], *, is_set: bool) -> None:
    """Refuse keys that take too many slots to find their places.

    Args:
        hashes: Of the keys in the order in which they are inserted, each once.
        is_set: Whether the dict of them becomes a set.

    Raises:
        InvalidMessageError: They do.
    """
    sequence = hashes.view(np.uint64)
    # A dict doubles its table when two thirds are taken, and inserts all keys again.
    size = MANY_KEYS
    while True:
        _check(sequence[: size * 2 // 3], size, neighbours=0)
        if size * 2 // 3 >= len(sequence):
            break
        size *= 2
    if is_set:  # made of a dict, a set has one size from the beginning
        _check(sequence, 1 << (2 * len(sequence)).bit_length(), neighbours=_LINEAR_PROBES)


def _check(hashes: _Hashes, size: int, *, neighbours: int) -> None:
    table = _Table(hashes, size, neighbours)
    left = (_MAX_SLOTS_OF_SET if neighbours else _MAX_SLOTS) * len(hashes)
    asking = np.arange(len(hashes), dtype=np.int32)
    for _ in range(_MIN_ROUNDS + len(hashes) // _KEYS_PER_ROUND):
        left -= len(asking)
        if left < 0:
            break
        asking = table.ask(asking)
        if not len(asking):
            return
    raise InvalidMessageError("its keys would take too long to sort into a table")


class _Table:
    """Which key each slot has, and at which slot each key asks next.

    A set looks at the neighbours of a slot before it goes on, if there are enough of them.
    """

    def __init__(self, hashes: _Hashes, size: int, neighbours: int) -> None:
        self._mask = np.uint64(size - 1)
        self._neighbours = neighbours
        self._last = size - 1 - neighbours
        self._nobody = len(hashes)
        self._keys: _Keys = np.full(size, self._nobody, np.int32)
        self._perturb = hashes.copy()
        self._base = (hashes & self._mask).view(np.int64)
        self._offset: _Keys = np.zeros(len(hashes), np.int32)

    def ask(self, asking: _Keys) -> _Keys:
        """Have keys ask at their slots; return those that are sent away, ready for their next."""
        slots = self._base[asking]
        if self._neighbours:
            slots += self._offset[asking]
        had = self._keys[slots]
        np.minimum.at(self._keys, slots, asking)
        has_it = self._keys[slots] == asking
        sent_away = np.concatenate([asking[~has_it], had[has_it & (had != self._nobody)]])
        self._advance(sent_away)
        return sent_away

    def _advance(self, keys: _Keys) -> None:
        base = self._base[keys]
        if self._neighbours:
            offset = self._offset[keys]
            is_done = offset >= np.where(base <= self._last, self._neighbours, 0)
            self._offset[keys] = np.where(is_done, 0, offset + 1)
            keys, base = keys[is_done], base[is_done]
        perturb = self._perturb[keys] >> _PERTURB_SHIFT
        self._perturb[keys] = perturb
        following = base.view(np.uint64) * np.uint64(5) + perturb + np.uint64(1)
        self._base[keys] = (following & self._mask).view(np.int64)
