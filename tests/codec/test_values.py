"""The containers of collections: as they are on the wire, and what is refused on both ends."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial
from typing import Any

import msgspec
import pytest
from msgspec.msgpack import Ext

from codec import payloads
from codec.payloads import forge_extension as forge
from rankwire.codec.codec import Codec
from rankwire.codec.values import Code
from rankwire.errors import InvalidMessageError, UnsupportedTypeError

payload_of = partial(payloads.payload_of, Codec())
roundtrip = partial(payloads.roundtrip, Codec())


@pytest.mark.parametrize(
    ("value", "code", "body"),
    [
        (OrderedDict(b=1, a=2), 14, [["b", "a"], [1, 2]]),
        (defaultdict(list, {1: 2}), 15, [[1], [2], "list"]),
        (defaultdict(None), 15, [[], [], None]),
        (Counter("aab"), 16, [["a", "b"], [2, 1]]),
        (deque([1, 2]), 17, [[1, 2], None]),
        (deque([1, 2], 7), 17, [[1, 2], 7]),
        (slice(1, None, "x"), 18, [1, None, "x"]),
    ],
    ids=repr,
)
def test_the_encoding_is_these_bytes(value, code, body):
    assert payload_of(value) == forge(code, body)
    arrived = Codec().decode(forge(code, body))
    assert type(arrived) is type(value)
    assert arrived == value


# -- what they have beside their items -------------------------------------------------------------


def test_the_metadata_of_a_state_dict_is_kept():
    state = OrderedDict(weight=1.0)
    state._metadata = OrderedDict({"": {"version": 2}, "layer": {"version": (1,)}})
    arrived = roundtrip([state])[0]
    assert arrived == state
    assert arrived._metadata == state._metadata
    assert type(arrived._metadata) is OrderedDict
    assert not hasattr(roundtrip(OrderedDict()), "_metadata")
    state._metadata = None
    assert vars(roundtrip(state)) == {"_metadata": None}


def test_what_the_metadata_and_the_values_have_beside_the_head_is_not_mixed_up():
    state = OrderedDict(weight=b"w" * 5000)
    state._metadata = b"m" * 6000
    arrived = roundtrip([state, b"x" * 7000])
    assert arrived == [state, b"x" * 7000]
    assert arrived[0]._metadata == state._metadata


def test_what_is_in_the_metadata_has_a_path():
    state = OrderedDict()
    state._metadata = [object()]
    with pytest.raises(UnsupportedTypeError) as caught:
        Codec().encode({"s": state})
    assert caught.value.path == 'value["s"]._metadata[0]'


@pytest.mark.parametrize("value", [OrderedDict(a=1), Counter("a")], ids=lambda v: type(v).__name__)
def test_other_attributes_are_refused(value):
    value.note = "lost otherwise"
    with pytest.raises(UnsupportedTypeError, match=r"attributes of its own \(note\)"):
        Codec().encode(value)


@pytest.mark.parametrize(
    "factory",
    [
        *(None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set),
        *(frozenset, OrderedDict, Counter, deque),
    ],
)
def test_a_received_default_dict_still_creates_missing_values(factory):
    arrived = roundtrip(defaultdict(factory, a=1))
    assert arrived.default_factory is factory
    if factory is not None:
        assert arrived["new"] == factory()


class NoList:
    """Only looks like a list."""


NoList.__name__ = "list"


@pytest.mark.parametrize("factory", [lambda: 1, object, NoList, defaultdict, int.from_bytes, len])
def test_a_default_dict_with_another_factory_is_refused(factory):
    with pytest.raises(UnsupportedTypeError, match=r"send dict\(value\)"):
        Codec().encode(defaultdict(factory))


# -- what no writer makes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "body"),
    [
        (Code.ORDERED_DICT, [["a"], []]),
        (Code.ORDERED_DICT, [["a", "a"], [1, 2]]),
        (Code.ORDERED_DICT, [[[]], [1]]),
        (Code.ORDERED_DICT, [["a"], [1], 2, 3]),
        (Code.ORDERED_DICT, {"a": 1}),
        (Code.ORDERED_DICT, ["a", "b"]),
        (Code.ORDERED_DICT, []),
        (Code.DEFAULT_DICT, [[], []]),
        (Code.DEFAULT_DICT, [[], [], "eval"]),
        (Code.DEFAULT_DICT, [[], [], "object"]),
        (Code.DEFAULT_DICT, [[], [], "__import__"]),
        (Code.DEFAULT_DICT, [[], [], []]),
        (Code.DEFAULT_DICT, [[], [], 0]),
        (Code.COUNTER, [["a", "a"], [1, 1]]),
        (Code.COUNTER, ["aa"]),
        (Code.COUNTER, [["a"], [1], 1]),
        (Code.DEQUE, [[1, 2], 1]),
        (Code.DEQUE, [[], -1]),
        (Code.DEQUE, [[], True]),
        (Code.DEQUE, [[], 1.5]),
        (Code.DEQUE, [[], 2**63]),
        (Code.DEQUE, ["ab", None]),
        (Code.DEQUE, [[1]]),
        (Code.SLICE, [1, 2]),
        (Code.SLICE, [1, 2, 3, 4]),
        (Code.SLICE, 1),
    ],
)
def test_malformed_bodies_are_refused(code, body):
    with pytest.raises(InvalidMessageError):
        Codec().decode(forge(code, body))


@pytest.mark.parametrize("code", [Code.ORDERED_DICT, Code.DEFAULT_DICT, Code.COUNTER])
def test_keys_of_one_hash_are_refused(code):
    wide = (number * (2**61 - 1) for number in range(1000))
    keys = [Ext(1, number.to_bytes(16, "little", signed=True)) for number in wide]
    besides = [None] if code == Code.DEFAULT_DICT else []
    with pytest.raises(InvalidMessageError, match="same hash"):
        Codec().decode(forge(code, [keys, [0] * len(keys), *besides]))


@pytest.mark.parametrize("code", [14, 15, 16, 17, 18])
def test_containers_nest_32_deep_and_no_deeper(code):
    def wrapped(inner: Any) -> Any:
        bodies = {14: [[1], [inner]], 15: [[1], [inner], None], 16: [[1], [inner]]}
        bodies |= {17: [[inner], None], 18: [inner, 1, 1]}
        return Ext(code, msgspec.msgpack.encode(bodies[code]))

    value: Any = 1
    for _ in range(32):
        value = wrapped(value)
    packed = msgspec.msgpack.encode(value)
    Codec().decode(bytearray(len(packed).to_bytes(4, "little") + packed))
    packed = msgspec.msgpack.encode(wrapped(value))
    with pytest.raises(InvalidMessageError, match="32 levels"):
        Codec().decode(bytearray(len(packed).to_bytes(4, "little") + packed))


@pytest.mark.parametrize("wrap", [lambda x: deque([x]), lambda x: OrderedDict(a=x)])
def test_the_writer_counts_the_same_levels(wrap):
    value: Any = 1
    for _ in range(32):
        value = wrap(value)
    roundtrip(value)
    with pytest.raises(UnsupportedTypeError, match="nested more than 32"):
        Codec().encode(wrap(value))


def test_a_deque_in_itself_is_refused():
    value: deque[Any] = deque()
    value.append(value)
    with pytest.raises(UnsupportedTypeError, match="in itself"):
        Codec().encode(value)
