"""Callbacks of work: where they run, and in which order."""

import logging
import threading

import numpy as np
import pytest
from queued import NAME, submit
from sums import on_all

import rankwire
from worlds import PATIENCE, eventually


def test_callbacks_get_the_handle(worker):
    done = []
    work = submit(worker, lambda: 1)
    work.add_done_callback(done.append)
    work.wait()
    eventually(lambda: done)
    work.add_done_callback(done.append)  # at once, by now
    assert done == [work, work]


def test_a_callback_that_raises_is_logged_and_harms_nobody(worker, caplog):
    def fail(work):
        raise ValueError("from a callback")

    gate = threading.Event()
    first = submit(worker, gate.wait)
    first.add_done_callback(fail)
    second = submit(worker, lambda: 2)
    with caplog.at_level(logging.ERROR):
        gate.set()
        assert second.wait(PATIENCE) == 2
        eventually(lambda: "from a callback" in caplog.text)


def test_a_callback_that_exits_does_not_stop_what_comes_after(worker):
    def leave(work):
        raise SystemExit

    gate = threading.Event()
    first = submit(worker, gate.wait)
    first.add_done_callback(leave)
    second = submit(worker, lambda: 2)
    gate.set()
    assert second.wait(timeout=PATIENCE) == 2


def test_a_callback_may_begin_the_next_operation(pair):
    def each(backend):
        begun = []

        def begin_next(work):
            begun.append(rankwire.all_reduce(backend, work.result(), async_op=True))

        first = rankwire.all_reduce(backend, np.ones(2), async_op=True)
        first.add_done_callback(begin_next)
        eventually(lambda: begun)
        return begun[0].wait(PATIENCE).tolist()

    assert on_all(pair, each) == [[4.0, 4.0]] * 2


@pytest.mark.parametrize("waits_too", [False, True], ids=["nobody waits", "somebody waits"])
def test_a_callback_may_wait_for_operations_of_the_same_group(pair, waits_too):
    def each(backend):
        totals = []

        def reduce_on(work):
            blocking = rankwire.all_reduce(backend, work.result() + 1, timeout=PATIENCE)
            later = rankwire.all_reduce(backend, blocking + 1, async_op=True, timeout=PATIENCE)
            totals.append(later.wait().tolist())

        first = rankwire.all_reduce(backend, np.ones(1), async_op=True)
        first.add_done_callback(reduce_on)
        if waits_too:
            first.wait(PATIENCE)
        eventually(lambda: totals)
        return totals[0]

    assert on_all(pair, each) == [[14.0]] * 2


def test_callbacks_run_in_one_thread_of_their_own_in_the_order_of_completion(worker):
    gate, log = threading.Event(), []

    def note(number, work):
        log.append((number, threading.current_thread().name))

    works = [submit(worker, gate.wait) for _ in range(10)]
    for number, work in reversed(list(enumerate(works))):
        work.add_done_callback(lambda work, number=number: note(number, work))
    gate.set()
    works[-1].wait()
    eventually(lambda: len(log) == 10)
    assert log == [(number, f"{NAME}-callbacks") for number in range(10)]


def test_a_callback_of_work_that_is_done_runs_at_once_in_this_thread(worker, caplog):
    work = submit(worker, lambda: 1)
    work.wait()
    threads = []
    work.add_done_callback(lambda _: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()]
    with caplog.at_level(logging.ERROR):
        work.add_done_callback(lambda _: 1 / 0)
    assert "division by zero" in caplog.text


def test_the_thread_comes_with_callbacks_and_ends_without(worker, monkeypatch):
    monkeypatch.setattr("rankwire.collectives.work._IDLE", 0.05)

    def threads():
        return [t for t in threading.enumerate() if t.name == f"{NAME}-callbacks"]

    submit(worker, lambda: 1).wait()
    assert not threads()
    for _ in range(3):
        gate, told = threading.Event(), threading.Event()
        work = submit(worker, gate.wait)
        work.add_done_callback(lambda _, told=told: told.set())
        gate.set()
        assert told.wait(PATIENCE)
        for thread in threads():
            assert thread.daemon
            thread.join(PATIENCE)
        assert not threads()


def test_a_slow_callback_holds_up_no_operation(worker):
    gate = threading.Event()
    begin = threading.Event()
    first = submit(worker, begin.wait)
    first.add_done_callback(lambda _: gate.wait())
    begin.set()
    assert submit(worker, lambda: 2).wait(PATIENCE) == 2
    gate.set()
