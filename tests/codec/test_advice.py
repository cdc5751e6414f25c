"""What is refused says what to do, for that very kind of value."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import enum
import functools
import queue
import re
import socket
import threading
import types
import weakref
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from rankwire.codec.codec import Codec
from rankwire.errors import UnsupportedTypeError


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Config:
    rate: float


class Box(msgspec.Struct):
    content: int


class Step(NamedTuple):
    number: int


class Ordinary:
    pass


class Texts(list[str]):
    pass


class Wrapped:
    def __array__(self) -> Any:
        return np.ones(1)


async def generate_later():
    yield 1


def generate() -> Any:
    yield 1


async def later() -> None:
    pass


COROUTINE = later()
COROUTINE.close()

FUNCTION = "register it there with agent.register, and send its name"
REGISTER = "Put @rankwire.message above class {0}, or codec.register({0}), on all ranks."


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (generate, FUNCTION),
        (lambda: 1, FUNCTION),
        (len, FUNCTION),
        ([].append, FUNCTION),
        (Ordinary().__init__, FUNCTION),
        (functools.partial(print, 1), FUNCTION),
        (np.add, FUNCTION),
        (Ordinary, "send an instance"),
        (int, "send an instance"),
        (types, "send its name"),
        (ValueError("x"), "Raise it"),
        (COROUTINE, "await it"),
        (generate_later(), "send [item async for item in value]"),
        (generate(), "send list(value)"),
        (iter([]), "send list(value)"),
        (map(str, []), "send list(value)"),
        (threading.Lock(), "in this process only"),
        (threading.Event(), "in this process only"),
        (threading.current_thread(), "in this process only"),
        (queue.Queue(), "in this process only"),
        (socket.socket, "send an instance"),
        (weakref.ref(Ordinary), "in this process only"),
        (contextvars.ContextVar("x"), "in this process only"),
        (Colour.RED, REGISTER.format("Colour")),
        (Config(0.1), REGISTER.format("Config")),
        (Box(1), REGISTER.format("Box")),
        (Step(1), REGISTER.format("Step")),
        (Ordinary(), "Make it a dataclass and put @rankwire.message above it"),
        (Texts(), "It is a subclass of list, which may hold more: send list(value)"),
        (np.random.default_rng(), "bit_generator.state"),
        (Wrapped(), "Send numpy.asarray(value)"),
        (np.ma.zeros(1), "pass value.data and numpy.ma.getmaskarray(value)"),
        (np.ma.masked, "pass value.data and numpy.ma.getmaskarray(value)"),
        (collections.ChainMap(), "Send dict(value)"),
        (types.MappingProxyType({}), "Send dict(value)"),
        ({}.keys(), "Send list(value) or set(value)"),
        ({}.values(), "Send list(value) or set(value)"),
        (np.array([{}]), "Its elements are Python objects: send array.tolist()"),
        (np.zeros(1, np.longdouble), "convert it with array.astype()"),
        (np.zeros(1, "i4,f4")[0], "convert it, such as by .item()"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else type(value).__name__,
)
def test_the_advice_is_for_that_very_kind(value, advice):
    with pytest.raises(UnsupportedTypeError, match=re.escape(advice)) as caught:
        Codec().encode([value])
    assert caught.value.path == "value[0]"


def test_a_file_is_named_by_its_path(tmp_path):
    with (tmp_path / "x").open("w") as file, pytest.raises(UnsupportedTypeError, match="its path"):
        Codec().encode(file)
