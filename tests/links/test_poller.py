"""Pollers over descriptors; that in memory is in test_memory_stream.py."""

import threading
import time

import pytest

from rankwire.links.poller import EpollPoller
from rankwire.links.spin import Spin
from rankwire.links.stream import SocketStream
from worlds import PATIENCE


@pytest.fixture
def poller():
    made = EpollPoller()
    yield made
    made.close()


@pytest.fixture
def streams(sockets):
    return [SocketStream(sock) for sock in sockets]


def read(stream):
    stream.recv_into(memoryview(bytearray(100)))


def test_a_watched_stream_is_told_as_long_as_there_is_something_to_read(poller, streams):
    near, far = streams
    poller.register(near, "key")
    assert poller.poll(0) is None
    far.send(b"x")
    assert [poller.poll(PATIENCE), poller.poll(0)] == ["key", "key"]
    read(near)
    assert poller.poll(0) is None


def test_an_armed_stream_is_told_once(poller, streams):
    near, far = streams
    poller.arm(near, "key")
    far.send(b"x")
    assert poller.poll(PATIENCE) == "key"
    assert poller.poll(0.01) is None
    poller.arm(near, "key")
    assert poller.poll(PATIENCE) == "key"


def test_a_stream_that_is_watched_no_more_is_not_told(poller, streams):
    near, far = streams
    poller.register(near, "key")
    far.send(b"x")
    poller.unregister(near)
    poller.unregister(near)
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


def test_waking_ends_a_poll_that_looks_before_it_sleeps(poller):
    begin = time.monotonic()
    poller.wake()
    assert poller.poll(PATIENCE, Spin(0.01)) is None
    assert time.monotonic() - begin < PATIENCE
