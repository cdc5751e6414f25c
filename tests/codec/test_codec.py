"""The contract of the codec: what goes in comes out, and only what a codec wrote goes in."""

from __future__ import annotations

import dataclasses
import enum
import math
import random
import struct
import sys
import time
import traceback
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta, timezone
from datetime import time as clock
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from codec.payloads import forge, payload_of, roundtrip
from faults.sizes import examples
from rankwire.codec import codec as codec_module
from rankwire.codec.codec import Codec
from rankwire.errors import (
    InvalidMessageError,
    MessageTooLargeError,
    UnsupportedTypeError,
)


class Colour(enum.Enum):
    RED = 1
    GREEN = "g"


class Access(enum.IntFlag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass(frozen=True)
class Point:
    x: Any
    y: Any = None


class Pair(msgspec.Struct):
    first: Any
    second: Any


class Step(NamedTuple):
    number: Any
    loss: Any = None


CLASSES = (Colour, Access, Point, Pair, Step)


@pytest.fixture
def codec() -> Codec:
    return Codec(CLASSES)


def exact(value: Any) -> Any:
    """What must stay the same of a value, with the types all the way down, comparable by ==."""
    match value:
        case list() | tuple():
            content: Any = [exact(item) for item in value]
        case dict():
            content = [(exact(key), exact(item)) for key, item in value.items()]
        case set() | frozenset():
            content = sorted((exact(item) for item in value), key=repr)
        case Point():
            content = exact([value.x, value.y])
        case Pair():
            content = exact([value.first, value.second])
        case defaultdict():
            content = value.default_factory, exact(dict(value))
        case Counter() | OrderedDict():
            content = exact(dict(value)), exact(vars(value))
        case deque():
            content = value.maxlen, exact(list(value))
        case slice():
            content = exact([value.start, value.stop, value.step])
        case range() | Decimal():
            content = repr(value)
        case np.ndarray() if value.dtype.names is not None:
            content = value.dtype, value.shape, value.flags.f_contiguous, value.tolist()
        case np.ndarray():
            content = value.dtype.str, value.shape, value.flags.f_contiguous, value.tobytes()
        case float():
            content = struct.pack("<d", value)
        case complex():
            content = struct.pack("<dd", value.real, value.imag)
        case datetime() | clock():
            content = value.isoformat(), value.fold
        case _:
            content = value
    return type(value).__name__, content


def assert_same(left: Any, right: Any) -> None:
    assert exact(left) == exact(right)


EAST = timezone(timedelta(hours=5, minutes=45, seconds=1, microseconds=2))
VALUES = [
    None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 3**999, -3**999,
    0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, 1 + 2j, complex(-0.0, math.nan),
    "", "text", "é\0\U0001f600", b"", b"short", b"long" * 2000, bytearray(), bytearray(b"b" * 5000),
    [], [1, [2, [3, "x"]]], (), (1, (2, [3])), {}, {"a": {"b": [1, (2,)]}},
    {1: "int", 2.5: "float", None: "none", b"b": "bytes", "s": "str", (1, ("a",)): "tuple"},
    {True: 1}, {False: (), True: {}}, {str(i): i for i in range(999)}, {i: (i,) for i in range(99)},
    {frozenset({1}): 1, 2**70: 2, Colour.RED: 3, 1j: 4, b"k" * 5000: 5, date(2000, 1, 1): 6},
    set(), {1, "a", (2, 3), None}, frozenset(), frozenset({frozenset({1}), 1.5}),
    date(1, 1, 1), datetime(2024, 2, 29, 23, 59, 59, 999999), datetime(2024, 1, 1, fold=1),
    datetime(2024, 1, 1, tzinfo=UTC), datetime(2024, 1, 1, tzinfo=EAST, fold=1), clock(1, 2, 3, 4),
    clock(1, 2, tzinfo=EAST), timedelta(-999999999), timedelta(1, 2, 3), timedelta.max,
    Colour.RED, Colour.GREEN, Access.READ, Access.READ | Access.WRITE, Access(0), [Access(64)],
    Point(1), Point((1, 2), [Point({1}), Pair(None, b"x" * 9000)]), Pair(Pair(1, 2), Colour.RED),
    [1.0] * 5000, tuple(map(float, range(70000))), set(map(float, range(5000))), [1.0] * 5000 + [1],
    np.float64(1.5), [np.int8(3), np.bool_(True)], np.arange(12).reshape(3, 4), (np.zeros(()), 1),
    {"weights": [np.ones(3), b"x" * 5000, np.zeros((0, 4))], "bias": np.float32(2)},
    Decimal("-0.10"), Decimal("NaN"), Fraction(-7, 3), UUID(int=2**127), range(3, -9, -2),
    PurePosixPath("/a/b"), PureWindowsPath("c:/d"), Path("x"), slice(None), slice((1,), "x", -2),
    OrderedDict(), OrderedDict(b=1, a=(2,)), OrderedDict.fromkeys(range(40)),
    OrderedDict(x=[b"x" * 5000]),
    defaultdict(None, {1: 2}), defaultdict(list, {(1,): [2]}), defaultdict(Counter),
    Counter("hello"), Counter({"a": -1, "b": 0, (1,): 2.5, None: "x"}),
    deque(), deque([1, (2,)], 5), deque([np.arange(3)]), deque(maxlen=0),
    Step(1), Step((1,), [Step(2, {Step(3)})]),
    {Step(1): 1, range(2): 2, Decimal(1) / 3: 3, UUID(int=1): 4},
    {PurePosixPath("a"): 1, Fraction(1, 3): 2, (range(1), Decimal(5)): 3},
    np.zeros(3, "i4,f8"), np.zeros((2, 0), [("a", "?"), ("b", "U3", (2, 3))]),
]  # fmt: skip


def name_of(value: Any) -> str:
    """The same name in every process: runs in parallel find a test by its name.

    The order of a set depends on the process, and so does the default text of an object.
    """
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__} of {sorted(map(repr, value))}"[:40]
    if isinstance(value, Ext):
        return f"Ext({value.code}, {bytes(value.data)!r})"
    return repr(value)[:40]


@pytest.mark.parametrize("value", VALUES, ids=name_of)
def test_a_value_arrives_equal_and_of_the_same_type(codec, value):
    assert_same(roundtrip(codec, value), value)
    assert_same(roundtrip(codec, [value, (value,), {"k": value}]), [value, (value,), {"k": value}])


@pytest.mark.parametrize("value", VALUES, ids=name_of)
def test_what_encode_returns_can_be_decoded(codec, value):
    assert_same(codec.decode(codec.encode(value)), value)


def test_what_is_decoded_is_a_copy_and_writable(codec):
    array = np.arange(1000)
    arrived = codec.decode(codec.encode([array]))[0]
    arrived[0] = 5
    assert array[0] == 0


def test_decoding_what_was_encoded_fails_as_decoding_a_payload_does(codec):
    buffers, nbytes = codec.encode("text")
    with pytest.raises(InvalidMessageError) as caught:
        codec.decode((buffers[:-1], nbytes))
    assert "tuple" not in "".join(traceback.format_exception(caught.value))


def test_all_values_travel_together_in_one_record(codec):
    buffers, nbytes = codec.encode_record(VALUES, [f"item{i}" for i in range(len(VALUES))])
    payload = bytearray().join(buffers)
    assert len(payload) == nbytes
    assert_same(codec.decode(payload), VALUES)


def test_a_plain_record_is_one_buffer(codec):
    buffers, nbytes = codec.encode_record(["add", 5.0, 0, [2, 3], {}], "abcde")
    assert len(buffers) == 1
    assert nbytes == len(buffers[0])
    assert codec.decode(bytearray(buffers[0])) == ["add", 5.0, 0, [2, 3], {}]


def test_an_aware_datetime_keeps_its_offset_whatever_its_zone(codec):
    zoneinfo = pytest.importorskip("zoneinfo")
    try:
        paris = zoneinfo.ZoneInfo("Europe/Paris")
    except zoneinfo.ZoneInfoNotFoundError:
        pytest.skip("no time zone database")
    moment = datetime(2024, 7, 1, 12, tzinfo=paris)
    arrived = roundtrip(codec, moment)
    assert arrived == moment
    assert arrived.utcoffset() == timedelta(hours=2)


def test_a_memoryview_arrives_as_bytes(codec):
    floats = np.arange(2000.0)
    assert_same(roundtrip(codec, memoryview(b"short")), b"short")
    assert_same(roundtrip(codec, memoryview(floats)), floats.tobytes())
    assert_same(roundtrip(codec, memoryview(floats)[::2]), floats[::2].tobytes())
    assert_same(roundtrip(codec, memoryview(np.zeros((0, 3)))), b"")


def test_the_same_object_twice_arrives_as_two(codec):
    array = np.ones(3)
    first, second = roundtrip(codec, [array, array])
    first[0] = 5
    assert second[0] == 1


def test_nan_keys_stay_apart(codec):
    nans = {float("nan"): 1, float("nan"): 2}
    assert list(roundtrip(codec, nans).values()) == [1, 2]
    assert len(roundtrip(codec, set(nans))) == 2


# -- layout ----------------------------------------------------------------------------------------


def test_the_layout_is_head_length_head_padding_buffers(codec):
    first, second = np.arange(5, dtype="u1"), np.arange(3, dtype="<f8")
    payload = payload_of(codec, [first, second])
    (head_nbytes,) = struct.unpack_from("<I", payload)
    start = -(-(4 + head_nbytes) // 16) * 16
    assert not any(payload[4 + head_nbytes : start])
    assert payload[start : start + 5] == first.tobytes()
    assert payload[start + 5 : start + 16] == bytes(11)
    assert payload[start + 16 :] == second.tobytes()


def test_buffers_are_not_copied_by_the_sender(codec):
    array, fortran, text = np.ones((64, 8)), np.ones((8, 9), order="F"), b"t" * 4096
    mutable = bytearray(100)
    buffers, _ = codec.encode({"a": [array, fortran], "t": text, "m": mutable})
    for owner in (array, fortran, np.frombuffer(mutable, "u1")):
        views = [np.frombuffer(b, "u1") for b in buffers if len(b) == owner.nbytes]
        assert any(np.shares_memory(view, owner) for view in views)
    assert any(buffer is text for buffer in buffers)


def test_an_array_with_gaps_is_copied_once(codec):
    base = np.arange(1000.0)
    buffers, _ = codec.encode(base[::2])
    data = np.frombuffer(buffers[-1], "f8")
    assert not np.shares_memory(data, base)
    assert (data == base[::2]).all()


def test_received_arrays_are_aligned_writable_views_of_the_payload(codec):
    sent = [np.ones(3, "u1"), np.ones(2, "c16"), b"x" * 4097, np.ones((3, 5), "f4", order="F")]
    payload = payload_of(codec, sent)
    memory = np.frombuffer(payload, "u1")
    for array in (item for item in codec.decode(payload) if isinstance(item, np.ndarray)):
        assert array.flags.aligned
        assert array.flags.writeable
        assert np.shares_memory(array, memory)
        assert (array.__array_interface__["data"][0] - memory.ctypes.data) % 16 == 0
        array[...] = 7
        assert (array == 7).all()


def test_a_head_of_4_gib_is_refused(codec, monkeypatch):
    monkeypatch.setattr(codec_module, "_MAX_HEAD_NBYTES", 10)
    codec.encode("a" * 9)
    with pytest.raises(MessageTooLargeError):
        codec.encode("a" * 10)
    with pytest.raises(MessageTooLargeError):
        codec.encode(("a" * 10,))


def test_an_item_of_4_gib_is_refused(codec, monkeypatch):
    def refuse(value: Any) -> bytes:
        raise msgspec.EncodeError("Can't encode strings longer than 2**32 - 1")

    monkeypatch.setattr(codec_module, "_pack", refuse)
    with pytest.raises(MessageTooLargeError):
        codec.encode("a")
    with pytest.raises(MessageTooLargeError):
        codec.encode_record(["a"], ["name"])


# -- errors of the sender --------------------------------------------------------------------------


def test_an_error_names_the_path_and_what_to_do(codec):
    with pytest.raises(UnsupportedTypeError, match=r"codec\.register.*allow_pickle") as caught:
        codec.encode_record(["f", [1, {"opt": object()}]], ["name", "args"])
    assert caught.value.path == 'args[1]["opt"]'
    assert caught.value.type_name == "object"
    assert str(caught.value).startswith('args[1]["opt"]: type object')


def test_the_path_begins_as_the_caller_says(codec):
    with pytest.raises(UnsupportedTypeError) as caught:
        codec.encode([object()], path="result")
    assert caught.value.path == "result[0]"


def test_a_failed_encode_leaves_the_codec_usable(codec):
    with pytest.raises(UnsupportedTypeError):
        codec.encode([np.ones(3), object()])
    assert roundtrip(codec, (1,)) == (1,)


def test_wide_ints_and_surrogates_are_found_among_plain_values(codec):
    assert roundtrip(codec, [1, "a", 2**80, {"k": -(2**90)}]) == [1, "a", 2**80, {"k": -(2**90)}]
    for value, path in [
        ("\ud800", "value"),
        (["a", "b\udfff"], "value[1]"),
        ({"k": ["\ud800"]}, 'value["k"][0]'),
        ({"\ud800": 1}, "value{key 0}"),
        ([np.str_("\ud800")], "value[0]"),
        ({"a": (1, 1 << 600_000)}, 'value["a"][1]'),
        (Point(1, {1: "\ud800"}), "value.y[1]"),
    ]:
        with pytest.raises(UnsupportedTypeError) as caught:
            codec.encode(value)
        assert caught.value.path == path
        assert str(caught.value).encode()


# -- registration ----------------------------------------------------------------------------------


def test_register_is_a_decorator_with_and_without_arguments():
    codec = Codec()

    @codec.register
    class Plain(enum.Enum):
        A = 1

    @codec.register(name="other")
    class Named(enum.Enum):
        A = 1

    assert roundtrip(codec, [Plain.A, Named.A]) == [Plain.A, Named.A]


def test_codecs_do_not_share_registrations():
    with pytest.raises(UnsupportedTypeError):
        Codec().encode(Point(1))
    with pytest.raises(InvalidMessageError, match="Point"):
        Codec().decode(payload_of(Codec([Point]), Point(1)))


# -- strictness ------------------------------------------------------------------------------------

SAMPLES = [
    ["add", 5.0, 0, [2, 3], {}],
    [np.arange(3.0), "x", np.arange(5, dtype="u1")],
    {"a": (1, {2}), "b": Point(np.ones(2), Colour.RED), "c": b"z" * 4100, (1,): 2**70},
    [datetime(2024, 1, 1, tzinfo=EAST), 1j, np.float32(1), np.str_("a"), bytearray(3)],
]


@pytest.mark.parametrize("sample", SAMPLES, ids=["plain", "arrays", "mixed", "scalars"])
def test_a_payload_cut_anywhere_is_refused(codec, sample):
    payload = payload_of(codec, sample)
    for length in range(len(payload)):
        with pytest.raises(InvalidMessageError):
            codec.decode(payload[:length])


@pytest.mark.parametrize("sample", SAMPLES, ids=["plain", "arrays", "mixed", "scalars"])
@pytest.mark.parametrize("tail", [b"\0", b"x", bytes(16)])
def test_trailing_bytes_are_refused(codec, sample, tail):
    with pytest.raises(InvalidMessageError):
        codec.decode(payload_of(codec, sample) + tail)


def test_padding_that_is_not_zero_is_refused(codec):
    payload = payload_of(codec, [np.ones(3, "u1"), np.ones(1)])
    (head_nbytes,) = struct.unpack_from("<I", payload)
    first = -(-(4 + head_nbytes) // 16) * 16
    for position in (*range(4 + head_nbytes, first), *range(first + 3, first + 16)):
        damaged = bytearray(payload)
        damaged[position] = 1
        with pytest.raises(InvalidMessageError, match="padding"):
            codec.decode(damaged)


def test_bytes_inside_the_head_after_its_value_are_refused(codec):
    with pytest.raises(InvalidMessageError):
        codec.decode(forge(b"\x01\x02"))


def test_a_head_that_ends_after_the_payload_is_refused(codec):
    with pytest.raises(InvalidMessageError):
        codec.decode(bytearray(struct.pack("<I", 5) + b"\x01"))


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\xc1",
        b"\xa1\xff",
        b"\x81\x80\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff\x01",
        b"\xdb\xff\xff\xff\xffabc",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x81\x01" * 100_000,
        Ext(99, b""),
        Ext(10, b""),
        Ext(10, b"\x01"),
        Ext(10, b"\x91"),
        Ext(11, b"\x92\x01\x01"),
        Ext(11, b"\x91\x90"),
        Ext(12, b"\x91\x80"),
        Ext(13, b"\x92\x91\x01\x90"),
        Ext(13, b"\x92\x92\x01\x01\x92\x01\x01"),
        Ext(13, b"\x92\xa1a\xa1b"),
        Ext(13, b"\x91\x90"),
        Ext(20, b"\1"),
        Ext(20, bytes(7) + b"\x80"),
        Ext(22, bytes(8)),
        Ext(30, msgspec.msgpack.encode(["Colour", "BLUE"])),
        Ext(30, msgspec.msgpack.encode(["Colour", 1])),
        Ext(30, msgspec.msgpack.encode(["Colour", ["RED"]])),
        Ext(30, msgspec.msgpack.encode([["Colour"], "RED"])),
        Ext(30, msgspec.msgpack.encode(["Point", "RED"])),
        Ext(31, msgspec.msgpack.encode(["Point", "x,y", [1]])),
        Ext(31, msgspec.msgpack.encode(["Point", "x,y", "ab"])),
        Ext(31, msgspec.msgpack.encode(["Point", "y,x", [1, 2]])),
        Ext(31, msgspec.msgpack.encode(["Point"])),
        Ext(31, msgspec.msgpack.encode(["os.system", "x,y", [1, 2]])),
    ],
    ids=name_of,
)
def test_a_malformed_head_is_refused(codec, head):
    with pytest.raises(InvalidMessageError):
        codec.decode(forge(head))


def test_an_error_has_its_cause(codec):
    with pytest.raises(InvalidMessageError) as caught:
        codec.decode(forge(b"\xa1\xff"))
    assert isinstance(caught.value.__cause__, UnicodeDecodeError)


def nested(depth: int, code: int) -> bytes:
    body = b"\x90"
    for _ in range(depth - 1):
        body = msgspec.msgpack.encode([Ext(code, body)])
    return msgspec.msgpack.encode(Ext(code, body))


@pytest.mark.fault(60, "values nest 32 deep and no deeper")
@pytest.mark.parametrize("code", [10, 12])
def test_extensions_nest_32_deep_and_no_deeper(codec, code):
    codec.decode(forge(nested(32, code)))
    with pytest.raises(InvalidMessageError, match="32"):
        codec.decode(forge(nested(33, code)))
    with pytest.raises(InvalidMessageError):
        codec.decode(forge(nested(5000, code)))


def test_depth_is_counted_along_a_path_not_over_siblings(codec):
    assert len(roundtrip(codec, [((i,),) for i in range(100)])) == 100


@pytest.mark.fault(60, "claims of much content allocate nothing")
@pytest.mark.parametrize("claim", [2**20, 2**40, 2**62, 2**63, 2**64 - 1])
def test_claimed_sizes_allocate_nothing(codec, claim):
    descriptions = [
        Ext(20, struct.pack("<Q", claim)),
        Ext(21, struct.pack("<Q", claim)),
        Ext(40, msgspec.msgpack.encode(["|u1", False, claim])),
        Ext(40, msgspec.msgpack.encode(["<f8", False, claim, claim])),
        Ext(40, msgspec.msgpack.encode(["|S2147483647", False, claim])),
        b"\xdd" + struct.pack(">I", min(claim, 2**32 - 1)),
        b"\xdf" + struct.pack(">I", min(claim, 2**32 - 1)),
        b"\xc9" + struct.pack(">I", min(claim, 2**32 - 1)) + b"\x0a",
    ]
    for description in descriptions:
        payload = forge(description, b"\1" * 64)
        tracemalloc.start()
        try:
            with pytest.raises(InvalidMessageError):
                codec.decode(payload)
            assert tracemalloc.get_traced_memory()[1] < 100_000
        finally:
            tracemalloc.stop()


def colliding_keys(count: int) -> list[list[int]]:
    """hash(-1) == hash(-2), so all tuples of them have one hash."""
    return [[-1 - (index >> bit & 1) for bit in range(14)] for index in range(count)]


@pytest.mark.fault(60, "keys chosen to collide cost no quadratic time")
def test_keys_with_one_hash_cost_no_quadratic_time(codec):
    tuples = [Ext(10, msgspec.msgpack.encode(key)) for key in colliding_keys(10_000)]
    prime = sys.hash_info.modulus
    ints = [Ext(1, (prime * (i + 2**70)).to_bytes(20, "little")) for i in range(10_000)]
    native = b"\xde" + struct.pack(">H", 10_000)
    native += b"".join(msgspec.msgpack.encode(key) + b"\xc0" for key in colliding_keys(10_000))
    heads = [Ext(11, msgspec.msgpack.encode(keys)) for keys in (tuples, ints)]
    heads += [Ext(13, msgspec.msgpack.encode([keys, [None] * 10_000])) for keys in (tuples, ints)]
    heads += [native, Ext(10, b"\x91" + native)]
    for head in heads:
        started = time.thread_time()
        with pytest.raises(InvalidMessageError):
            codec.decode(forge(head))
        assert time.thread_time() - started < 0.5  # without the check it is several seconds


# -- hypothesis ------------------------------------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**300), 2**300)
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
    | st.datetimes()
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.sampled_from(Colour)
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.uuids()
    | st.builds(range, st.integers(0, 99))
    | st.text("ab/.\\", max_size=5).map(PurePosixPath)
)
KEYS = st.recursive(SCALARS, lambda k: st.tuples(k, k) | st.frozensets(k, max_size=3), max_leaves=4)
ARRAYS = [np.arange(5, dtype=">i4"), np.ones((2, 3), order="F"), np.zeros(()), b"b" * 4096]
LEAVES = SCALARS | st.binary().map(bytearray) | st.sampled_from(ARRAYS)
TREES = st.recursive(
    LEAVES,
    lambda tree: (
        st.lists(tree)
        | st.lists(tree).map(tuple)
        | st.dictionaries(KEYS, tree, max_size=20)
        | st.sets(KEYS)
        | st.builds(Point, tree, tree)
        | st.builds(Pair, tree, tree)
        | st.builds(Step, tree, tree)
        | st.builds(slice, tree, tree, tree)
        | st.dictionaries(KEYS, tree, max_size=20).map(OrderedDict)
        | st.dictionaries(KEYS, tree, max_size=20).map(lambda d: defaultdict(set, d))
        | st.lists(KEYS).map(Counter)
        | st.builds(deque, st.lists(tree, max_size=5), st.integers(5, 9) | st.none())
    ),
    max_leaves=20,
)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=list(HealthCheck))
@given(TREES)
def test_any_tree_arrives_equal_and_of_the_same_types(value):
    assert_same(roundtrip(Codec(CLASSES), value), value)


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=200))
def test_any_head_gives_a_value_or_the_one_error(head):
    try:
        Codec(CLASSES).decode(forge(head))
    except InvalidMessageError:
        pass


# -- fuzz ------------------------------------------------------------------------------------------


def mutated(rng: random.Random, payload: bytes) -> bytearray:
    damaged = bytearray(payload)
    for _ in range(rng.randint(1, 4)):
        position = rng.randrange(len(damaged))
        match rng.randrange(5):
            case 0:
                damaged[position] = rng.randrange(256)
            case 1:
                damaged[position] ^= 1 << rng.randrange(8)
            case 2:
                damaged[position:position] = rng.randbytes(rng.randint(1, 4))
            case 3 if len(damaged) > 8:
                del damaged[position : position + rng.randint(1, 4)]
            case _:
                damaged[position : position + 1] = bytes(
                    [rng.choice(b"\x80\x9f\xc7\xc9\xdd\xdf\xff")]
                )
    if rng.random() < 0.5 and len(damaged) > 4:  # let the damage get past the length
        head_nbytes = rng.randint(0, len(damaged) - 4) if rng.random() < 0.3 else len(damaged) - 4
        damaged[:4] = struct.pack("<I", head_nbytes)
    return damaged


def test_20000_damaged_payloads_give_a_value_or_the_one_error(codec):
    rng = random.Random(60)
    small = [value for value in VALUES if len(payload_of(codec, value)) < 2000]
    payloads = [bytes(payload_of(codec, value)) for value in [*small, *SAMPLES, small]]
    refused = 0
    for turn in range(20_000):
        if turn % 10 == 0:
            payload = forge(rng.randbytes(rng.randint(0, 64)), rng.randbytes(rng.randint(0, 32)))
        else:
            payload = mutated(rng, rng.choice(payloads))
        try:
            codec.decode(payload)
        except InvalidMessageError:
            refused += 1
    assert 5_000 < refused < 20_000


# -- threads ---------------------------------------------------------------------------------------


def test_eight_threads_share_a_codec(codec):
    values = [value for value in VALUES if len(payload_of(codec, value)) < 10_000]
    payloads = [payload_of(codec, value) for value in values]

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(400):
            index = rng.randrange(len(payloads))
            assert_same(codec.decode(bytearray(payloads[index])), values[index])
            assert payload_of(codec, values[index]) == payloads[index]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
    finally:
        sys.setswitchinterval(interval)


def test_decoding_may_decode():
    codec = Codec()
    inner = payload_of(codec, [np.arange(4), (1,)])

    @dataclasses.dataclass
    class Envelope:
        content: bytes

        def __post_init__(self) -> None:
            self.opened = codec.decode(bytearray(self.content))

    codec.register(Envelope, name="Envelope")
    outer = roundtrip(codec, [np.ones(3), Envelope(bytes(inner)), np.zeros(2)])
    assert_same(outer[1].opened, [np.arange(4), (1,)])
    assert_same([outer[0], outer[2]], [np.ones(3), np.zeros(2)])
