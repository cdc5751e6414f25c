"""Refuses keys that have different hashes and yet collide in a dict or set.

A dict or set probes a sequence of slots that follows from a key's hash. Hashes of numbers have no
secret, so a sender can fill the slots of one sequence with a third of the keys and let the others
walk along it: n**2 probes, minutes for a million keys, inside the interpreter. So for many keys
without a secret, the probes are counted before the table is built.

The count is exact for CPython's tables. Inserting keys one by one, each into the first free slot of
its sequence, has the same result as if every slot kept the earliest key that probes it and sent
later ones on (deferred acceptance, Gale and Shapley), in any order of probing. So numpy does it for
all keys at once, in linear time. For other tables it is an estimate.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rankwire.errors import InvalidMessageError

# This many take 50 ms at worst.
MANY_KEYS = 8192
# Average probes per key. In dicts, random hashes take 2, and multiples of a high power of two,
# whose lower bits are equal, up to 20. A set also probes nine neighbours of each slot, which costs
# little.
_MAX_SLOTS = 32
_MAX_SLOTS_OF_SET = 192
# Rounds in which all keys without a slot probe, mostly 40. Each takes 20 us even for one key.
_MIN_ROUNDS = 500
_KEYS_PER_ROUND = 16

# Of CPython: Objects/dictobject.c and Objects/setobject.c.
_PERTURB_SHIFT = np.uint64(5)
_LINEAR_PROBES = 9

_Hashes: TypeAlias = npt.NDArray[np.uint64]
_Keys: TypeAlias = npt.NDArray[np.int32]


def check_table(hashes: npt.NDArray[np.int64], *, is_set: bool) -> None:
    """Refuse keys that take too many probes to find their slots.

    The hashes are in the order of insertion, each once. With ``is_set``, the dict becomes a set.
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
    """The key in each slot, and the slot that each key probes next.

    A set probes the neighbours of a slot before it goes on, if there are enough of them.
    """

    def __init__(self, hashes: _Hashes, size: int, neighbours: int) -> None:
        self._mask = np.uint64(size - 1)
        self._neighbours = neighbours
        self._last = size - 1 - neighbours
        self._free = len(hashes)
        self._keys: _Keys = np.full(size, self._free, np.int32)
        self._perturb = hashes.copy()
        self._base = (hashes & self._mask).view(np.int64)
        self._offset: _Keys = np.zeros(len(hashes), np.int32)

    def ask(self, asking: _Keys) -> _Keys:
        """Let keys probe their slots; return those that are sent on, ready for their next slot."""
        slots = self._base[asking]
        if self._neighbours:
            slots += self._offset[asking]
        had = self._keys[slots]
        np.minimum.at(self._keys, slots, asking)
        has_it = self._keys[slots] == asking
        sent_away = np.concatenate([asking[~has_it], had[has_it & (had != self._free)]])
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
