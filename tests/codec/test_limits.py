"""Too many items, and keys of one hash, are refused in linear time, and honest messages are not."""

from __future__ import annotations

import dataclasses
import struct
import sys
import tracemalloc
from collections import Counter, OrderedDict, deque
from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from codec.payloads import forge as payload
from faults.sizes import examples
from rankwire.codec.codec import Codec
from rankwire.codec.limits import (
    DEFAULT_MAX_ITEMS,
    ItemCount,
    KeyCheck,
    may_hold_wide_maps,
    refuse_extensions_as_keys,
    refuse_wide_maps,
)
from rankwire.errors import InvalidMessageError

PRIME = sys.hash_info.modulus  # ints that differ by a multiple of it have the same hash


def check_keys(keys: list[Any], nbytes: int = 1025) -> None:
    """As for a message that is not much longer than its keys."""
    KeyCheck(nbytes, lambda _: None).check(keys)


def packed(value: Any) -> memoryview:
    return memoryview(msgspec.msgpack.encode(value))


@pytest.mark.parametrize(
    "keys",
    [
        [],
        list(range(100_000)),
        [float(i) / 7 for i in range(10_000)],
        [2.0**i for i in range(-1000, 1000)] + [2**i for i in range(1000)],
        [str(i) for i in range(10_000)],
        [(i, -1, -2) for i in range(10_000)],
        [(x, y, z) for x in range(-9, 9) for y in range(-9, 9) for z in range(-9, 9)],
        [complex(x, y) for x in range(100) for y in range(100)],
        [i * PRIME for i in range(1, 129)],
        # All edges of a grid that cross from column -2 to -1 have one hash.
        [frozenset({(-1, y), (-2, y)}) for y in range(100)],
        [frozenset({-1, *range(300)}), frozenset({-2, *range(300)})],
        [frozenset({i, j}) for i in range(-100, 100) for j in range(-100, i)],
        [(frozenset({-1, str(i)}), x) for i in range(1000) for x in (-1, -2)],
    ],
    ids=[
        "none",
        "ints",
        "floats",
        "powers",
        "strings",
        "tuples",
        "points",
        "complex",
        "primes",
        "grid",
        "two sets",
        "pairs",
        "sets in tuples",
    ],
)
def test_honest_keys_pass(keys):
    check_keys(keys)


@pytest.mark.parametrize(
    "keys",
    [
        [i * PRIME for i in range(1, 130)],
        [*"abc", *[i * PRIME for i in range(1, 130)]],
        [tuple(-1 - (i >> bit & 1) for bit in range(9)) for i in range(400)],
        [complex(-1000003 * i, i) for i in range(400)],
        [Decimal(i * PRIME) for i in range(1, 130)],
        [Fraction(i * PRIME) for i in range(1, 130)],
        [UUID(int=i * PRIME) for i in range(1, 130)],
    ],
    ids=["primes", "strings and primes", "tuples", "complex", "decimals", "fractions", "uuids"],
)
def test_many_keys_of_one_hash_are_refused(keys):
    with pytest.raises(InvalidMessageError, match="same hash"):
        check_keys(keys)


def alike(count: int, depth: int, last: int) -> Any:
    """Nested frozensets of one hash for all ``last``, which is all in which they differ."""
    if depth == 0:
        return 7 + PRIME * last
    return frozenset(alike(count, depth - 1, n) for n in [*range(count - 1), count + last])


@dataclasses.dataclass(frozen=True)
class Named:
    name: str
    content: Any = dataclasses.field(hash=False)


def parts_of_named(value: Any) -> list[Any] | None:
    return [value.name, value.content] if type(value) is Named else None


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nested_keys_that_multiply_their_collisions_are_refused(depth):
    count = {1: 64, 2: 30, 3: 8}[depth]
    keys = [alike(count, depth, n) for n in range(max(count, 30))]
    assert len(set(map(hash, keys))) == 1
    with pytest.raises(InvalidMessageError, match="too long to compare"):
        check_keys(keys)


def test_what_the_fields_of_a_key_hold_is_counted():
    keys = [Named("one", {7 + PRIME * i: n for i in range(100)}) for n in range(100)]
    KeyCheck(1025, lambda _: None).check(keys)
    with pytest.raises(InvalidMessageError, match="too long to compare"):
        KeyCheck(1025, parts_of_named).check(keys)


def test_a_wide_number_counts_as_the_square_of_its_width():
    """As much as it takes to convert it to decimal digits."""
    for nbytes, is_refused in ((64, False), (1024, False), (8192, True), (65_535, True)):
        wide = 1 << 8 * nbytes - 9
        keys = [(wide + PRIME * n,) for n in range(2)]
        assert len(set(map(hash, keys))) == 1
        check = KeyCheck(sum(key[0].bit_length() // 8 for key in keys), lambda _: None)
        if is_refused:
            with pytest.raises(InvalidMessageError, match="too long to compare"):
                check.check(keys)
        else:
            check.check(keys)


def test_wide_ints_by_themselves_are_compared_quickly_and_pass():
    check_keys([2**exponent - 1 for exponent in range(61, 61 * 128, 61)])
    check_keys([*[(1 << 500_000) + PRIME * n for n in range(100)], 0.5, "text", 1j])


@pytest.mark.parametrize(
    "contain", [list, deque, dict.fromkeys, OrderedDict.fromkeys, Counter, set, slice]
)
def test_what_the_fields_of_a_key_hold_is_counted_whatever_holds_it(contain):
    """Fields that are not hashed are compared all the same."""
    wide = [1 << 300_000, Decimal(5), Fraction(1, 3)]
    held = slice(*wide) if contain is slice else contain(wide)
    with pytest.raises(InvalidMessageError, match="too long to compare"):
        KeyCheck(70_000, parts_of_named).check([Named("one", held), Named("one", [held])])


def test_what_a_tuple_of_another_class_holds_is_counted():
    class Size(tuple[Any, ...]):
        __slots__ = ()

    keys = [Size([7 + PRIME * i for i in range(200)] + [PRIME * n]) for n in range(120)]
    with pytest.raises(InvalidMessageError, match="too long to compare"):
        KeyCheck(1025, lambda _: None).check(keys)


def test_the_budget_is_for_the_whole_message():
    check = KeyCheck(1025, lambda _: None)
    keys = [alike(40, 1, n) for n in range(10)]
    for _ in range(7):
        check.check(keys)
    with pytest.raises(InvalidMessageError, match="too long to compare"):
        check.check(keys)


@pytest.mark.parametrize(
    "padding", [0.5, 7, -1, 300, 70_000, 2**40, "s" * 31, "t" * 32, "u" * 300, b"v" * 99]
)
@pytest.mark.parametrize("header", [b"\xde\x00\x10", b"\xde\x01\x00", b"\xdf\x00\x00\x00\x01"])
def test_a_wide_map_is_found_wherever_it_is(header, padding):
    before = msgspec.msgpack.encode([padding] * 1100)[3:]
    for body in (header + before, before + header, before + b"\x91\x81\x01" + header):
        with pytest.raises(InvalidMessageError, match="native map"):
            refuse_wide_maps(memoryview(body))


def test_a_wide_map_inside_an_extension_is_left_to_its_own_scan():
    for nbytes in (1, 2, 4, 8, 16, 17, 300, 70_000):
        refuse_wide_maps(packed([Ext(10, b"\xde" * nbytes)] * 1000))


def test_an_extension_as_a_key_of_a_native_map_is_refused():
    for body in (b"\x81\xc7\x00\x0c\x01", b"\x91\x82\x01\x02\xd4\x0c\x90\x01"):
        with pytest.raises(InvalidMessageError, match="an extension as a key"):
            refuse_extensions_as_keys(memoryview(body))
    refuse_extensions_as_keys(packed([Ext(12, b"\x90"), {"a": Ext(12, b"\x90"), 1: {2.5: None}}]))


@pytest.mark.parametrize("hidden", [False, True], ids=["a key", "in a tuple that is a key"])
def test_a_codec_refuses_records_and_frozensets_as_keys_of_native_maps(hidden):
    """However deep: they would be compared without asking."""
    codec = Codec([Named])
    pack = msgspec.msgpack.encode
    for key in (Ext(12, pack([1])), Ext(31, pack(["Named", "name,content", ["a", 1]]))):
        ext = Ext(10, pack([key])) if hidden else key
        odd = msgspec.Raw(b"\x81" + pack(ext) + b"\x00")
        head = pack([b" " * 1100, Ext(10, pack([odd]))])
        with pytest.raises(InvalidMessageError, match="an extension as a key"):
            codec.decode(bytearray(struct.pack("<I", len(head)) + head))


def test_a_short_body_is_not_scanned():
    refuse_wide_maps(memoryview(b"\xde" * 1024))
    with pytest.raises(InvalidMessageError):
        refuse_wide_maps(memoryview(b"\xde" * 1025))


def test_a_payload_without_the_two_bytes_holds_no_wide_map():
    payload = bytearray(b"\x00" * 10 + b"\xde" + b"\xdf")
    assert not may_hold_wide_maps(payload, 10)
    assert may_hold_wide_maps(payload, 11)
    assert may_hold_wide_maps(payload[11:], 1)


# Bytes that look like the headers of wide maps in every place where that is harmless.
LOOKALIKES = (
    st.floats(width=64)
    | st.sampled_from([struct.unpack(">d", bytes([b] * 8))[0] for b in (0xDE, 0xDF, 0xC1)])
    | st.sampled_from([0xDE, 0xDF, 0xDEDF, 0xDEDFDEDF, 0xDEDFDEDFDEDFDEDF, -0x22, -0x2122])
    | st.integers(-(2**63), 2**64 - 1)
    | st.text("a\u0781\u07ff", max_size=300)
    | st.binary(max_size=300)
    | st.sampled_from([b"\xde" * n for n in (0, 255, 256, 65_536)])
    | st.binary(max_size=40).map(lambda body: Ext(10, body))
    | st.sampled_from([None, True, False])
)
TREES = st.recursive(
    LOOKALIKES,
    lambda tree: st.lists(tree, max_size=40) | st.dictionaries(st.text(), tree, max_size=15),
    max_leaves=30,
)


@settings(max_examples=examples(200), deadline=None)
@given(TREES)
def test_honest_msgpack_passes_the_scan(tree):
    refuse_wide_maps(packed([tree, b" " * 1024]))


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(min_size=1025, max_size=2000))
def test_the_scan_of_anything_ends(body):
    try:
        refuse_wide_maps(memoryview(body))
    except InvalidMessageError:
        pass


pack = msgspec.msgpack.encode


def items_in(value):
    if isinstance(value, list):
        return 1 + sum(map(items_in, value))
    if isinstance(value, dict):
        return 1 + sum(items_in(key) + items_in(item) for key, item in value.items())
    return 1


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
    | st.binary(max_size=300) | st.text(min_size=20, max_size=80),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=60,
)  # fmt: skip


def is_refused(body, limit):
    try:
        ItemCount(limit).add(memoryview(body))
    except InvalidMessageError:
        return True
    return False


@given(plain)
def test_every_item_counts_once(value):
    count, body = items_in(value), pack(value)
    assert not is_refused(body, count)
    assert is_refused(body, count - 1)


@pytest.mark.parametrize("count", [4095, 4096, 4097, 8191, 20_000])
def test_long_runs_count_exactly(count):
    for item in (0, 1.5, "word", {}, 70_000):
        body = pack([item] * count + ["a long string of more than 31 characters"] + [item] * 5)
        assert not is_refused(body, count + 7)
        assert is_refused(body, count + 6)


@given(st.binary(max_size=200))
def test_noise_is_left_to_the_decoder(noise):
    is_refused(noise, 10)


@given(st.lists(st.sampled_from([0x90, 0xC0, 0xA1, 0xCB, 0xD4, 0xC7, 0xDB, 0xFF]), max_size=50))
def test_tokens_that_are_cut_off_do_not_stop_it(tokens):
    is_refused(bytes(tokens), 10)


def dicts(count):
    """Return a message of a list of so many empty dicts."""
    return payload(b"\xdd" + count.to_bytes(4, "big") + b"\x80" * count)


def test_a_message_at_the_limit_is_decoded_and_one_above_it_refused():
    codec = Codec(max_items=5000)
    assert len(codec.decode(dicts(4999))) == 4999
    with pytest.raises(InvalidMessageError, match="more than 5000 items"):
        codec.decode(dicts(5000))


def test_by_default_the_limit_is_a_million():
    assert DEFAULT_MAX_ITEMS == 1_000_000
    assert len(Codec().decode(dicts(999_999))) == 999_999
    with pytest.raises(InvalidMessageError, match="max_items"):
        Codec().decode(dicts(1_000_000))


def test_what_is_refused_takes_no_memory():
    message = dicts(20 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidMessageError):
            Codec().decode(message)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_items_inside_extensions_count_too():
    codec = Codec(max_items=2000)
    for value in ([tuple(range(400))] * 6, {key: [key] * 3 for key in range(700)}):
        buffers, _ = Codec().encode(value)
        with pytest.raises(InvalidMessageError, match="items"):
            codec.decode(bytearray(b"".join(buffers)))
        assert Codec().decode(bytearray(b"".join(buffers))) == value


def test_arrays_and_byte_strings_are_one_item():
    import numpy as np

    value = [np.zeros(1000), b"x" * 100_000, "y" * 100_000]
    buffers, _ = Codec().encode(value)
    assert len(Codec(max_items=10).decode(bytearray(b"".join(buffers)))) == 3
