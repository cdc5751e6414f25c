"""The clock alone; what worlds do with theirs is in ``backends/test_world_clock.py``."""

import threading
import time

import pytest

from clocks import FastClock
from rankwire.clock import REAL_TIME, Clock

SOON = 10.0  # what must happen "at once" happens within it on the slowest machine


@pytest.fixture(params=[Clock, FastClock], ids=["real", "by hand"])
def clock(request):
    return request.param()


def test_real_time_is_the_monotonic_time_itself():
    assert REAL_TIME.now is time.monotonic
    assert REAL_TIME.sleep is time.sleep


def test_taking_a_lock_is_one_call_of_a_c_function():
    """Or an interrupt might fall between taking it and saying so."""
    assert not hasattr(REAL_TIME.acquire, "__code__")


def test_time_passes_while_it_sleeps(clock):
    begin = clock.now()
    clock.sleep(0.02)
    assert 0.02 <= clock.now() - begin < SOON


def test_a_lock_is_taken_in_time_or_not(clock):
    lock = threading.Lock()
    assert clock.acquire(lock, True, SOON)
    begin = time.monotonic()
    assert not clock.acquire(lock, True, 0.02)
    assert 0.02 <= time.monotonic() - begin < SOON
    threading.Timer(0.02, lock.release).start()
    assert clock.acquire(lock, True, -1)


def test_an_event_is_waited_for_until_the_time_is_over(clock):
    event = threading.Event()
    assert not clock.wait(event, 0.02)
    threading.Timer(0.02, event.set).start()
    assert clock.wait(event)


def test_something_holds_after_a_condition_was_notified_often_enough(clock):
    condition, numbers = threading.Condition(), []

    def count():
        for number in range(3):
            time.sleep(0.005)
            with condition:
                numbers.append(number)
                condition.notify_all()

    thread = threading.Thread(target=count)
    thread.start()
    with condition:
        assert clock.wait_for(condition, lambda: len(numbers) == 3, SOON)
    clock.join(thread)
    assert not thread.is_alive()


def test_what_does_not_hold_in_time_is_given_up_though_it_was_notified():
    clock, condition = FastClock(10.0), threading.Condition()
    condition.wait = lambda seconds: clock.sleep(0.05)  # it wakes up too early, again and again
    begin = clock.now()
    with condition:
        assert not clock.wait_for(condition, lambda: False, 0.5)
    assert 0.5 <= clock.now() - begin < 10 * SOON


def test_what_holds_already_is_not_waited_for(clock):
    assert clock.wait_for(threading.Condition(), lambda: True, 0.0)
    assert clock.wait_for(threading.Condition(), lambda: True)


def test_a_thread_that_goes_on_is_not_joined(clock):
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    thread.start()
    clock.join(thread, 0.02)
    assert thread.is_alive()
    go_on.set()
    clock.join(thread, SOON)
    assert not thread.is_alive()
