"""Operations in the background: handles, and who runs them while somebody waits."""

import asyncio
import gc
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial

import numpy as np
import pytest
from queued import new_background, submit
from sums import on_all

import rankwire
from rankwire.collectives.work import Work
from rankwire.errors import DeadlineExceededError
from worlds import PATIENCE, eventually

# -- handles ---------------------------------------------------------------------------------------


def test_a_result(worker):
    work = submit(worker, lambda: 42)
    assert work.wait() == work.result() == work.wait(timeout=0) == 42
    assert work.done()
    assert not work.running()
    assert work.exception() is None


def test_it_has_what_its_base_class_has():
    base, work = Future(), Work("test()", new_background(), 0)
    base.set_running_or_notify_cancel()
    for name, value in vars(base).items():
        assert vars(work)[name] == value or name == "_condition"
    assert isinstance(work._condition, threading.Condition)


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

    assert Photograph("test()", new_background(), 0).wait(timeout=0.01) == "just in time"


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


# -- asyncio ---------------------------------------------------------------------------------------


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
