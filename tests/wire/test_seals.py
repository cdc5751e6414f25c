"""Seals: a frame arrives as it was sent and where it was sent, or the connection is refused."""

import random
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headers import bytes_received, pack_header
from rankwire.errors import ProtocolError
from rankwire.wire.frames import (
    HEADER_NBYTES,
    SEAL_NBYTES,
    Channel,
)
from rankwire.wire.parser import FrameParser
from rankwire.wire.seals import BULK_NBYTES, SLICE_NBYTES, Protection, Seal, make_seals

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
SAID = b"HELLO and CHALLENGE"
SEALED = Protection.SEALED
# Around the sizes where the parser changes its ways.
SIZES = [0, 1, 100, 65472, 65487, 65488, 65489, 65504, 65535, 65536, 65537, 70_000, 200_000]


def frame(sequence, payload=b"", *, channel=Channel.CALL, group=0, tag=7, seal=None, number=None):
    """Return a sealed frame; ``number`` is what the seal counts, if not the same."""
    header = pack_header((group, channel, tag), len(payload), sequence)
    seal = seal or Seal(KEY)
    counted = sequence if number is None else number
    return b"".join([header, *seal.around(counted, header, channel, ([payload], len(payload)))[0]])


def parser(**options):
    return FrameParser(seal=Seal(KEY, **options))


def feed(parser, stream, step=1 << 20):
    """Give a stream to a parser in pieces; return its frames."""
    frames, stream = [], memoryview(stream)
    while stream:
        buffer = parser.receive_buffer()
        count = min(len(buffer), len(stream), step)
        buffer[:count] = stream[:count]
        stream = stream[count:]
        frames += bytes_received(parser, count)
    return frames


def refused(stream, step=1 << 20):
    """Return the frames before the refusal that a stream must lead to."""
    receiver, frames = parser(), []
    try:
        frames = feed(receiver, stream, step)
    except ProtocolError:
        return frames
    with pytest.raises(ProtocolError):  # one behind whole frames is raised by the next call
        bytes_received(receiver, 0)
    return frames


# -- the good way


@pytest.mark.parametrize("channel", [Channel.CALL, Channel.MESSAGE])
@pytest.mark.parametrize("full_mac", [False, True])
def test_what_was_sealed_arrives(channel, full_mac):
    seal = Seal(KEY, full_mac=full_mac)
    payloads = [random.Random(size).randbytes(size) for size in SIZES]
    stream = b"".join(
        frame(number, payload, channel=channel, seal=seal)
        for number, payload in enumerate(payloads)
    )
    got = feed(parser(full_mac=full_mac), stream)
    assert [bytes(each.payload) for each in got] == payloads


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("step", [1, 7, 1000, 65536])
def test_any_split_of_the_stream_gives_the_same_frames(size, step):
    if size > 20_000 * step:
        return  # too many steps
    payload = random.Random(size).randbytes(size)
    stream = b"".join(frame(n, payload, channel=Channel.MESSAGE) for n in range(3))
    got = feed(parser(), stream, step)
    assert [(f.envelope[1], f.envelope[2], bytes(f.payload)) for f in got] == [
        (Channel.MESSAGE, 7, payload)
    ] * 3


@given(
    st.lists(st.sampled_from([0, 3, 65480, 65500, 65540, 80_000]), min_size=1, max_size=5),
    st.integers(1, 100_000),
)
def test_frames_of_any_sizes_in_any_pieces(sizes, step):
    step = max(step, 50)
    stream = b"".join(frame(n, bytes([n]) * size) for n, size in enumerate(sizes))
    assert [len(each.payload) for each in feed(parser(), stream, step)] == sizes


def test_the_seal_is_this_mac():
    import hashlib
    import hmac

    header = pack_header((1, Channel.CALL, 2), 3, 4)
    expected = hmac.new(KEY, struct.pack("<Q", 4) + header + b"abc", hashlib.sha256).digest()
    assert Seal(KEY).of(4, header, Channel.CALL, [b"a", b"bc"], 3) == expected[:16]


@pytest.mark.parametrize("channel", [Channel.MESSAGE, Channel.COLLECTIVE])
def test_for_large_payloads_the_seal_covers_the_crc(channel):
    import hashlib
    import hmac

    payload = bytes(BULK_NBYTES + 1)
    header = pack_header((0, channel, 0), len(payload), 0)
    said = bytes(8) + header + struct.pack("<I", zlib.crc32(payload))
    expected = hmac.new(KEY, said, hashlib.sha256).digest()[:16]
    assert Seal(KEY).of(0, header, channel, [payload], len(payload)) == expected
    full = Seal(KEY, full_mac=True).of(0, header, channel, [payload], len(payload))
    assert full == hmac.new(KEY, bytes(8) + header + payload, hashlib.sha256).digest()[:16]


@pytest.mark.parametrize(
    ("channel", "nbytes"),
    [
        (Channel.MESSAGE, BULK_NBYTES),
        (Channel.CALL, BULK_NBYTES + 1),
        (Channel.REPLY, BULK_NBYTES + 1),
        (Channel.CONTROL, BULK_NBYTES + 1),
    ],
    ids=str,
)
def test_all_other_frames_are_covered_by_the_mac_in_full(channel, nbytes):
    payload = bytes(nbytes)
    header = pack_header((0, channel, 0), nbytes, 0)
    plain, full = (
        Seal(KEY, full_mac=full_mac).of(0, header, channel, [payload], nbytes)
        for full_mac in (False, True)
    )
    assert plain == full


# -- what was altered


@pytest.mark.parametrize("before", [0, 2])
def test_every_flipped_bit_of_a_frame_is_refused_and_nothing_of_it_delivered(before):
    good = b"".join(frame(number, b"before") for number in range(before))
    target = frame(before, b"small")
    after = frame(before + 1, b"after")
    for bit in range(8 * len(target)):
        damaged = bytearray(target)
        damaged[bit // 8] ^= 1 << bit % 8
        receiver = parser()
        try:
            got = feed(receiver, good + bytes(damaged) + after)
        except ProtocolError:
            got = []
            assert not before, "frames before it are delivered"
        assert len(got) == before, bit
        # A length that grew makes the parser wait for more; what then comes is refused.
        assert receiver.violation is not None or receiver.in_frame, bit


@given(st.integers(0, 8 * (HEADER_NBYTES + 90_000 + 2 * SEAL_NBYTES) - 1), st.booleans())
def test_any_flipped_bit_of_a_large_frame_is_refused(bit, is_bulk):
    channel = Channel.MESSAGE if is_bulk else Channel.CALL
    stream = bytearray(frame(0, bytes(90_000), channel=channel))
    stream[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        assert feed(parser(), bytes(stream)) == []


@pytest.mark.parametrize("nbytes", [0, 100, 60_000])
@pytest.mark.parametrize("bit", range(16, 30))
def test_a_length_that_was_made_large_is_refused_from_the_header(nbytes, bit):
    stream = bytearray(frame(0, bytes(nbytes)))
    stream[24 + bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        feed(parser(), bytes(stream[: HEADER_NBYTES + SEAL_NBYTES]))


@given(st.binary(min_size=1, max_size=300), st.integers(0, 299))
def test_noise_in_a_stream_is_refused(noise, where):
    stream = frame(0, bytes(range(200)))
    where = min(where, len(stream))
    receiver = parser()
    try:
        got = feed(receiver, stream[:where] + noise + stream[where:])
    except ProtocolError:
        return
    assert got == [] or where == len(stream) or stream.startswith(stream[:where] + noise)


def test_a_frame_without_a_seal_is_refused():
    plain = pack_header((0, Channel.CALL, 0), 3, 0) + b"abc"
    assert refused(plain + plain) == []


def test_altered_bulk_with_the_same_crc_passes_unless_the_mac_is_asked_for():
    """Said plainly in SECURITY.md: a CRC finds damage, not intent."""
    payload = bytearray(BULK_NBYTES + 8)
    twin = _with_crc(payload[:-4] + b"\1\2\3\4", zlib.crc32(payload))
    assert bytes(twin) != bytes(payload)
    assert zlib.crc32(twin) == zlib.crc32(payload)
    for full_mac in (False, True):
        seal = Seal(KEY, full_mac=full_mac)
        sent = frame(0, bytes(payload), channel=Channel.MESSAGE, seal=seal)
        altered = sent[: HEADER_NBYTES + SEAL_NBYTES] + bytes(twin) + sent[-SEAL_NBYTES:]
        if full_mac:
            with pytest.raises(ProtocolError, match="seal"):
                feed(parser(full_mac=True), altered)
        else:
            assert len(feed(parser(), altered)) == 1


def _with_crc(data, wanted):
    """Return data whose first four bytes were chosen such that it has this CRC."""
    # The CRC is linear: find the bits to flip by elimination.
    base = zlib.crc32(data)
    rows = []
    for bit in range(32):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        rows.append((zlib.crc32(flipped) ^ base, 1 << bit))
    target, chosen = base ^ wanted, 0
    basis = {}
    for effect, bits in rows:
        while effect and effect.bit_length() in basis:
            other = basis[effect.bit_length()]
            effect, bits = effect ^ other[0], bits ^ other[1]
        if effect:
            basis[effect.bit_length()] = (effect, bits)
    while target:
        effect, bits = basis[target.bit_length()]
        target, chosen = target ^ effect, chosen ^ bits
    result = bytearray(data)
    for bit in range(32):
        if chosen >> bit & 1:
            result[bit // 8] ^= 1 << bit % 8
    return result


# -- what was moved


def test_a_replayed_frame_is_refused():
    assert len(refused(frame(0, b"pay 100") * 2)) == 1


def test_a_replayed_frame_is_refused_even_with_a_fitting_sequence_number():
    second = bytearray(frame(0, b"pay 100"))
    second[4:8] = struct.pack("<I", 1)
    assert len(refused(frame(0, b"pay 100") + bytes(second))) == 1


def test_a_dropped_frame_is_refused():
    assert len(refused(frame(0) + frame(2))) == 1


def test_swapped_frames_are_refused():
    assert refused(frame(1) + frame(0)) == []


def after_four_billion_frames():
    receiver = parser()
    frames, counts, sequence, place, read = receiver.state
    receiver.commit((frames, counts, sequence, place._replace(sealed=1 << 32), read))
    return receiver


def test_a_frame_from_four_billion_frames_ago_is_refused():
    """The header's sequence number repeats by then, the number under the seal does not."""
    receiver = after_four_billion_frames()
    with pytest.raises(ProtocolError, match="seal"):
        feed(receiver, frame(0, b"old"))
    later = after_four_billion_frames()
    assert len(feed(later, frame(0, b"new", number=1 << 32))) == 1


@pytest.mark.parametrize(
    "seal",
    [Seal(OTHER_KEY), make_seals(KEY, SAID, SEALED, dialled=True).incoming],
    ids=["another key", "the other direction"],
)
def test_a_frame_of_another_key_is_refused(seal):
    receiver = FrameParser(seal=make_seals(KEY, SAID, SEALED, dialled=False).incoming)
    with pytest.raises(ProtocolError, match="seal"):
        feed(receiver, frame(0, b"x", seal=seal))


# -- the keys


def test_each_end_opens_what_the_other_seals():
    near = make_seals(KEY, SAID, SEALED, dialled=True)
    far = make_seals(KEY, SAID, SEALED, dialled=False)
    for sender, receiver in ((near, far), (far, near)):
        got = feed(FrameParser(seal=receiver.incoming), frame(0, b"x", seal=sender.outgoing))
        assert got[0].payload == b"x"


def test_a_frame_sent_back_to_its_sender_is_refused():
    near = make_seals(KEY, SAID, SEALED, dialled=True)
    with pytest.raises(ProtocolError, match="seal"):
        feed(FrameParser(seal=near.incoming), frame(0, b"x", seal=near.outgoing))


@pytest.mark.parametrize(
    ("key", "said"), [(OTHER_KEY, SAID), (KEY, SAID + b"!")], ids=["secret", "nonces or ranks"]
)
def test_another_handshake_has_other_keys(key, said):
    ours = make_seals(KEY, SAID, SEALED, dialled=True)
    theirs = make_seals(key, said, SEALED, dialled=False)
    with pytest.raises(ProtocolError, match="seal"):
        feed(FrameParser(seal=ours.incoming), frame(0, b"x", seal=theirs.outgoing))


def test_without_protection_there_are_no_seals():
    assert make_seals(KEY, SAID, Protection.NONE, dialled=True) is None


# -- a farewell that nobody has read


@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_a_farewell_at_the_end_of_unread_frames_is_recognised(ahead):
    receiver = parser()
    feed(receiver, frame(0) + frame(1))
    unread = b"".join(frame(2 + n, b"unread") for n in range(ahead))
    farewell = frame(2 + ahead, channel=Channel.FAREWELL, tag=0)
    assert receiver.is_farewell(unread + farewell)
    assert not receiver.is_farewell(unread + farewell[:-1] + b"\0")
    assert not receiver.is_farewell(unread + farewell[:HEADER_NBYTES])
    assert not receiver.is_farewell(farewell[-20:])


def test_a_farewell_behind_a_half_read_frame_is_recognised():
    receiver, large = parser(), frame(0, bytes(100_000))
    feed(receiver, large[:70_000])
    farewell = frame(1, channel=Channel.FAREWELL, tag=0)
    assert receiver.is_farewell(large[70_000:] + farewell)


def test_a_forged_farewell_is_not_believed():
    forged = frame(0, channel=Channel.FAREWELL, tag=0, seal=Seal(OTHER_KEY))
    assert not parser().is_farewell(forged)


@pytest.mark.parametrize("full_mac", [False, True], ids=["crc", "mac"])
@pytest.mark.parametrize("sizes", [[SLICE_NBYTES + 1], [5, 0, 3 * SLICE_NBYTES, 7]])
def test_a_seal_that_is_made_while_its_frame_leaves_is_the_same(sizes, full_mac):
    seal = Seal(KEY, full_mac=full_mac)
    payload = [random.Random(size).randbytes(size) for size in sizes]
    nbytes = sum(sizes)
    header = pack_header((0, Channel.MESSAGE, 7), nbytes, 3)
    buffers, coming = seal.around(3, header, Channel.MESSAGE, (payload, nbytes))
    steps = 0
    while coming.go_on():
        steps += 1
    assert coming.is_made
    assert not coming.go_on()
    assert steps == sum(-(-size // SLICE_NBYTES) for size in sizes)
    head = seal.begin_head(3, header).finish()
    assert b"".join(buffers) == b"".join(
        [head, *payload, seal.of(3, header, Channel.MESSAGE, payload, nbytes)]
    )
