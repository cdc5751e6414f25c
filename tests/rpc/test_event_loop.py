"""One event loop for all ``async def`` functions."""

import asyncio
import threading

from rankwire.clock import REAL_TIME
from rankwire.rpc.served_call import EventLoop


class Holder:
    task = None


def test_coroutines_run_concurrently_in_one_thread():
    loop = EventLoop(REAL_TIME)
    threads, done = set(), threading.Semaphore(0)

    async def work():
        threads.add(threading.current_thread())
        await asyncio.sleep(0.05)
        done.release()

    for _ in range(100):
        loop.run(work, Holder())
    for _ in range(100):
        assert done.acquire(timeout=10)
    assert len(threads) == 1
    loop.close()


def test_closing_cancels_what_runs():
    loop = EventLoop(REAL_TIME)
    started, cancelled = threading.Event(), threading.Event()

    async def work():
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    loop.run(work, Holder())
    assert started.wait(10)
    loop.close()
    assert cancelled.is_set()
    loop.close()
    loop.run(work, Holder())  # ignored: nobody is left to run it


def test_without_coroutines_there_is_no_thread():
    before = threading.active_count()
    loop = EventLoop(REAL_TIME)
    assert threading.active_count() == before
    loop.close()
