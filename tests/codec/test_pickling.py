"""Pickles travel only if both ends allow them."""

from __future__ import annotations

import collections
import decimal
from typing import Any

import numpy as np
import pytest

from codec.payloads import payload_of
from rankwire.codec.codec import Codec
from rankwire.errors import InvalidMessageError, UnsupportedTypeError

Coordinates = collections.namedtuple("Coordinates", "x y")
ran: list[str] = []


def run(what: str) -> None:
    ran.append(what)


class Runs:
    def __reduce__(self) -> Any:
        return run, ("code",)


class Broken:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError


class BrokenOnArrival:
    def __reduce__(self) -> Any:
        return int, ("not a number",)


@pytest.fixture
def open_codec() -> Codec:
    return Codec(allow_pickle=True)


@pytest.mark.parametrize(
    "value",
    [
        Coordinates(1, 2),
        decimal.Decimal("1E+100000"),
        collections.defaultdict(Coordinates._make, a=1),
        "\ud800",
        1 << 600_000,
        [1, {"k": (Coordinates(1, [2]), b"x" * 5000)}],
        range(2**70),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_carried_travels_as_a_pickle(open_codec, value):
    arrived = open_codec.decode(payload_of(open_codec, value))
    assert type(arrived) is type(value)
    assert arrived == value


def test_object_arrays_travel_as_a_pickle(open_codec):
    arrived = open_codec.decode(payload_of(open_codec, [np.ones(2), np.array([{}, None])]))
    assert arrived[1].tolist() == [{}, None]


def test_what_is_carried_travels_without_pickle(open_codec):
    value = [1, (2,), {3}, np.float32(1), b"x" * 5000]
    assert payload_of(open_codec, value) == payload_of(Codec(), value)


def test_a_sender_without_the_option_refuses():
    with pytest.raises(UnsupportedTypeError, match="allow_pickle"):
        Codec().encode(object())


@pytest.mark.fault(60, "a pickle is refused, and runs nothing, unless it was asked for")
def test_a_receiver_without_the_option_refuses_and_runs_nothing(open_codec):
    payload = payload_of(open_codec, [1, Runs()])
    with pytest.raises(InvalidMessageError, match="allow_pickle"):
        Codec().decode(payload)
    assert ran == []
    open_codec.decode(payload)
    assert ran == ["code"]


def test_a_value_that_does_not_pickle_is_refused_with_its_path(open_codec):
    with pytest.raises(UnsupportedTypeError, match="ZeroDivisionError") as caught:
        open_codec.encode({"k": [Broken()]})
    assert caught.value.path == 'value["k"][0]'
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_pickle_that_does_not_load_is_refused(open_codec):
    with pytest.raises(InvalidMessageError) as caught:
        open_codec.decode(payload_of(open_codec, BrokenOnArrival()))
    assert isinstance(caught.value.__cause__, ValueError)


def test_too_deep_values_are_refused_and_not_pickled(open_codec):
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnsupportedTypeError):
        open_codec.encode(loop)
