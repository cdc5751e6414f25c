"""Classes that every codec of a process carries."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import pytest

from codec.payloads import roundtrip as through
from rankwire.codec import classes
from rankwire.codec.classes import message, options_of
from rankwire.codec.codec import Codec
from rankwire.errors import ConfigurationError, UnsupportedTypeError


class Step(NamedTuple):
    number: int


class Coordinates(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: int


class Handle:
    """Of no kind that is carried without hooks."""

    def __init__(self, number: int) -> None:
        self.number = number


@pytest.fixture
def shared():
    """What is registered for all codecs, without what other tests leave there."""
    classes.SHARED.__init__()
    yield classes.SHARED
    classes.SHARED.__init__()


def test_a_message_is_known_to_every_codec(shared):
    before = Codec()

    @message
    @dataclasses.dataclass
    class Point:
        x: int

    @message(name="C")
    class Choice(enum.Enum):
        YES = 1

    assert message(Step) is Step
    values = [Point(1), Choice.YES, Step(2)]
    for codec in (before, Codec(), Codec([Frozen])):
        assert through(codec, values) == values
    assert bytearray().join(before.encode(Choice.YES)[0]).count(b"\xa1C") == 1


def test_a_class_of_another_kind_is_no_message(shared):
    for cls in (object, int, Frozen(1)):
        with pytest.raises(ConfigurationError):
            message(cls)


def test_two_messages_cannot_share_a_name(shared):
    message(Step)
    with pytest.raises(ConfigurationError, match="another class is registered as 'Step'"):
        message(Coordinates, name="Step")
    with pytest.raises(ConfigurationError, match="another class is registered as 'Step'"):
        Codec().register(Coordinates, name="Step")
    with pytest.raises(ConfigurationError, match="already"):
        Codec().register(Step, name="other")
    Codec([Step])  # the same once more


def test_a_class_that_is_defined_again_takes_the_place_of_the_former(shared):
    def define() -> Any:
        @message
        @dataclasses.dataclass
        class Cell:
            x: int

        return Cell

    first, second = define(), define()
    codec = Codec()
    assert type(through(codec, second(1))) is second
    with pytest.raises(UnsupportedTypeError):
        codec.encode(first(1))


def test_a_name_that_a_codec_has_given_away_does_not_arrive_as_the_other_class(shared):
    codec = Codec()
    codec.register(Coordinates, name="Step")
    message(Step)
    assert through(codec, Coordinates(1, 2)) == Coordinates(1, 2)
    with pytest.raises(UnsupportedTypeError):
        codec.encode(Step(1))
    assert through(Codec(), Step(1)) == Step(1)


def test_hooks_are_known_to_every_codec(shared):
    before = Codec()
    take, build = lambda handle, sending: handle.number, lambda number, receiving: Handle(number)
    assert message(Handle, take=take, build=build) is Handle
    for codec in (before, Codec()):
        assert through(codec, [Handle(7)])[0].number == 7
    assert options_of(Handle) == {"name": "Handle", "take": take, "build": build}
    message(Step)
    assert options_of(Step) == {"name": "Step", "take": None, "build": None}
    assert options_of(Coordinates) is None


def test_a_class_that_is_defined_again_brings_its_hooks(shared):
    def define(factor: int) -> Any:
        class Cell(Handle):
            pass

        return message(
            Cell,
            take=lambda cell, sending: cell.number * factor,
            build=lambda number, receiving: Cell(number),
        )

    define(1)
    assert through(Codec(), define(10)(2)).number == 20


def test_both_hooks_are_needed_and_builtin_forms_cannot_have_any(shared):
    with pytest.raises(ConfigurationError, match="two functions"):
        message(Handle, take=lambda handle, sending: 1)
    with pytest.raises(ConfigurationError, match="its own encoding"):
        message(dict, take=lambda value, sending: 1, build=lambda state, receiving: {})
