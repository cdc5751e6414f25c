"""Which classes can be registered, and how their instances come apart and are built."""

from __future__ import annotations

import collections
import dataclasses
import enum
import sys
import time
from typing import Any, NamedTuple

import msgspec
import pytest

from rankwire.codec.classes import ClassTable, EnumClass, RecordClass
from rankwire.codec.codec import Codec
from rankwire.errors import ConfigurationError, InvalidMessageError, UnsupportedTypeError


class Colour(enum.Enum):
    RED = 1
    CRIMSON = 1
    GREEN = "g"


class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: int
    made: int = dataclasses.field(init=False, default=7)


@dataclasses.dataclass(kw_only=True)
class Keywords:
    a: int
    b: int = 2


class Box(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag=True, array_like=True):
    first_item: Any
    second_item: Any = None


@dataclasses.dataclass
class NeedsMore:
    x: int
    scale: dataclasses.InitVar[int]

    def __post_init__(self, scale: int) -> None:
        self.x *= scale


@dataclasses.dataclass(init=False)
class OwnConstructor:
    x: int

    def __init__(self) -> None:
        self.x = 1


@dataclasses.dataclass
class AlsoList(list[int]):
    x: int = 1


def record_class(cls: type) -> RecordClass:
    table = ClassTable()
    table.add(cls, None)
    carried = table.of_class(cls)
    assert isinstance(carried, RecordClass)
    return carried


def enum_class(cls: type) -> EnumClass:
    table = ClassTable()
    table.add(cls, None)
    carried = table.of_name(cls.__qualname__)
    assert isinstance(carried, EnumClass)
    return carried


@pytest.mark.parametrize(
    "record", [Frozen(1), Keywords(a=1, b=3), Box(first_item=1, second_item=[2])], ids=repr
)
def test_records_are_built_equal(record):
    carried = record_class(type(record))
    assert carried.build(carried.values_of(record)) == record


def test_fields_outside_the_constructor_travel_too():
    carried = record_class(Frozen)
    frozen = Frozen(1)
    object.__setattr__(frozen, "made", 99)
    assert carried.build(carried.values_of(frozen)).made == 99


@pytest.mark.parametrize("values", [[], [1], [1, 2, 3], "ab", None, {"x": 1, "made": 2}])
def test_a_wrong_number_of_values_is_refused(values):
    with pytest.raises(InvalidMessageError):
        record_class(Frozen).build(values)


@pytest.mark.parametrize("member", [*Colour, Access.READ, Access.READ | Access.WRITE, Access(0)])
def test_members_are_found_again(member):
    carried = enum_class(type(member))
    assert carried.member_of(carried.key_of(member)) is member


@pytest.mark.parametrize("key", ["BLUE", 1, None, ["RED"], "__class__", ""])
def test_a_key_that_is_no_member_is_refused(key):
    with pytest.raises(InvalidMessageError):
        enum_class(Colour).member_of(key)


@pytest.mark.parametrize("key", [64, -100, True, "BOTH", 2**80])
def test_a_value_that_is_no_flag_is_refused(key):
    with pytest.raises(InvalidMessageError):
        enum_class(Access).member_of(key)


@pytest.mark.parametrize(
    "cls",
    [
        object,
        int,
        dict,
        time.struct_time,
        type("Ordinary", (), {}),
        NeedsMore,
        OwnConstructor,
        AlsoList,
        Frozen(1),
        "Frozen",
        list[int],
    ],
    ids=repr,
)
def test_other_kinds_of_classes_cannot_be_registered(cls):
    with pytest.raises(ConfigurationError):
        ClassTable().add(cls, None)


def test_registering_twice_is_harmless():
    table = ClassTable()
    table.add(Frozen, None)
    carried = table.of_class(Frozen)
    table.add(Frozen, "Frozen")
    assert table.of_class(Frozen) is carried


def test_a_class_has_one_name_and_a_name_one_class():
    table = ClassTable()
    table.add(Frozen, "A")
    table.add(Colour, "B")
    for cls, name in [
        (Frozen, "C"),
        (Keywords, "A"),
        (Keywords, "B"),
        (Access, "A"),
        (Access, "B"),
    ]:
        with pytest.raises(ConfigurationError):
            table.add(cls, name)
    table.add(Keywords, "C")
    assert [table.of_class(cls).cls for cls in (Frozen, Colour, Keywords)]
    assert table.of_class(Access) is None
    assert table.of_name("D") is None


class Option(enum.IntFlag):
    """Keeps bits that it does not know."""

    ONE = 1


class Wide(enum.IntFlag):
    LOW = 1
    HIGH = 1 << 200


def test_combined_flags_of_more_than_64_bits_are_refused():
    """Their class keeps all of them in one dict, and a sender could choose values of one hash."""
    carried = EnumClass("Option", Option)
    assert carried.member_of(1 << 63 | 1) == 1 << 63 | 1
    for value in (1 << 64, 1 << 30_000, sys.hash_info.modulus * 9):
        with pytest.raises(InvalidMessageError, match="no such member"):
            carried.member_of(value)
    assert carried.cls._value2member_map_.keys() == {1, 1 << 63 | 1}


def test_a_named_flag_travels_whatever_its_width_and_the_sender_learns_of_others():
    carried = EnumClass("Wide", Wide)
    assert carried.member_of(carried.key_of(Wide.HIGH)) is Wide.HIGH
    with pytest.raises(UnsupportedTypeError, match=r"at most 64 bits: send value\.value"):
        Codec([Wide]).encode(Wide.HIGH | Wide.LOW)


# -- namedtuples -----------------------------------------------------------------------------------

Coordinates = collections.namedtuple("Coordinates", "x y", defaults=[None])
Renamed = collections.namedtuple("Renamed", "a class a", rename=True)


class Step(NamedTuple):
    number: int
    loss: float = 0.0


class Checked(collections.namedtuple("Checked", "x")):
    __slots__ = ()

    def __new__(cls, x):
        if x < 0:
            raise ValueError("negative")
        return super().__new__(cls, x)


@pytest.mark.parametrize(
    "value", [Coordinates(1), Coordinates((1,), 2), Renamed(1, 2, 3), Step(1, 2.5), Checked(0)]
)
def test_namedtuples_are_built_equal(value):
    codec = Codec([type(value)])
    arrived = codec.decode(bytearray().join(codec.encode([value])[0]))[0]
    assert type(arrived) is type(value)
    assert arrived == value


def test_the_constructor_of_a_namedtuple_checks_what_arrives():
    codec = Codec([Checked])
    payload = bytearray().join(codec.encode(Checked(1))[0])
    assert payload.endswith(b"\x91\x01")
    payload[-1] = 0xFF
    with pytest.raises(InvalidMessageError, match="the constructor of 'Checked' raised ValueError"):
        codec.decode(payload)


def test_a_namedtuple_that_is_not_registered_is_no_tuple():
    with pytest.raises(UnsupportedTypeError, match=r"@rankwire\.message above class Step"):
        Codec().encode(Step(1))
