"""What is plain, what is refused and under which path. That values survive is in test_codec."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import uuid
from pathlib import PurePosixPath
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.msgpack import Ext

from rankwire.codec.classes import ClassTable
from rankwire.codec.value_writer import _LOWER, Refusal, Writer
from rankwire.codec.values import ALWAYS_PLAIN, BUILT_IN, PLAIN, is_flat


@dataclasses.dataclass
class Config:
    rate: Any
    steps: Any = None
    late: int = dataclasses.field(init=False)


class Number(enum.IntEnum):
    ONE = 1


class Text(enum.StrEnum):
    A = "a"


class Box(msgspec.Struct):
    content: Any


Coordinates = collections.namedtuple("Coordinates", "x y")


def subclass_of(base: type, *args: Any, **kwargs: Any) -> Any:
    return type(f"My{base.__name__}", (base,), {})(*args, **kwargs)


@pytest.fixture
def writer() -> Writer:
    classes = ClassTable()
    classes.add(Config, None)
    return Writer(classes, None, PLAIN)


def refused(writer: Writer, value: Any) -> tuple[str, str]:
    with pytest.raises(Refusal) as caught:
        writer.lower(value)
    return "".join(reversed(caught.value.trail)), caught.value.type_name


@pytest.mark.parametrize("value", [[], [1, 2.0, "a", None, True], {}, {"a": 1, 2: None}, b"short"])
def test_containers_of_plain_values_are_flat(value):
    assert is_flat(value)


@pytest.mark.parametrize(
    "value",
    [
        [[]],
        [b"bytes"],
        {"a": []},
        {(): 1},
        {str(i): i for i in range(16)},
        (),
        b"x" * 4096,
        [1.0] * 4096,
        [Number.ONE],
        {"a": Text.A},
        {Text.A: 1},
        [np.float64(1)],
        [np.str_("a")],
        Coordinates(1, 2),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_anything_else_is_not_flat(value):
    assert not is_flat(value)


def test_plain_containers_are_passed_and_not_rebuilt(writer):
    inner, long = list(range(100)), list(range(5000))
    assert writer.lower(inner) is inner
    assert writer.lower(long) is long
    assert writer.lower([inner, ()])[0] is inner


@pytest.mark.parametrize(
    "value",
    [
        object(),
        object,
        len,
        Number.ONE,
        Text.A,
        Box(1),
        Coordinates(1, 2),
        subclass_of(int, 1),
        subclass_of(float, 1.0),
        subclass_of(str, "a"),
        subclass_of(bytes, b"a"),
        subclass_of(list),
        subclass_of(dict),
        subclass_of(tuple),
        subclass_of(set),
        subclass_of(frozenset),
        subclass_of(complex, 1),
        subclass_of(bytearray, b"a"),
        subclass_of(datetime.date, 2024, 1, 1),
        subclass_of(Config, 1),
        collections.defaultdict(lambda: 1),
        subclass_of(collections.OrderedDict),
        subclass_of(collections.Counter),
        subclass_of(collections.deque),
        subclass_of(decimal.Decimal, 1),
        subclass_of(fractions.Fraction, 1),
        subclass_of(PurePosixPath),
        subclass_of(uuid.UUID, int=1),
        range(2**70),
        iter([]),
        msgspec.UNSET,
        msgspec.Raw(b"\x01"),
        Ext(10, b"\x90"),
        ValueError("x"),
        np.zeros(1, "O"),
        np.zeros(1, "i4,O"),
        np.zeros(1, "i4,f4")[0],
        np.zeros(1, "V3"),
        np.zeros(1, np.longdouble),
        np.longdouble(1),
        np.zeros(1, "V3")[0],
        np.ma.zeros(1),
        subclass_of(np.float64, 1),
        np.zeros(1).view(np.recarray),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_types_are_refused_and_not_sent_as_something_near(writer, value):
    assert refused(writer, value)[0] == ""
    assert refused(writer, [1, {"k": (value,)}])[0] == '[1]["k"][0]'
    assert refused(writer, [1.0] * 5000 + [value])[0] == "[5000]"


def test_the_type_is_named_with_its_module(writer):
    assert refused(writer, collections.ChainMap())[1] == "collections.ChainMap"
    assert refused(writer, range(2**70))[1] == "range"


def test_the_path_leads_to_the_refused_value(writer):
    bad = object()
    assert refused(writer, {"a": [0, {3: bad}]})[0] == '["a"][1][3]'
    assert refused(writer, {(1, 2): bad})[0] == "[<tuple>]"
    assert refused(writer, {'quo"te\n': bad})[0] == '["quo"te\\n"]'
    assert refused(writer, {"k" * 100: bad})[0] == f'["{"k" * 40}"]'
    assert refused(writer, {1: 2, bad: 1})[0] == "{key 1}"
    assert refused(writer, {bad})[0] == "{element 0}"
    assert refused(writer, frozenset({bad}))[0] == "{element 0}"
    assert refused(writer, {str(i): i if i < 50 else bad for i in range(99)})[0] == '["50"]'
    config = Config(1, [bad])
    config.late = 1
    assert refused(writer, (config,))[0] == "[0].steps[0]"


def test_a_field_that_was_never_set_is_refused(writer):
    with pytest.raises(Refusal, match="late"):
        writer.lower(Config(1))


def nest(depth: int, wrap: Any) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "wrap",
    [
        lambda value: [value],
        lambda value: (value,),
        lambda value: {"k": value},
        lambda value: frozenset({value}),
        lambda value: {value: 1} if isinstance(value, int) else {(1,): value},
    ],
    ids=["list", "tuple", "dict", "frozenset", "dict of tuples"],
)
def test_values_nest_32_deep_and_no_deeper(writer, wrap):
    writer.lower(nest(32, wrap))
    with pytest.raises(Refusal, match="32"):
        writer.lower(nest(33, wrap))
    with pytest.raises(Refusal, match="32"):
        Writer(ClassTable(), None, PLAIN).lower(nest(900, wrap))


def test_a_record_is_no_level_of_nesting(writer):
    writer.lower_record([nest(32, lambda value: [value])], ["a"])
    with pytest.raises(Refusal, match="32"):
        writer.lower_record([nest(33, lambda value: [value])], ["a"])


def test_a_value_in_itself_is_refused(writer):
    loop: list[Any] = []
    loop.append(loop)
    wide: dict[str, Any] = {}
    wide["a"] = [wide, wide, (wide,)]
    long = [1.0] * 4096
    long.append(long)  # type: ignore[arg-type]
    config = Config(1)
    config.late, config.steps = 1, config
    for value in (loop, wide, long, config):
        with pytest.raises(Refusal, match="in itself"):
            Writer(writer.classes, None, PLAIN).lower(value)


def test_the_second_walk_finds_what_msgspec_refuses():
    writer = Writer(ClassTable(), None, ALWAYS_PLAIN)
    assert writer.lower([1, "a", 2**64 - 1, -(2**63)]) == [1, "a", 2**64 - 1, -(2**63)]
    assert isinstance(writer.lower(2**64), Ext)
    assert isinstance(writer.lower(-(2**63) - 1), Ext)
    with pytest.raises(Refusal, match="surrogate"):
        writer.lower("\ud800")


@pytest.mark.parametrize("count", [4096, 2**16 - 1, 2**16])
def test_many_floats_are_packed_without_looking_at_each(writer, count):
    packed = writer.lower([1.5] * count)
    assert isinstance(packed, msgspec.Raw)
    assert msgspec.msgpack.decode(packed) == [1.5] * count


def test_what_only_looks_like_many_floats_is_not_packed(writer):
    for nine_bytes in ([1] * 9, ["abcdefgh"], [2**62], [-(2**62)], [None, "abcdefg"]):
        values = [1.5] * 4096 + nine_bytes
        assert writer.lower(values) is values


def test_short_bytes_stay_in_the_head_and_long_ones_go_beside_it(writer):
    short, long = b"s" * 4095, b"l" * 4096
    assert writer.lower(short) is short
    assert isinstance(writer.lower(long), Ext)
    assert writer.buffers == [long]
    assert writer.buffers[0] is long


def test_empty_buffers_take_no_place(writer):
    writer.lower([bytearray(), np.zeros((0, 3)), np.array([], "U3")])
    assert writer.buffers == []


def test_all_types_with_an_encoding_of_their_own_are_built_in():
    assert PLAIN.union(_LOWER) == BUILT_IN
