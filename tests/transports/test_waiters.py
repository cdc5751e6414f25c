"""Waiters: a thread sleeps at several streams and is woken by what comes first."""

import os
import time

import pytest

from connected import socket_pair, write
from rankwire.clock import REAL_TIME
from rankwire.transports import stream_of
from rankwire.transports.memory_stream import MemoryWaiter, memory_pair
from rankwire.transports.poller import PollWaiter
from rankwire.transports.spin import Spin
from worlds import PATIENCE, Running


@pytest.fixture(params=["sockets", "memory"])
def kind(request):
    return request.param


@pytest.fixture
def waiter(kind):
    waiter = MemoryWaiter(REAL_TIME) if kind == "memory" else PollWaiter(Spin(1e-4, REAL_TIME))
    yield waiter
    waiter.close()
    waiter.close()
    waiter.release()  # too late, and does nothing


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


def slept(waiter, streams, seconds):
    before = time.monotonic()
    waiter.wait(streams, seconds)
    return time.monotonic() - before


@pytest.mark.parametrize("which", [0, 1])
def test_what_comes_on_any_stream_wakes_the_thread(waiter, streams, which):
    sleeping = Running(slept, waiter, [near for near, _ in streams], PATIENCE)
    time.sleep(0.02)
    write(streams[which][1], b"x")
    assert sleeping.result() < PATIENCE / 2
    assert slept(waiter, [near for near, _ in streams], PATIENCE) < PATIENCE / 2, (
        "it is still there"
    )


def test_the_end_of_a_stream_wakes_the_thread(waiter, streams):
    sleeping = Running(slept, waiter, [near for near, _ in streams], PATIENCE)
    time.sleep(0.02)
    streams[1][1].shut_down()
    assert sleeping.result() < PATIENCE / 2


def test_a_release_wakes_the_thread_also_before_it_sleeps(waiter, streams):
    waiter.release()
    waiter.release()
    assert slept(waiter, [near for near, _ in streams], PATIENCE) < PATIENCE / 2


def test_it_can_be_released_without_streams(waiter):
    sleeping = Running(slept, waiter, [], PATIENCE)
    time.sleep(0.02)
    waiter.release()
    assert sleeping.result() < PATIENCE / 2


def test_the_time_ends_the_sleep(waiter, streams):
    assert slept(waiter, [near for near, _ in streams], 0.02) >= 0.02


def test_a_closed_waiter_gives_its_descriptor_back():
    before = os.listdir("/proc/self/fd")
    PollWaiter(Spin(0.0, REAL_TIME)).close()
    assert os.listdir("/proc/self/fd") == before
