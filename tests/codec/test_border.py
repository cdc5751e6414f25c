"""Whatever is raised while a payload is decoded, ``decode`` raises one kind of error."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
from collections import defaultdict
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from codec.payloads import forge as payload
from faults.sizes import examples
from rankwire.codec import scalars
from rankwire.codec.codec import Codec
from rankwire.codec.values import Code
from rankwire.errors import InvalidMessageError, OverloadedError

_pack = msgspec.msgpack.encode


@dataclasses.dataclass(frozen=True)
class Checked:
    number: Any

    def __post_init__(self) -> None:
        if type(self.number) is int:
            raise SystemExit(self.number)


class Option(enum.IntFlag):
    ONE = 1


class Hooked:
    pass


CODEC = Codec([Checked, Option])
CODEC.register(Hooked, take=lambda value, _: None, build=lambda state, _: state.missing)


class Speechless(Exception):
    """Cannot be turned into text."""

    def __str__(self) -> str:
        raise ValueError(self)


class Fatal(BaseException):
    """Not an ``Exception``."""


RAISED = [
    *(ValueError("text"), KeyError(1 << 16_000), OverflowError(), MemoryError(), RecursionError()),
    *(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), OSError(), StopIteration(), Speechless()),
    *(SystemExit(1), GeneratorExit(), asyncio.CancelledError(), Fatal(), OverloadedError("full")),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["build", "__init__", "__hash__", "__eq__"])
def test_what_a_users_code_raises_refuses_the_message(where, error):
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    codec = Codec()
    if where == "build":
        cls: type = type("Odd", (), {})
        codec.register(cls, take=lambda value, sending: None, build=fail)
        item = Ext(Code.HOOKED, _pack(["Odd", None]))
    else:
        cls = dataclasses.make_dataclass("Odd", ["x"], namespace={"__hash__": lambda self: 1})
        codec.register(cls, name="Odd")
        setattr(cls, where, fail)
        record = Ext(Code.RECORD, _pack(["Odd", "x", [1]]))
        item = Ext(Code.SET, _pack([record, record]))
    with pytest.raises(InvalidMessageError) as caught:
        codec.decode(payload(item))
    assert str(caught.value)


def test_an_interrupt_is_not_an_invalid_message():
    def interrupted(state: Any, receiving: Any) -> None:
        raise KeyboardInterrupt

    codec = Codec()
    codec.register(Hooked, take=lambda value, sending: None, build=interrupted)
    with pytest.raises(KeyboardInterrupt):
        codec.decode(payload(Ext(Code.HOOKED, _pack(["Hooked", None]))))


def test_a_name_too_wide_to_print_is_still_an_invalid_message():
    """The name of a default dict's factory, and that of a class, may be too wide to print."""
    wide = Ext(1, (1 << 16_000).to_bytes(2001, "little"))
    for item in (
        Ext(Code.DEFAULT_DICT, _pack([[], [], wide])),
        *(Ext(code, _pack([wide, "x", []])) for code in (Code.RECORD, Code.ENUM, Code.HOOKED)),
    ):
        with pytest.raises(InvalidMessageError):
            CODEC.decode(payload(item))


CODES = [
    *scalars.UNPACKERS,
    *(code for name, code in vars(Code).items() if name.isupper() and type(code) is int),
    *(-128, -1, 0, 99, 127),
]
WIDE = Ext(1, (1 << 16_000).to_bytes(2001, "little"))
ITEMS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=30)
    | st.sampled_from(["Checked", "number", "Option", "Hooked", "<f8", "|b1", "<U1", "M8[ns]"])
    | st.sampled_from(["list", "float32", "bool", "dtype", "device", "cpu", "U", "S"])
    | st.sampled_from([b"1E99999", b"NaN", b"sNaN", b"-Infinity", b"\xff" * 16, bytes(28)])
    | st.just(WIDE)
)
# Everything in the place of everything else: as the body of an extension, or as an item of it.
TREES = st.recursive(
    ITEMS,
    lambda tree: (
        st.lists(tree, max_size=5)
        | st.lists(st.lists(tree, max_size=3), min_size=2, max_size=3)
        | st.builds(
            Ext, st.sampled_from(CODES), tree.map(_pack) | st.binary(max_size=40) | st.just(b"1")
        )
    ),
    max_leaves=12,
)


@settings(max_examples=examples(1000), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(CODES), TREES, st.binary(max_size=40))
def test_any_body_of_any_extension_gives_a_value_or_the_one_error(code, tree, beside):
    for body in (_pack(tree), _pack([tree]), _pack([[tree], [tree], tree])):
        try:
            CODEC.decode(payload(Ext(code, body)) + beside)
        except InvalidMessageError:
            pass


def test_honest_default_dicts_pass():
    for value in (defaultdict(None, {"a": 1}), defaultdict(list, {(1,): 2})):
        decoded = CODEC.decode(bytearray().join(CODEC.encode(value)[0]))
        assert decoded == value
        assert decoded.default_factory is value.default_factory
