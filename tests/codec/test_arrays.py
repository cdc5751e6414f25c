"""numpy through the codec: exact, uncopied, and nothing from the wire reaches numpy unchecked."""

from __future__ import annotations

import struct
import sys
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.msgpack import Ext

from codec import payloads
from rankwire.codec import arrays, tensors
from rankwire.codec.codec import Codec
from rankwire.errors import InvalidMessageError, UnsupportedTypeError

payload_of = partial(payloads.payload_of, Codec())
roundtrip = partial(payloads.roundtrip, Codec())


DTYPES = [
    *("?", "i1", "u1", "<i2", ">i2", "<u2", "<i4", ">i4", "<u4", "<i8", ">i8", "<u8", ">u8"),
    *("<f2", ">f2", "<f4", ">f4", "<f8", ">f8", "<c8", ">c8", "<c16", ">c16"),
    *("<M8[ns]", ">M8[D]", "<m8[25s]", ">m8[as]", "S1", "S7", "<U1", ">U5"),
]


def random_array(code: str, shape: tuple[int, ...], order: str = "C") -> np.ndarray[Any, Any]:
    numbers = np.random.default_rng(1).integers(0, 100, shape)
    kind = np.dtype(code).kind
    array = (
        numbers.astype("i8").astype(code)
        if kind in "mM"
        else (numbers % 2 if kind == "b" else numbers)
    )
    return np.array(array.astype(code), order=order)  # type: ignore[call-overload]


def array_payload(*description: Any, data: bytes = b"") -> bytearray:
    head = msgspec.msgpack.encode(Ext(40, msgspec.msgpack.encode(description)))
    prefix = struct.pack("<I", len(head)) + head
    padding = bytes(-len(prefix) % 16) if data else b""
    return bytearray(prefix + padding + data)


def assert_same(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> None:
    assert type(left) is np.ndarray
    assert left.dtype == right.dtype
    assert left.dtype.byteorder == right.dtype.byteorder
    assert left.shape == right.shape
    assert left.tobytes() == right.tobytes()


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (0,), (3, 0, 2), (3, 4), (2, 3, 4)], ids=str)
def test_arrays_of_every_dtype_arrive_equal(code, shape):
    for order in "CF":
        array = random_array(code, shape, order)
        arrived = roundtrip(array)
        assert_same(arrived, array)
        assert arrived.flags.c_contiguous == array.flags.c_contiguous
        assert arrived.flags.f_contiguous == array.flags.f_contiguous
        assert arrived.flags.writeable
        assert arrived.flags.aligned


@pytest.mark.parametrize("code", DTYPES)
def test_scalars_of_every_dtype_stay_scalars(code):
    scalar = random_array(code, (3,))[1]
    arrived = roundtrip(scalar)
    assert type(arrived) is type(scalar)
    assert arrived.dtype == scalar.dtype
    assert arrived == scalar or np.isnat(scalar)


@pytest.mark.parametrize(
    "scalar",
    [
        np.float64("nan"),
        np.float64("-0.0"),
        np.datetime64("NaT", "s"),
        np.timedelta64("NaT", "s"),
        np.longlong(1),
    ],
    ids=repr,
)
def test_special_scalars_keep_their_bytes(scalar):
    arrived = roundtrip(scalar)
    assert arrived.dtype == scalar.dtype
    assert arrived.tobytes() == scalar.tobytes()


@pytest.mark.filterwarnings("ignore:The 'generic' unit")  # numpy 2.5 deprecates it
def test_times_without_a_unit_arrive_equal():
    array = np.array(["NaT", "NaT"], "<m8")
    assert_same(roundtrip(array), array)


@pytest.mark.parametrize("text", ["", "a", "trailing\0", "é" * 5000])
def test_string_scalars_are_exact(text):
    arrived = roundtrip([np.str_(text), np.bytes_(text.encode())])
    assert [type(item) for item in arrived] == [np.str_, np.bytes_]
    assert [item[:] for item in arrived] == [text, text.encode()]


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[::2],
        lambda a: a[::-1],
        lambda a: a[:, 1:3],
        lambda a: a.T[1:],
        lambda a: np.broadcast_to(a[0], (3, 4)),
        lambda a: a.transpose(1, 0)[::2, ::2],
    ],
)
def test_arrays_with_gaps_arrive_without(view):
    array = view(np.arange(24.0).reshape(6, 4))
    assert_same(roundtrip(array), array)


def test_the_bytes_of_an_array_are_its_own_memory():
    for array in (np.ones((3, 4)), np.ones((3, 4), order="F"), np.ones(()), np.ones((2, 3, 4)).T):
        assert np.shares_memory(np.frombuffer(arrays.array_bytes(array), "u1"), array)
    assert not np.shares_memory(np.frombuffer(arrays.array_bytes(array[::2]), "u1"), array)


def test_a_read_only_array_is_sent_as_it_is_and_arrives_writable():
    array = np.arange(4)
    array.flags.writeable = False
    assert roundtrip(array).flags.writeable


def test_a_received_array_keeps_its_memory_alive():
    array = roundtrip(np.arange(1000))
    spoiled = [bytearray(b"\xff") * 8100 for _ in range(10)]
    assert len(spoiled) == 10
    assert (array == np.arange(1000)).all()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(1, "O"),
        np.zeros(1, "V4"),
        np.zeros(1, np.longdouble),
        np.zeros(1, np.clongdouble),
        np.ndarray((3,), "S0"),
    ],
    ids=lambda array: array.dtype.str,
)
def test_other_dtypes_are_refused(array):
    with pytest.raises(UnsupportedTypeError, match=r"Its (dtype|elements)") as caught:
        Codec().encode([array])
    assert caught.value.path == "value[0]"


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="numpy 1 has 32")
def test_more_than_32_dimensions_are_refused():
    roundtrip(np.ones((1,) * 32))
    with pytest.raises(UnsupportedTypeError, match="33 dimensions"):
        Codec().encode(np.ones((1,) * 33))


@pytest.mark.parametrize(
    "code",
    [
        *("|O", "|O8", "O", "|V8", "<f16", "<c32", "<i8,<i8", "f8", "=f8", "|f8", "<i3", "<b1"),
        *("|S0", "<U0", "|S2147483648", "<U536870912", "|S99999999999999999999", "|S\u0661"),
        *("<M8[0s]", "<M8[xs]", "<M8[s/7]", "<M8[1s]", "|T16", "<f8\0", " <f8", "float64", ""),
        "x" * 10_000,
    ],
    ids=lambda code: code[:30],
)
def test_a_dtype_outside_the_list_is_refused(code):
    with pytest.raises(InvalidMessageError):
        Codec().decode(array_payload(code, False, 0))


@pytest.mark.parametrize(
    "shape",
    [
        (-1,),
        (2**63,),
        (2**64 - 1,),
        (2**62, 4),
        (2**32, 2**32),
        (2**61, 2**61, 2**61),
        (0, 2**63),
        (0, 2**62, 2**62),
        (0, 2**62),
        (-1, -3),
        (1.0,),
        (True,),
        ("3",),
        (None,),
        ([3],),
        (1,) * 33,
        (2,) * 10_000,
        (3, 2),
        (2,),
        (4,),
    ],
    ids=lambda shape: str(shape)[:40],
)
def test_a_shape_that_does_not_fit_the_bytes_is_refused(shape):
    with pytest.raises(InvalidMessageError):
        Codec().decode(array_payload("<f8", False, *shape, data=bytes(24)))


def test_an_empty_array_with_large_extents_is_harmless():
    assert Codec().decode(array_payload("<f8", True, 0, 2**59)).shape == (0, 2**59)
    assert Codec().decode(array_payload("|S2147483647", False, 0)).shape == (0,)


@pytest.mark.parametrize(
    "description",
    [
        (),
        ("<f8",),
        ("<f8", 0, 3),
        ("<f8", "C", 3),
        (3, False, 3),
        (["<f8"], False, 3),
        ("<f8", None),
    ],
    ids=str,
)
def test_a_malformed_description_is_refused(description):
    with pytest.raises(InvalidMessageError):
        Codec().decode(array_payload(*description, data=bytes(24)))


def test_bytes_that_are_no_bools_are_refused():
    Codec().decode(array_payload("|b1", False, 3, data=b"\0\1\0"))
    with pytest.raises(InvalidMessageError, match="b1"):
        Codec().decode(array_payload("|b1", False, 3, data=b"\0\1\2"))


@pytest.mark.parametrize("order", ["<", ">"])
def test_characters_that_do_not_exist_are_refused(order):
    highest, beyond = struct.pack(f"{order}I", 0x10FFFF), struct.pack(f"{order}I", 0x110000)
    arrived = Codec().decode(array_payload(f"{order}U1", False, 2, data=highest * 2))
    assert arrived.tolist() == ["\U0010ffff"] * 2
    with pytest.raises(InvalidMessageError, match="U1"):
        Codec().decode(array_payload(f"{order}U1", False, 2, data=highest + beyond))


@pytest.mark.parametrize(
    "parts",
    [
        [],
        ["<f8"],
        ["<f8", b"short"],
        ["<f8", bytes(9)],
        ["<f8", "a" * 8],
        ["|O", bytes(8)],
        ["|b1", b"\2"],
        ["U", b"bytes"],
        ["S", "text"],
        ["<U1", struct.pack("<I", 0x110000)],
        [1, bytes(8)],
        [None, None],
        ["<f8", bytes(8), 1],
        "<f8",
    ],
    ids=str,
)
def test_a_malformed_scalar_is_refused(parts):
    head = msgspec.msgpack.encode(Ext(41, msgspec.msgpack.encode(parts)))
    with pytest.raises(InvalidMessageError):
        Codec().decode(bytearray(struct.pack("<I", len(head)) + head))


def test_dtype_codes_are_those_of_numpy():
    assert arrays.dtype_code(np.dtype("f8")) == ("<f8" if sys.byteorder == "little" else ">f8")
    assert arrays.dtype_code(np.dtype("O")) is None
    assert arrays.dtype_code(np.dtype((np.void, 3))) is None


def test_without_torch_tensors_are_refused(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert not tensors.is_tensor(np.ones(3))
    monkeypatch.setitem(sys.modules, "torch", None)  # what makes an import fail
    tensors._torch.cache_clear()
    body = msgspec.msgpack.encode(["float32", 2])
    head = msgspec.msgpack.encode(Ext(42, body))
    prefix = struct.pack("<I", len(head)) + head
    with pytest.raises(InvalidMessageError, match="torch"):
        Codec().decode(bytearray(prefix + bytes(-len(prefix) % 16) + bytes(8)))


@pytest.mark.parametrize("head", [arrays.array_head, tensors.tensor_head])
def test_a_description_that_is_too_long_or_holds_a_map_is_refused(head):
    """A map could have keys that were chosen to collide."""
    for description in (["<f4", False, {1: 2}], ["float32", {1: 2}]):
        with pytest.raises(Exception, match="got `object`"):
            head(msgspec.msgpack.encode(description))
    long = msgspec.msgpack.encode(["<f4", False, *[1] * 1000])
    with pytest.raises(InvalidMessageError, match="a description of an array in"):
        head(long)
