"""Arrays with fields: exact dtypes, no byte that is not in a field, and nothing odd let in."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from codec import payloads
from rankwire.codec import structured
from rankwire.codec.codec import Codec
from rankwire.codec.values import Code
from rankwire.errors import InvalidMessageError, UnsupportedTypeError

payload_of = partial(payloads.payload_of, Codec())


INNER = np.dtype([("x", "<f4"), ("flag", "?")])
DTYPES = [
    np.dtype("i4,f8"),
    np.dtype([("name", "U5"), ("age", ">i2"), ("when", "M8[us]"), ("for", "m8[s]")]),
    np.dtype([("a", "i1"), ("b", "f8")], align=True),
    np.dtype([("m", "c8", (2, 3)), ("b", "?", (4,))]),
    np.dtype([("inner", INNER), ("many", INNER, (2,)), ("é ,:", "S3")]),
    np.dtype({"names": ["a", "b"], "formats": ["u1", "u2"], "offsets": [3, 8], "itemsize": 16}),
    np.dtype([("a", [("b", [("c", [("d", "i1")])])])]),
]


def filled(dtype: np.dtype[Any], shape: tuple[int, ...], order: Any = "C") -> np.ndarray[Any, Any]:
    array = np.zeros(shape, dtype, order=order)
    if "name" in dtype.fields:
        array["name"] = "né"
    for number, item in enumerate(array.reshape(-1)):
        for name in dtype.names:
            if dtype[name].base.kind in "iufc":
                item[name] = number + 1
    return array


def memory_of(array: np.ndarray[Any, Any]) -> bytes:
    """What is between the fields too: a copy would leave that out."""
    return array.reshape(-1).view(np.uint8).tobytes()


def forge(body: Any, elements: bytes = b"") -> bytearray:
    packed = msgspec.msgpack.encode(Ext(Code.STRUCTURED_ARRAY, msgspec.msgpack.encode(body)))
    payload = bytearray(len(packed).to_bytes(4, "little") + packed)
    return payload + bytes(-len(payload) % 16) * bool(elements) + elements


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[:30])
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 0), (2, 3)], ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_with_fields_arrive_equal(dtype, shape, order):
    array = filled(dtype, shape, order)
    arrived = Codec().decode(payload_of([1, array, b"x" * 5000]))[1]
    assert type(arrived) is np.ndarray
    assert arrived.dtype == dtype
    assert arrived.shape == shape
    assert repr(arrived) == repr(array)
    assert arrived.flags.f_contiguous == array.flags.f_contiguous
    assert arrived.flags.writeable
    arrived[...] = array


def test_the_description_is_size_alignment_and_fields():
    array = np.zeros(3, [("a", "<i2"), ("b", "<f8", (2,))])
    body = [[18, False, ["a", 0, "<i2"], ["b", 2, "<f8", 2]], False, 3]
    assert payload_of(array) == forge(body, bytes(54))


def test_the_bytes_are_the_arrays_own_memory():
    array = filled(DTYPES[0], (1000,))
    assert np.shares_memory(np.frombuffer(Codec().encode(array)[0][-1], "u1"), array)


@pytest.mark.parametrize("step", [1, 2, -1])
def test_padding_between_fields_is_not_sent(step):
    secret = np.zeros(9, [("a", "u1"), ("password", "S8"), ("b", "u1")])
    secret["password"] = b"hunter2!"
    secret["a"], secret["b"] = range(9), range(9, 18)
    view = secret[["a", "b"]][::step]
    assert view.dtype.itemsize == 10
    payload = payload_of(view)
    assert b"hunter2" not in payload
    arrived = Codec().decode(payload)
    assert arrived.dtype == view.dtype
    assert arrived.tolist() == view.tolist()


def test_addresses_between_fields_are_not_sent():
    array = np.array([(1, "x"), (2, "y")], [("a", "i4"), ("o", "O")])
    arrived = Codec().decode(payload_of(array[["a"]]))
    assert arrived["a"].tolist() == [1, 2]
    assert set(memory_of(arrived)) == {0, 1, 2}


@pytest.mark.parametrize(
    ("array", "advice"),
    [
        (np.zeros(1, "i4,O"), "tolist"),
        (np.zeros(1, [("a", [("o", "O")])]), "tolist"),
        (np.zeros(1, [("a", "V3")]), "each field"),
        (np.zeros(1, [("a", np.longdouble)]), "each field"),
        (np.zeros(1, [(("title", "a"), "i4")]), "each field"),
        (np.zeros(1, {"names": "ab", "formats": ["i4", "i2"], "offsets": [0, 2]}), "each field"),
        (np.zeros(1, np.dtype((np.record, [("a", "i4")]))), "each field"),
        (np.zeros(1, [("a", [("b", [("c", [("d", [("e", "i1")])])])])]), "each field"),
        (np.zeros(1, [(f"f{n}", "i1") for n in range(257)]), "each field"),
        (np.zeros(1, [("x" * 20_000, "i1")]), "each field"),
        (np.zeros(1, [("\ud800", "i1")]), "each field"),
    ],
)
def test_others_are_refused_with_advice(array, advice):
    with pytest.raises(UnsupportedTypeError, match=advice):
        Codec().encode([array])


def nested(depth: int) -> Any:
    return [1, False, ["a", 0, nested(depth - 1)]] if depth else "|i1"


@pytest.mark.parametrize(
    "described",
    [
        [],
        [4],
        [4, False],
        [4, ["a", 0, "<i4"]],
        [8, 0, ["a", 0, "<i4"]],
        [8, True, ["a", 1, "<i4"]],
        ["<i4"],
        "<i4",
        None,
        {"a": 1},
        [4, False, ["a", 0]],
        [4, False, ["a", 0, "<i4", -1]],
        [4, False, ["a", 0, "<i4", 2]],
        [4, False, ["a", 1, "<i4"]],
        [4, False, ["a", -1, "<i4"]],
        [4, False, ["a", 0, "|O"]],
        [8, False, ["a", 0, "|O8"]],
        [4, False, ["a", 0, "|V4"]],
        [4, False, ["a", 0, "i4"]],
        [4, False, ["a", 0, "<i4,<i4"]],
        [8, False, ["a", 0, "<i4"], ["a", 4, "<i4"]],
        [8, False, ["a", 4, "<i4"], ["b", 0, "<i4"]],
        [8, False, ["a", 0, "<i4"], ["b", 2, "<i4"]],
        [8, False, ["", 0, "<i4"], ["f0", 4, "<i4"]],
        [2**40, False, ["a", 0, "<i4"]],
        [4, False, ["a", 0, "<i1", 2**31, 2**31]],
        [True, False, ["a", 0, "|i1"]],
        [4, False, ["a", 0.0, "<i4"]],
        [4, False, [["a"], 0, "<i4"]],
        [4, False, ["a", 0, {"b": 1}]],
        nested(5),
        [300, False, *[[f"f{number}", number, "|i1"] for number in range(300)]],
    ],
    ids=lambda described: str(described)[:40],
)
def test_a_malformed_description_is_refused(described):
    with pytest.raises(InvalidMessageError):
        Codec().decode(forge([described, False, 1], bytes(8)))
    with pytest.raises(InvalidMessageError):
        Codec().decode(forge([described, False, 0]))


@pytest.mark.parametrize("rest", [[False], [0, 1], [], [False, -1], [False, "1"], [False, 2**62]])
def test_a_malformed_shape_is_refused(rest):
    with pytest.raises(InvalidMessageError):
        Codec().decode(forge([[8, False, ["a", 0, "<i8"]], *rest], bytes(64)))


def test_a_description_that_is_too_long_is_refused():
    with pytest.raises(InvalidMessageError):
        Codec().decode(forge([[1, False, ["x" * 20_000, 0, "|i1"]], False, 0]))


def test_a_map_in_a_description_is_refused_before_it_is_built():
    with pytest.raises(InvalidMessageError, match="Expected"):
        Codec().decode(forge([[4, False, ["a", 0, [{1: 2}]]], False, 0]))


@pytest.mark.parametrize("where", [4, 9, 10, 15, 20, 21])
def test_bytes_that_are_no_bools_are_refused_wherever_they_are(where):
    inner = [("y", "<i4"), ("flags", "?", (2,))]
    array = np.zeros(2, [("x", "<i4"), ("flag", "?"), ("inner", inner)])
    body = [structured.describe(array.dtype), False, 2]
    elements = bytearray(array.nbytes)
    elements[where] = 1
    Codec().decode(forge(body, bytes(elements)))
    elements[where] = 2
    with pytest.raises(InvalidMessageError, match="not the bytes of an array of dtype"):
        Codec().decode(forge(body, bytes(elements)))


@pytest.mark.parametrize("order", ["<", ">"])
def test_characters_that_do_not_exist_are_refused(order):
    array = np.zeros(2, [("pad", "u1"), ("text", f"{order}U2", (2,))])
    array["text"] = "ok"
    body = [structured.describe(array.dtype), False, 2]
    elements = bytearray(array.tobytes())
    Codec().decode(forge(body, bytes(elements)))
    elements[-4:] = (0x110000).to_bytes(4, "little" if order == "<" else "big")
    with pytest.raises(InvalidMessageError, match="not the bytes"):
        Codec().decode(forge(body, bytes(elements)))


LEAVES = st.sampled_from(["?", "i1", "<i4", ">f8", "U3", "S2", "M8[s]", "c16"])
FIELDS = st.recursive(
    LEAVES,
    lambda inner: st.lists(
        st.tuples(inner, st.lists(st.integers(0, 3), max_size=2).map(tuple)), min_size=1, max_size=4
    ).map(lambda kinds: [(f"f{n}", kind, shape) for n, (kind, shape) in enumerate(kinds)]),
    max_leaves=8,
).filter(lambda kind: isinstance(kind, list))


@given(FIELDS, st.lists(st.integers(0, 3), max_size=3), st.booleans())
def test_any_carried_dtype_arrives_equal(fields, shape, align):
    array = np.zeros(shape, np.dtype(fields, align=align))
    if structured.describe(array.dtype) is None:
        return  # it is nested too deeply
    arrived = Codec().decode(payload_of(array))
    assert arrived.dtype == array.dtype
    assert arrived.shape == array.shape
    assert not any(memory_of(arrived))
