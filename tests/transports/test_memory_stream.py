"""Streams in memory: bytes are neither lost nor doubled, bounded, late when they should be."""

import random
import time
from contextlib import suppress
from itertools import repeat, starmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connected import read_into, write
from interrupts import Interrupt, every_interrupt
from rankwire.clock import REAL_TIME
from rankwire.errors import ChannelClosedError, DeadlineExceededError, PeerLostError
from rankwire.links.connection import Connection
from rankwire.transports.memory_stream import MemoryPoller, memory_pair
from rankwire.transports.pipe import Gate, Route
from rankwire.wire.frames import HEADER, HEADER_NBYTES, Channel
from real_time import Deadline
from worlds import PATIENCE, Running

SHORT = 0.05
LATER = 0.6  # seconds in which a test surely looks what is there before
LARGE = 1 << 30


def frame(payload=b"", *, channel=Channel.MESSAGE, sequence=0):
    return HEADER.pack(channel, sequence, 0, 0, len(payload)) + payload


def take(stream, nbytes=1 << 16):
    buffer = bytearray(nbytes)
    return bytes(buffer[: read_into(stream, buffer)])


def take_all(stream):
    """Return all that is there, and whether the stream has ended."""
    data = b""
    while True:
        try:
            piece = take(stream)
        except BlockingIOError:
            return data, False
        if not piece:
            return data, True
        data += piece


# -- bytes


def test_bytes_come_as_they_were_written_both_ways():
    near, far = memory_pair(LARGE, REAL_TIME)
    assert write(near, b"ab", bytearray(b"cd"), memoryview(b"ef")) == 6
    assert write(near, b"gh") == 2
    assert write(far, b"back") == 4
    assert [take(far, 3), take(far, 3), take(far)] == [b"abc", b"def", b"gh"]
    assert take(near) == b"back"
    for end in (near, far):
        with pytest.raises(BlockingIOError):
            take(end)


def test_the_writer_may_change_its_memory():
    near, far = memory_pair(LARGE, REAL_TIME)
    memory = bytearray(b"before")
    write(near, memory)
    memory[:] = b"after."
    assert take(far) == b"before"


def test_what_is_peeked_stays():
    near, far = memory_pair(LARGE, REAL_TIME)
    with pytest.raises(BlockingIOError):
        far.peek(5)
    write(near, b"abc")
    write(near, b"def")
    assert [far.peek(2), far.peek(100)] == [b"ab", b"abcdef"]
    assert take(far) == b"abcdef"
    near.shut_down()
    assert far.peek(1) == b""


@given(st.lists(st.one_of(st.binary(max_size=100), st.integers(1, 150)), max_size=40))
def test_any_order_of_writes_and_reads_gives_the_same_bytes(steps):
    near, far = memory_pair(120, REAL_TIME)
    sent, got = b"", b""
    for step in steps:
        with suppress(BlockingIOError):
            if isinstance(step, bytes):
                sent += step[: write(near, step)]
            else:
                got += take(far, step)
        assert near.unsent_nbytes() == len(sent) - len(got)
    assert got + take_all(far)[0] == sent


def test_a_stream_says_what_it_is():
    near, _ = memory_pair(1, REAL_TIME)
    assert (near.transport, near.fileno(), near.unacknowledged(), near.peer_pid()) == (
        "memory",
        -1,
        None,
        0,
    )


# -- room


def test_a_full_pipe_takes_what_there_is_room_for():
    near, far = memory_pair(100, REAL_TIME)
    assert write(near, bytes(60)) == 60
    assert write(near, bytes(500)) == 100 - 60 + 2 * HEADER_NBYTES
    with pytest.raises(BlockingIOError):
        write(near, bytes(HEADER_NBYTES + 1))
    assert not near.wait(0.0, to_write=True)
    take(far)
    assert near.wait(0.0, to_write=True)
    assert write(near, bytes(50)) == 50


def test_one_large_message_and_any_without_content_always_have_room():
    near, far = memory_pair(10, REAL_TIME)
    assert write(near, bytes(1000)) == 1000
    assert write(near, bytes(HEADER_NBYTES)) == HEADER_NBYTES
    assert take(far) == bytes(1000 + HEADER_NBYTES)


def test_a_writer_wakes_up_when_there_is_room():
    near, far = memory_pair(10, REAL_TIME)
    write(near, bytes(100))
    waiting = Running(near.wait, PATIENCE, to_write=True)
    time.sleep(SHORT)
    assert not waiting.done
    take(far)
    assert waiting.result() is True


def test_a_writer_that_waits_hears_what_comes_beside():
    near, _ = memory_pair(10, REAL_TIME)
    one, other = memory_pair(10, REAL_TIME)
    write(near, bytes(100))
    waiting = Running(near.wait, PATIENCE, [other], to_write=True)
    time.sleep(SHORT)
    assert not waiting.done
    write(one, b"x")
    assert waiting.result() is False
    assert not near.wait(PATIENCE, [other], to_write=True)
    assert near.wait(PATIENCE, [other], to_write=True) is False


# -- waiting for something to read


def test_a_reader_wakes_up_when_something_comes():
    near, far = memory_pair(10, REAL_TIME)
    assert not far.wait(0.01)
    waiting = Running(far.wait, PATIENCE)
    time.sleep(SHORT)
    assert not waiting.done
    write(near, b"x")
    assert waiting.result() is True


@pytest.mark.parametrize("end", ["near", "far"])
def test_a_reader_wakes_up_at_the_end(end):
    near, far = memory_pair(10, REAL_TIME)
    waiting = Running(far.wait, PATIENCE)
    time.sleep(SHORT)
    (near if end == "near" else far).shut_down()
    assert waiting.result() is True
    assert take_all(far) == (b"", True)


def test_threads_that_leave_are_forgotten():
    near, _ = memory_pair(10, REAL_TIME)
    write(near, bytes(100))
    assert not near.wait(0.01, [near], to_write=True)
    assert not near.wait(0.01)
    pipe = near.outgoing
    assert (pipe.writers, pipe.readers, near.incoming.readers) == ([], [], [])


# -- ends


def test_what_was_written_before_an_end_is_read():
    near, far = memory_pair(LARGE, REAL_TIME)
    write(near, b"last words")
    near.shut_down()
    near.shut_down()
    with pytest.raises(BrokenPipeError):
        write(near, b"x")
    with pytest.raises(BrokenPipeError):
        write(far, b"x")
    assert take_all(far) == (b"last words", True)
    assert take_all(far) == (b"", True)
    near.close()


def test_what_is_on_its_way_at_an_end_arrives_and_at_a_cut_is_lost():
    near, far = memory_pair(LARGE, REAL_TIME, Route(REAL_TIME.now, repeat(LATER)))
    write(near, frame(b"slow"))
    near.shut_down()
    assert take_all(far) == (b"", False)
    assert far.wait(PATIENCE)
    assert take_all(far) == (frame(b"slow"), True)
    near, far = memory_pair(LARGE, REAL_TIME, Route(REAL_TIME.now, repeat(SHORT)))
    write(near, frame(b"lost"))
    near.abort()
    assert take_all(far) == (b"", True)
    time.sleep(2 * SHORT)
    assert take_all(far) == (b"", True)


def test_a_cut_leaves_what_is_visible():
    near, far = memory_pair(LARGE, REAL_TIME, Route(REAL_TIME.now, iter([0.0, PATIENCE])))
    write(near, frame(b"seen"))
    write(near, frame(b"lost", sequence=1))
    far.abort()
    assert take_all(far) == (frame(b"seen"), True)


# -- delays


def test_a_message_is_visible_after_its_delay_and_not_before():
    near, far = memory_pair(LARGE, REAL_TIME, Route(REAL_TIME.now, repeat(LATER)))
    begin = time.monotonic()
    write(near, frame(b"slow"))
    with pytest.raises(BlockingIOError):
        take(far)
    assert not far.wait(0.01)
    assert far.wait(PATIENCE)
    assert LATER <= time.monotonic() - begin < PATIENCE
    assert take(far) == frame(b"slow")


def test_a_sleeper_learns_of_a_message_that_comes_later():
    near, far = memory_pair(LARGE, REAL_TIME, Route(REAL_TIME.now, repeat(SHORT)))
    waiting = Running(far.wait, PATIENCE)
    time.sleep(0.01)
    write(near, frame(b"x"))
    assert waiting.result() is True


def test_messages_stay_in_order_and_courtesies_take_no_time_of_their_own():
    near, far = memory_pair(LARGE, REAL_TIME, Route(REAL_TIME.now, iter([LATER, 0.0])))
    assert write(near, frame(b"slow") + frame(b"fast", sequence=1)) == len(frame(b"slow"))
    write(near, frame(b"fast", sequence=1))
    write(near, frame(channel=Channel.FAREWELL, sequence=2))
    assert take_all(far)[0] == b""
    data = b""
    while len(data) < 3 * HEADER_NBYTES + 8:
        assert far.wait(PATIENCE)
        data += take(far)
    assert data == frame(b"slow") + frame(b"fast", sequence=1) + frame(
        channel=Channel.FAREWELL, sequence=2
    )


@given(st.lists(st.binary(max_size=80), min_size=1, max_size=6), st.data())
def test_messages_are_counted_however_they_are_cut(payloads, data):
    counted = []
    near, far = memory_pair(
        LARGE, REAL_TIME, Route(REAL_TIME.now, on_message=lambda: counted.append(1))
    )
    stream = b"".join(
        [
            frame(channel=Channel.GREETING),
            *(frame(payload, sequence=number + 1) for number, payload in enumerate(payloads)),
            frame(channel=Channel.FAREWELL, sequence=len(payloads) + 1),
        ]
    )
    rest = stream
    while rest:
        piece = rest[: data.draw(st.integers(1, len(rest)))]
        rest = rest[write(near, piece) :]
    assert take_all(far)[0] == stream
    assert len(counted) == len(payloads)


def test_a_gate_lets_one_message_through_at_a_time_from_all():
    gate = Gate(SHORT)
    pairs = [memory_pair(LARGE, REAL_TIME, Route(REAL_TIME.now, gate=gate)) for _ in range(2)]
    begin = time.monotonic()
    for near, _ in pairs:
        write(near, frame(bytes(5000)))
        write(near, frame(b"second", sequence=1))
    got = []
    while len(got) < 4:
        for _, far in pairs:
            if far.wait(0.001):
                message = take(far, 1000)
                while len(message) > HEADER_NBYTES + 10 and len(message) < 5000 + HEADER_NBYTES:
                    message += take(far, 1000)  # what has begun goes on
                got.append(len(message))
    assert sorted(got) == [6 + HEADER_NBYTES] * 2 + [5000 + HEADER_NBYTES] * 2
    assert time.monotonic() - begin >= 3 * SHORT


# -- pollers


@pytest.fixture
def poller():
    made = MemoryPoller(REAL_TIME)
    yield made
    made.close()


def test_streams_are_told_in_turn(poller):
    pairs = [memory_pair(LARGE, REAL_TIME) for _ in range(3)]
    for number, (near, far) in enumerate(pairs):
        poller.register(near, number)
        write(far, b"x")
    assert sorted(poller.poll(0) for _ in range(3)) == [0, 1, 2]


def test_what_becomes_visible_later_is_told_then(poller):
    near, far = memory_pair(LARGE, REAL_TIME, back=Route(REAL_TIME.now, repeat(SHORT)))
    poller.register(near, "key")
    write(far, frame(b"slow"))
    assert poller.poll(0) is None
    assert poller.poll(PATIENCE) == "key"


def test_a_sleeping_poll_is_woken_by_a_stream_by_wake_and_by_close(poller):
    near, far = memory_pair(LARGE, REAL_TIME)
    poller.register(near, "key")
    for action, expected in ((lambda: write(far, b"x"), "key"), (poller.wake, None)):
        waiting = Running(poller.poll, PATIENCE)
        time.sleep(SHORT)
        action()
        assert waiting.result() == expected
        take_all(near)
    waiting = Running(poller.poll, PATIENCE)
    time.sleep(SHORT)
    poller.close()
    assert isinstance(waiting.error(), ValueError)


# -- connections


def connections(limit=LARGE, **options):
    near, far = memory_pair(limit, REAL_TIME)

    def flush_when_possible(connection):
        def flush():
            with suppress(DeadlineExceededError):
                connection.outbox.flush(Deadline(0.0))

        connection.stream.outgoing.flush_when_possible(flush)

    options = {
        "max_nbytes": LARGE,
        "clock": REAL_TIME,
        "on_rest": flush_when_possible,
        **options,
    }
    return Connection(near, peer=1, **options), Connection(far, peer=0, **options)


def send(connection, payload, timeout=PATIENCE, tag=0):
    connection.send((0, Channel.MESSAGE, tag), ((payload,), len(payload)), Deadline(timeout))


def receive(connection, timeout=PATIENCE):
    return [bytes(frame.payload) for frame in connection.read(Deadline(timeout))]


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 1024, 5000, 1 << 20])
def test_frames_of_any_size_pass(nbytes):
    near, far = connections()
    payload = random.Random(nbytes).randbytes(nbytes)
    send(near, payload)
    send(near, b"next")
    got = []
    while len(got) < 2:
        got += receive(far)
    assert got == [payload, b"next"]


def test_the_rest_of_a_message_leaves_when_the_reader_has_made_room():
    near, far = connections(100)
    send(near, bytes(90))
    send(near, b"x" * 50, timeout=0.0)  # a part of it is taken, so it counts as sent
    assert near.outbox.is_holding
    with pytest.raises(DeadlineExceededError):
        send(near, b"no room", timeout=0.0)
    got = []
    while len(got) < 2:
        got += receive(far)
    assert got == [bytes(90), b"x" * 50]
    assert not near.outbox.is_holding
    send(near, b"room again", timeout=0.0)
    assert receive(far) == [b"room again"]


def test_a_farewell_and_an_abort_are_told_apart():
    near, far = connections()
    send(near, b"last")
    near.farewell(Deadline(PATIENCE))
    near.close()
    assert receive(far) == [b"last"]
    with pytest.raises(ChannelClosedError):
        far.read(Deadline(PATIENCE))
    near, far = connections()
    send(near, b"last")
    near.stream.abort()
    assert receive(far) == [b"last"]
    with pytest.raises(PeerLostError):
        far.read(Deadline(PATIENCE))


def test_many_threads_write_and_one_reads():
    near, far = connections(200)
    writers = [
        Running(lambda n=n: [send(near, bytes([n]) * 60) for _ in range(50)]) for n in range(4)
    ]
    got = []
    while len(got) < 200:
        got += receive(far)
    for writer in writers:
        writer.result()
    assert sorted(got) == sorted(bytes([n]) * 60 for n in range(4) for _ in range(50))


# -- interrupts


def payload_of(frame):
    return bytes(frame.payload)


@pytest.mark.fault(37, "an interrupt in a stream in memory neither loses nor doubles bytes")
@pytest.mark.parametrize("limit", [LARGE, 100])
@pytest.mark.parametrize("second_after", [None, 1, 3])
def test_an_interrupt_anywhere_in_a_write(limit, second_after):
    near, far = memory_pair(limit, REAL_TIME)
    numbers = iter(range(1 << 30))

    def run(interrupting):
        number = next(numbers)
        data = b"%08d" % number * 8
        counts = []
        with suppress(Interrupt, BlockingIOError), interrupting:
            near.write((data,), counts)
        got, _ = take_all(far)
        assert got == data[: sum(counts)]
        write(near, b"next")
        assert take_all(far)[0] == b"next"

    assert every_interrupt(run, second_after=second_after) >= 5


@pytest.mark.fault(37, "an interrupt in a stream in memory neither loses nor doubles bytes")
@pytest.mark.parametrize("second_after", [None, 1, 3])
def test_an_interrupt_anywhere_in_a_read(second_after):
    near, far = memory_pair(100, REAL_TIME)

    def run(interrupting):
        write(near, b"a" * 30)
        write(near, b"b" * 30)
        counts, buffer = [], bytearray(40)
        with suppress(Interrupt), interrupting:
            far.read(memoryview(buffer), counts)
        got = bytes(buffer[: sum(counts)])
        assert got + take_all(far)[0] == b"a" * 30 + b"b" * 30
        assert near.unsent_nbytes() == 0

    assert every_interrupt(run, second_after=second_after) >= 5


@pytest.mark.fault(37, "an interrupted thread that waits in memory leaves nothing behind")
@pytest.mark.parametrize("to_write", [False, True])
def test_an_interrupt_anywhere_in_a_wait(to_write):
    def run(interrupting):
        near, far = memory_pair(10, REAL_TIME)
        write(near, bytes(100))
        end = near
        with suppress(Interrupt), interrupting:
            end.wait(0.01, to_write=to_write)
        assert take_all(far)[0] == bytes(100)
        write(far, b"x")
        assert near.wait(PATIENCE)
        assert near.wait(PATIENCE, to_write=True)

    assert every_interrupt(run) >= 5


def test_a_reader_that_is_interrupted_again_and_again_gets_every_message():
    near, far = connections(300)
    sending = Running(lambda: [send(near, b"%06d" % n * 20) for n in range(300)])
    got = []

    def run(interrupting):
        if len(got) == 300:
            return
        with suppress(Interrupt), interrupting:
            got.extend(map(payload_of, starmap(far.receive(Deadline(PATIENCE)).popleft, ((),))))

    every_interrupt(run)
    while len(got) < 300:
        got.extend(receive(far))
    sending.result()
    assert got == [b"%06d" % n * 20 for n in range(300)]
