"""Damages valid messages: a fast mutator, reproducible from its seed."""

import itertools
import random
import struct
from collections.abc import Sequence

# Numbers at which lengths and counts go wrong.
_BOUNDARIES = [
    0, 1, 2, 15, 16, 31, 32, 127, 128, 255, 256, 32767, 32768, 65535, 65536, (1 << 24) - 1, 1 << 30,
    (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 62, (1 << 63) - 1, 1 << 63,
    (1 << 64) - 1,
]  # fmt: skip
_NUMBERS = [
    struct.pack(order + kind, number & mask)
    for order in "<>"
    for kind, mask in (("B", 0xFF), ("H", 0xFFFF), ("I", (1 << 32) - 1), ("Q", (1 << 64) - 1))
    for number in _BOUNDARIES
]
# First bytes of msgpack items that announce much: long strings, arrays, maps, extensions.
_ANNOUNCEMENTS = [
    bytes([kind]) + b"\xff" * size
    for kind, size in (
        (0xC6, 4), (0xC9, 5), (0xD9, 1), (0xDB, 4), (0xDC, 2), (0xDD, 4), (0xDE, 2), (0xDF, 4),
        (0x9F, 0), (0x8F, 0), (0xC7, 2), (0xD4, 1), (0xCF, 8), (0xD3, 8), (0xCB, 8), (0xC1, 0),
    )
]  # fmt: skip


class Mutator:
    """Makes inputs out of a corpus of valid ones.

    Args:
        corpus: What to damage.
        seed: The same seed gives the same inputs.
    """

    def __init__(self, corpus: Sequence[bytes], seed: int | str) -> None:
        self._corpus = list(corpus)
        self._chance = random.Random(seed)
        self._ways = [
            self._flip_a_bit,
            self._set_a_byte,
            self._lie,
            self._lie,
            self._announce,
            self._truncate,
            self._extend,
            self._splice,
            self._repeat,
            self._delete,
        ]

    def next(self) -> bytearray:
        """Return the next input: mostly a valid one with one to four damages, sometimes noise."""
        chance = self._chance
        if chance.random() < 0.05:
            return bytearray(chance.randbytes(chance.randrange(300)))
        data = bytearray(chance.choice(self._corpus))
        for _ in range(chance.choice((1, 1, 2, 4))):
            chance.choice(self._ways)(data)
        return data

    def split(self, data: bytearray) -> list[memoryview]:
        """Return the input in a few pieces."""
        view, chance = memoryview(data), self._chance
        cuts = sorted(chance.randrange(len(data) + 1) for _ in range(chance.choice((0, 0, 1, 3))))
        edges = [0, *cuts, len(data)]
        return [view[start:stop] for start, stop in itertools.pairwise(edges)]

    def _place(self, data: bytearray) -> int:
        """Return a place; more often near the beginning, where lengths and kinds are."""
        if not data:
            return 0
        size = min(len(data), 64) if self._chance.random() < 0.6 else len(data)
        return int(self._chance.random() * size)

    def _flip_a_bit(self, data: bytearray) -> None:
        if data:
            data[self._place(data)] ^= 1 << self._chance.randrange(8)

    def _set_a_byte(self, data: bytearray) -> None:
        if data:
            data[self._place(data)] = self._chance.randrange(256)

    def _lie(self, data: bytearray) -> None:
        self._overwrite(data, self._chance.choice(_NUMBERS))

    def _announce(self, data: bytearray) -> None:
        self._overwrite(data, self._chance.choice(_ANNOUNCEMENTS))

    def _overwrite(self, data: bytearray, what: bytes) -> None:
        place = self._place(data)
        data[place : place + len(what)] = what

    def _truncate(self, data: bytearray) -> None:
        del data[self._place(data) :]

    def _extend(self, data: bytearray) -> None:
        data += self._chance.randbytes(self._chance.randrange(40))

    def _splice(self, data: bytearray) -> None:
        other = self._chance.choice(self._corpus)
        data[self._place(data) :] = other[int(self._chance.random() * len(other)) :]

    def _repeat(self, data: bytearray) -> None:
        place = self._place(data)
        data[place:place] = data[place : place + self._chance.randrange(1, 64)]

    def _delete(self, data: bytearray) -> None:
        place = self._place(data)
        del data[place : place + self._chance.randrange(1, 32)]
