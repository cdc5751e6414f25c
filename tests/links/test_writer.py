"""Writing frames: whole ones, in order, whatever falls into it."""

import array
import hashlib
import random
import struct
import time
from contextlib import suppress
from itertools import islice

import pytest

from headers import pack_header
from interrupts import Interrupt, Interrupting, every_interrupt
from links.ends import Proxied, ReadsItself, fill, frame_bytes, frames_of, hold, noise, read, send
from rankwire.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    PeerLostError,
)
from rankwire.links.writer import FrameWriter
from rankwire.wire.frames import HEADER_NBYTES, Channel
from real_time import Deadline
from worlds import PATIENCE, Running, eventually

MIB = 1 << 20
SOON = 8.0  # seconds for what takes milliseconds, on a machine that is busy with other things


@pytest.mark.parametrize("piece", [b"", b"x", b"y" * 100, b"z" * 4096])
def test_a_message_in_2000_pieces_arrives_as_one(connections, piece):
    near, far = connections  # the kernel takes 1024 pieces at once at most
    sending = Running(send, near, [piece] * 2000)
    [frame] = read(far)
    sending.result()
    assert frame.payload == piece * 2000


def test_pieces_of_all_sizes_and_kinds_arrive_in_order(connections):
    near, far = connections
    chance = random.Random(7)
    pieces = []
    for _ in range(700):
        data = chance.randbytes(8 * chance.choice((0, 0, 1, 2, 100, 5000)))
        pieces.append(
            chance.choice(
                (data, bytearray(data), memoryview(data), memoryview(array.array("d", data)))
            )
        )
    sending = Running(send, near, pieces)
    [frame] = read(far)
    sending.result()
    assert frame.payload == b"".join(pieces)


def test_numbers_of_eight_bytes_arrive_whole_when_the_peer_takes_them_in_parts(connections):
    near, far = connections
    numbers = array.array("d", range(MIB))
    sending = Running(send, near, [memoryview(numbers), b"", memoryview(numbers)])
    time.sleep(0.05)
    [frame] = read(far)
    sending.result()
    assert frame.payload == numbers.tobytes() * 2


def test_header_and_payload_leave_in_one_system_call(make_link):
    calls = []

    def counted(call):
        def count(data):
            calls.append(call(data))
            return calls[-1]

        return count

    for nbytes in (0, 100, 16384, 100_000):
        link = make_link()
        sock = link.connection.stream
        link.connection.outbox._send = counted(sock.send)
        sock.sock = Proxied(sock.sock, sendmsg=counted(sock.sock.sendmsg))
        send(link.connection, bytes(nbytes))
        assert calls.pop() == HEADER_NBYTES + nbytes
        assert not calls


def test_what_is_on_the_wire_is_these_bytes(link):
    send(link.connection, [b"first ", b"half"], tag=3)
    link.connection.send((7, Channel.COLLECTIVE, 2**64 - 1), ((), 0), Deadline(PATIENCE))
    expected = frame_bytes(b"first half", tag=3) + pack_header((7, 2, 2**64 - 1), 0, 1)
    assert link.receive(len(expected)) == expected


def test_threads_never_interleave_their_frames(connections):
    near, far = connections
    threads, messages = 8, 300

    def message(thread, number):
        chance = random.Random(f"{thread} {number}")
        body = chance.randbytes(chance.choice((0, 10, 1000, 17_000, 70_000)))
        head = struct.pack("<II", thread, number) + hashlib.sha256(body).digest()
        return [head, body[: len(body) // 2], body[len(body) // 2 :]]

    def work(thread):
        for number in range(messages):
            send(near, message(thread, number), tag=thread)

    running = [Running(work, thread) for thread in range(threads)]
    expected = [0] * threads
    for frame in islice(frames_of(far), threads * messages):
        thread, number = struct.unpack_from("<II", frame.payload)
        assert frame.envelope[2] == thread
        assert frame.payload[8:40] == hashlib.sha256(frame.payload[40:]).digest()
        assert number == expected[thread], "each thread's frames come in its order"
        expected[thread] += 1
    for thread in running:
        thread.result()
    assert expected == [messages] * threads


def test_held_frames_leave_in_order_with_the_next_one(link):
    calls = []
    sock = link.connection.stream
    link.connection.outbox._stream = Proxied(
        sock, write=lambda *given: calls.append(1) or sock.write(*given)
    )
    for number in range(3):
        hold(link.connection, bytes([number]), tag=number)
    assert not calls
    send(link.connection, b"\3", tag=3)
    expected = b"".join(frame_bytes(bytes([n]), tag=n, sequence=n) for n in range(4))
    assert link.receive(len(expected)) == expected
    assert len(calls) == 1


@pytest.mark.parametrize("nbytes", [0, 16384, 16385, 200_000])
def test_held_frames_leave_before_a_frame_of_any_size(connections, nbytes):
    near, far = connections
    for number in range(3):
        hold(near, bytes([number]))
    sending = Running(send, near, bytes(nbytes))
    frames = read(far, 4)
    sending.result()
    assert [frame.payload for frame in frames] == [b"\0", b"\1", b"\2", bytes(nbytes)]


def test_flushing_sends_what_is_held_and_nothing_twice(connections):
    near, far = connections
    near.outbox.flush(Deadline(0.0))
    for number in range(3):
        hold(near, bytes([number]))
    for _ in range(2):
        near.outbox.flush(Deadline(PATIENCE))
    send(near, b"\3")
    assert [frame.payload for frame in read(far, 4)] == [b"\0", b"\1", b"\2", b"\3"]


def test_what_is_held_is_bounded(connections):
    near, far = connections
    for number in range(100):
        hold(near, bytes([number]) * 1000)
    frames = frames_of(far)
    assert [frame.payload[0] for frame in islice(frames, 60)] == list(range(60))
    near.outbox.flush(Deadline(PATIENCE))
    assert [frame.payload[0] for frame in islice(frames, 40)] == list(range(60, 100))


def test_held_frames_stay_held_when_nothing_could_be_sent_in_time(link):
    hold(link.connection, b"0", tag=0)
    filler = fill(link.connection.stream)
    for impatient in (
        lambda: link.connection.outbox.flush(Deadline(0.05)),
        lambda: send(link.connection, b"1", tag=1, timeout=0.05),
    ):
        with pytest.raises(DeadlineExceededError):
            impatient()
    assert link.connection.failure is None
    link.receive(filler)
    send(link.connection, b"2", tag=2)
    expected = frame_bytes(b"0", tag=0) + frame_bytes(b"2", tag=2, sequence=1)
    assert link.receive(len(expected)) == expected


def test_a_farewell_leaves_after_what_was_held(connections):
    near, far = connections
    hold(near, b"last words")
    near.farewell(Deadline(PATIENCE))
    near.close()
    assert [frame.payload for frame in read(far)] == [b"last words"]
    with pytest.raises(ChannelClosedError):
        far.read(Deadline(PATIENCE))


def test_threads_that_hold_send_and_flush_lose_and_double_nothing(connections):
    near, far = connections

    def work(thread):
        chance = random.Random(thread)
        for number in range(500):
            body = struct.pack("<II", thread, number) + bytes(chance.choice((0, 100, 20_000)))
            send(near, body, hold=chance.random() < 0.7)
            if chance.random() < 0.1:
                near.outbox.flush(Deadline(PATIENCE))
        near.outbox.flush(Deadline(PATIENCE))

    running = [Running(work, thread) for thread in range(4)]
    received = {thread: [] for thread in range(4)}
    for frame in islice(frames_of(far), 2000):
        thread, number = struct.unpack_from("<II", frame.payload)
        received[thread].append(number)
    for thread in running:
        thread.result()
    assert received == {thread: list(range(500)) for thread in range(4)}


def test_a_send_of_which_nothing_has_left_leaves_the_connection_usable(link):
    filler = fill(link.connection.stream)
    deadline = Deadline(0.1)
    for payload in (b"small", bytes(100_000)):
        deadline = Deadline(0.1)
        with pytest.raises(DeadlineExceededError) as caught:
            link.connection.send((0, Channel.MESSAGE, 0), ([payload], len(payload)), deadline)
        assert 0.09 <= deadline.waited < SOON
        assert (caught.value.limit, caught.value.waiting_for) == (0.1, [1])
    assert link.connection.failure is None
    assert not link.lost
    link.receive(filler)
    send(link.connection, b"after all", tag=9)
    expected = frame_bytes(b"after all", tag=9)
    assert link.receive(len(expected)) == expected


def test_a_send_without_patience_is_refused_at_once(link):
    fill(link.connection.stream)
    before = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        send(link.connection, b"x", timeout=0.0)
    assert time.monotonic() - before < SOON
    assert link.connection.failure is None


def test_the_rest_of_a_message_that_was_not_taken_in_time_leaves_later(link):
    message = bytearray(noise(64 * MIB))
    sent = frame_bytes(bytes(message))
    with pytest.raises(DeadlineExceededError):
        send(link.connection, message, timeout=0.1)
    message[:] = bytes(len(message))  # the caller's again
    assert link.connection.failure is None
    following = Running(send, link.connection, b"later")
    assert link.receive(len(sent)) == sent
    assert link.receive(HEADER_NBYTES + 5) == frame_bytes(b"later", sequence=1)
    following.result()
    assert not link.lost


def test_the_deadline_covers_the_frames_of_other_threads(link):
    blocked = Running(send, link.connection, bytes(64 * MIB), timeout=PATIENCE)
    eventually(link.connection.outbox._lock.locked)
    deadline = Deadline(0.1)
    with pytest.raises(DeadlineExceededError, match="other threads"):
        link.connection.send((0, Channel.MESSAGE, 0), ([b"x"], 1), deadline)
    assert 0.09 <= deadline.waited < SOON
    assert link.connection.failure is None
    link.receive(HEADER_NBYTES + 64 * MIB)
    blocked.result()
    send(link.connection, b"next")
    assert link.receive(HEADER_NBYTES + 4) == frame_bytes(b"next", sequence=1)


def test_reading_what_comes_while_a_send_is_blocked_lets_both_ends_send_first(connections):
    payloads = [bytes([rank]) * (32 * MIB) for rank in (0, 1)]

    def exchange(rank):
        meanwhile = ReadsItself(connections[rank])
        send(connections[rank], payloads[rank], meanwhile=meanwhile)
        return meanwhile.frames or read(connections[rank])

    running = [Running(exchange, rank) for rank in (0, 1)]
    assert [thread.result()[0].payload for thread in running] == payloads[::-1]


def test_a_send_that_is_blocked_notices_what_there_is_to_read_only_later(link):
    """Such as a connection that comes in meanwhile: the peer may be blocked in a send, too."""
    filler = fill(link.connection.stream)

    class Later(ReadsItself):
        comes = Deadline(0.1)

        def watch(self):
            return [link.raw] if self.comes.expired else []

        def read(self):
            if self.comes.expired and not self.frames:
                self.frames.append(link.receive(filler))

    send(link.connection, b"x", meanwhile=Later(link.connection), timeout=SOON)
    assert link.receive(HEADER_NBYTES + 1) == frame_bytes(b"x")


def test_input_that_waits_to_be_read_does_not_prolong_the_deadline_of_a_send(link):
    # Another thread has the reading role, or the peer sends faster than this one reads.
    link.raw.sendall(frame_bytes(b"unread"))
    fill(link.connection.stream)
    reads = []

    class NothingCanBeRead(ReadsItself):
        def read(self):
            reads.append(time.monotonic())
            assert not deadline.waited > 1.5, "called again and again, long after the deadline"

    deadline = Deadline(0.2)
    meanwhile = NothingCanBeRead(link.connection)
    with pytest.raises(DeadlineExceededError):
        link.connection.send((0, Channel.MESSAGE, 0), ([b"x"], 1), deadline, meanwhile=meanwhile)
    assert 0.2 <= deadline.waited < SOON
    assert 0 < len(reads) < 500, "it looks all the time"
    assert link.connection.failure is None


def test_a_thread_that_is_sending_does_not_wait_for_itself(link):
    """What it does while its peer takes no more may want to tell that very peer something."""
    link.raw.sendall(frame_bytes(b"input"))
    filler = fill(link.connection.stream)
    waits = []

    class Tells(ReadsItself):
        def read(self):
            if waits:
                return super().read()
            patience = Deadline(SOON)
            with pytest.raises(DeadlineExceededError, match="this thread is sending to it"):
                send(link.connection, b"news", timeout=SOON)
            waits.append(patience.waited)
            link.receive(filler)
            return True

    send(link.connection, b"x", meanwhile=Tells(link.connection), timeout=2 * SOON)
    assert link.receive(HEADER_NBYTES + 1) == frame_bytes(b"x")
    assert waits
    assert max(waits) < SOON / 2


def test_a_send_that_fails_before_a_byte_has_left_changes_nothing(link):
    for bad in ["text", None, memoryview(b"abcdef")[::2]]:
        with pytest.raises((TypeError, BufferError)):
            link.connection.send((0, Channel.MESSAGE, 0), ([bad], 3), Deadline(PATIENCE))
    with pytest.raises(struct.error):
        link.connection.send((0, Channel.MESSAGE, -1), ([b"x"], 1), Deadline(PATIENCE))
    send(link.connection, b"good")
    assert link.receive(HEADER_NBYTES + 4) == frame_bytes(b"good")


class Conversation:
    """What a thread that is interrupted sends, and what its peer makes of it."""

    def __init__(self, pair):
        self.near, self.far = pair
        self.reading = Running(self._read)

    def send(self, tag, nbytes):
        send(self.near, bytes([tag]) * nbytes, tag=tag)

    def _read(self):
        frames, deadline = [], Deadline(PATIENCE)
        while not frames or frames[-1].envelope[2] != 9:
            frames += self.far.read(deadline)
            assert not deadline.expired
        return frames

    def tags(self):
        """Send the last one, and return the tags of all that came, each of them whole."""
        self.send(9, 1)
        frames = self.reading.result()
        for frame in frames:
            assert frame.payload == bytes([frame.envelope[2]]) * len(frame.payload)
        return [frame.envelope[2] for frame in frames]


@pytest.mark.fault(37, "an interrupted send has sent nothing, or its message arrives whole")
@pytest.mark.parametrize("nbytes", [10, 20_000, 70_000, 3_000_000])
def test_an_interrupt_anywhere_in_a_send_leaves_the_connection_and_whole_frames(make_pair, nbytes):
    sent = []

    def run(interrupting):
        talk = Conversation(make_pair("unix", introduced=False))
        talk.send(1, 100)
        with suppress(Interrupt), interrupting:
            talk.send(2, nbytes)
        talk.send(3, 50)
        sent.append(talk.tags())

    places = every_interrupt(run)
    assert places >= 12
    assert {tuple(tags) for tags in sent} == {(1, 3, 9), (1, 2, 3, 9)}
    assert sent[-1] == [1, 2, 3, 9]


@pytest.mark.fault(37, "two interrupts in a send leave the connection and whole frames")
@pytest.mark.parametrize("gap", [1, 2, 3, 5, 8])
def test_two_interrupts_anywhere_in_a_send_leave_the_connection(make_pair, gap):
    def run(interrupting):
        talk = Conversation(make_pair("unix", introduced=False))
        talk.send(1, 100)
        with suppress(Interrupt), interrupting:
            talk.send(2, 3_000_000)
        talk.send(3, 50)
        assert talk.tags() in ([1, 3, 9], [1, 2, 3, 9])

    every_interrupt(run, second_after=gap)


@pytest.mark.fault(37, "many interrupts in a send leave whole frames, or end the connection")
def test_many_interrupts_in_a_send_never_let_a_frame_begin_in_another(make_pair):
    lost = []
    for number in range(60):
        talk = Conversation(make_pair("unix", introduced=False))
        talk.send(1, 100)
        with suppress(Interrupt), Interrupting(*range(number, number + 30, 3)):
            talk.send(2, 3_000_000)
        try:
            talk.send(3, 50)
            tags = talk.tags()
        except PeerLostError as error:
            lost.append(error.reason)
            with pytest.raises(PeerLostError):
                talk.reading.result()
        else:
            assert tags in ([1, 3, 9], [1, 2, 3, 9])
    assert set(lost) <= {"sending to it was interrupted again and again"}


@pytest.mark.fault(37, "an interrupt in a send whose time is over leaves whole frames")
def test_an_interrupt_anywhere_in_a_send_that_is_too_late_leaves_whole_frames(make_pair):
    def run(interrupting):
        near, far = make_pair("unix", introduced=False)
        rests = []
        near.outbox._on_rest = lambda: rests.append(near)
        sent = bytearray(b"\2" * (8 * MIB))
        with suppress(Interrupt, DeadlineExceededError), interrupting:
            near.send((0, Channel.MESSAGE, 2), ([sent], len(sent)), Deadline(0.001))
        sent[:] = bytes(len(sent))
        assert bool(rests) == near.outbox.is_holding
        assert Conversation((near, far)).tags() in ([9], [2, 9])

    assert every_interrupt(run) >= 25


class Interrupted:
    """What interrupts a send that waits."""

    def watch(self):
        raise Interrupt


@pytest.mark.fault(37, "a send that cannot be finished ends the connection")
def test_a_send_that_was_interrupted_too_often_ends_the_connection(make_pair):
    near, _ = make_pair("unix", introduced=False)
    put_in_order = near.outbox._put_in_order

    def put_in_order_interrupted(_):
        raise Interrupt

    near.outbox._put_in_order = put_in_order_interrupted
    with pytest.raises(Interrupt):
        near.send(
            (0, Channel.MESSAGE, 5),
            ([bytes(8 * MIB)], 8 * MIB),
            Deadline(PATIENCE),
            meanwhile=Interrupted(),
        )
    near.outbox._put_in_order = put_in_order
    with pytest.raises(PeerLostError, match="interrupted again and again"):
        send(near, b"next")


def test_the_rest_of_an_interrupted_message_leaves_without_another_send(make_pair):
    rests = []
    near, far = make_pair("unix", introduced=False)
    near.outbox._on_rest = lambda: rests.append(near)
    with pytest.raises(Interrupt):
        near.send(
            (0, Channel.MESSAGE, 5),
            ([bytes(MIB * 8)], MIB * 8),
            Deadline(PATIENCE),
            meanwhile=Interrupted(),
        )
    assert rests == [near]
    assert near.outbox.is_holding
    reading = Running(read, far)
    near.outbox.flush(Deadline(PATIENCE))
    [frame] = reading.result()
    assert (frame.envelope[2], len(frame.payload)) == (5, MIB * 8)
    assert not near.outbox.is_holding


def test_a_message_that_was_not_taken_in_time_says_whether_it_will_arrive(make_pair):
    near, far = make_pair("unix", introduced=False)
    with pytest.raises(DeadlineExceededError, match="the rest follows") as caught:
        near.send((0, Channel.MESSAGE, 1), ([bytes(MIB * 8)], MIB * 8), Deadline(0.05))
    assert caught.value.may_have_arrived
    for nbytes in (10, 8 * MIB):  # behind the rest of the first one, nothing of these leaves
        with pytest.raises(DeadlineExceededError) as caught:
            near.send((0, Channel.MESSAGE, 2), ([bytes(nbytes)], nbytes), Deadline(0.0))
        assert not caught.value.may_have_arrived
    reading = Running(read, far, 2)
    send(near, b"last", tag=3)
    assert [(frame.envelope[2], len(frame.payload)) for frame in reading.result()] == [
        (1, MIB * 8),
        (3, 4),
    ]


# -- a writer alone


class FakeStream:
    """Takes what it is told to take."""

    def __init__(self, *takes):
        self.takes = list(takes)
        self.taken = b""

    def send(self, data):
        count = self.takes.pop(0) if self.takes else len(data)
        if isinstance(count, Exception):
            raise count
        self.taken += bytes(data[:count])
        return min(count, len(data))

    def write(self, pieces, counts):
        counts.append(self.send(b"".join(pieces)))

    def wait(self, seconds, beside=(), *, to_write=False):
        return seconds > 0


def make_writer(stream, *, on_rest=lambda: None):
    """Return a writer whose owner keeps the first cause, and the list of causes."""
    causes = []

    def fail(cause):
        causes.append(cause)
        writer.failure = writer.failure or cause
        return writer.failure.copy()

    writer = FrameWriter(
        stream,
        peer=1,
        seal=None,
        on_rest=on_rest,
        fail=fail,
        explain=lambda error: PeerLostError(1, error.strerror),
    )
    return writer, causes


def write(writer, payload, timeout=PATIENCE, **options):
    message = ([payload], len(payload))
    writer.send((0, Channel.MESSAGE, 0), message, Deadline(timeout), **options)


@pytest.mark.parametrize("nbytes", [3, 20_000])
def test_a_frame_that_is_taken_in_parts_arrives_whole(nbytes):
    stream = FakeStream(5, BlockingIOError(), 1, 30)
    writer, _ = make_writer(stream)
    payload = noise(nbytes)
    write(writer, payload)
    assert stream.taken == frame_bytes(payload)
    assert (writer.frames_sent, writer.is_holding, writer.held_nbytes) == (1, False, 0)


def test_the_rest_of_a_small_frame_is_seen_to_and_leaves_before_the_next():
    called = []
    stream = FakeStream(5, BlockingIOError(), BlockingIOError())
    writer, _ = make_writer(stream, on_rest=lambda: called.append(writer.held_nbytes))
    write(writer, b"first", timeout=0.0)  # counts as sent: it leaves in the background
    assert called == [HEADER_NBYTES + 5 - 5]
    assert writer.is_holding
    stream.takes.clear()
    write(writer, b"second")
    assert stream.taken == frame_bytes(b"first") + frame_bytes(b"second", sequence=1)
    assert not writer.is_holding


def test_a_stream_that_breaks_ends_the_writer_for_good():
    stream = FakeStream(OSError(32, "Broken pipe"), OSError(32, "Broken pipe"))
    writer, causes = make_writer(stream)
    for _ in range(2):
        with pytest.raises(PeerLostError, match="Broken pipe"):
            write(writer, b"x")
    assert len(causes) == 1
    assert stream.taken == b""


def test_nothing_is_sent_after_the_last_frame():
    stream = FakeStream()
    writer, _ = make_writer(stream)
    end = ChannelClosedError("this end has left")
    write(writer, b"last words", last=end)
    with pytest.raises(ChannelClosedError, match="this end has left"):
        write(writer, b"more")
    with pytest.raises(ChannelClosedError):
        write(writer, b"more", hold=True)
    assert stream.taken == frame_bytes(b"last words")


def test_a_last_frame_that_was_not_sent_is_not_the_last():
    writer, _ = make_writer(FakeStream(*[BlockingIOError()] * 3))
    with pytest.raises(DeadlineExceededError):
        write(writer, b"last words", timeout=0.0, last=ChannelClosedError("left"))
    assert writer.failure is None


def test_in_the_child_of_a_fork_a_writer_only_refuses():
    stream = FakeStream()
    writer, _ = make_writer(stream)
    writer._lock.acquire()  # by a thread that is not there
    writer.close_in_child(ChannelClosedError("forked"))
    with pytest.raises(ChannelClosedError, match="forked"):
        write(writer, b"x")
    assert stream.taken == b""
