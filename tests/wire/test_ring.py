"""The ring beside a stream: both lanes together give what was sent; garbage is refused."""

import random
from collections import deque
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headers import pack_header
from interrupts import Interrupt, every_interrupt
from rankwire.errors import ProtocolError
from rankwire.wire.frames import HEADER_NBYTES, LOAN, Channel
from rankwire.wire.parser import FrameParser
from rankwire.wire.ring import (
    AWAKE,
    READ,
    RING_NBYTES,
    WRITTEN,
    RingReader,
    RingWriter,
)

DATA = 1 << 16


class Lane:
    """Both ends of a ring, in memory of this process."""

    def __init__(self):
        self.memory = memoryview(bytearray(RING_NBYTES))
        self.words = self.memory.cast("Q")
        self.data = self.memory[256:]
        self.writer, self.reader = RingWriter(self.memory), RingReader(self.memory)
        self.look(True)
        self.place = 0

    def look(self, is_looking):
        self.words[AWAKE] = is_looking

    def put(self, payload=b"", *, tag=0, sequence=0, channel=Channel.MESSAGE):
        return self.writer.put(record(payload, tag=tag, sequence=sequence, channel=channel))

    def take(self, sequence=0):
        frames = deque()
        self.place = self.reader.take(self.place, sequence, frames)
        self.words[READ] = self.place
        return [(frame.envelope[2], bytes(frame.payload)) for frame in frames]


def record(payload=b"", *, tag=0, sequence=0, channel=Channel.MESSAGE):
    return pack_header((0, channel, tag), len(payload), sequence) + payload


def test_records_arrive_in_order_whatever_their_sizes():
    lane, source = Lane(), random.Random(1)
    for number in range(3000):
        payload = source.randbytes(source.choice([0, 1, 31, 32, 33, 1000, 16_000]))
        assert lane.put(payload, tag=number)
        assert lane.take() == [(number, payload)]


def test_what_has_no_room_is_not_written_and_has_room_again_once_something_was_read():
    lane, count = Lane(), 0
    while lane.put(bytes([count % 251]) * 700, tag=count):
        count += 1
    assert 80 < count <= DATA // 736
    assert lane.writer.unread_nbytes <= DATA
    assert [tag for tag, _ in lane.take()] == list(range(count))
    assert lane.writer.unread_nbytes == 0
    assert lane.put(b"next", tag=count)
    assert lane.take() == [(count, b"next")]


def test_a_ring_without_a_polling_reader_is_not_written_to():
    lane = Lane()
    lane.look(False)
    assert not lane.words[AWAKE]
    assert not lane.put(b"x")
    assert lane.reader.is_empty()
    lane.look(True)
    assert lane.words[AWAKE]
    assert lane.put(b"x")
    assert not lane.reader.is_empty()


def test_records_wait_for_the_frames_of_the_stream_before_them():
    lane = Lane()
    lane.put(b"a", tag=1, sequence=0)
    lane.put(b"b", tag=2, sequence=2)
    assert lane.take(0) == [(1, b"a")]
    assert lane.take(0) == lane.take(1) == []
    assert lane.take(2) == [(2, b"b")]


def test_numbers_wrap_at_32_bits():
    lane = Lane()
    lane.put(b"a", sequence=2**32 - 1)
    lane.put(b"b", sequence=0)
    assert [payload for _, payload in lane.take(2**32 - 1)] == [b"a"]
    assert [payload for _, payload in lane.take(0)] == [b"b"]


# -- beside a stream -------------------------------------------------------------------------------


class BothLanes:
    """A sender that uses one lane or the other, and a parser that reads both."""

    def __init__(self, **options):
        self.lane = Lane()
        self.parser = FrameParser(**options)
        self.parser.ring = self.lane.reader
        self.stream = bytearray()
        self.sequence = 0
        self.taken = []

    def send(self, tag, nbytes, by_ring):
        frame = record(bytes([tag % 256]) * nbytes, tag=tag, sequence=self.sequence)
        if not (by_ring and self.lane.writer.put(frame)):
            self.stream += frame
            self.sequence += 1

    def read(self, most):
        """Do what a connection does: first the ring, then the stream."""
        parser = self.parser
        if not parser.take_records() and (self.stream or parser.in_frame):
            is_whole = parser.take_in(lambda view: self._fill(view, most))
            if not is_whole:
                parser.commit(parser.parse()[0])
        while parser.frames:
            frame = parser.frames.popleft()
            assert frame.payload == bytes([frame.envelope[2] % 256]) * len(frame.payload)
            self.taken.append(frame.envelope[2])

    def _fill(self, view, most):
        count = min(most, len(view), len(self.stream))
        view[:count] = self.stream[:count]
        del self.stream[:count]
        return count


sends = st.tuples(st.just("send"), st.sampled_from([0, 5, 900, 9000, 70_000]), st.booleans())
reads = st.tuples(st.just("read"), st.sampled_from([1, 31, 40, 5000, 1 << 20]), st.none())


@pytest.mark.parametrize("written", [DATA - 1, DATA - 40, (1 << 64) - 32, (1 << 64) - 1])
@pytest.mark.parametrize("read", [0, DATA - 64, (1 << 64) - 64, (1 << 64) - 1])
def test_a_writer_bears_whatever_the_reader_does_to_the_words(written, read):
    lane = Lane()
    for nbytes in (0, 50, 10_000):
        lane.words[WRITTEN], lane.words[READ] = written, read
        lane.put(bytes(nbytes))  # in memory of its own; what the reader makes of it is its business


@given(st.lists(st.one_of(sends, reads), max_size=60))
def test_both_lanes_together_give_what_was_sent_in_order(steps):
    lanes = BothLanes()
    count = 0
    for what, number, by_ring in steps:
        if what == "send":
            lanes.send(count, number, by_ring)
            count += 1
        else:
            lanes.read(number)
    while lanes.stream or not lanes.lane.reader.is_empty():
        lanes.read(1 << 20)
    assert lanes.taken == list(range(count))


def test_records_between_two_frames_that_are_read_at_once_come_between_them():
    lanes = BothLanes()
    lanes.read(1)
    for tag, by_ring in enumerate([False, True, True, False, True, False, False, True]):
        lanes.send(tag, 10, by_ring)
    lanes.read(1 << 20)
    lanes.read(1 << 20)
    assert lanes.taken == list(range(8))


def test_a_record_behind_a_large_frame_waits_until_all_of_that_has_come():
    lanes = BothLanes()
    lanes.send(0, 200_000, by_ring=False)
    lanes.send(1, 10, by_ring=True)
    for _ in range(3):
        lanes.read(60_000)
        assert lanes.taken == []
    while lanes.stream:
        lanes.read(60_000)
    lanes.read(1)
    assert lanes.taken == [0, 1]


# -- interrupts ------------------------------------------------------------------------------------


@pytest.mark.fault(37, "a record whose writing is interrupted has arrived whole, or not at all")
def test_an_interrupted_put_has_written_all_or_nothing():
    def run(interrupting):
        lane = Lane()
        lane.words[WRITTEN] = lane.words[READ] = lane.place = DATA - 64  # the next one wraps
        with suppress(Interrupt), interrupting:
            lane.put(b"x" * 100, tag=7)
        assert lane.take() in ([], [(7, b"x" * 100)])
        assert lane.put(b"next", tag=8)
        assert lane.take() == [(8, b"next")]

    assert every_interrupt(run) >= 2


@pytest.mark.fault(37, "records that an interrupted thread was reading are read once")
@pytest.mark.parametrize("second_after", [None, 1, 4])
def test_an_interrupted_reader_loses_and_repeats_nothing(second_after):
    def run(interrupting):
        lanes = BothLanes()
        for tag, by_ring in enumerate([True, False, True, True, False, True]):
            lanes.send(tag, 20, by_ring)
        with suppress(Interrupt), interrupting:
            for _ in range(3):
                if not lanes.parser.take_records() and lanes.stream:
                    lanes.parser.read_by(noting(lanes))
                    lanes.parser.commit(lanes.parser.parse()[0])
                while lanes.parser.frames:
                    # One step, as the inbox does it.
                    lanes.taken.extend(map(tag_of, [lanes.parser.frames.popleft()]))
        frames = [tag_of(frame) for frame in lanes.parser.frames]
        lanes.parser.frames.clear()
        lanes.taken += frames
        for _ in range(3):
            lanes.read(1 << 20)
        missing = set(range(6)) - set(lanes.taken)
        assert len(missing) <= 1  # in the hand of the test itself
        assert lanes.taken == [tag for tag in range(6) if tag not in missing]

    assert every_interrupt(run, second_after=second_after, apart_from=["test_ring.py"]) >= 20


def noting(lanes):
    def read(view, counts):
        counts.append(lanes._fill(view, 1 << 20))

    return read


def tag_of(frame):
    return frame.envelope[2]


# -- what is not a ring ----------------------------------------------------------------------------


def wrong(change):
    lane = Lane()
    lane.put(b"good", tag=1)
    start = lane.words[WRITTEN]
    lane.put(b"bad" * 20, tag=2)
    change(lane, start)
    return lane


@pytest.mark.fault(12, "what another process writes into a ring is checked like a wire")
@pytest.mark.parametrize(
    "change",
    [
        lambda lane, at: lane.data.__setitem__(at, 77),  # the channel
        lambda lane, at: lane.data.__setitem__(at, int(Channel.FAREWELL)),
        lambda lane, at: lane.data.__setitem__(at + 1, LOAN >> 8),
        lambda lane, at: lane.data.__setitem__(slice(at + 4, at + 8), b"\xff" * 4),  # the number
        lambda lane, at: lane.data.__setitem__(at + 24, 255),  # the size
        lambda lane, at: lane.data.__setitem__(slice(at + 24, at + 32), b"\xff" * 8),
        lambda lane, at: lane.data.__setitem__(at, 0),  # the end of the ring, before it is
    ],
    ids=["channel", "special", "lent", "number", "size", "huge", "end"],
)
def test_an_invalid_record_is_refused_and_earlier_records_are_delivered(change):
    lane = wrong(change)
    parser = FrameParser()
    parser.ring = lane.reader
    assert parser.take_records()
    assert [frame.payload for frame in parser.frames] == [b"good"]
    parser.frames.clear()
    assert not parser.take_records()
    with pytest.raises(ProtocolError):
        parser.take_in(lambda view: 0)


@pytest.mark.parametrize("written", [DATA + 32, 2**64 - 1, 33])
def test_an_impossible_count_is_refused(written):
    lane = Lane()
    lane.words[WRITTEN] = written
    parser = FrameParser()
    parser.ring = lane.reader
    with pytest.raises(ProtocolError):
        parser.take_records()


@pytest.mark.fault(60, "noise in a ring gives frames or an error, and nothing else")
@given(st.integers(0, 2**32), st.integers(0, 2**17))
def test_noise_in_a_ring_does_no_harm(seed, written):
    lane, source = Lane(), random.Random(seed)
    lane.data[:] = source.randbytes(DATA)
    for at in range(0, DATA, source.choice([32, 64, 4096])):
        if source.random() < 0.5:  # headers that are almost right
            size = source.choice([0, 10, 4000, DATA, 2**64 - 1])
            header = pack_header((0, Channel.MESSAGE, 0), size, source.choice([0, 1]))
            lane.data[at : at + HEADER_NBYTES] = header
    lane.words[WRITTEN] = written
    parser = FrameParser()
    parser.ring = lane.reader
    with suppress(ProtocolError):
        parser.take_records()
    assert sum(len(frame.payload) for frame in parser.frames) <= DATA
