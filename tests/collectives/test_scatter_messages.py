"""What a root scatters, as messages that say what they are."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire.collectives.operands import operand, pack_part, unpack_part
from rankwire.errors import ConfigurationError, InvalidMessageError, RankwireError


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
