"""Decoding takes time in proportion to length, whatever types of keys share a hash.

For every pair of types that can share a hash, messages are made by hand of as many colliding keys
as allowed, in everything that hashes: sets, dicts of all kinds, keys in keys, native maps.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID

import msgspec
import numpy as np
import pytest
from msgspec.msgpack import Ext

from rankwire.codec.classes import ClassTable
from rankwire.codec.codec import Codec
from rankwire.codec.limits import KeyCheck
from rankwire.codec.value_writer import Writer
from rankwire.codec.values import ALWAYS_PLAIN, Code
from rankwire.errors import InvalidMessageError

PRIME = 2**61 - 1  # numbers that differ by a multiple of it have the same hash
HASH = 1 << 20

# CPU time, as the machine may be loaded. The limit is 0.5 us a byte, and 5 ms for a message.
MOST_SECONDS = 0.1
MOST_SECONDS_PER_BYTE = 5e-6


@dataclasses.dataclass(frozen=True)
class Labelled:
    label: str
    content: Any = dataclasses.field(hash=False)


def ints(count: int) -> list[Any]:
    return [HASH + PRIME * n for n in range(1, count + 1)]


def wide_ints(count: int) -> list[Any]:
    top = 1 << 8 * 16_000
    return [top + (HASH - top) % PRIME + PRIME * n for n in range(min(count, 4))]


def widest_int(count: int) -> list[Any]:
    top = 1 << 8 * 65_535 - 2
    return [top + (HASH - top) % PRIME]


def floats(count: int) -> list[Any]:
    return [2.0 ** (20 + 61 * n) for n in range(-16, 16)][:count]


def complexes(count: int) -> list[Any]:
    return [complex(HASH - 1_000_003 * n, n) for n in range(count)]


def decimals(count: int) -> list[Any]:
    return [Decimal(HASH + PRIME * (count + n)) for n in range(count)]


def wide_decimals(count: int) -> list[Any]:
    top = 10**4000
    return [Decimal(top + (HASH - top) % PRIME + PRIME * n) for n in range(count // 4)]


def fractions(count: int) -> list[Any]:
    return [Fraction(HASH * 7 + PRIME * n, 7) for n in range(1, count + 1)]


def wide_fractions(count: int) -> list[Any]:
    bottom = 10**2400 + 1
    return [Fraction(HASH * bottom + PRIME * n, bottom) for n in range(1, count // 4)]


def uuids(count: int) -> list[Any]:
    return [UUID(int=HASH + PRIME * n) for n in range(count)]


def numpy_floats(count: int) -> list[Any]:
    return [np.float64(value) for value in floats(count)]


def numpy_ints(count: int) -> list[Any]:
    return [np.int64(HASH + PRIME * n) for n in range(3)]


def numpy_times(count: int) -> list[Any]:
    return [np.timedelta64(HASH + PRIME * n, unit) for n in range(3) for unit in ("s", "ms", "h")]


KINDS: list[Callable[[int], list[Any]]] = [
    *(ints, wide_ints, widest_int, floats, complexes, decimals, wide_decimals),
    *(fractions, wide_fractions, uuids, numpy_floats, numpy_ints, numpy_times),
]

_pack = msgspec.msgpack.encode


def lowered(value: Any) -> Any:
    return Writer(TABLE, None, ALWAYS_PLAIN).lower(value)


TABLE = ClassTable()
TABLE.add(Labelled, "Labelled")


def native_map(keys: list[Any]) -> Any:
    """Return maps of 15 entries, the most that is not found by its first byte."""
    pairs = [b"".join(_pack(lowered(key)) + b"\xc0" for key in batch) for batch in batched(keys)]
    return [
        msgspec.Raw(bytes([0x80 + len(batch)]) + pair)
        for batch, pair in zip(batched(keys), pairs, strict=True)
    ]


def batched(keys: list[Any]) -> list[list[Any]]:
    # The first and the last meet: those of two kinds, in all maps.
    half = len(keys) // 2
    mixed = [key for pair in zip(keys[:half], keys[half:], strict=False) for key in pair]
    return [mixed[start : start + 15] for start in range(0, len(mixed), 15)]


WRAPPED: dict[str, Callable[[list[Any]], Any]] = {
    "set": lambda keys: Ext(Code.SET, _pack(lowered(keys))),
    "many sets": lambda keys: [
        Ext(Code.FROZENSET, _pack(lowered(batch))) for batch in batched(keys) * 8
    ],
    "dict": lambda keys: Ext(Code.DICT, _pack([lowered(keys), [None] * len(keys)])),
    "counter": lambda keys: Ext(Code.COUNTER, _pack([lowered(keys), [1] * len(keys)])),
    "tuples": lambda keys: Ext(Code.SET, _pack(lowered([(key,) for key in keys]))),
    "sets in a set": lambda keys: Ext(Code.SET, _pack(lowered([frozenset({key}) for key in keys]))),
    "fields": lambda keys: Ext(Code.SET, _pack(lowered([Labelled("one", key) for key in keys]))),
    "native map": native_map,
    "tuples in a native map": lambda keys: native_map([(key,) for key in keys]),
}


def message_of(item: Any) -> bytearray:
    head = _pack([b" " * 1025, item])  # long enough to be looked at
    return bytearray(len(head).to_bytes(4, "little") + head)


PAIRS = list(itertools.combinations_with_replacement(KINDS, 2))


@pytest.mark.parametrize("kinds", PAIRS, ids=lambda pair: " and ".join(k.__name__ for k in pair))
def test_keys_of_two_types_and_one_hash_are_decoded_or_refused_in_linear_time(kinds):
    keys = [*kinds[0](64), *kinds[1](64)]
    codec = Codec([Labelled])
    for name, wrap in WRAPPED.items():
        payload = message_of(wrap(keys))
        began = time.process_time()
        try:
            codec.decode(payload)
        except InvalidMessageError:
            pass
        seconds = time.process_time() - began
        assert seconds < MOST_SECONDS + MOST_SECONDS_PER_BYTE * len(payload), name


def test_the_types_do_share_a_hash():
    """Or the test above shows nothing."""
    hashes = {kind.__name__: {hash(key) for key in kind(8)} for kind in KINDS}
    assert all(found == {HASH} for name, found in hashes.items() if name != "numpy_times")


@pytest.mark.parametrize("kind", [decimals, fractions], ids=lambda kind: kind.__name__)
def test_many_honest_keys_of_a_costly_type_pass(kind):
    exact = type(kind(1)[0])
    keys = [exact(n) / 7 for n in range(10_000)]
    KeyCheck(len(keys) * 10, lambda _: None).check(keys)
    value = {exact(n): n for n in range(300)}
    codec = Codec()
    assert codec.decode(bytearray().join(codec.encode(value)[0])) == value


def test_a_wide_int_and_decimals_of_other_hashes_travel():
    value = {10**20_000: 1, **{Decimal(n): n for n in range(100)}, Fraction(1, 3): "third"}
    codec = Codec()
    assert codec.decode(bytearray().join(codec.encode(value)[0])) == value
