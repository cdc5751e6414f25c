"""Pollers: what both kinds do, and the one over descriptors; see also test_memory_stream.py."""

import threading
import time

import pytest

from connected import read_into, socket_pair, write
from rankwire.clock import REAL_TIME
from rankwire.transports import stream_of
from rankwire.transports.memory_stream import MemoryPoller, memory_pair
from rankwire.transports.poller import EpollPoller
from rankwire.transports.spin import Spin
from rankwire.wire.ring import READ, RING_NBYTES, WRITTEN, RingReader
from worlds import PATIENCE


@pytest.fixture
def poller():
    made = EpollPoller()
    yield made
    made.close()


@pytest.fixture
def streams(sockets):
    return [stream_of(sock) for sock in sockets]


@pytest.fixture
def two_pairs(transport, cleanup):
    pairs = [[stream_of(sock) for sock in socket_pair(transport)] for _ in range(2)]
    for pair in pairs:
        for stream in pair:
            cleanup.callback(stream.close)
    return pairs


def read(stream):
    stream.recv_into(memoryview(bytearray(100)))


@pytest.fixture(params=["unix", "tcp", "memory"])
def either(request, cleanup):
    """A poller of each kind, and two ends of a connection."""
    if request.param == "memory":
        made, ends = MemoryPoller(REAL_TIME), memory_pair(1 << 20, REAL_TIME)
    else:
        made, ends = EpollPoller(), list(map(stream_of, socket_pair(request.param)))
    cleanup.callback(made.close)
    for end in ends:
        cleanup.callback(end.close)
    return made, *ends


def test_a_watched_stream_is_told_as_long_as_there_is_something_to_read(either):
    poller, near, far = either
    poller.register(near, "key")
    assert poller.poll(0) is None
    write(far, b"x")
    assert [poller.poll(PATIENCE), poller.poll(0)] == ["key", "key"]
    read_into(near, bytearray(100))
    assert poller.poll(0) is None
    far.shut_down()
    assert poller.poll(PATIENCE) == "key"


def test_an_armed_stream_is_told_once(either):
    poller, near, far = either
    poller.arm(near, "key")
    write(far, b"x")
    assert poller.poll(PATIENCE) == "key"
    write(far, b"y")
    assert poller.poll(0.01) is None
    poller.arm(near, "key")
    assert poller.poll(PATIENCE) == "key"


def test_a_stream_that_is_watched_no_more_is_not_told(either):
    poller, near, far = either
    poller.register(near, "key")
    write(far, b"x")
    poller.unregister(near)
    poller.unregister(near)
    write(far, b"y")
    assert poller.poll(0.01) is None


def test_a_closed_stream_is_not_armed(poller, streams):
    near, _ = streams
    near.close()
    poller.arm(near, "key")
    assert poller.poll(0) is None


def test_waking_ends_one_poll(poller):
    poller.wake()
    assert poller.poll(PATIENCE) is None
    begin = time.monotonic()
    threading.Timer(0.02, poller.wake).start()
    assert poller.poll(PATIENCE) is None
    assert time.monotonic() - begin < PATIENCE
    assert poller.poll(0.01) is None


@pytest.mark.parametrize("spin", [0.0, PATIENCE], ids=["sleeping", "looking"])
def test_waking_ends_a_poll_that(poller, streams, spin):
    near, far = streams
    poller.register(near, "key")
    far.send(b"x")
    assert poller.poll(PATIENCE, Spin(spin, REAL_TIME)) == "key"  # of which it expects more
    read(near)
    begin = time.monotonic()
    threading.Timer(0.02, poller.wake).start()
    assert poller.poll(PATIENCE, Spin(spin, REAL_TIME)) is None
    assert time.monotonic() - begin < PATIENCE


def test_looking_that_pays_is_done_as_long_as_ever(poller, two_pairs):
    (near, far), _ = two_pairs
    poller.register(near, "key")
    spin = Spin(0.1, REAL_TIME)
    for number in range(20):  # looks at the last stream, and at all
        spin.budget = spin.most / 2
        far.send(b"x")
        assert poller.poll(0, spin) == "key"
        assert spin.budget == spin.most, number
        read(near)
    assert poller.poll(0, spin) is None
    assert spin.budget == 0.0


def test_looking_finds_what_comes_on_any_stream(poller, two_pairs):
    spin = Spin(PATIENCE, REAL_TIME)
    for number, (near, _) in enumerate(two_pairs):
        poller.register(near, number)
    for number in (0, 0, 1, 1, 0):
        near, far = two_pairs[number]
        far.send(b"x")
        assert poller.poll(0, spin) == number
        read(near)


@pytest.mark.parametrize("spin", [0.0, PATIENCE], ids=["sleeping", "looking"])
def test_a_stream_that_always_has_input_does_not_keep_others_from_their_turn(
    poller, two_pairs, spin
):
    spin = Spin(spin, REAL_TIME)
    (busy, its_peer), (near, far) = two_pairs
    poller.register(busy, "busy")
    poller.register(near, "other")
    its_peer.send(b"x")
    assert poller.poll(PATIENCE, spin) == "busy"
    far.send(b"x")
    polls = [poller.poll(PATIENCE, spin) for _ in range(40)]
    assert {*polls} == {"busy", "other"}
    poller.unregister(near)
    poller.wake()
    polls = [poller.poll(PATIENCE, spin) for _ in range(40)]
    assert polls.count(None) == 1


@pytest.mark.parametrize("transport", ["unix"], indirect=True)
def test_a_ring_that_always_has_records_does_not_keep_others_from_their_turn(poller, two_pairs):
    spin = Spin(PATIENCE, REAL_TIME)
    (busy, its_peer), (near, far) = two_pairs
    for stream in (busy, near):
        stream.read_ring(RingReader(memoryview(bytearray(RING_NBYTES))))
    poller.register(busy, "busy")
    poller.register(near, "other")
    its_peer.send(b"x")
    assert poller.poll(PATIENCE, spin) == "busy"
    read(busy)
    busy.ring.words[WRITTEN] = 32
    far.send(b"x")
    assert {poller.poll(PATIENCE, spin) for _ in range(40)} == {"busy", "other"}
    busy.ring.words[READ] = 32
    assert {poller.poll(PATIENCE, spin) for _ in range(40)} == {"other"}
    read(near)
    busy.ring.words[WRITTEN] = 64  # it was looked away from: this came before that
    assert poller.poll(PATIENCE) == "busy"
