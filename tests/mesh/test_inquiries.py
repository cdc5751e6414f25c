"""A hang says where: what the ranks are doing that were waited for in vain."""

import asyncio
import os
import signal
import threading
import time

import numpy as np
import pytest

import rankwire
from rankwire import (
    DeadlineExceededError,
    FaultPlan,
    RpcAgent,
    SimulatedBackend,
    SubBackend,
)
from rankwire.mesh import inquiries, mesh
from rankwire.mesh.calls import Serving
from rankwire.testing import run_ranks, tcp_world

LIMIT = 0.4


@pytest.fixture(scope="module")
def world():
    """Two ranks in processes of their own."""
    with rankwire.local(2) as world:
        world.run(time_out, receive, time.monotonic)  # all is imported there from now on
        yield world


def sleep_in_the_program():
    time.sleep(1.5)


def wait_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    threading.Timer(1.5, lock.release).start()
    with lock:
        pass


def wait_for_an_event():
    threading.Event().wait(1.5)


def compute():
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        sum(range(1000))


def receive(backend):
    backend.recv(1, timeout=LIMIT)


def send_much(backend):
    backend.send(bytes(64 << 20), 1, timeout=LIMIT)


def receive_later(backend):
    backend.irecv(1, timeout=LIMIT).wait()


def receive_from_any(backend):
    backend.recv(rankwire.ANY_RANK, timeout=LIMIT)


def meet(backend):
    rankwire.barrier(backend, timeout=LIMIT)


def add_up(backend):
    rankwire.all_reduce(backend, np.ones(4), timeout=LIMIT)


def time_out(backend, on_zero, on_one):
    """Run as rank 0 what times out, and as rank 1 what it waits for in vain; return the error."""
    if backend.rank == 1:
        return on_one()
    with pytest.raises(DeadlineExceededError) as info:
        on_zero(backend)
    return str(info.value)


# -- where -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", [receive, receive_later, receive_from_any, meet, add_up])
def test_an_operation_whose_time_is_up_says_where_the_other_rank_is(operation, world):
    text, _ = world.run(time_out, operation, sleep_in_the_program)
    assert "rank 1 says: MainThread sleeps in sleep_in_the_program (" in text
    assert f"test_inquiries.py:{sleep_in_the_program.__code__.co_firstlineno + 1})" in text


def test_a_send_that_is_not_taken_says_where_the_other_rank_is():
    with rankwire.local(2) as world:  # its own: what was sent stays there
        text, _ = world.run(time_out, send_much, sleep_in_the_program)
    assert "rank 1 says: MainThread sleeps in sleep_in_the_program (" in text


@pytest.mark.parametrize(
    ("on_one", "doing"),
    [
        (wait_for_a_lock, "waits for a lock in wait_for_a_lock ("),
        (wait_for_an_event, "waits for a lock in wait_for_an_event ("),
        (compute, "in compute ("),
    ],
)
def test_it_says_whether_the_other_rank_runs_or_waits(on_one, doing, world):
    text, _ = world.run(time_out, receive, on_one)
    assert f"rank 1 says: MainThread {doing}" in text or (on_one is compute and doing in text)


def test_a_rank_that_receives_itself_is_said_to():
    def wait_for_each_other(backend):
        with pytest.raises(rankwire.RankwireError) as info:  # rank 0 leaves after its own
            backend.recv(1 - backend.rank, timeout=LIMIT + backend.rank)
        return str(info.value)

    text, _ = run_ranks(2, wait_for_each_other)
    circle = "it waits for the rank that asks, so the two wait for each other"
    assert f"rank 1 says: {circle}; rank 1 is in recv(), called in wait_for_each_other (" in text


def test_ranks_whose_time_is_up_at_once_say_that_they_wait_for_each_other(monkeypatch):
    asking = threading.Barrier(2)

    def inquire(*args):
        asking.wait()  # both receives are over
        return inquiries.inquire(*args)

    def wait_for_each_other(backend):
        with pytest.raises(rankwire.RankwireError) as info:
            backend.recv(1 - backend.rank, timeout=LIMIT)
        told = str(info.value)
        backend.barrier()  # neither leaves before the other has its answer
        return told

    monkeypatch.setattr(mesh, "inquire", inquire)
    for text in run_ranks(2, wait_for_each_other):
        assert "so the two wait for each other" in text


def test_members_of_a_group_are_asked(world):
    def meet_in_a_group(backend):
        with SubBackend(backend, [1, 0], keep_order=True) as group:
            if backend.rank == 1:
                time.sleep(1.5)
                return None
            with pytest.raises(DeadlineExceededError) as info:
                group.recv(0, timeout=LIMIT)
            return str(info.value)

    text, _ = world.run(meet_in_a_group)
    assert "rank 0 says: MainThread sleeps in meet_in_a_group (" in text


def test_a_rank_that_stands_still_does_not_say_and_costs_little_time():
    with rankwire.local(2) as world:
        pid = world.on(1).run(lambda backend: os.getpid())
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        text = world.on(0).run(time_out, receive, None)
        assert "rank 1 does not say what it is doing" in text
        assert time.monotonic() - began < 20
        os.kill(pid, signal.SIGCONT)


def test_who_only_looks_asks_nobody(monkeypatch):
    asked = []
    monkeypatch.setattr(mesh, "inquire", lambda *args: asked.append(args))
    with tcp_world(2) as (backend, _):
        for timeout in (0.0, 0.01):
            with pytest.raises(DeadlineExceededError):
                backend.recv(1, timeout=timeout)
        assert not asked
        with pytest.raises(DeadlineExceededError):
            backend.recv(1, timeout=0.25)
        assert len(asked) == 1


def test_what_another_rank_says_is_only_text(monkeypatch):
    hostile = "\x1b[2J\n" + "x" * 5000
    monkeypatch.setattr(mesh, "describe", lambda *_: hostile)
    with tcp_world(2) as (backend, _):
        with pytest.raises(DeadlineExceededError) as info:
            backend.recv(1, timeout=0.25)
    text = str(info.value)
    assert "rank 1 says: \\x1b[2J xxx" in text
    assert len(text) < 1500
    assert "\n" not in text


def test_an_answer_that_is_too_long_or_none_is_no_answer(monkeypatch):
    monkeypatch.setattr(mesh, "describe", lambda *_: "x" * (1 << 20))
    with tcp_world(2) as (backend, other):
        with pytest.raises(DeadlineExceededError, match="rank 1 does not say"):
            backend.recv(1, timeout=0.25)
        other.send(b"still there", 0)
        assert backend.recv(1) == b"still there"


# -- which calls -----------------------------------------------------------------------------------


def test_the_calls_that_a_rank_serves_are_told():
    go_on = threading.Event()
    with tcp_world(2) as world, RpcAgent(world[0]) as zero, RpcAgent(world[1]) as one:
        one.register("slow", lambda: go_on.wait(20))
        running = zero.rpc_async(1, "slow")
        with pytest.raises(DeadlineExceededError) as info:
            world[0].recv(1, timeout=LIMIT)
        assert "it has served 'slow' of rank 0 for 0." in str(info.value)
        assert world[1].status().peers[0].serving == ("slow",)
        assert "served: slow" in str(world[1].status())
        go_on.set()
        assert running.result()


def test_a_call_whose_time_is_up_says_where_the_function_is():
    go_on = threading.Event()

    def hang_there():
        go_on.wait(20)

    with tcp_world(2) as world, RpcAgent(world[0]) as zero, RpcAgent(world[1]) as one:
        one.register(hang_there)
        try:
            with pytest.raises(DeadlineExceededError) as info:
                zero.rpc_sync(1, "hang_there", timeout=0.8)
        finally:
            go_on.set()
    line = hang_there.__code__.co_firstlineno + 1
    assert "it is running: it waits for a lock in hang_there (" in str(info.value)
    assert f"test_inquiries.py:{line})" in str(info.value)


def test_a_coroutine_whose_time_is_up_says_where_it_awaits():
    async def nap():
        await asyncio.sleep(20)

    with tcp_world(2) as world, RpcAgent(world[0]) as zero, RpcAgent(world[1]) as one:
        one.register(nap)
        with pytest.raises(DeadlineExceededError) as info:
            zero.rpc_sync(1, "nap", timeout=0.8)
    assert "it is running: it awaits in nap (" in str(info.value)


def test_much_is_summed_up():
    serving = [Serving(0, f"f{number}", 1.0) for number in range(10)]
    text = inquiries.describe([f"thread {number}" for number in range(10)], serving)
    assert text.startswith("thread 0; thread 1; ")
    assert text.endswith("it has served 'f3' of rank 0 for 1 s; and 12 more")


def test_a_rank_that_has_nothing_to_say_is_left_out():
    assert inquiries.describe([], []) == ""
    backend, other = SimulatedBackend.create_group(2)
    with backend, other, pytest.raises(DeadlineExceededError) as info:
        backend.recv(1, timeout=0.25)  # no thread is called "rank 1"
    assert "rank 1 says" not in str(info.value)
    assert "does not say" not in str(info.value)


def test_an_inquiry_is_no_message_of_the_program():
    plan = FaultPlan().kill(1, after=1)
    backend, other = SimulatedBackend.create_group(2, faults=plan)
    with backend, other:
        for _ in range(3):
            with pytest.raises(DeadlineExceededError):
                backend.recv(1, timeout=0.25)
        assert backend.alive == (0, 1)
