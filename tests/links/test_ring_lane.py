"""Connections with a ring: who looks gets frames through memory, and who sleeps is woken."""

import errno
import random
import socket
import threading
import time
from contextlib import closing, contextmanager, suppress

import pytest

from headers import pack_header
from interrupts import Interrupt, every_interrupt
from links.ends import read, send
from rankwire.clock import REAL_TIME
from rankwire.errors import DeadlineExceededError, PeerLostError, ProtocolError
from rankwire.links.connection import Connection
from rankwire.links.inbox import Inbox
from rankwire.transports import unix_stream
from rankwire.transports.shared_memory import CAN_SHARE
from rankwire.transports.spin import Spin
from rankwire.wire.frames import Channel
from rankwire.wire.mailbox import Mailbox
from rankwire.wire.receive import Receive
from rankwire.wire.ring import AWAKE
from real_time import Deadline
from rpc.callee import world_of_two
from worlds import PATIENCE, Running, eventually, nursery, runtime_folder_of_its_own

pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="there are rings on Linux and x86 only")

LOOKS_FOR = 0.002  # seconds; threads of one process keep each other from running while they look


def unintroduced_ends(*, spin=LOOKS_FOR, max_nbytes=1 << 30, options=({}, {})):
    return [
        Connection(
            sock,
            peer=peer,
            max_nbytes=max_nbytes,
            spin=Spin(spin, REAL_TIME),
            clock=REAL_TIME,
            **options[peer],
        )
        for peer, sock in enumerate(map(without_blocking, socket.socketpair()))
    ]


@contextmanager
def two_ends(**options):
    """Both ends of one connection, which have introduced themselves."""
    ends = unintroduced_ends(**options)
    with closing(ends[0]), closing(ends[1]):
        for end in ends:
            end.introduce()
        for end in (*ends, *ends):
            end.read_ready()
        yield ends


def without_blocking(sock):
    sock.setblocking(False)
    return sock


@pytest.fixture
def ends():
    with two_ends() as both:
        assert all(end.outbox.ring is not None for end in both)
        yield both


def test_a_reader_that_looks_gets_small_frames_through_the_ring(ends):
    near, far = ends
    sent = near.outbox.frames_sent
    for number in range(50):
        reading = Running(read, far)
        eventually(lambda: near.outbox.ring.words[AWAKE])
        send(near, b"small", tag=number)
        (frame,) = reading.result()
        assert (frame.envelope[2], frame.payload) == (number, b"small")
    assert near.outbox.frames_sent - sent < 10  # by the stream, when nobody happened to look
    assert far.queued_nbytes == 0


def test_a_reader_that_does_not_look_gets_them_through_the_stream(ends):
    near, far = ends
    sent = near.outbox.frames_sent
    send(near, b"small")
    assert near.outbox.frames_sent == sent + 1
    assert [frame.payload for frame in read(far)] == [b"small"]


def test_order_is_kept_between_the_lanes(ends):
    near, far = ends
    near.lend_from = 1 << 30
    sizes = random.Random(3).choices([5, 500, 17_000, 300_000], [12, 6, 2, 1], k=400)

    def write():
        for number, size in enumerate(sizes):
            send(near, bytes([number % 256]) * size, tag=number)
            if number % 7 == 0:
                time.sleep(random.uniform(0, 2 * LOOKS_FOR) if number % 70 == 0 else 0.0002)

    writing = Running(write)
    frames = read(far, len(sizes))
    writing.result()
    assert [frame.envelope[2] for frame in frames] == list(range(len(sizes)))
    assert all(
        frame.payload == bytes([number % 256]) * sizes[number]
        for number, frame in enumerate(frames)
    )
    assert near.outbox.frames_sent < len(sizes)  # some took the ring


def test_several_threads_may_send(ends):
    near, far = ends

    def write(thread):
        for number in range(300):
            send(near, number.to_bytes(4, "little"), tag=thread)

    writing = [Running(write, thread) for thread in range(4)]
    frames = read(far, 1200)
    for running in writing:
        running.result()
    for thread in range(4):
        numbers = [frame.payload for frame in frames if frame.envelope[2] == thread]
        assert numbers == [number.to_bytes(4, "little") for number in range(300)]


def test_a_reader_that_stops_looking_at_the_last_moment_is_woken(ends, monkeypatch):
    near, far = ends
    ring = near.outbox.ring
    put = type(ring).put

    def put_late(self, frame):
        try:
            return put(self, frame)
        finally:
            far.stream.ring.words.__setitem__(AWAKE, 0)

    far.stream.ring.words[AWAKE] = 1
    monkeypatch.setattr(type(ring), "put", put_late)
    send(near, b"late")
    assert far.stream.peek(1)  # something woke it that a poller sees
    assert [frame.payload for frame in read(far)] == [b"late"]


def test_who_has_waited_for_room_leaves_no_reply_where_a_poller_does_not_see_it(ends):
    near, far = ends
    inbox = Inbox(0, Mailbox(keep_unmatched=False), REAL_TIME, far, fetch=True)
    for number in range(2):
        inbox.expect(Receive((0, int(Channel.MESSAGE), number)))
    far.stream.ring.words[AWAKE] = 1
    send(near, b"one", tag=0)
    assert not far.stream.ring.is_empty()
    assert inbox.wait_until(lambda: inbox.in_flight < 2, Deadline(PATIENCE))
    send(near, b"another one", tag=1)
    assert far.stream.peek(1)


def test_what_was_put_before_the_end_is_read_before_it(ends):
    near, far = ends
    far.stream.ring.words[AWAKE] = 1
    send(near, b"last words")
    assert not far.stream.ring.is_empty()
    near.stream.shut_down()
    assert [frame.payload for frame in read(far)] == [b"last words"]
    with pytest.raises(PeerLostError):
        far.read(Deadline(PATIENCE))


def test_what_was_put_before_the_stream_breaks_is_read_before_that(ends):
    near, far = ends
    send(near, b"first")
    assert [frame.payload for frame in read(far)] == [b"first"]
    far.stream.ring.words[AWAKE] = 1

    def receive_nothing(_):
        """The peer puts a record after the reader's look at the ring, and then dies."""
        far._recv_into = far.stream.recv_into
        send(near, b"last words")
        near.stream.shut_down()
        raise ConnectionResetError(errno.ECONNRESET, "it had not read all")

    far._recv_into = receive_nothing
    assert [frame.payload for frame in read(far)] == [b"last words"]
    with pytest.raises(PeerLostError):
        far.read(Deadline(PATIENCE))


@pytest.mark.parametrize("how", ["closes", "fails"])
def test_what_is_sent_to_a_reader_that_has_ended_while_it_looked_is_not_lost_silently(ends, how):
    near, far = ends
    far.stream.ring.words[AWAKE] = 1
    if how == "closes":
        far.close()
    else:
        far.fail(ProtocolError("it said something else"))
    with pytest.raises(PeerLostError):
        send(near, b"nobody reads this")


def test_what_is_in_a_ring_counts_as_not_taken(ends):
    near, far = ends
    far.stream.ring.words[AWAKE] = 1
    before = near.queued_nbytes
    send(near, bytes(1000))
    assert near.queued_nbytes - before >= 1000
    read(far)
    assert near.queued_nbytes == before


def test_a_message_that_is_too_large_is_refused_on_either_lane():
    with two_ends(max_nbytes=1000) as (near, far):
        if far.stream.ring is not None:
            far.stream.ring.words[AWAKE] = 1
        send(near, bytes(1001))
        with pytest.raises(ProtocolError):
            far.read(Deadline(PATIENCE))


def test_memory_is_not_shared_if_one_end_does_not_want_it():
    with two_ends(options=({}, {"single_copy": False})) as (near, far):
        assert near.outbox.ring is None
        assert far.outbox.ring is None


def test_an_offer_is_not_answered_before_this_end_has_introduced_itself():
    """A dialler that gives up before has said nothing, and may close what it has dialled."""
    near, far = unintroduced_ends()
    with closing(near), closing(far):
        far._offer_ring(far.stream)
        with pytest.raises(DeadlineExceededError):
            near.await_introduction(Deadline(0.01), lambda: None)
        assert near.outbox.frames_sent == 0
        assert far.read_ready() is None
        far.introduce(is_read=False)
        near.await_introduction(Deadline(PATIENCE), lambda: None)
        near.introduce()
        far.read_ready()
        near.read_ready()
        assert all(end.outbox.ring is not None for end in (near, far))


def test_noise_in_the_ring_ends_the_connection(ends):
    _, far = ends
    far.stream._shared.view[256:288] = pack_header((0, 77, 0), 0, far.parser.state[2])
    far.stream._shared.view.cast("Q")[0] = 64
    with pytest.raises(ProtocolError):
        far.read(Deadline(PATIENCE))
    assert isinstance(far.failure, ProtocolError)


@pytest.mark.fault(37, "what is sent through a ring is sent once, wherever an interrupt falls")
def test_an_interrupted_send_through_the_ring_is_sent_once_or_not_at_all(ends):
    near, far = ends
    numbers = iter(range(1 << 30))

    def run(interrupting):
        number = next(numbers)
        far.stream.ring.words[AWAKE] = 1
        with suppress(Interrupt), interrupting:
            send(near, b"perhaps", tag=number)
        far.stream.ring.words[AWAKE] = 1
        send(near, b"surely", tag=number)
        frames = []
        while not frames or frames[-1].payload != b"surely":
            frames += far.read(Deadline(PATIENCE))
        assert [bytes(frame.payload) for frame in frames] in (
            [b"surely"],
            [b"perhaps", b"surely"],
        )
        assert {frame.envelope[2] for frame in frames} == {number}

    assert every_interrupt(run) >= 10


@pytest.mark.parametrize("second_after", [None, 3])
def test_an_interrupted_receive_through_the_ring_loses_and_repeats_nothing(ends, second_after):
    near, far = ends
    inbox = Inbox(0, Mailbox(), REAL_TIME, far)
    numbers = iter(range(1 << 30))

    def receive(tag):
        taken = inbox.take(Receive((0, int(Channel.MESSAGE), tag)), Deadline(PATIENCE))
        return bytes(taken)

    def run(interrupting):
        number = next(numbers)
        payloads = []
        for lane in (1, 0, 1):
            far.stream.ring.words[AWAKE] = lane
            payloads.append(str(number * 3 + len(payloads)).encode())
            send(near, payloads[-1])
        received = []
        with suppress(Interrupt), interrupting:
            received.append(receive(0))
        received += [receive(0) for _ in range(3 - len(received))]
        assert received == payloads
        assert far.stream.ring.is_empty()
        assert not inbox.is_read

    assert every_interrupt(run, second_after=second_after) >= 10


@pytest.mark.parametrize("how", ["no memory", "not opened", "turned off", "nobody spins"])
def test_without_a_ring_the_stream_carries_everything(how, monkeypatch):
    def refuse(*_):
        raise OSError("not here")

    options = {}
    if how == "no memory":
        monkeypatch.setattr(unix_stream, "SharedMemory", refuse)
    elif how == "not opened":
        monkeypatch.setattr(unix_stream, "open_shared", refuse)
    elif how == "turned off":
        options = {"options": [{"single_copy": False}] * 2}
    else:
        options = {"spin": 0.0}
    with two_ends(**options) as (near, far):
        assert near.outbox.ring is None
        for number in range(20):
            reading = Running(read, far)
            send(near, b"x", tag=number)
            assert [frame.envelope[2] for frame in reading.result()] == [number]


@pytest.fixture(scope="module", autouse=True)
def shared_nursery():
    with nursery():
        yield


def test_nobody_sleeps_through_a_message_whenever_it_comes():
    """Pauses about as long as a reader looks: it stops looking just when something is written."""
    with runtime_folder_of_its_own(), world_of_two("unix") as (near, far):
        echo_with_pauses(near, far, 4000)


def echo_with_pauses(near, far, count):
    echoing = threading.Thread(
        target=far.call,
        args=("eval", f"[backend.send(backend.recv(0, timeout=60), 0) for _ in range({count})]"),
    )
    echoing.start()
    source = random.Random(5)
    longest = 0.0
    for number in range(count):
        begin = time.monotonic()
        near.send(number.to_bytes(8, "little"), 1)
        assert near.recv(1, timeout=PATIENCE) == number.to_bytes(8, "little")
        longest = max(longest, time.monotonic() - begin)
        until = time.perf_counter() + source.choice([0.0, 5e-5, 9e-5, 1e-4, 1.1e-4, 2e-4])
        while time.perf_counter() < until:
            pass
    echoing.join()
    assert longest < PATIENCE / 2
