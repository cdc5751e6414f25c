"""Sleeping on a word: it ends by a change, a wake-up, a signal or the time; never before."""

import ctypes
import mmap
import os
import signal
import threading
import time

import pytest

from rankwire.transports.shared_memory import CAN_SHARE
from rankwire.transports.shared_segment import sleep_while, wake_all
from worlds import Running, eventually

pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="Linux on x86 only")

LONG = 30.0
SOON = 8.0


@pytest.fixture
def word():
    """A word of eight bytes that forks of this process share, and its address."""
    memory = mmap.mmap(-1, 4096)
    view = memoryview(memory).cast("Q")
    return view, ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))


def test_a_word_that_has_changed_already_is_not_slept_on(word):
    view, address = word
    view[0] = 5
    begin = time.monotonic()
    sleep_while(address, 4, LONG)
    assert time.monotonic() - begin < SOON


def test_a_sleep_ends_at_its_time(word):
    begin = time.monotonic()
    sleep_while(word[1], 0, 0.05)
    assert time.monotonic() - begin >= 0.045


def test_all_that_sleep_are_woken(word):
    view, address = word
    sleepers = [Running(sleep_while, address, 0, LONG) for _ in range(3)]
    view[0] = 1
    eventually(lambda: wake_all(address) or all(sleeper.done for sleeper in sleepers), SOON)


def test_a_sleeper_in_another_process_is_woken(word):
    view, address = word
    child = os.fork()
    if child == 0:
        sleep_while(address, 0, LONG)
        os._exit(7)
    view[0] = 1
    ended = eventually(lambda: wake_all(address) or os.waitpid(child, os.WNOHANG)[0] == child, SOON)
    assert ended


def test_a_signal_ends_a_sleep(word):
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    try:
        timer = threading.Timer(
            0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1)
        )
        timer.start()
        begin = time.monotonic()
        while not heard and time.monotonic() - begin < SOON:
            sleep_while(word[1], 0, LONG)
        assert heard
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
