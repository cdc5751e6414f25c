"""Frames: any split of a stream gives the same frames, and only a valid stream gives any."""

import random
import resource
import tracemalloc
from itertools import cycle
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headers import bytes_received, pack_header
from rankwire.errors import MessageTooLargeError, ProtocolError
from rankwire.links.memory import allocate
from rankwire.wire.frames import (
    DEFAULT_MAX_MESSAGE_NBYTES,
    HEADER_NBYTES,
    LOAN,
    WORLD_GROUP,
    Channel,
    Frame,
)
from rankwire.wire.parser import FrameParser

BUFFER = 65536  # what one read takes at most; a frame that is larger gets memory of its own
U64 = 2**64 - 1
WHOLE_READ = 1 << 30
LENDING = {
    *(Channel.MESSAGE, Channel.COLLECTIVE, Channel.STREAM, Channel.CALL, Channel.REPLY),
    Channel.ITEM,
}


def frame_bytes(payload=b"", *, channel=Channel.MESSAGE, group=0, tag=0, sequence=0):
    return pack_header((group, channel, tag), len(payload), sequence) + payload


def stream_of(frames, *, first=0):
    """Return the bytes of frames, as (channel, group, tag, payload), numbered from ``first``."""
    return b"".join(
        frame_bytes(payload, channel=channel, group=group, tag=tag, sequence=first + index)
        for index, (channel, group, tag, payload) in enumerate(frames)
    )


class Fields(NamedTuple):
    channel: int
    group: int
    tag: int
    payload: bytes


def fields_of(frame):
    """Return a frame as (channel, group, tag, payload)."""
    assert isinstance(frame, Frame)
    group, channel, tag = frame.envelope
    return Fields(channel, group, tag, frame.payload)


def feed(parser, stream, *sizes):
    """Feed a stream in reads of at most these sizes, in turn; return the frames."""
    view, frames = memoryview(stream), []
    for size in cycle(sizes or (WHOLE_READ,)):
        if not view:
            return frames
        room = parser.receive_buffer()
        assert len(room) > 0, "there is always room for more"
        count = min(size, len(room), len(view))
        room[:count] = view[:count]
        view = view[count:]
        frames += map(fields_of, bytes_received(parser, count))
    raise AssertionError("unreachable")


def step_by_step(parser, stream):
    """Feed a stream as a connection does; return the frames, and whether some are special."""
    view, frames, is_special = memoryview(stream), [], False

    def read(room, counts):
        nonlocal view
        count = min(len(room), len(view))
        room[:count] = view[:count]
        view = view[count:]
        counts.append(count)

    while view:
        parser.read_by(read)
        state, special = parser.parse()
        parser.commit(state)
        frames += map(fields_of, parser.frames)
        parser.frames.clear()
        is_special |= special
    return frames, is_special


def pattern(nbytes, seed=0):
    return bytes((seed + 7 * index) & 0xFF for index in range(min(nbytes, 4099))) * (
        nbytes // 4099 + 1
    )


def payload_of(nbytes, seed=0):
    return pattern(nbytes, seed)[:nbytes]


# -- the header


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            (Channel.MESSAGE, 0, 0, 0, 0),
            "01 00 0000 00000000 0000000000000000 0000000000000000 0000000000000000",
        ),
        (
            (Channel.CALL, 0, 7, 5, 3),
            "04 00 0000 03000000 0000000000000000 0700000000000000 0500000000000000",
        ),
        (
            (Channel.COLLECTIVE, 0x1122334455667788, 0x99AABBCCDDEEFF00, 0x0102030405060708, 0xA1),
            "02 00 0000 A1000000 8877665544332211 00FFEEDDCCBBAA99 0807060504030201",
        ),
        (
            (Channel.FAREWELL, U64, U64, U64, 2**32 - 1),
            "0A 00 0000 FFFFFFFF FFFFFFFFFFFFFFFF FFFFFFFFFFFFFFFF FFFFFFFFFFFFFFFF",
        ),
        (
            (Channel.MESSAGE | LOAN, 0, 7, 48, 3),
            "01 01 0000 03000000 0000000000000000 0700000000000000 3000000000000000",
        ),
    ],
)
def test_the_header_is_these_bytes(fields, expected):
    channel, group, tag, nbytes, sequence = fields
    assert pack_header((group, channel, tag), nbytes, sequence) == bytes.fromhex(expected)
    assert len(bytes.fromhex(expected)) == HEADER_NBYTES == 32


def test_channels_have_these_numbers_on_the_wire():
    assert {channel.name: int(channel) for channel in Channel} == {
        "MESSAGE": 1,
        "COLLECTIVE": 2,
        "STREAM": 3,
        "CALL": 4,
        "REPLY": 5,
        "CANCEL": 6,
        "CONTROL": 7,
        "ITEM": 8,
        "CREDIT": 9,
        "FAREWELL": 10,
        "GREETING": 11,
    }
    assert WORLD_GROUP == 0


def test_the_sequence_in_a_header_wraps_at_32_bits():
    assert pack_header((0, 1, 0), 0, 2**32) == pack_header((0, 1, 0), 0, 0)
    assert pack_header((0, 1, 0), 0, 2**40 + 5) == pack_header((0, 1, 0), 0, 5)


def test_a_frame_comes_out_as_it_went_in():
    [frame] = feed(FrameParser(), frame_bytes(b"hello", channel=Channel.REPLY, group=9, tag=U64))
    assert frame == (Channel.REPLY, 9, U64, b"hello")
    assert isinstance(frame[-1], bytearray)


# -- any split of the stream


heads = st.tuples(
    st.sampled_from(list(Channel)),
    st.sampled_from([0, 1, U64]) | st.integers(0, U64),
    st.sampled_from([0, 1, U64]) | st.integers(0, U64),
)
small_frames = st.lists(
    st.tuples(heads, st.binary(max_size=200)).map(lambda pair: (*pair[0], pair[1])), max_size=12
)
around_the_buffer = st.sampled_from(
    [
        *(0, 1, HEADER_NBYTES, 1000),
        *(BUFFER - 2 * HEADER_NBYTES + step for step in (-1, 0, 1)),
        *(BUFFER - HEADER_NBYTES + step for step in (-1, 0, 1)),
        *(BUFFER + step for step in (-1, 0, 1)),
        *(2 * BUFFER, 200 * 1024),
    ]
)
large_frames = st.lists(
    st.tuples(heads, around_the_buffer, st.integers(0, 255)).map(
        lambda triple: (*triple[0], payload_of(triple[1], triple[2]))
    ),
    max_size=5,
)


@pytest.mark.fault(16, "any split of a stream gives the same frames")
@given(frames=small_frames, sizes=st.lists(st.integers(1, 100), min_size=1, max_size=8))
def test_any_split_gives_the_same_frames(frames, sizes):
    parser = FrameParser()
    assert feed(parser, stream_of(frames), *sizes) == frames
    assert not parser.in_frame


@given(
    frames=large_frames,
    sizes=st.lists(
        st.sampled_from([31, 32, 33, 1000, BUFFER - 33, BUFFER - 32, BUFFER, WHOLE_READ])
        | st.integers(500, 2 * BUFFER),
        min_size=1,
        max_size=6,
    ),
)
def test_any_split_gives_the_same_frames_around_the_size_of_the_buffer(frames, sizes):
    parser = FrameParser()
    assert feed(parser, stream_of(frames), *sizes) == frames
    assert not parser.in_frame


@given(frames=small_frames)
def test_one_byte_at_a_time_gives_the_same_frames(frames):
    assert feed(FrameParser(), stream_of(frames), 1) == frames


@pytest.mark.parametrize(
    "nbytes",
    [0, 1, BUFFER - 33, BUFFER - 32, BUFFER - 31, BUFFER, 200 * 1024],
)
def test_one_byte_at_a_time_gives_a_large_frame_and_the_next(nbytes):
    frames = [(1, 0, 1, payload_of(nbytes)), (1, 0, 2, b"next")]
    assert feed(FrameParser(), stream_of(frames), 1) == frames


@given(frames=small_frames, rest=st.binary(max_size=HEADER_NBYTES - 1))
def test_bytes_of_a_header_that_is_not_complete_are_kept(frames, rest):
    parser = FrameParser()
    assert feed(parser, stream_of(frames) + rest) == frames
    assert parser.in_frame is bool(rest)


@given(frames=small_frames, cut=st.integers(1, 100))
def test_a_frame_cut_short_is_never_given(frames, cut):
    frames = [*frames, (1, 2, 3, bytes(100))]
    parser = FrameParser()
    assert feed(parser, stream_of(frames)[:-cut]) == frames[:-1]
    assert parser.in_frame


def test_many_frames_in_one_read_come_in_order():
    frames = [(1, 0, tag, b"x" * (tag % 5)) for tag in range(1500)]
    assert feed(FrameParser(), stream_of(frames)) == frames


@pytest.mark.parametrize("nbytes", [10, 200 * 1024])
def test_the_receiver_owns_its_payloads(nbytes):
    parser = FrameParser()
    [first] = feed(parser, frame_bytes(payload_of(nbytes, 1), sequence=0))
    [second] = feed(parser, frame_bytes(payload_of(nbytes, 2), sequence=1))
    assert first.payload == payload_of(nbytes, 1)
    first.payload[:] = bytes(nbytes)
    first.payload.extend(b"resized")
    assert second.payload == payload_of(nbytes, 2)
    assert feed(parser, frame_bytes(b"third", sequence=2)) == [(1, 0, 0, b"third")]


def test_a_large_payload_is_received_straight_into_its_own_memory():
    parser = FrameParser()
    stream = frame_bytes(payload_of(1 << 20))
    assert feed(parser, stream[: HEADER_NBYTES + 100]) == []
    assert len(parser.receive_buffer()) == (1 << 20) - 100


def test_in_frame_is_true_while_a_frame_is_incomplete():
    parser = FrameParser()
    small, large = frame_bytes(b"abc"), frame_bytes(bytes(100_000), sequence=1)
    assert not parser.in_frame
    for stream in (small, large):
        boundaries = (1, HEADER_NBYTES - 1, HEADER_NBYTES, len(stream) - 1)
        done = 0
        for boundary in boundaries:
            assert feed(parser, stream[done:boundary]) == []
            assert parser.in_frame
            done = boundary
        assert len(feed(parser, stream[done:])) == 1
        assert not parser.in_frame


# -- what is refused


def tampered(offset, value, *, sequence=0):
    header = bytearray(frame_bytes(b"", sequence=sequence))
    header[offset] = value
    return bytes(header)


@pytest.mark.parametrize("channel", [0, max(Channel) + 1, 127, 128, 255])
def test_an_unknown_channel_is_refused(channel):
    with pytest.raises(ProtocolError, match=f"channel {channel}"):
        feed(FrameParser(), tampered(0, channel))


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        *((1, value) for value in (2, 3, 128, 129, 255)),
        *((offset, value) for offset in (2, 3) for value in (1, 128, 255)),
    ],
)
def test_flags_and_reserved_bits_are_refused(offset, value):
    with pytest.raises(ProtocolError, match=r"flags|reserved"):
        feed(FrameParser(), tampered(offset, value))


@pytest.mark.parametrize("channel", sorted(LENDING))
@pytest.mark.parametrize("nbytes", [0, 48, 8224, 100_000])
def test_what_may_be_lent_comes_out_with_the_flag_and_is_pointed_out(channel, nbytes):
    frames = [(channel, 5, 6, b"here"), (channel | LOAN, 5, 6, payload_of(nbytes))]
    parser = FrameParser()
    assert step_by_step(parser, stream_of(frames[:1])) == (frames[:1], False)
    assert step_by_step(parser, stream_of(frames[1:], first=1)) == (frames[1:], True)


@pytest.mark.parametrize("channel", sorted({*Channel} - LENDING))
def test_a_loan_on_a_channel_that_does_not_lend_is_refused(channel):
    with pytest.raises(ProtocolError, match=f"channel {int(channel)} cannot lend"):
        feed(FrameParser(), pack_header((0, channel | LOAN, 0), 0, 0))


@pytest.mark.parametrize("channel", [Channel.FAREWELL, Channel.GREETING])
@pytest.mark.parametrize("nbytes", [0, 40, 100_000])
def test_greetings_and_farewells_are_marked_as_special(channel, nbytes):
    _, is_special = step_by_step(FrameParser(), frame_bytes(bytes(nbytes), channel=channel))
    assert is_special


@pytest.mark.fault(42, "a gap or a repeat in a stream of frames is refused")
@pytest.mark.parametrize("sequence", [0, 1, 3, 2**31, 2**32 - 1])
def test_a_gap_or_a_repeat_in_the_sequence_is_refused(sequence):
    parser = FrameParser()
    feed(parser, stream_of([(1, 0, 0, b"a"), (1, 0, 0, b"b")]))
    with pytest.raises(ProtocolError, match=f"sequence number {sequence}, expected 2"):
        feed(parser, frame_bytes(b"c", sequence=sequence))


def test_a_replayed_stream_is_refused():
    stream = stream_of([(1, 0, 0, b"a"), (1, 0, 0, bytes(100_000))])
    parser = FrameParser()
    assert len(feed(parser, stream)) == 2
    with pytest.raises(ProtocolError, match="repeated"):
        feed(parser, stream)


def test_the_sequence_wraps_at_32_bits():
    parser = FrameParser()
    frames, counts, _, *rest = parser.state
    parser.commit((frames, counts, 2**32 - 2, *rest))
    frames = [(1, 0, tag, bytes(size)) for tag, size in enumerate((1, 100_000, 1, 100_000))]
    assert feed(parser, stream_of(frames, first=2**32 - 2)) == frames
    with pytest.raises(ProtocolError, match="expected 2"):
        feed(parser, frame_bytes(sequence=2**32 - 1))


def test_the_limit_itself_is_accepted():
    for limit in (0, 10, 100_000):
        [frame] = feed(FrameParser(max_nbytes=limit), frame_bytes(bytes(limit)))
        assert len(frame.payload) == limit


@pytest.mark.fault(12, "an impossible length is refused from the header alone")
@pytest.mark.parametrize("limit", [0, 10, 100_000, DEFAULT_MAX_MESSAGE_NBYTES])
@pytest.mark.parametrize(
    "beyond", [lambda limit: limit + 1, lambda _: 2**32 - 1, lambda _: 2**63, lambda _: U64]
)
def test_a_length_above_the_limit_is_refused_from_the_header_alone(limit, beyond):
    nbytes = beyond(limit)
    parser = FrameParser(max_nbytes=limit)
    header = pack_header((0, Channel.MESSAGE, 0), nbytes, 0)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=f"announced {nbytes} bytes") as caught:
            feed(parser, header)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 128 * 1024, "nothing may be allocated for it"
    assert isinstance(caught.value.__cause__, MessageTooLargeError)
    assert (caught.value.__cause__.nbytes, caught.value.__cause__.limit) == (nbytes, limit)


def resident_nbytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_memory_grows_with_what_has_come_and_not_with_what_was_announced():
    parser = FrameParser(max_nbytes=1 << 30, allocate=allocate)
    before = resident_nbytes()
    assert feed(parser, pack_header((0, Channel.MESSAGE, 0), 1 << 29, 0) + bytes(1000)) == []
    assert parser.in_frame
    assert resident_nbytes() - before < 16 << 20


def test_a_message_that_memory_cannot_hold_is_a_protocol_error():
    parser = FrameParser(max_nbytes=2**62)
    with pytest.raises(ProtocolError, match="no memory"):
        feed(parser, pack_header((0, Channel.MESSAGE, 0), 2**62, 0))


@pytest.mark.parametrize(
    "violation",
    [
        tampered(0, 99, sequence=2),
        tampered(1, 2, sequence=2),
        frame_bytes(b"", sequence=1),
        pack_header((0, Channel.MESSAGE, 0), U64, 2),
    ],
    ids=["channel", "flags", "sequence", "length"],
)
@pytest.mark.parametrize("size", [WHOLE_READ, HEADER_NBYTES, 1])
def test_frames_before_a_violation_are_given_however_the_stream_is_split(violation, size):
    good = [(1, 0, 1, b"first"), (1, 0, 2, b"second")]
    parser, frames = FrameParser(), []
    stream = stream_of(good) + violation
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]

    def feed_all():
        for piece in (*pieces, b"\0"):
            parser.receive_buffer()[: len(piece)] = piece
            frames.extend(map(fields_of, bytes_received(parser, len(piece))))

    with pytest.raises(ProtocolError):
        feed_all()
    assert frames == good


# -- fuzzing


def mutated(stream, chance):
    """Return the stream with some bytes changed, removed, repeated or inserted."""
    damaged = bytearray(stream)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(damaged) + 1)
        match chance.randrange(4):
            case 0 if at < len(damaged):
                damaged[at] ^= 1 << chance.randrange(8)
            case 1:
                del damaged[at : at + chance.randint(1, 40)]
            case 2:
                damaged[at:at] = damaged[at : at + chance.randint(1, 40)]
            case _:
                damaged[at:at] = chance.randbytes(chance.randint(1, 8))
    return bytes(damaged)


def random_stream(chance):
    frames = [
        (chance.randint(1, 9), chance.choice((0, 1, U64)), chance.randrange(5), bytes(size))
        for size in chance.choices((0, 1, 5, 31, 32, 33, 200), k=chance.randint(1, 5))
    ]
    return stream_of(frames)


@pytest.mark.parametrize("kind", ["random", "mutated"])
def test_garbage_gives_frames_or_a_protocol_error_and_nothing_else(kind):
    chance = random.Random(f"rankwire {kind}")
    refused = 0
    for _ in range(15_000):
        if kind == "random":
            stream = chance.randbytes(chance.randint(1, 200))
        else:
            stream = mutated(random_stream(chance), chance)
        parser = FrameParser(max_nbytes=1 << 20)
        try:
            frames = feed(parser, stream, chance.choice((1, 7, 40, WHOLE_READ)))
        except ProtocolError:
            refused += 1
        else:
            for frame in frames:
                assert frame.channel in set(Channel) or frame.channel & ~LOAN in LENDING
            assert sum(HEADER_NBYTES + len(frame.payload) for frame in frames) <= len(stream)
    assert refused > 5_000, "the fuzzer must reach the checks"
