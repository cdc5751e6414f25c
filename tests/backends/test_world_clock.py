"""All that waits in a world waits by the clock that the world was given."""

import contextlib
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from clocks import FastClock
from rankwire import RpcAgent, SubBackend, all_reduce
from rankwire.backends.faults import FaultPlan
from rankwire.backends.simulated import SimulatedBackend
from rankwire.clock import REAL_TIME, Clock
from rankwire.errors import DeadlineExceededError, PeerLostError
from worlds import tcp_world

PACE = 10.0
LIMIT = 10.0  # seconds of a world whose time runs at that pace
# In real seconds: sooner than the limit by any other clock, with room for a busy machine.
LEAST, MOST = LIMIT / PACE * 0.95, LIMIT * 0.8


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


@contextlib.contextmanager
def simulated(world_size=2, clock=None, **options):
    world = SimulatedBackend.create_group(world_size, clock=clock or FastClock(PACE), **options)
    try:
        yield world
    finally:
        for backend in world:
            backend.close()


@contextlib.contextmanager
def taking(least=LEAST, most=MOST):
    begin = time.monotonic()
    yield
    assert least <= time.monotonic() - begin < most


def agents_of(world, stack):
    return [stack.enter_context(RpcAgent(backend)) for backend in world]


def recv(world, stack):
    world[0].recv(1, timeout=LIMIT)


def barrier(world, stack):
    world[0].barrier(timeout=LIMIT)


def send(world, stack):
    for _ in range(2):
        world[0].send(bytes(2000), 1, timeout=LIMIT)


def group(world, stack):
    SubBackend(world[0], [0, 1], timeout=LIMIT)


def collective(world, stack):
    all_reduce(world[0], np.zeros(1), timeout=LIMIT)


def work(world, stack):
    """The operation's own time is longer; a second one waits for its turn."""
    running = all_reduce(world[0], np.zeros(1), async_op=True, timeout=1000.0)
    waiting = all_reduce(world[0], np.zeros(1), async_op=True, timeout=1000.0)
    stack.callback(world[0].close)
    with pytest.raises(TimeoutError):
        waiting.result(0.0)
    running.wait(LIMIT)


def turn(world, stack):
    all_reduce(world[0], np.zeros(1), async_op=True, timeout=1000.0)
    stack.callback(world[0].close)
    all_reduce(world[0], np.zeros(1), timeout=LIMIT)


def call(world, stack):
    caller, callee = agents_of(world, stack)
    go_on = threading.Event()
    stack.callback(go_on.set)
    callee.register("block", go_on.wait)
    caller.rpc_sync(1, "block", timeout=LIMIT)


def future(world, stack):
    caller, callee = agents_of(world, stack)
    go_on = threading.Event()
    stack.callback(go_on.set)
    callee.register("block", go_on.wait)
    caller.rpc_async(1, "block", timeout=1000.0).result(LIMIT)


def late_future(world, stack):
    """Nobody waits for it but by its callback: the standby ends it."""
    caller, callee = agents_of(world, stack)
    go_on, ended = threading.Event(), threading.Event()
    stack.callback(go_on.set)
    callee.register("block", go_on.wait)
    pending = caller.rpc_async(1, "block", timeout=LIMIT)
    pending.add_done_callback(lambda _: ended.set())
    assert ended.wait(60.0)
    pending.result()


WAITS = [recv, barrier, send, group, collective, work, turn, call, future, late_future]


@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.__name__)
def test_a_limit_is_reached_by_the_clock_of_the_world(wait):
    with simulated(queue_nbytes=1000) as world, contextlib.ExitStack() as stack:
        with taking(), pytest.raises(TimeoutError) as caught:
            wait(world, stack)
    if isinstance(caught.value, DeadlineExceededError) and caught.value.waited is not None:
        assert LIMIT <= caught.value.waited < MOST * PACE


def test_closing_an_agent_leaves_calls_their_grace_by_that_clock():
    begun, go_on = threading.Event(), threading.Event()
    with simulated() as world, contextlib.ExitStack() as stack:
        caller, callee = agents_of(world, stack)
        callee.register("block", lambda: [begun.set(), go_on.wait()])
        pending = caller.rpc_async(1, "block", timeout=1000.0)
        assert begun.wait(60.0)
        with taking():
            callee.close(grace=LIMIT)
        go_on.set()
        assert pending.exception() is not None


@pytest.mark.parametrize("kind", ["message", "call", "collective"])
def test_a_delay_is_as_long_as_that_clock_says(pool, kind):
    faults = FaultPlan().delay(LIMIT, src=0, dst=1)
    with simulated(faults=faults, timeout=1000.0) as world, contextlib.ExitStack() as stack:
        caller, callee = agents_of(world, stack)
        callee.register("echo", lambda value: value)
        with taking():
            if kind == "message":
                world[0].send(b"late", 1)
                assert world[1].recv(0) == b"late"
            elif kind == "call":
                assert caller.rpc_sync(1, "echo", "late") == "late"
            else:
                both = pool.map(lambda backend: all_reduce(backend, np.ones(1)), world)
                assert [value.tolist() for value in both] == [[2.0], [2.0]]


def test_a_reader_is_as_slow_as_that_clock_says():
    with simulated(faults=FaultPlan().slow_reader(1, LIMIT / 2), timeout=1000.0) as world:
        for number in range(3):
            world[0].send(bytes([number]), 1)
        with taking():
            assert [bytes(world[1].recv(0)) for _ in range(3)] == [b"\0", b"\1", b"\2"]


@pytest.mark.parametrize(
    "faults",
    [FaultPlan().kill(1, after_seconds=LIMIT), FaultPlan().partition([[0], [1]], after=LIMIT)],
    ids=["kill", "partition"],
)
def test_a_fault_comes_when_that_clock_says(faults):
    with taking(), simulated(faults=faults, timeout=1000.0) as world:
        with pytest.raises(PeerLostError):
            world[0].recv(1)


@pytest.fixture
def uses_of_real_time(monkeypatch):
    """Where the real clock is used, but by what must not wait."""
    uses = []

    def noting(function):
        def noted(*args):
            if args[-1:] != (0.0,):  # of AT_ONCE, which is over by any clock
                uses.append("".join(traceback.format_stack(limit=6)))
            return function(*args)

        return noted

    for name in ("now", "sleep", "acquire"):
        monkeypatch.setattr(REAL_TIME, name, noting(getattr(REAL_TIME, name)))
    for name in ("wait", "join"):
        monkeypatch.setattr(Clock, name, noting(getattr(Clock, name)))
    return uses


def live(backend):
    """Use most of what a backend has, on one of two ranks."""
    other = 1 - backend.rank
    backend.send(b"message", other)
    assert backend.recv(other) == b"message"
    with pytest.raises(DeadlineExceededError):
        backend.recv(other, tag=7, timeout=0.05)
    backend.sendrecv(np.zeros(3), other, other)
    backend.barrier()
    with SubBackend(backend, [0, 1]) as group:
        group.barrier()
        assert all_reduce(group, np.ones(1)).tolist() == [2.0]
    assert all_reduce(backend, np.ones(1 << 16))[0] == 2.0
    assert all_reduce(backend, np.ones(1), async_op=True).wait().tolist() == [2.0]
    work, told = all_reduce(backend, np.ones(1), async_op=True, timeout=60.0), threading.Event()
    work.add_done_callback(lambda _: told.set())
    assert work.wait(30.0).tolist() == [2.0]  # less than its own limit: it is not run here
    assert told.wait(30.0)
    with RpcAgent(backend, workers=2) as agent:
        agent.register("echo", lambda value: value)
        agent.register("nested", lambda: agent.rpc_sync(other, "echo", 1))
        agent.register("slow", lambda: threading.Event().wait(0.2))

        @agent.register
        async def coroutine():
            return "awaited"

        backend.barrier()
        assert agent.rpc_sync(other, "echo", "value") == "value"
        assert agent.rpc_sync(other, "echo", bytes(9 << 20)) is not None
        assert agent.rpc_sync(other, "nested") == 1
        assert agent.rpc_sync(backend.rank, "echo", 5) == 5
        assert agent.rpc_async(other, "coroutine").result(30.0) == "awaited"
        futures = [agent.rpc_async(other, "echo", number) for number in range(30)]
        assert [future.result() for future in futures] == list(range(30))
        with pytest.raises(DeadlineExceededError):
            agent.rpc_sync(other, "slow", timeout=0.05)
        backend.barrier()


@pytest.mark.parametrize("world", [simulated, tcp_world])
def test_no_other_clock_is_used_in_a_world(world, pool, uses_of_real_time):
    clock = FastClock(1.0)
    with world(2, clock=clock, timeout=30.0) as backends:
        for done in [pool.submit(live, backend) for backend in backends]:
            done.result(50.0)
    assert not uses_of_real_time, "\n\n".join(uses_of_real_time)
    assert set(clock.uses) >= {"now", "acquire", "wait", "join"}  # who sleeps depends on the moment
