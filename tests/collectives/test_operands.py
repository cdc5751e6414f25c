"""Users' arrays as flat memory, and back. Tensors are in ``test_tensor_operands``."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire.codec.codec import Codec
from rankwire.collectives.operands import new_like, operand, pack_part, unpack_part
from rankwire.errors import (
    ConfigurationError,
    InvalidMessageError,
    RankwireError,
    UnsupportedTypeError,
)


def layouts():
    base = np.arange(24.0).reshape(4, 6)
    return {
        "C": base,
        "Fortran": np.asfortranarray(base),
        "strided": np.arange(96.0).reshape(8, 12)[::2, ::2],
        "reversed": base[::-1, ::-1],
        "transposed": base.T,
        "broadcast": np.broadcast_to(np.arange(6.0), (4, 6)),
        "0-d": np.array(3.0),
        "empty": np.empty((0, 3)),
        "empty strided": np.empty((4, 0, 3))[::2],
        "big-endian": base.astype(">f8"),
        "unaligned": np.frombuffer(bytearray(8 * 24 + 1), "f8", 24, 1).reshape(4, 6),
        "read-only": np.frombuffer(bytes(range(24)), np.uint8),
    }


@pytest.mark.parametrize("layout", layouts())
def test_the_elements_are_flat_and_in_c_order(layout):
    array = layouts()[layout]
    whole = operand(array)
    flat = whole.flat()
    assert (whole.value is array, whole.shape) == (True, array.shape)
    assert (flat.shape, flat.dtype) == ((array.size,), array.dtype)
    assert flat.flags.c_contiguous
    assert flat.tolist() == array.ravel().tolist()
    assert np.shares_memory(flat, array) == (array.flags.c_contiguous and array.size > 0)


@pytest.mark.parametrize(
    "layout", [name for name in layouts() if name not in ("read-only", "broadcast")]
)
def test_what_is_stored_is_in_the_users_array(layout):
    array = layouts()[layout]
    whole = operand(array)
    flat = whole.flat()
    flat[...] = np.arange(100.0, 100.0 + flat.size)
    whole.store(flat)
    assert array.ravel().tolist() == list(range(100, 100 + array.size))


def test_rows():
    assert operand(np.ones((5, 2))).rows == 5
    assert operand(np.ones((0, 2))).rows == 0
    assert operand(np.array(1)).rows == 1


def test_a_dtype_has_one_name():
    for dtype, name in [
        ("<f4", "float32"),
        ("=f4", "float32"),
        (">f4", "big-endian float32"),
        ("?", "bool"),
        ("u1", "uint8"),
        ("<c16", "complex128"),
        ("<U3", "str96"),
        ("<M8[s]", "datetime64[s]"),
        ("<M8[ms]", "datetime64[ms]"),
    ]:
        assert operand(np.empty(2, dtype)).dtype_name == name
    assert not operand(np.empty(2, np.int16)).is_bfloat16


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [[1, 2], (1,), 3, 2.5, "text", b"bytes", None, np.float32(3), memoryview(b"x"), object()],
)
def test_what_is_no_array_is_refused_with_advice(value):
    with pytest.raises(UnsupportedTypeError, match=r"numpy\.asarray") as caught:
        operand(value, "out")
    assert caught.value.path == "out"
    assert caught.value.type_name == type(value).__qualname__


@pytest.mark.parametrize("dtype", [object, [("a", "i4")], "V4", np.longdouble])
def test_dtypes_that_are_not_carried_are_refused(dtype):
    with pytest.raises(UnsupportedTypeError, match="are not carried"):
        operand(np.zeros(2, dtype))


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_a_matrix_is_flat_or_refused():
    matrix = np.matrix([[1.0, 2.0], [3.0, 4.0]])
    try:
        flat = operand(matrix).flat()
    except UnsupportedTypeError:
        return
    assert flat.shape == (4,)


def test_a_masked_array_does_not_lose_its_mask_without_a_word():
    # The codec refuses it.
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    with pytest.raises(UnsupportedTypeError):
        Codec().encode(masked)
    with pytest.raises(UnsupportedTypeError):
        operand(masked)


# -- where results go ------------------------------------------------------------------------------


def test_an_out_that_fits():
    source = operand(np.ones((4, 2), np.float32))
    operand(np.ones((2, 2), np.float32)).check_like(source, (2, 2), "out")
    operand(np.ones((2, 4), np.float32)[:, ::2]).check_like(source, (2, 2), "out")


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (np.ones((2, 2)), ["out is float64 (2, 2)", "the result is float32 (2, 2)"]),
        (np.ones((4,), np.float32), ["out is float32 (4,)", "the result is float32 (2, 2)"]),
        (np.ones((2, 2), ">f4"), ["out is big-endian float32", "the result is float32"]),
    ],
)
def test_an_out_that_does_not_fit(out, words):
    source = operand(np.ones((4, 2), np.float32))
    with pytest.raises(ConfigurationError) as caught:
        operand(out).check_like(source, (2, 2), "out")
    for word in words:
        assert word in str(caught.value)


def test_an_out_that_cannot_be_written():
    frozen = np.ones((2, 2), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ConfigurationError, match="out is read-only"):
        operand(frozen).check_like(operand(frozen), (2, 2), "out")
    with pytest.raises(ConfigurationError, match="array is read-only"):
        operand(frozen).check_writable("array")


@pytest.mark.parametrize("dtype", ["f4", ">i2", "?", "c16", "U3"])
def test_new_memory_of_the_same_kind(dtype):
    source = operand(np.empty((2, 3), dtype)[:, ::2])
    new = new_like(source, (5, 1))
    assert (new.value.dtype, new.shape) == (np.dtype(dtype), (5, 1))
    assert new.dtype_name == source.dtype_name
    assert new.value.flags.c_contiguous
    assert new.value.flags.writeable
    assert not np.shares_memory(new.value, source.value)


# -- what a root scatters, as messages that say what they are --------------------------------------


def packed(array):
    whole = operand(array)
    buffers, nbytes = pack_part(whole, whole.flat())
    payload = bytearray(b"".join(buffers))
    assert len(payload) == nbytes
    return payload


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (4, 0, 2), (1,) * 32])
@pytest.mark.parametrize("dtype", ["f4", ">i8", "?", "c16", "U3", "M8[ms]", "S2"])
def test_an_array_is_what_it_was(dtype, shape):
    array = np.ones(shape, dtype)
    result = unpack_part(packed(array), None)
    assert (result.dtype, result.shape) == (array.dtype, array.shape)
    assert result.tobytes() == array.tobytes()
    out = np.zeros(shape, dtype)
    assert unpack_part(packed(array), operand(out)) is out
    assert out.tobytes() == array.tobytes()


def test_elements_begin_where_memory_is_aligned():
    buffers, _ = pack_part(operand(np.ones(3)), np.ones(3))
    assert len(buffers[0]) % 64 == 0


def test_an_out_with_gaps_is_filled():
    out = np.zeros((4, 2))[:, 0]
    unpack_part(packed(np.arange(4.0)), operand(out))
    assert out.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "out", [np.zeros(3, "f4"), np.zeros(2), np.zeros((3, 1)), np.zeros(3, ">f8")]
)
def test_an_out_that_does_not_fit_is_refused(out):
    before = out.copy()
    with pytest.raises(ConfigurationError, match=r"out is .* the message holds a"):
        unpack_part(packed(np.ones(3)), operand(out))
    assert (out == before).all()


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(foreign):
    for out in (None, operand(np.ones(2))):
        with pytest.raises(RankwireError):
            unpack_part(bytearray(foreign), out)


@given(st.data())
def test_a_damaged_message_gives_an_error_or_an_array(data):
    payload = packed(np.ones(4))
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([None, 0, 3, 20, -1]))
    try:
        result = unpack_part(payload[:cut], None)
    except RankwireError:
        return
    assert isinstance(result, np.ndarray)


def test_bytes_that_are_no_bool_are_refused():
    payload = packed(np.ones(3, bool))
    payload[-1] = 7
    with pytest.raises(InvalidMessageError, match="not the bytes"):
        unpack_part(payload, None)


def test_a_dtype_whose_elements_are_addresses_is_refused():
    payload = packed(np.ones(3))
    for code in (b"|O8", b"|V8"):
        with pytest.raises(InvalidMessageError):
            unpack_part(bytearray(bytes(payload).replace(b"<f8", code)), None)


@pytest.mark.parametrize("shape", [(1 << 50,), (5,), (0, 1 << 62), (1 << 40, 1 << 40)])
def test_memory_is_made_only_for_what_is_there(shape):
    """What is told is not believed: the bytes of 4 elements are there."""
    payload = bytearray(b"".join(pack_part(operand(np.ones(4)), np.ones(4))[0]))
    body = msgspec.msgpack.encode([False, "<f8", shape])
    head = len(body).to_bytes(4, "little") + body
    forged = bytearray(head + bytes(-len(head) % 64) + payload[-32:])
    for out in (None, operand(np.ones(4))):
        with pytest.raises(RankwireError):
            unpack_part(forged, out)
