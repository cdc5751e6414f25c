"""The number of items in a message is limited, exactly, and before any of them is made."""

import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire.errors import InvalidMessageError
from rankwire.wire.codec import Codec
from rankwire.wire.items import DEFAULT_MAX_ITEMS, ItemCount

pack = msgspec.msgpack.encode


def items_in(value):
    if isinstance(value, list):
        return 1 + sum(map(items_in, value))
    if isinstance(value, dict):
        return 1 + sum(items_in(key) + items_in(item) for key, item in value.items())
    return 1


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
    | st.binary(max_size=300) | st.text(min_size=20, max_size=80),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=60,
)  # fmt: skip


def is_refused(body, limit):
    try:
        ItemCount(limit).add(memoryview(body))
    except InvalidMessageError:
        return True
    return False


@given(plain)
def test_every_item_counts_once(value):
    count, body = items_in(value), pack(value)
    assert not is_refused(body, count)
    assert is_refused(body, count - 1)


@pytest.mark.parametrize("count", [4095, 4096, 4097, 8191, 20_000])
def test_long_runs_count_exactly(count):
    for item in (0, 1.5, "word", {}, 70_000):
        body = pack([item] * count + ["a long string of more than 31 characters"] + [item] * 5)
        assert not is_refused(body, count + 7)
        assert is_refused(body, count + 6)


@given(st.binary(max_size=200))
def test_noise_is_left_to_the_decoder(noise):
    is_refused(noise, 10)


@given(st.lists(st.sampled_from([0x90, 0xC0, 0xA1, 0xCB, 0xD4, 0xC7, 0xDB, 0xFF]), max_size=50))
def test_tokens_that_are_cut_off_do_not_stop_it(tokens):
    is_refused(bytes(tokens), 10)


def payload(head):
    return bytearray(len(head).to_bytes(4, "little") + head)


def dicts(count):
    """Return a message of a list of so many empty dicts."""
    return payload(b"\xdd" + count.to_bytes(4, "big") + b"\x80" * count)


def test_a_message_at_the_limit_is_decoded_and_one_above_it_refused():
    codec = Codec(max_items=5000)
    assert len(codec.decode(dicts(4999))) == 4999
    with pytest.raises(InvalidMessageError, match="more than 5000 items"):
        codec.decode(dicts(5000))


def test_by_default_the_limit_is_a_million():
    assert DEFAULT_MAX_ITEMS == 1_000_000
    assert len(Codec().decode(dicts(999_999))) == 999_999
    with pytest.raises(InvalidMessageError, match="max_items"):
        Codec().decode(dicts(1_000_000))


def test_what_is_refused_takes_no_memory():
    message = dicts(20 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidMessageError):
            Codec().decode(message)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_items_inside_extensions_count_too():
    codec = Codec(max_items=2000)
    for value in ([tuple(range(400))] * 6, {key: [key] * 3 for key in range(700)}):
        buffers, _ = Codec().encode(value)
        with pytest.raises(InvalidMessageError, match="items"):
            codec.decode(bytearray(b"".join(buffers)))
        assert Codec().decode(bytearray(b"".join(buffers))) == value


def test_arrays_and_byte_strings_are_one_item():
    import numpy as np

    value = [np.zeros(1000), b"x" * 100_000, "y" * 100_000]
    buffers, _ = Codec().encode(value)
    assert len(Codec(max_items=10).decode(bytearray(b"".join(buffers)))) == 3
