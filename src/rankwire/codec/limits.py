"""Limits on the memory and time that a small message can cost its receiver.

A msgpack item takes at least one byte, but most Python objects take 50 and more: a megabyte of
empty dicts decodes to 72 megabytes. So the items of a head are counted before it is decoded, if it
has more bytes than the limit.

Python hashes numbers and tuples without a secret, so a sender can choose n keys of equal hash,
which take n**2 comparisons in a dict: a quarter of a megabyte stops the interpreter for seconds.
Keys of different hashes can collide too: a dict or set probes a sequence of slots that follows from
the hash, so a sender can fill one sequence and let all other keys walk along it. The keys of an
extension are checked for both. msgspec builds native maps without a check, so the codec writes only
short ones with plain keys, and scans a head that may hold others.

All checks take linear time and raise only ``InvalidMessageError``.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeAlias
from uuid import UUID

import msgspec
import numpy as np
import numpy.typing as npt

from rankwire.errors import InvalidMessageError

DEFAULT_MAX_ITEMS = 1_000_000

# The most that a fixmap holds: a longer map begins with one of two bytes.
MAX_NATIVE_MAP = 15

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

# Ordinary keys share hashes too: 34 powers of two do, and classes may hash by one field.
_MAX_EQUAL_HASHES = 128
# Too short to hold enough keys to matter: 60 fractions and numpy floats of one hash take 4 ms.
MIN_SCANNED_NBYTES = 1024

# Steps of comparing per message: 10 to 20 ns each, so at most half a second for a megabyte. The
# free ones are enough for any 4 kB.
_FREE_STEPS = 1 << 18
_STEPS_PER_BYTE = 32
_BYTES_PER_STEP = 64  # of equal strings
# To compare an int with a Decimal, Python converts it to decimal digits in quadratic time: 75 us
# for 1,000 bytes, 340 ms for 65,535. To compare a Fraction with a Decimal, it converts two ints and
# multiplies one of them by the Decimal.
_BITS_OF_ROOT, _STEPS_OF_ROOT = 128, 4
_DIGITS_OF_ROOT = 16
# Comparing these with a number of another type takes 2 to 5 us, and two dataclasses 0.1 us.
_DECIMAL_STEPS = 256
_FRACTION_STEPS = _NUMPY_STEPS = 512
_RECORD_STEPS = 32

# Hashed with a secret of this process, or only three values.
_HASHED_SAFELY: frozenset[type] = frozenset({type(None), bool, str, bytes})
# Two of these are compared in one step; wide ints too, since no digits are made.
_SINGLE: frozenset[type] = frozenset(
    {type(None), bool, float, complex, date, time, datetime, timedelta, UUID, range}
)
_QUICK = _HASHED_SAFELY | _SINGLE | {int}

_MAP16, _MAP32 = 0xDE, 0xDF
# Tokens of a fixed length, frequent ones first; the first pattern has only the short maps.
_RARE_TOKENS = (
    rb"|[\xcc\xd0].|[\xcf\xd3].{8}|\xd5.{3}|\xd6.{5}|\xd7.{9}|\xd8.{17}|"
    + b"|".join(b"%c.{%d}" % (0xA0 + nbytes, nbytes) for nbytes in range(1, 32))
    + rb")"
)
_SHORT_TOKENS = re.compile(
    rb"(?:(?:\xcb.{8})++|[\x00-\xa0\xc0\xc2\xc3\xe0-\xff]|[\xca\xce\xd2\xdd].{4}|[\xcd\xd1\xd4\xdc].."
    + _RARE_TOKENS
    + b"*+",
    re.DOTALL,
)
_SHORT_TOKEN = (
    rb"(?:[\x00-\xa0\xc0\xc2\xc3\xe0-\xff]|\xcb.{8}|[\xca\xce\xd2\xdd\xdf].{4}|[\xcd\xd1\xd4\xdc\xde].."
    + _RARE_TOKENS
)
# So many at once cost 30 ns each, as decoding does; the rest of a run is counted one by one.
_BLOCK = 4096
_block = re.compile(_SHORT_TOKEN + b"{%d}" % _BLOCK, re.DOTALL)
_rest_of_block = re.compile(_SHORT_TOKEN + b"{0,%d}+" % _BLOCK, re.DOTALL)
_each_token = re.compile(_SHORT_TOKEN, re.DOTALL)
# Tokens that say their length (bin, str, ext): the width of the length, and what else follows it.
_LONG_TOKENS = {
    **{0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0)},
    **{0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)},
    **{0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)},
}

_Hashes: TypeAlias = npt.NDArray[np.uint64]
_Keys: TypeAlias = npt.NDArray[np.int32]


class ItemCount:
    """Counts the items of one payload, whose head may have several bodies."""

    __slots__ = ("_count", "_limit")

    def __init__(self, limit: int) -> None:
        self._count = 0
        self._limit = limit

    def add(self, body: memoryview) -> None:
        """Count the items of a msgpack body; an extension counts as one."""
        position = 0
        while position < len(body):
            if match := _block.match(body, position):
                position = match.end()
                self._count += _BLOCK
            elif (match := _rest_of_block.match(body, position)) and match.end() > position:
                self._count += len(_each_token.findall(body, position, match.end()))
                position = match.end()
            elif body[position] in _LONG_TOKENS:
                position = _skip_long_token(body, position)
                self._count += 1
            else:
                return  # truncated or invalid: the decoder raises
            if self._count > self._limit:
                raise InvalidMessageError(
                    f"the payload holds more than {self._limit} items; arrays count as one, and "
                    "Codec(max_items=) allows more"
                )


class KeyCheck:
    """Limits the time to compare the keys of one message.

    Python compares each two keys of the same hash, so few may share one. Keys may hold sets, whose
    members are compared in turn, so the message has a budget of steps.

    The bound: each value has a *weight*, and comparing two values takes at most the mean of their
    weights in steps. A single value weighs what it takes to compare it with the costliest value of
    any other type, and a sequence the sum of its items. A set of n members weighs n / 2 times their
    sum: only sets of one size are compared, and if all members have one hash, each meets half of
    the other set on average. So g keys of one hash, which are g * (g - 1) / 2 pairs, take at most
    (g - 1) / 2 times the sum of their weights.

    ``parts_of`` returns the fields by which a registered record compares; None for other values.
    """

    __slots__ = ("_left", "_parts_of", "_weights")

    def __init__(self, nbytes: int, parts_of: Callable[[Any], Sequence[Any] | None]) -> None:
        self._left = _FREE_STEPS + _STEPS_PER_BYTE * nbytes
        self._parts_of = parts_of
        # Holds the value too, so that its id is not reused.
        self._weights: dict[int, tuple[Any, int]] = {}

    def check(self, keys: Sequence[Any], *, is_set: bool = False) -> None:
        """Refuse keys, in insertion order, that take too long to put into a dict and then a set."""
        kinds = set(map(type, keys))
        is_quick = kinds <= _QUICK
        if kinds <= _HASHED_SAFELY or (is_quick and len(keys) <= _MAX_EQUAL_HASHES):
            return
        groups = _groups_of_many(keys, is_set) if len(keys) > MANY_KEYS else _groups(keys)
        for group in groups:
            if len(group) > _MAX_EQUAL_HASHES:
                raise InvalidMessageError(f"more than {_MAX_EQUAL_HASHES} keys have the same hash")
            if not is_quick:
                self._left -= (len(group) - 1) * sum(map(self._weight, group)) // 2
                if self._left < 0:
                    raise InvalidMessageError("its keys would take too long to compare")

    def _weight(self, value: Any) -> int:
        kind = type(value)
        if kind in _SINGLE:
            return 1
        if kind is int:
            return _int_weight(value)
        if kind is str or kind is bytes or kind is bytearray:
            return 1 + len(value) // _BYTES_PER_STEP
        if kind is Decimal:
            root = len(value.as_tuple().digits) // _DIGITS_OF_ROOT
            return _DECIMAL_STEPS + root * root
        if kind is Fraction:
            parts = _int_weight(value.numerator) + _int_weight(value.denominator)
            return _FRACTION_STEPS + parts
        if isinstance(value, np.generic):
            return _NUMPY_STEPS + value.nbytes // _BYTES_PER_STEP
        known = self._weights.get(id(value))
        if known is not None:
            return known[1]
        weight = self._weight_of_parts(value)
        self._weights[id(value)] = (value, weight)
        return weight

    def _weight_of_parts(self, value: Any) -> int:
        fields = self._parts_of(value)
        if fields is not None:
            return _RECORD_STEPS + self._sum(fields)
        if isinstance(value, (tuple, list, deque)):
            return self._sum(value)
        if isinstance(value, (frozenset, set)):
            return (len(value) + 2) * self._sum(value) // 2
        if isinstance(value, dict):
            return (len(value) + 2) * self._sum(value) // 2 + self._sum(value.values())
        if isinstance(value, slice):
            return self._sum((value.start, value.stop, value.step))
        return _RECORD_STEPS  # a path, an enum's member, or what hooks have built

    def _sum(self, values: Iterable[Any]) -> int:
        return 1 + sum(map(self._weight, values))


def _int_weight(value: int) -> int:
    root = value.bit_length() // _BITS_OF_ROOT
    return 1 + _STEPS_OF_ROOT * root * root


def _groups(keys: Sequence[Any]) -> Iterable[list[Any]]:
    hashes = list(map(hash, keys))
    if len(set(hashes)) == len(keys):
        return ()
    groups: dict[int, list[Any]] = {}
    for key, value in zip(keys, hashes, strict=True):
        groups.setdefault(value, []).append(key)
    return [group for group in groups.values() if len(group) > 1]


def _groups_of_many(keys: Sequence[Any], is_set: bool) -> Iterable[list[Any]]:
    """Group the keys like ``_groups``, without a table of hashes; check the future table."""
    hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
    order = np.argsort(hashes, kind="stable")
    is_first = np.diff(hashes[order], prepend=~hashes[order[:1]]) != 0
    check_table(hashes[np.sort(order[is_first])], is_set=is_set)
    if is_first.all():
        return ()
    groups = np.split(order, np.nonzero(is_first)[0][1:])
    return [[keys[index] for index in group] for group in groups if len(group) > 1]


def check_table(hashes: npt.NDArray[np.int64], *, is_set: bool) -> None:
    """Refuse keys that take too many probes to find their slots.

    ``hashes`` has each hash once, in insertion order. With ``is_set``, the dict becomes a set. The
    count is exact for CPython's tables, and an estimate for others. Inserting keys one by one, each
    into the first free slot of its sequence, has the same result as if every slot kept the earliest
    key that probes it and sent later ones on (deferred acceptance, Gale and Shapley), in any order
    of probing. So numpy does it for all keys at once, in linear time.
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
    """The key in each slot, and the slot that each key probes next: for sets, its neighbours."""

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
        """Let keys probe their slots; return the displaced keys, moved to their next slots."""
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


def may_hold_wide_maps(payload: bytearray | memoryview, end: int) -> bool:
    """Return whether ``payload[:end]`` may hold wide maps, by two fast searches."""
    if isinstance(payload, memoryview):  # it has no ``find``
        payload = bytearray(payload[:end])
    return payload.find(_MAP16, 0, end) >= 0 or payload.find(_MAP32, 0, end) >= 0


def refuse_wide_maps(body: memoryview) -> None:
    """Refuse msgpack with a map of more than 15 entries, except in extensions or short bodies."""
    if len(body) <= MIN_SCANNED_NBYTES:
        return
    position = 0
    # The pattern matches at least the empty string.
    while (position := _SHORT_TOKENS.match(body, position).end()) < len(body):  # type: ignore[union-attr]
        if body[position] not in _LONG_TOKENS:
            raise InvalidMessageError(f"a native map of more than {MAX_NATIVE_MAP}, or no msgpack")
        position = _skip_long_token(body, position)


def refuse_extensions_as_keys(body: memoryview) -> None:
    """Refuse extensions as keys of native maps: it decodes them as lists, which cannot be keys."""
    try:
        msgspec.msgpack.decode(body, ext_hook=lambda code, body: [])
    except msgspec.DecodeError as error:
        raise InvalidMessageError(f"an extension as a key of a native map, or {error}") from error


def _skip_long_token(body: memoryview, position: int) -> int:
    width, besides = _LONG_TOKENS[body[position]]
    nbytes = int.from_bytes(body[position + 1 : position + 1 + width], "big")
    return position + 1 + width + besides + nbytes
