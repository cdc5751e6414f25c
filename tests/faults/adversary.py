"""Makes messages that are meant to take long: valid to a parser, hard for what comes after it.

Each aims at more than linear time: keys of one hash, alone and nested, in sets, dicts, tuples and
the fields of classes; keys that walk along one another in a table; long runs of the smallest
items; deep nesting with much at the bottom; maps where none is expected; numbers as wide as
allowed. Reproducible from its seed.
"""

import random
import struct
import sys
from collections.abc import Callable

import msgspec
import numpy as np
from msgspec import Raw
from msgspec.msgpack import Ext

from headers import pack_header
from rankwire.wire.frames import Channel

PRIME = sys.hash_info.modulus  # ints that differ by a multiple of it have the same hash
_pack = msgspec.msgpack.Encoder().encode

# The codes of extensions, as in codec/scalars.py and codec/values.py.
_INT, _COMPLEX, _TIMEDELTA, _DECIMAL, _FRACTION, _UUID, _RANGE, _PATH = 1, 2, 6, 7, 8, 9, 50, 51
_TUPLE, _SET, _FROZENSET, _DICT = 10, 11, 12, 13
_ORDERED_DICT, _DEFAULT_DICT, _COUNTER, _DEQUE, _SLICE = 14, 15, 16, 17, 18
_ENUM, _RECORD, _HOOKED, _ARRAY, _NUMPY_SCALAR, _STRUCTURED = 30, 31, 32, 40, 41, 43

Item = object
_SIZES = (1000, 10_000, 30_000, 100_000)


class Adversary:
    """Makes hard inputs.

    Args:
        seed: The same seed gives the same inputs.
        records: The names and signatures of registered classes that may be keys, with the number of
            their fields.
        enums: The names of registered enums.
    """

    def __init__(self, seed: str, records: list[tuple[str, str, int]], enums: list[str]) -> None:
        self._chance = random.Random(seed)
        self._records = records
        self._enums = enums
        self._kinds: list[Callable[[int], Item]] = [
            self._alike_in_a_keyed,
            self._nested_alike,
            self._nested_alike,
            self._records_of_one_hash,
            self._walkers,
            self._many_small,
            self._deep_with_much_below,
            self._native_maps,
            self._odd_keys_of_native_maps,
            self._maps_in_descriptions,
            self._wide_numbers,
            self._many_fields,
        ]

    def payload(self) -> bytearray:
        """Return a payload for a codec."""
        head = _pack(self.item())
        return bytearray(struct.pack("<I", len(head)) + head)

    def item(self) -> Item:
        """Return one hard item, or a few beside each other."""
        chance = self._chance
        size = chance.choice(_SIZES)
        if chance.random() < 0.2:
            return [chance.choice(self._kinds)(size // 4) for _ in range(4)]
        return chance.choice(self._kinds)(size)

    def control(self) -> bytearray:
        """Return a control message as long as one may be."""
        count = self._chance.choice(_SIZES)
        text = "\x1b" * count + "\n" * count
        return bytearray(
            _pack(
                self._chance.choice(
                    [
                        {"type": "beat", "silent": [[n, 1.0] for n in range(count)]},
                        {
                            "type": "beat",
                            "silent": _raw_map([_number(n) for n in range(7)] * count),
                        },
                        {"type": "beat", "unknown": _raw_map(list(range(count)))},
                        {"type": "fallen", "reason": text, "traceback": text},
                        {"type": "gone", "rank": 1, "reason": text, "traceback": text},
                        {"type": "failed", "reason": text, "missing": list(range(count))},
                        {"type": "waiting", "missing": [-1] * count},
                        {"type": "notice", "group": 1, "sequence": 1, "description": text},
                        {
                            "type": "notice",
                            "group": 1,
                            "sequence": 1,
                            "description": "",
                            "text": text,
                        },
                        {"type": "beat", "unknown": Raw(b"\x91" * count + b"\x90")},
                    ]
                )
            )
        )

    def stream(self) -> bytearray:
        """Return a stream of many small frames."""
        sizes = self._chance.choices((0, 1, 60, 5000), (50, 30, 20, 1), k=3000)
        return bytearray().join(
            pack_header((0, Channel.MESSAGE, n), size, n) + bytes(size)
            for n, size in enumerate(sizes)
        )

    def array(self) -> bytearray:
        """Return an array message whose description is too much of one."""
        extents = self._chance.choice([0, 1, 2**63])
        body = _pack(["<f4", False, *[extents] * self._chance.choice(_SIZES)])[:65_535]
        return bytearray(struct.pack("<BBH", 0, 0, len(body)) + body)

    # -- what is hard ------------------------------------------------------------------------------

    def _keyed(self, keys: list[Item]) -> Item:
        """Return a set or a dict of these keys, of any kind."""
        dicts = {_DICT: [], _ORDERED_DICT: [], _COUNTER: [], _DEFAULT_DICT: ["list"]}
        code = self._chance.choice([_SET, _FROZENSET, *dicts])
        return Ext(code, _pack([keys, keys, *dicts[code]]) if code in dicts else _pack(keys))

    def _of_one_hash(self, count: int) -> list[Item]:
        """Return different keys that are not containers, all with one hash."""
        kind = self._chance.randrange(7)
        if kind == 0:
            return [_number(n) for n in range(count)]
        if kind == 1:  # -1 and -2 have one hash, so do tuples of them
            width = max(count.bit_length(), 1)
            return [
                Ext(
                    _TUPLE,
                    bytes([0x90 | width if width < 16 else 0x9F]) + _signs(n, min(width, 15)),
                )
                for n in range(min(count, 1 << min(width, 15)))
            ]
        if kind == 2:
            return [Ext(_COMPLEX, struct.pack("<dd", -1000003.0 * n, n)) for n in range(count)]
        if kind == 3:
            return [Ext(_DECIMAL, b"%d" % (7 + PRIME * n)) for n in range(count)]
        if kind == 4:
            return [_fraction(7 + PRIME * n, 1) for n in range(count)]
        if kind == 5:  # to compare it with the others, Python converts the first to digits
            top = 1 << 8 * self._chance.choice([100, 4000, 65_535]) - 2
            wide = top + (7 - top) % PRIME
            others = [Ext(_DECIMAL, b"%d" % (7 + PRIME * n)) for n in range(1, count)]
            return [Ext(_INT, wide.to_bytes(wide.bit_length() // 8 + 1, "little")), *others]
        return [
            Ext(_NUMPY_SCALAR, _pack(["<i8", _number(n).to_bytes(8, "little")])) for n in range(4)
        ]

    def _alike_in_a_keyed(self, size: int) -> Item:
        """Return many groups of equal hashes, each as large as is allowed or somewhat larger."""
        group = self._chance.choice([2, 64, 128, 129, size])
        return [self._keyed(self._of_one_hash(group)) for _ in range(max(size // group // 4, 1))]

    def _nested_alike(self, size: int) -> Item:
        """Return nested frozensets that differ only in their last members, at every level."""
        depth = self._chance.choice([1, 1, 2, 3, 6, 12])
        width = max(2, min(int((size / 4) ** (1 / (depth + 1))), 128))
        top = [self._alike(width, depth, n) for n in range(width)]
        return self._keyed(top)

    def _alike(self, width: int, depth: int, last: int) -> Item:
        if depth == 0:
            return _number(last)
        inner = [self._alike(width, depth - 1, n) for n in [*range(width - 1), width + last]]
        code = self._chance.choice([_FROZENSET, _FROZENSET, _TUPLE]) if depth > 1 else _FROZENSET
        return Ext(code, _pack(inner))

    def _records_of_one_hash(self, size: int) -> Item:
        """Return instances of a class that hashes by less than it compares."""
        if not self._records:
            return self._nested_alike(size)
        name, signature, fields = self._chance.choice(self._records)
        width = int((size / 4) ** 0.5)
        content = Ext(_DICT, _pack([[_number(n) for n in range(width)], [0] * width]))
        records = [
            Ext(_RECORD, _pack([name, signature, [1] + [content] * (fields - 2) + [n]]))
            for n in range(min(width, 128))
        ]
        return self._keyed(records)

    def _walkers(self, size: int) -> Item:
        """Return keys that lie along one sequence of slots, and others that walk along it."""
        del size  # as large as makes the difference
        return self._keyed(walkers(1 << self._chance.choice([12, 14, 16])))

    def _many_small(self, size: int) -> Item:
        """Return as many of the smallest items as fit, of one kind or all."""
        smallest: list[Item] = [
            Ext(_TUPLE, b"\x90"),
            Ext(_SET, b"\x90"),
            Ext(_FROZENSET, _pack([-1, -2])),
            Ext(_DICT, _pack([[], []])),
            Ext(_ARRAY, _pack(["<f4", False, 0])),
            Ext(_NUMPY_SCALAR, _pack(["<f4", bytes(4)])),
            Ext(_TIMEDELTA, bytes(12)),
            Ext(_DECIMAL, b"0"),
            _fraction(1, 3),
            Ext(_UUID, bytes(16)),
            Ext(_RANGE, bytes(16) + b"\x01" + bytes(7)),
            Ext(_PATH, b"\0a"),
            Ext(_ORDERED_DICT, _pack([[], []])),
            Ext(_DEFAULT_DICT, _pack([[], [], None])),
            Ext(_COUNTER, _pack([[], []])),
            Ext(_DEQUE, _pack([[], None])),
            Ext(_SLICE, _pack([0, 0, 0])),
            Ext(_STRUCTURED, _pack([[1, False, ["a", 0, "|i1"]], False, 0])),
            Raw(b"\x90"),
            Raw(b"\x80"),
            Raw(b"\x00"),
            Raw(b"\xc4\x00"),
        ]
        if self._chance.random() < 0.5:
            smallest = [self._chance.choice(smallest)]
        return [smallest[n % len(smallest)] for n in range(size)]

    def _deep_with_much_below(self, size: int) -> Item:
        """Return containers in containers, with everything at the bottom."""
        below = [-1, -2, *range(size)]
        item: Item = Ext(_TUPLE, _pack(below))
        code = self._chance.choice([_TUPLE, _FROZENSET])
        for _ in range(30):
            second = [Ext(_TUPLE, _pack([-2, *below[1:]]))] if code == _FROZENSET else []
            item = Ext(code, _pack([item, *second[: self._chance.randrange(2)]]))
        return item

    def _native_maps(self, size: int) -> Item:
        """Return maps of msgpack itself, small ones and one that is too wide."""
        keys = [_number(n) for n in range(7)]
        maps: list[Item] = [_raw_map(keys) for _ in range(size // 20)]
        if self._chance.random() < 0.5:
            maps.append(_raw_map([n << 40 for n in range(size)]))
        return maps

    def _odd_keys_of_native_maps(self, size: int) -> Item:
        """Return maps of msgpack itself whose keys are records with such maps in them."""
        if not self._records:
            return self._native_maps(size)
        name, signature, fields = self._chance.choice(self._records)

        def record(content: Item) -> Item:
            return Ext(_RECORD, _pack([name, signature, [1, content, *[0] * (fields - 2)]]))

        def alike(depth: int, last: int) -> Item:
            if depth == 0:
                return record(last)
            return record(_raw_map([alike(depth - 1, n) for n in [*range(13), 20 + last]]))

        return _raw_map([alike(2 if size > 10_000 else 1, n) for n in range(14)])

    def _maps_in_descriptions(self, size: int) -> Item:
        """Return what should describe an array, a number, or a member of an enum, and is a map."""
        wide = _raw_map([(n << 44) % PRIME for n in range(size)])
        code = self._chance.choice(
            [_ARRAY, 42, _NUMPY_SCALAR, _ENUM, _RECORD, _HOOKED, _STRUCTURED, 44, 45, 46]
        )
        return Ext(code, _pack(["<f4", False, wide]))

    def _many_fields(self, size: int) -> Item:
        """Return empty arrays with as many fields as are allowed, side by side and nested."""
        fields = [[str(n), n, self._chance.choice(["|i1", "|b1"])] for n in range(256)]
        wide = [256, False, *fields]
        deep: Item = [1, False, ["a", 0, "|i1"]]
        for _ in range(3):
            deep = [1, False, ["a", 0, deep]]
        twice = [512, False, ["a", 0, wide], ["b", 256, wide]]
        described = self._chance.choice([wide, deep, twice])
        shape = self._chance.choice([[0], [2**31, 0], []])
        return [Ext(_STRUCTURED, _pack([described, False, *shape])) for _ in range(size // 500)]

    def _wide_numbers(self, size: int) -> Item:
        """Return numbers that are as wide as is allowed, as values, keys and flags."""
        kind = self._chance.randrange(4)
        if kind == 0:  # whose digits agree but for the last ones
            nbytes = self._chance.choice([4096, 65_536])
            top = 1 << 8 * nbytes - 8
            count = min(size // 200, (8 << 20) // nbytes)
            numbers = [
                Ext(_INT, (top + n * PRIME).to_bytes(nbytes, "little")) for n in range(count)
            ]
        elif kind == 1:
            numbers = [
                Ext(_INT, (n + (1 << 32_000)).to_bytes(4096, "little")) for n in range(size // 200)
            ]
        elif kind == 2:
            odd = self._chance.getrandbits(8000) | 1
            numbers = [_fraction((1 << 8100) + 2 * n, odd) for n in range(size // 100)]
        else:
            digits = b"1" * 4090
            numbers = [Ext(_DECIMAL, digits + b"%d" % (n % 10**6)) for n in range(size // 200)]
        if self._enums and self._chance.random() < 0.5:
            name = self._chance.choice(self._enums)
            return [Ext(_ENUM, _pack([name, number])) for number in numbers]
        return self._keyed(numbers)


def walkers(size):
    """Keys for a dict of so many slots: half lie along one sequence, the others walk along it."""
    mask, half = size - 1, size // 3 - 1
    line = [1]
    while len(line) < half:
        line.append((5 * line[-1] + 1) & mask)
    place = np.full(size, size)
    place[line] = np.arange(half)
    hashes = np.arange(size, 1 << 25, 7, dtype=np.uint64)
    slots = hashes & np.uint64(mask)
    perturb = hashes
    for _ in range(6):  # until nothing is left of the hash, and the sequence is the line
        is_on_line = place[slots.astype(np.int64)] < half
        hashes, slots, perturb = hashes[is_on_line], slots[is_on_line], perturb[is_on_line]
        perturb = perturb >> np.uint64(5)
        slots = (slots * np.uint64(5) + perturb + np.uint64(1)) & np.uint64(mask)
    return list(dict.fromkeys([*line, *hashes[:half].tolist()]))


def _number(number: int) -> Item:
    """Return one of the numbers that have the hash 7."""
    value = 7 + PRIME * number
    if value < 2**64:
        return value
    return Ext(_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _fraction(numerator: int, denominator: int) -> Item:
    parts = [
        n.to_bytes(n.bit_length() // 8 + 1, "little", signed=True) for n in (numerator, denominator)
    ]
    return Ext(_FRACTION, struct.pack("<H", len(parts[0])) + b"".join(parts))


def _signs(number: int, width: int) -> bytes:
    return bytes(0xFF - (number >> bit & 1) for bit in range(width))


def _raw_map(keys: list[Item]) -> Raw:
    head = bytes([0x80 | len(keys)]) if len(keys) < 16 else b"\xdf" + struct.pack(">I", len(keys))
    return Raw(head + b"".join(_pack(key) + b"\x00" for key in keys))
