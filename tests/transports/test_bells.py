"""Bells: a thread sleeps at several streams and is woken by what comes first."""

import os
import time

import pytest

from connected import socket_pair
from rankwire.clock import REAL_TIME
from rankwire.transports.bells import PollBell
from rankwire.transports.memory_poller import MemoryBell
from rankwire.transports.memory_stream import memory_pair
from rankwire.transports.spin import Spin
from rankwire.transports.stream import stream_of
from worlds import PATIENCE, Running


@pytest.fixture(params=["sockets", "memory"])
def kind(request):
    return request.param


@pytest.fixture
def bell(kind):
    bell = MemoryBell(REAL_TIME) if kind == "memory" else PollBell(Spin(1e-4, REAL_TIME))
    yield bell
    bell.close()
    bell.close()
    bell.release()  # too late, and does nothing


@pytest.fixture
def streams(kind, cleanup):
    """Two pairs of ends."""
    pairs = []
    for _ in range(2):
        if kind == "memory":
            pair = memory_pair(1 << 20, REAL_TIME)
        else:
            pair = tuple(map(stream_of, socket_pair("unix")))
        pairs.append(pair)
        for end in pair:
            cleanup.callback(end.close)
    return pairs


def slept(bell, streams, seconds):
    before = time.monotonic()
    bell.listen(streams, seconds)
    return time.monotonic() - before


@pytest.mark.parametrize("which", [0, 1])
def test_what_comes_on_any_stream_wakes_the_thread(bell, streams, which):
    sleeping = Running(slept, bell, [near for near, _ in streams], PATIENCE)
    time.sleep(0.02)
    streams[which][1].send(b"x")
    assert sleeping.result() < PATIENCE / 2
    assert slept(bell, [near for near, _ in streams], PATIENCE) < PATIENCE / 2, "it is still there"


def test_the_end_of_a_stream_wakes_the_thread(bell, streams):
    sleeping = Running(slept, bell, [near for near, _ in streams], PATIENCE)
    time.sleep(0.02)
    streams[1][1].shut_down()
    assert sleeping.result() < PATIENCE / 2


def test_ringing_wakes_the_thread_also_before_it_sleeps(bell, streams):
    bell.release()
    bell.release()
    assert slept(bell, [near for near, _ in streams], PATIENCE) < PATIENCE / 2


def test_it_can_be_rung_without_streams(bell):
    sleeping = Running(slept, bell, [], PATIENCE)
    time.sleep(0.02)
    bell.release()
    assert sleeping.result() < PATIENCE / 2


def test_the_time_ends_the_sleep(bell, streams):
    assert slept(bell, [near for near, _ in streams], 0.02) >= 0.02


def test_a_closed_bell_gives_its_descriptor_back():
    before = os.listdir("/proc/self/fd")
    PollBell(Spin(0.0, REAL_TIME)).close()
    assert os.listdir("/proc/self/fd") == before
