"""Array messages: an array comes out as it went in, and nothing else passes for one."""

import random
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire.errors import InvalidMessageError, UnsupportedTypeError
from rankwire.wire.array_messages import HEAD_NBYTES, ArrayMessage, pack_array, unpack_head

CODES = [
    *("|b1", "|i1", "|u1"),
    *(order + kind for order in "<>" for kind in ("i2", "u4", "i8", "f2", "f4", "f8", "c8", "c16")),
    *("|S1", "|S7", "<U1", ">U5", "<M8[ns]", ">M8[D]", "<m8[us]", "<m8"),
]
shapes = st.lists(st.integers(0, 5), max_size=5).map(tuple)
LAYOUTS = ["C", "F", "gaps", "backwards", "transposed", "read-only"]


def array_of(code, shape, layout="C"):
    """Return an array whose elements differ, as far as its dtype allows."""
    dtype = np.dtype(code)
    count = int(np.prod(shape, dtype=int))
    numbers = np.arange(count)
    if dtype.kind in "SU":
        flat = (numbers % 10).astype("U1").astype(dtype)
    elif dtype.kind in "mM":
        flat = numbers.astype("i8").astype(dtype)
    else:
        flat = (numbers % 2 if dtype.kind == "b" else numbers % 100).astype(dtype)
    array = flat.reshape(shape)
    if layout == "F":
        return np.asfortranarray(array) if shape else array
    if layout == "gaps" and shape:
        return np.repeat(array, 2, axis=-1)[..., ::2]
    if layout == "backwards" and shape:
        return array[::-1]
    if layout == "transposed":
        return array.T
    if layout == "read-only":
        array.flags.writeable = False
    return array


def message_of(array):
    """Return an array message as one piece."""
    buffers, nbytes = pack_array(array)
    message = bytearray().join(buffers)
    assert len(message) == nbytes
    return message


def received(message):
    return unpack_head(message[:HEAD_NBYTES], len(message)).view(message)


def assert_same(array, other):
    assert other.dtype == array.dtype
    assert other.dtype.str == array.dtype.str, "the byte order too"
    assert other.shape == array.shape
    assert other.tobytes() == array.tobytes()


# -- round trips


@given(code=st.sampled_from(CODES), shape=shapes, layout=st.sampled_from(LAYOUTS))
def test_an_array_comes_out_as_it_went_in(code, shape, layout):
    array = array_of(code, shape, layout)
    assert_same(array, received(message_of(array)))


@pytest.mark.parametrize("code", CODES)
def test_every_kind_of_array_comes_out_as_it_went_in(code):
    for shape in [(), (0,), (1,), (3, 0, 2), (7,), (2, 3, 4), (1, 1, 1, 1)]:
        for layout in LAYOUTS:
            array = array_of(code, shape, layout)
            assert_same(array, received(message_of(array)))


def test_what_comes_out_can_be_written_and_is_a_view_of_the_message():
    array = array_of("<f4", (3, 5))
    message = message_of(array)
    view = received(message)
    assert view.flags.writeable
    view[0, 0] = 77
    assert received(message)[0, 0] == 77
    assert array[0, 0] == 0


def test_the_order_in_memory_stays():
    array = array_of("<f8", (4, 5), "F")
    assert received(message_of(array)).flags.f_contiguous
    assert message_of(array) != message_of(np.ascontiguousarray(array))


@pytest.mark.parametrize("layout", ["C", "F", "transposed", "read-only"])
def test_the_elements_are_not_copied(layout):
    array = array_of("<f8", (40, 50), layout)
    head, elements = pack_array(array)[0]
    assert np.shares_memory(np.frombuffer(elements, np.uint8), array)
    assert len(head) % 64 == 0


def test_an_array_with_gaps_is_copied_as_it_must_be():
    array = array_of("<f8", (40, 50), "gaps")
    _, elements = pack_array(array)[0]
    assert not np.shares_memory(np.frombuffer(elements, np.uint8), array)


def test_an_array_in_a_file_comes_out_as_an_array(tmp_path):
    mapped = np.memmap(tmp_path / "mapped", "<f4", "w+", shape=(3, 5))
    mapped[...] = array_of("<f4", (3, 5))
    received_array = received(message_of(mapped))
    assert type(received_array) is np.ndarray
    assert_same(array_of("<f4", (3, 5)), received_array)


@given(code=st.sampled_from(CODES), shape=shapes)
def test_the_elements_begin_at_a_multiple_of_64(code, shape):
    array = array_of(code, shape)
    message = message_of(array)
    head = unpack_head(message[:HEAD_NBYTES], len(message))
    assert head.start % 64 == 0
    assert head.nbytes == len(message) == head.start + array.nbytes


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((1,) * 32, "<c16"),
        np.zeros((2**35, 0, 2**24), "<M8[9999as]"),
        np.zeros((0, *(1,) * 30, 2**59), "<f8"),
        np.zeros(1, f"<U{10**6}"),
    ],
    ids=["32 dimensions", "far extents", "both", "long text"],
)
def test_the_longest_heads_fit_in_what_a_receiver_reads_first(array):
    message = message_of(array)
    head = unpack_head(message[:HEAD_NBYTES], len(message))
    assert head.start <= HEAD_NBYTES
    assert (head.head.dtype, head.head.shape) == (array.dtype, array.shape)


def test_the_layout_is_these_bytes():
    message = message_of(np.array([1, 2], "<u2"))
    description = b"\x93\xa3<u2\xc2\x02"  # msgpack: ["<u2", false, 2]
    expected = b"\0\0" + struct.pack("<H", len(description)) + description
    assert message == expected + bytes(64 - len(expected)) + b"\1\0\2\0"


def test_an_array_message_describes_its_dtype_and_shape():
    message = message_of(array_of("<f4", (2, 3)))
    head = unpack_head(message[:HEAD_NBYTES], len(message))
    assert isinstance(head, ArrayMessage)
    assert head.describe() == "float32 (2, 3)"
    assert head.tensor_dtype == ""


# -- what cannot be sent


@pytest.mark.parametrize(
    "value",
    [
        [1, 2, 3],
        3.5,
        b"bytes",
        None,
        np.float64(1.0),
        np.array([object()]),
        np.zeros(2, [("a", "i4"), ("b", "f8")]),
        np.zeros(2, "V5"),
        np.zeros(2, np.longdouble),
        np.zeros(2, np.clongdouble),
        np.ma.masked_array(np.zeros(2), [True, False]),
        np.zeros(2).view(type("Subclass", (np.ndarray,), {})),
    ],
    ids=lambda value: getattr(getattr(value, "dtype", type(value).__name__), "str", "") or "list",
)
def test_what_is_not_carried_is_refused_with_advice(value):
    with pytest.raises(UnsupportedTypeError, match="array"):
        pack_array(value)


# -- garbage


def outcome(message):
    """Return what a message gives: an array, or None if it is none. Nothing else may happen."""
    try:
        array = received(bytearray(message))
    except InvalidMessageError:
        return None
    array.tobytes()
    repr(array)
    return array


@given(
    code=st.sampled_from(CODES),
    shape=shapes,
    at=st.integers(0),
    flip=st.integers(1, 255),
    cut=st.integers(0, 70),
)
def test_a_damaged_message_is_an_array_or_an_invalid_message(code, shape, at, flip, cut):
    message = message_of(array_of(code, shape))
    damaged = bytearray(message)
    damaged[at % 40] ^= flip
    outcome(damaged)
    outcome(damaged[: len(damaged) - cut])
    if cut:
        assert outcome(message[: len(message) - cut]) is None
    assert outcome(message + b"\0") is None


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\0",
        b"\0\0\0",
        bytes(4),
        bytes(64),
        bytes(1000),
        b"\2\0" + message_of(np.zeros(3))[2:],  # kind
        b"\0\1" + message_of(np.zeros(3))[2:],  # reserved
        b"\0\0\xff\xff" + bytes(600),  # a description longer than the message
        b"\1\0" + message_of(np.zeros(3))[2:],  # an array's description of a tensor
        b"just some text that was sent by send()" * 20,
    ],
    ids=["empty", "1", "3", "4", "64", "zeros", "kind", "reserved", "length", "tensor", "text"],
)
def test_what_was_not_sent_as_an_array_is_an_invalid_message(message):
    with pytest.raises(InvalidMessageError):
        unpack_head(bytearray(message)[:HEAD_NBYTES], len(message))


def described(description, elements=b"", kind=0):
    head = struct.pack("<BBH", kind, 0, len(description)) + description
    return head + bytes(-len(head) % 64) + elements


@pytest.mark.parametrize(
    "description",
    [
        b"",
        b"\xc0",
        b"\x90",
        b"\x91\xa3<u2",
        b"\x93\xa2O8\xc2\x01",  # objects
        b"\x93\xa2O8\xc2\x00",
        b"\x93\xa3|V8\xc2\x01",
        b"\x93\xa3=u2\xc2\x02",  # another spelling
        b"\x93\xa3<u2\x00\x02",  # order is no bool
        b"\x93\xa3<u2\xc2\xff",  # -1
        b"\x93\xa3<u2\xc2\xca\x40\x00\x00\x00",  # 2.0
        b"\x93\xa3<u2\xc2\xc3",  # True
        b"\x94\xa3<u2\xc2" + b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff" * 2,
        b"\xdc\x00\x23\xa3<u2\xc2" + b"\x01" * 33,  # 33 dimensions
        b"\x93\xa3<u2\xc2\x02\x00",  # something behind it
        b"\x93\xa3<u2\xc2",  # an end too early
    ],
)
def test_a_description_that_no_sender_writes_is_an_invalid_message(description):
    for elements in (b"", bytes(2), bytes(4)):
        message = described(description, elements)
        with pytest.raises(InvalidMessageError):
            unpack_head(bytearray(message), len(message))


@pytest.mark.parametrize("nbytes", [0, 1, 3, 5, 64])
def test_elements_that_do_not_add_up_are_an_invalid_message(nbytes):
    message = described(b"\x93\xa3<u2\xc2\x02", bytes(nbytes))
    with pytest.raises(
        InvalidMessageError, match=f"an array of 68 bytes in a message of {64 + nbytes}"
    ):
        unpack_head(bytearray(message), len(message))


def test_bytes_that_are_no_values_of_the_dtype_are_an_invalid_message():
    for description, elements in (
        (b"\x93\xa3|b1\xc2\x02", b"\1\2"),
        (b"\x93\xa3<U1\xc2\x01", b"\xff" * 4),
    ):
        message = bytearray(described(description, elements))
        head = unpack_head(message, len(message))
        with pytest.raises(InvalidMessageError):
            head.view(message)


def test_20000_random_messages_give_an_array_or_an_invalid_message():
    chance = random.Random("rankwire array messages")
    good = [
        message_of(
            array_of(
                chance.choice(CODES), tuple(chance.choices((0, 1, 2, 3), k=chance.randrange(4)))
            )
        )
        for _ in range(200)
    ]
    arrays = 0
    for _ in range(20_000):
        if chance.random() < 0.3:
            message = bytearray(chance.randbytes(chance.randrange(200)))
            message[:2] = bytes([chance.randrange(2), 0])[: len(message)]
        else:
            message = bytearray(chance.choice(good))
            for _ in range(chance.randrange(3)):
                message[chance.randrange(min(40, len(message)))] = chance.randrange(256)
        arrays += outcome(message) is not None
    assert 3_000 < arrays < 17_000, "the fuzzer must reach both ends"
