"""Operations in the background: order, the worker, and those who wait and help it."""

import gc
import signal
import threading
import time
import weakref
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
from queued import NAME, keep_workers_away, new_task, submit
from sums import on_all

import rankwire
from interrupts import Interrupt, every_interrupt
from rankwire.collectives import background as background_module
from rankwire.errors import ConfigurationError
from worlds import PATIENCE, eventually


def threads_named(name):
    return [thread for thread in threading.enumerate() if thread.name == name]


# -- order and threads -----------------------------------------------------------------------------


def test_one_after_the_other_in_the_order_they_were_begun(worker):
    log, inside = [], threading.Lock()

    def run(number):
        assert inside.acquire(blocking=False), "another one is running"
        log.append(number)
        time.sleep(0.001)
        inside.release()

    works = [submit(worker, partial(run, number)) for number in range(20)]
    for work in works:
        work.wait(PATIENCE)
    assert log == list(range(20))


def test_one_thread_that_comes_with_work_and_ends_without(worker, monkeypatch):
    monkeypatch.setattr(background_module, "_IDLE", 0.05)
    assert not threads_named(NAME)
    for _ in range(3):
        gate = threading.Event()
        works = [submit(worker, gate.wait) for _ in range(5)]
        (thread,) = threads_named(NAME)
        assert thread.daemon
        gate.set()
        for work in works:
            assert work.wait(PATIENCE)
        thread.join(PATIENCE)
        assert not threads_named(NAME)


def test_a_thread_that_is_about_to_end_loses_no_work(worker, monkeypatch):
    monkeypatch.setattr(background_module, "_IDLE", 0.001)
    for number in range(100):
        assert submit(worker, lambda number=number: number).wait(PATIENCE) == number
        time.sleep(0.0012 if number % 2 else 0.0008)


def test_many_threads_may_submit(worker):
    def submit_some(offset):
        works = [submit(worker, lambda i=i: i) for i in range(offset, offset + 50)]
        return [work.wait(PATIENCE) for work in works]

    results = on_all(range(0, 400, 50), submit_some)
    assert [number for of_thread in results for number in of_thread] == list(range(400))


def test_the_thread_of_a_group_is_named_after_its_rank(pair):
    work = rankwire.barrier(pair[1], async_op=True)
    assert threads_named("rankwire-collectives-1")
    rankwire.barrier(pair[0])
    work.wait(PATIENCE)


def test_an_idle_thread_keeps_no_result_alive(worker, monkeypatch):
    monkeypatch.setattr(background_module, "_IDLE", 2.0)
    work = submit(worker, lambda: np.ones(1000))
    result = weakref.ref(work.wait(PATIENCE))
    del work
    gc.collect()
    eventually(lambda: result() is None, timeout=1.5)


# -- those who wait --------------------------------------------------------------------------------


@pytest.fixture
def unattended(monkeypatch, worker):
    """A background whose worker is not woken."""
    keep_workers_away(monkeypatch)
    return worker


def test_who_waits_runs_all_up_to_its_own_and_no_more(unattended):
    ran = []

    def run(number):
        ran.append((number, threading.current_thread()))
        return number

    works = [submit(unattended, partial(run, number)) for number in range(5)]
    assert works[2].wait() == 2
    here = threading.current_thread()
    assert ran == [(0, here), (1, here), (2, here)]
    assert [work.done() for work in works] == [True] * 3 + [False] * 2
    assert [works[4].exception(), works[3].result()] == [None, 3]


def test_an_error_of_an_earlier_one_is_not_raised_to_who_waits_for_a_later_one(unattended):
    failing, later = submit(unattended, lambda: 1 / 0), submit(unattended, lambda: "later")
    assert later.wait() == "later"
    assert isinstance(failing.exception(0), ZeroDivisionError)


def test_who_comes_when_the_worker_is_at_an_earlier_one_waits_for_it(worker):
    begun, gate, threads = threading.Event(), threading.Event(), []

    def first():
        begun.set()
        assert gate.wait(PATIENCE)

    submit(worker, first)
    later = submit(worker, lambda: threads.append(threading.current_thread().name))
    assert begun.wait(PATIENCE)
    threading.Timer(0.05, gate.set).start()
    later.wait()
    assert threads == [NAME]


@pytest.mark.parametrize("timeout", [0.05, 1.0])
def test_who_waits_for_less_than_the_operation_may_take_does_not_run_it(worker, timeout):
    begun, gate = threading.Event(), threading.Event()

    def slow():
        begun.set()
        return threading.current_thread().name, gate.wait(PATIENCE)

    work = submit(worker, slow, limit=PATIENCE)
    before = time.monotonic()
    with pytest.raises(TimeoutError):
        work.wait(timeout)
    assert timeout * 0.9 < time.monotonic() - before < timeout + 5.0
    assert begun.wait(PATIENCE)
    gate.set()
    assert work.wait(2 * PATIENCE) == (NAME, True)


def test_who_waits_for_longer_than_the_operation_may_take_runs_it(unattended):
    work = submit(unattended, threading.current_thread, limit=1.0)
    assert work.wait(2.0) is threading.current_thread()


def test_an_infinite_timeout_is_none(worker):
    assert submit(worker, lambda: 1, limit=float("inf")).wait(float("inf")) == 1


@pytest.mark.parametrize("waits_before", [0, 20])
def test_a_blocking_operation_has_those_in_the_background_run_before_it(pair, waits_before):
    """Also where the worker leaves them to whoever waits, because all were waited for so far."""

    def each(backend):
        for _ in range(waits_before):
            rankwire.all_reduce(backend, np.ones(1), async_op=True).wait()
        work = rankwire.all_reduce(backend, np.ones(1), async_op=True)
        total = rankwire.all_reduce(backend, np.full(1, 2.0))
        return work.done(), work.result().tolist(), total.tolist()

    assert on_all(pair, each) == [(True, [2.0], [4.0])] * 2


def test_work_that_nobody_waits_for_is_run_also_after_many_that_were_waited_for(worker):
    for _ in range(200):
        assert submit(worker, lambda: 1).wait() == 1
    for pause in (0.0, 0.0001, 0.001, 0.01):
        time.sleep(pause)
        done = threading.Event()
        submit(worker, done.set)
        assert done.wait(PATIENCE)


def test_several_threads_may_wait_for_work_of_one_group(worker):
    """Each runs its own and those before it, one at a time, and none is left over."""
    log, inside = [], threading.Lock()

    def run(number):
        assert inside.acquire(blocking=False), "another one is running"
        log.append(number)
        inside.release()

    works = [submit(worker, partial(run, number)) for number in range(400)]
    on_all(range(8), lambda first: [work.wait() for work in works[first::8]])
    assert log == list(range(400))


def test_a_task_that_is_withdrawn_is_not_run(unattended):
    ran = []
    task = new_task(unattended, lambda: ran.append(1))
    unattended.submit(task)
    assert unattended.withdraw(task)
    assert unattended.withdraw(new_task(unattended, list)), "it was never submitted"
    submit(unattended, lambda: None).wait()
    assert not ran


def test_a_task_that_runs_or_has_run_cannot_be_withdrawn(worker):
    begun, gate = threading.Event(), threading.Event()
    task = new_task(worker, lambda: [begun.set(), gate.wait(PATIENCE)])
    worker.submit(task)
    assert begun.wait(PATIENCE)
    assert not worker.withdraw(task)
    gate.set()
    task.work.wait()
    assert not worker.withdraw(task)


# -- interrupts ------------------------------------------------------------------------------------


def test_an_interrupt_ends_the_wait_and_the_operation_that_it_fell_into(unattended):
    def interrupted():
        raise KeyboardInterrupt

    first, second, third = (submit(unattended, run) for run in (int, interrupted, lambda: 3))
    with pytest.raises(KeyboardInterrupt):
        third.wait()
    assert first.result(0) == 0
    assert isinstance(second.exception(0), KeyboardInterrupt)
    assert not third.done()
    assert third.wait() == 3


@pytest.mark.fault(37, "after a caught interrupt while waiting for work the queue goes on")
@pytest.mark.parametrize("is_attended", [True, False])
@pytest.mark.parametrize("second_after", [None, 1, 7])
def test_an_interrupt_anywhere_while_waiting_loses_no_work(
    worker, second_after, is_attended, monkeypatch
):
    if not is_attended:
        keep_workers_away(monkeypatch)

    def run(interrupting):
        ran, told = [], []

        def submit_one(number):
            work = submit(worker, lambda: ran.append(number) or number)
            work.add_done_callback(lambda work: told.append(number))
            return work

        works = [submit_one(number) for number in range(3)]
        with suppress(Interrupt), interrupting:
            works[2].wait()
        for number, work in enumerate(works):
            error = work.exception(PATIENCE if is_attended else None)
            assert isinstance(error, Interrupt) if error else work.result(0) == number
        assert submit(worker, lambda: "goes on").wait() == "goes on"
        assert len({*ran}) == len(ran)
        eventually(lambda: told == [0, 1, 2])

    assert every_interrupt(run, second_after=second_after) >= 10


@pytest.mark.fault(37, "after a caught interrupt while submitting work the queue goes on")
def test_an_interrupt_anywhere_in_submitting_loses_no_other_work(worker):
    def run(interrupting):
        ran = []
        task = new_task(worker, lambda: ran.append("task"))
        is_interrupted = False
        try:
            with interrupting:
                worker.submit(task)
        except Interrupt:
            is_interrupted = worker.withdraw(task)
        assert submit(worker, lambda: "goes on").wait() == "goes on"
        assert ran == ([] if is_interrupted else ["task"])

    assert every_interrupt(run) >= 2


def test_a_signal_handler_that_waits_for_later_work_is_told_that_its_thread_runs_an_earlier(
    unattended,
):
    """It would wait for itself: the earlier one stands still as long as the handler runs."""
    told = []

    def handle(number, frame):
        with pytest.raises(ConfigurationError, match="signal handler"):
            later.wait()
        told.append(number)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        earlier = submit(unattended, lambda: signal.raise_signal(signal.SIGUSR1))
        later = submit(unattended, lambda: "later")
        earlier.wait()
        assert told == [signal.SIGUSR1]
        assert later.wait() == "later"
    finally:
        signal.signal(signal.SIGUSR1, before)
