"""Operations in the background: handles, order, threads."""

import asyncio
import gc
import logging
import threading
import time
import weakref
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial

import numpy as np
import pytest
from sums import on_all

import rankwire
from rankwire.clock import REAL_TIME
from rankwire.collectives import work as work_module
from rankwire.collectives.work import OperationThread, Work
from rankwire.errors import DeadlineExceededError
from rankwire.testing import simulated_world
from worlds import PATIENCE, eventually


@pytest.fixture
def worker():
    return OperationThread("test-worker", REAL_TIME)


@pytest.fixture
def pair():
    with simulated_world(2) as world:
        yield world


def submit(worker, run, description="test()"):
    work = Work(description, REAL_TIME)
    worker.submit(work, run)
    return work


def threads_named(name):
    return [thread for thread in threading.enumerate() if thread.name == name]


# -- handles ---------------------------------------------------------------------------------------


def test_a_result(worker):
    work = submit(worker, lambda: 42)
    assert work.wait() == work.result() == work.wait(timeout=0) == 42
    assert work.done()
    assert not work.running()
    assert work.exception() is None


def test_an_error(worker):
    work = submit(worker, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        work.wait()
    assert work.done()
    assert isinstance(work.exception(), ZeroDivisionError)


def test_an_error_of_the_deepest_kind(worker):
    def leave():
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        submit(worker, leave).wait(PATIENCE)
    assert submit(worker, lambda: "the thread goes on").wait(PATIENCE)


def test_waiting_ends_in_time_while_the_operation_goes_on(pair):
    work = rankwire.all_reduce(pair[0], np.ones(3), async_op=True)
    begin = time.monotonic()
    with pytest.raises(DeadlineExceededError) as caught:
        work.wait(timeout=0.05)
    assert 0.04 < time.monotonic() - begin < 5.0
    assert (caught.value.limit, caught.value.op) == (0.05, "wait")
    assert "all_reduce(sum, float64, (3,)) goes on" in str(caught.value)
    assert not work.done()
    with pytest.raises(DeadlineExceededError):
        work.wait(timeout=0)
    rankwire.all_reduce(pair[1], np.ones(3))
    assert work.wait(PATIENCE).tolist() == [2.0] * 3


def test_the_operations_own_limit_is_another_error_than_that_of_the_wait(pair):
    work = rankwire.all_reduce(pair[0], np.ones(3), async_op=True, timeout=0.1)
    with pytest.raises(DeadlineExceededError) as caught:
        work.wait(timeout=PATIENCE)
    assert caught.value.limit == 0.1
    assert caught.value.waiting_for == [1]
    assert work.exception() is caught.value


def test_an_operation_that_ends_in_the_last_moment_gives_its_result():
    class Photograph(Work):
        """It is done between the end of the wait and the look at it."""

        def result(self, timeout=None):
            if not self.done():
                self.set_result("just in time")
                raise FutureTimeoutError
            return super().result(timeout)

    assert Photograph("test()", REAL_TIME).wait(timeout=0.01) == "just in time"


def test_it_cannot_be_cancelled(pair):
    work = rankwire.barrier(pair[0], async_op=True)
    assert not work.cancel()
    assert work.running()
    rankwire.barrier(pair[1])
    assert work.wait(PATIENCE) is None
    assert not work.cancelled()


def test_what_it_looks_like(worker):
    gate = threading.Event()
    work = submit(worker, gate.wait, "barrier()")
    assert repr(work) == "<Work barrier(), running>"
    assert isinstance(work, Future)
    gate.set()
    work.wait()
    assert repr(work) == "<Work barrier(), done>"
    failed = submit(worker, partial(int, "x"))
    failed.exception(PATIENCE)
    assert repr(failed).startswith("<Work test(), failed: invalid literal")


@pytest.mark.parametrize("seconds", [-1.0, 0, 0.0])
def test_no_time_polls(worker, seconds):
    gate = threading.Event()
    work = submit(worker, gate.wait)
    with pytest.raises(DeadlineExceededError):
        work.wait(timeout=seconds)
    gate.set()
    work.wait()


def test_a_dropped_handle_completes(pair):
    total = np.ones(3)
    rankwire.all_reduce(pair[0], total, async_op=True)
    gc.collect()
    rankwire.all_reduce(pair[1], np.ones(3))
    eventually(lambda: total.tolist() == [2.0] * 3)


# -- callbacks and asyncio -------------------------------------------------------------------------


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
    assert "from a callback" in caplog.text


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


def test_it_can_be_awaited(pair):
    async def each(backend):
        works = [rankwire.all_gather(backend, np.array([i]), async_op=True) for i in range(5)]
        gathered = await asyncio.gather(*works)
        last = await rankwire.barrier(backend, async_op=True)
        return [array.tolist() for array in gathered], last, await works[0] is gathered[0]

    results = on_all(pair, lambda backend: asyncio.run(each(backend)))
    assert results == [([[i, i] for i in range(5)], None, True)] * 2


def test_awaiting_raises_its_error(pair):
    async def late():
        await rankwire.all_reduce(pair[0], np.ones(2), async_op=True, timeout=0.1)

    with pytest.raises(DeadlineExceededError):
        asyncio.run(late())


def test_an_await_that_is_given_up_leaves_the_operation_alone(pair):
    async def impatient():
        work = rankwire.all_reduce(pair[0], np.ones(2), async_op=True)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(work, 0.02)
        assert not work.cancelled()
        return work

    work = asyncio.run(impatient())
    rankwire.all_reduce(pair[1], np.ones(2))
    assert work.wait(PATIENCE).tolist() == [2.0, 2.0]


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
    monkeypatch.setattr(work_module, "_IDLE", 0.05)
    assert not threads_named("test-worker")
    for _ in range(3):
        gate = threading.Event()
        works = [submit(worker, gate.wait) for _ in range(5)]
        (thread,) = threads_named("test-worker")
        assert thread.daemon
        gate.set()
        for work in works:
            assert work.wait(PATIENCE)
        thread.join(PATIENCE)
        assert not threads_named("test-worker")


def test_a_thread_that_is_about_to_end_loses_no_work(worker, monkeypatch):
    monkeypatch.setattr(work_module, "_IDLE", 0.001)
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
    monkeypatch.setattr(work_module, "_IDLE", 2.0)
    work = submit(worker, lambda: np.ones(1000))
    result = weakref.ref(work.wait(PATIENCE))
    del work
    gc.collect()
    eventually(lambda: result() is None, timeout=1.5)
