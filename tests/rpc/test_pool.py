"""The serving pool alone, with jobs made by hand."""

import queue
import threading
import time

import pytest

from rankwire.clock import REAL_TIME
from rankwire.errors import ChannelClosedError
from rankwire.rpc.pool import JobSource, Limits, Pool
from real_time import Deadline
from worlds import eventually


class FakeFunction:
    def __init__(self, is_slow=False):
        self.is_slow = is_slow


class FakeJob:
    def __init__(self, action=lambda worker: None, depth=0, function=None):
        self.action = action
        self.depth = depth
        self.function = function or FakeFunction()
        self.done = threading.Event()
        self.refused = None
        self.thread = None

    def run(self, worker):
        self.thread = threading.current_thread()
        self.action(worker)
        self.done.set()

    def refuse(self, reason):
        self.refused = reason
        self.done.set()

    def note_pace(self, seconds):
        self.seconds = seconds
        self.function.is_slow = seconds > 0.1


class Source:
    """A port: jobs come out of a queue; more than one poller at a time is an error."""

    def __init__(self):
        self.jobs = queue.Queue()
        self.pollers = 0
        self.most_pollers = 0
        self.looks = 0
        self.ended = threading.Event()

    def poll(self):
        self.pollers += 1
        self.most_pollers = max(self.most_pollers, self.pollers)
        try:
            job = self.jobs.get()
        finally:
            self.pollers -= 1
        if job == "closed":
            raise ChannelClosedError("closed")
        return [] if job is None else job if isinstance(job, list) else [job]

    def wake(self):
        self.jobs.put(None)

    def look(self):
        self.looks += 1
        return False


@pytest.fixture
def source():
    return Source()


def make_pool(source, **limits):
    limits = {"workers": 4, "max_queued": 100, "max_nested": 8} | limits
    jobs = JobSource(source.poll, source.wake, source.look, source.ended.set)
    pool = Pool(jobs, Limits(**limits), REAL_TIME)
    pool.start()
    return pool


@pytest.fixture
def pool(source):
    pool = make_pool(source)
    yield pool
    assert pool.close(Deadline(5))
    assert source.most_pollers <= 1  # none, if the pool was closed before a thread came to poll


def submit(source, *jobs):
    for job in jobs:
        source.jobs.put(job)
    return jobs


def wait_for(*jobs):
    for job in jobs:
        assert job.done.wait(10)


def test_short_jobs_stay_on_the_thread_that_read_them(source, monkeypatch):
    # On a busy machine a thread may be kept from running for longer than the standby waits.
    for look in ("_CHECK_EVERY", "_SPARE_CHECK"):
        monkeypatch.setattr(f"rankwire.rpc.pool.{look}", 60.0)
    pool = make_pool(source)
    jobs = submit(source, *[FakeJob() for _ in range(100)])
    wait_for(*jobs)
    assert len({job.thread for job in jobs}) == 1
    assert len(pool._threads) == 2
    assert pool.close(Deadline(5))


def test_a_stuck_job_does_not_hold_up_the_next(source, pool):
    go_on = threading.Event()
    stuck, quick = submit(source, FakeJob(lambda _: go_on.wait(10)), FakeJob())
    wait_for(quick)
    assert not stuck.done.is_set()
    go_on.set()
    wait_for(stuck)


def test_jobs_read_together_do_not_wait_for_a_stuck_one(source, pool):
    go_on = threading.Event()
    stuck, quick = FakeJob(lambda _: go_on.wait(10)), FakeJob()
    source.jobs.put([stuck, quick])
    wait_for(quick)
    go_on.set()
    wait_for(stuck)


def test_a_stuck_job_after_a_long_silence_is_noticed(source, pool):
    eventually(lambda: pool._standby_sleeps)
    go_on = threading.Event()
    stuck, quick = submit(source, FakeJob(lambda _: go_on.wait(10)), FakeJob())
    wait_for(quick)
    go_on.set()
    wait_for(stuck)


def test_a_job_known_to_be_slow_hands_the_role_over_first(source, pool):
    go_on = threading.Event()
    slow = FakeJob(lambda _: go_on.wait(10), function=FakeFunction(is_slow=True))
    quick = FakeJob()
    submit(source, slow, quick)
    wait_for(quick)
    assert quick.thread is not slow.thread
    go_on.set()
    wait_for(slow)


def test_jobs_that_arrived_when_their_function_was_slow_run_at_once_when_it_is_not(
    source, pool, monkeypatch
):
    """They are read many at a time: a hand-over for each would take longer than all of them."""
    handed_over, hand_over = [], pool._hand_over
    monkeypatch.setattr(pool, "_hand_over", lambda: (handed_over.append(1), hand_over()))
    function = FakeFunction(is_slow=True)
    jobs = [FakeJob(function=function) for _ in range(100)]
    source.jobs.put(jobs)
    for job in jobs:
        wait_for(job)
    assert 1 <= len(handed_over) < 50


def test_a_job_about_to_block_lets_another_thread_poll(source, pool):
    inner = FakeJob(depth=1)

    def outer(worker):
        pool.about_to_block(worker)
        submit(source, inner)
        assert inner.done.wait(10)

    (job,) = submit(source, FakeJob(outer))
    wait_for(job)


def test_more_calls_than_workers_wait_in_line(source):
    pool = make_pool(source, workers=2, max_queued=10)
    running, most = [], []

    def work(_):
        running.append(1)
        most.append(len(running))
        time.sleep(0.01)
        running.pop()

    jobs = submit(source, *[FakeJob(work) for _ in range(10)])
    wait_for(*jobs)
    assert max(most) <= 2
    assert all(job.refused is None for job in jobs)
    assert pool.queue.jobs() == []
    assert pool.close(Deadline(5))


def test_beyond_the_queue_a_call_is_refused(source):
    pool = make_pool(source, workers=1, max_queued=2)
    go_on = threading.Event()
    jobs = submit(source, *[FakeJob(lambda _: go_on.wait(10)) for _ in range(5)])
    wait_for(jobs[3], jobs[4])
    assert "1 calls are running and 2 waiting" in jobs[4].refused
    go_on.set()
    wait_for(*jobs)
    assert pool.close(Deadline(5))


@pytest.mark.fault(27, "nested calls do not wait for the workers that wait for them")
def test_nested_calls_have_threads_of_their_own(source):
    pool = make_pool(source, workers=1, max_nested=3)
    go_on = threading.Event()
    top = submit(source, FakeJob(lambda _: go_on.wait(10)))
    nested = submit(source, *[FakeJob(lambda _: go_on.wait(10), depth=1) for _ in range(4)])
    wait_for(nested[3])
    assert "3 nested calls are running" in nested[3].refused
    go_on.set()
    wait_for(*top, *nested)
    assert pool.close(Deadline(5))


def test_idle_threads_go_away(source, monkeypatch):
    monkeypatch.setattr("rankwire.rpc.pool._LINGER", 0.05)
    pool = make_pool(source, workers=20)
    go_on = threading.Event()
    jobs = submit(source, *[FakeJob(lambda _: go_on.wait(10)) for _ in range(10)])
    deadline = Deadline(10)
    while len(pool._threads) < 11 and not deadline.expired:
        time.sleep(0.001)
    go_on.set()
    wait_for(*jobs)
    while len(pool._threads) > 2 and not deadline.expired:
        time.sleep(0.01)
    assert len(pool._threads) == 2
    assert pool.close(Deadline(5))


def test_the_standby_sleeps_when_nothing_happens(source, pool):
    (job,) = submit(source, FakeJob())
    wait_for(job)
    eventually(lambda: pool._standby_sleeps)
    before = source.looks
    time.sleep(0.3)
    assert source.looks - before <= 2


def test_a_job_added_by_hand_is_done(source, pool):
    job = FakeJob()
    pool.add(job)
    wait_for(job)


def test_the_end_of_the_port_ends_all_threads(source):
    pool = make_pool(source)
    source.jobs.put("closed")
    deadline = Deadline(10)
    while pool._threads and not deadline.expired:
        time.sleep(0.005)
    assert len(pool._threads) == 0
    assert pool.close(Deadline(1))


def test_close_says_when_a_job_still_runs(source):
    pool = make_pool(source)
    go_on = threading.Event()
    (job,) = submit(source, FakeJob(lambda _: go_on.wait(10)))
    eventually(lambda: job.thread)
    assert not pool.close(Deadline(0.1))
    go_on.set()
    wait_for(job)
    assert pool.close(Deadline(5))


def test_stress_one_poller_at_a_time_and_every_job_done_once(source, pool):
    count = []

    def work(worker, nap):
        count.append(1)
        if nap:
            pool.about_to_block(worker)
            time.sleep(nap)

    jobs = [
        FakeJob(lambda worker, nap=nap: work(worker, nap), depth=i % 2)
        for i in range(2000)
        for nap in [0.002 if i % 50 == 0 else 0]
    ]
    submit(source, *jobs)
    wait_for(*jobs)
    assert len(count) + sum(job.refused is not None for job in jobs) == 2000
