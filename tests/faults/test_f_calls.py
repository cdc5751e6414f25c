"""Calls that hang, recurse, wait for each other or are not wanted any more (rows 26, 27, 44)."""

import re
import signal
import threading
import time
from functools import partial

import numpy as np
import pytest

from rankwire import (
    CallCancelledError,
    CircularCallError,
    DeadlineExceededError,
    RemoteError,
    RpcAgent,
    current_call,
)
from rankwire.deadline import Deadline
from rankwire.links.send_handle import SendHandle
from rankwire.mesh import call_port
from rankwire.rpc import call_inquiries
from worlds import (
    LEND_FROM,
    PATIENCE,
    eventually,
    process_world,
    tcp_world,
)


@pytest.fixture
def agents():
    with tcp_world(3) as world:
        made = [RpcAgent(backend) for backend in world]
        yield made
        for agent in made:
            agent.close(grace=2.0)


@pytest.fixture
def patient(monkeypatch):
    """Whoever is late waits for what its callee says, however busy the machine is."""
    monkeypatch.setattr(call_inquiries, "Deadline", lambda _, clock: Deadline(PATIENCE, clock))


@pytest.mark.fault(26, "a late caller is told what its callee is doing")
def test_f26_a_function_that_hangs_is_named_in_the_callers_error(agents, patient):
    go_on = threading.Event()
    agents[1].register("hang", lambda: go_on.wait(PATIENCE))
    agents[1].register("one", lambda: 1)
    assert agents[0].rpc_sync(1, "one") == 1  # they are connected
    begin = time.monotonic()
    with pytest.raises(DeadlineExceededError) as caught:
        agents[0].rpc_sync(1, "hang", timeout=0.5)
    assert time.monotonic() - begin < 8.0
    told = caught.value.detail
    assert re.search(r"rank 1 has had 'hang' for [\d.]+ s; it is running", told)
    late = agents[0].rpc_async(1, "hang", timeout=0.5).exception(PATIENCE)
    assert isinstance(late, DeadlineExceededError)
    assert "it is running" in late.detail
    go_on.set()


@pytest.mark.fault(26, "a callee that does not answer at all is named too, without a long wait")
def test_f26_a_stopped_callee_is_named_in_the_callers_error():
    with process_world(2) as (first, second):
        for rank in (first, second):
            rank.call("eval", "globals().update(agent=__import__('rankwire').RpcAgent(backend))")
        second.call("eval", "agent.register('one', lambda: 1) and None")
        assert first.call("eval", "agent.rpc_sync(1, 'one')") == 1
        second.stop()
        begin = time.monotonic()
        late = first.start("eval", "agent.rpc_sync(1, 'one', timeout=0.5)")
        error = late.error()
        assert late.ended - begin < 8.0
        assert "rank 1 does not say what it is doing" in error.detail
        second.signal(signal.SIGCONT)
        assert first.call("eval", "agent.rpc_sync(1, 'one')") == 1


@pytest.mark.fault(26, "a lock of the user's that two calls wait for is hinted at, at the deadline")
def test_f26_the_error_of_calls_that_wait_for_a_users_lock_names_both_ranks(agents, patient):
    lock = threading.Lock()

    def locked(agent, dst):
        with lock:
            return agent.rpc_sync(dst, "needs_lock")

    def needs_lock():
        with lock:
            return 1

    agents[1].register("locked", partial(locked, agents[1]))
    agents[0].register("needs_lock", needs_lock)
    with pytest.raises(DeadlineExceededError) as caught:
        agents[0].rpc_sync(1, "locked", 0, timeout=1.5)
    assert "rank 0 'needs_lock'" in caught.value.detail
    assert "'locked'" in caught.value.detail


@pytest.mark.fault(27, "calls that wait for each other in a circle are reported with the circle")
def test_f27_a_circle_over_three_ranks_is_reported_where_it_is_deepest(agents):
    caught = []

    def through(agent, dst, name):
        try:
            return agent.rpc_sync(dst, name)
        except CircularCallError as error:
            caught.append(error)
            raise

    @agents[0].register
    async def begin():
        return agents[0].rpc_sync(1, "second")

    @agents[0].register
    async def back():
        return "never while the loop is blocked"

    agents[1].register("second", partial(through, agents[1], 2, "third"))
    agents[2].register("third", partial(through, agents[2], 0, "back"))
    started = time.monotonic()
    with pytest.raises(RemoteError) as remote:
        agents[2].rpc_sync(0, "begin", timeout=60)
    assert time.monotonic() - started < 15
    assert "CircularCallError" in remote.value.remote_type
    (error,) = caught
    assert (error.rank, error.peer) == (2, 0)
    names = {0: ["back", "begin"], 1: ["second"], 2: ["third"]}
    assert sorted(error.circle) == sorted((r, n) for r, all_of in names.items() for n in all_of)
    position = error.circle.index((0, "begin"))
    turned = error.circle[position:] + error.circle[:position]
    assert turned == [(0, "begin"), (1, "second"), (2, "third"), (0, "back")]
    assert agents[1].rpc_sync(0, "back", timeout=PATIENCE)


@pytest.mark.fault(27, "calls that recurse are never taken for a circle")
def test_f27_deep_recursion_with_slow_ends_is_no_circle(agents):
    def down(agent, depth):
        if depth == 0:
            time.sleep(3)
            return 0
        return 1 + agent.rpc_sync((agent.rank + 1) % 3, "down", depth - 1)

    for agent in agents:
        agent.register("down", partial(down, agent))
    futures = [agents[0].rpc_async(dst, "down", 31) for dst in range(3)]
    assert [future.result(PATIENCE) for future in futures] == [31] * 3


@pytest.mark.fault(44, "a cancelled call ends the calls that it has made")
def test_f44_a_caller_that_dies_ends_the_calls_made_for_it():
    with process_world(3) as ranks:
        for rank in ranks:
            rank.call("eval", "globals().update(agent=__import__('rankwire').RpcAgent(backend))")
        ranks[1].call(
            "eval", "agent.register('middle', lambda: agent.rpc_sync(2, 'leaf')) and None"
        )
        look = (
            "globals().update(seen=[]) or agent.register('leaf', lambda:"
            " seen.append(__import__('rankwire').current_call())"
            " or eventually(lambda: seen[0].cancelled)) and None"
        )
        ranks[2].call("eval", look)
        ranks[0].start("eval", "agent.rpc_sync(1, 'middle')")
        eventually(lambda: ranks[2].call("eval", "bool(seen)"))
        ranks[0].kill()
        eventually(lambda: ranks[2].call("eval", "seen[0].cancelled"))
        eventually(lambda: ranks[1].call("eval", "not agent.activity().in_service"))


@pytest.mark.fault(44, "a function whose caller is gone cannot begin another call")
def test_f44_a_cancelled_function_cannot_call_any_more(agents):
    started, errors = threading.Event(), []

    def work():
        started.set()
        eventually(lambda: current_call().cancelled)
        try:
            agents[1].rpc_sync(2, "one")
        except CallCancelledError as error:
            errors.append(error)

    agents[1].register("work", work)
    agents[2].register("one", lambda: 1)
    future = agents[0].rpc_async(1, "work")
    assert started.wait(PATIENCE)
    future.cancel()
    error = eventually(lambda: errors and errors[0])
    assert (error.op, error.rank, error.peer) == ("rpc_sync 'one'", 1, 2)
    assert "rank 0, does not want" in str(error)


@pytest.mark.fault(44, "a large reply that nobody wants is not kept for its caller")
def test_f44_a_cancel_in_the_middle_of_offering_a_reply_takes_it_back(agents, monkeypatch):
    """The cancel comes after the offer was sent and before the port has noted it."""
    offered, go_on, settled = threading.Event(), threading.Event(), []
    offer, settle = call_port.offer, SendHandle.settle

    def slow_offer(*args, **kwargs):
        lent = offer(*args, **kwargs)
        if lent is not None and threading.current_thread().name == "rankwire-serving":
            offered.set()
            assert go_on.wait(PATIENCE)
        return lent

    def timed_settle(self, deadline):
        begin = time.monotonic()
        try:
            return settle(self, deadline)
        finally:
            settled.append(time.monotonic() - begin)

    monkeypatch.setattr(call_port, "offer", slow_offer)
    monkeypatch.setattr(SendHandle, "settle", timed_settle)
    agents[1].register("large", lambda: np.zeros(2 * LEND_FROM, np.uint8))
    future = agents[0].rpc_async(1, "large", timeout=60)
    if not offered.wait(PATIENCE / 2):
        pytest.skip("this machine does not lend memory")
    future.cancel()
    eventually(lambda: all(not job.incoming.is_wanted for job in _active(agents[1])))
    go_on.set()
    eventually(lambda: not agents[1].activity().in_service)
    assert settled[0] < PATIENCE  # it is taken back long before the call's own deadline
    assert not agents[1]._port._sending


def _active(agent):
    return list(agent._server.active.values())


@pytest.mark.fault(44, "after many cancelled calls nothing of them is left")
def test_f44_cancelled_nested_calls_leave_nothing_behind(agents):
    started = threading.Semaphore(0)

    def leaf():
        started.release()
        eventually(lambda: current_call().cancelled)

    agents[1].register("middle", lambda: agents[1].rpc_sync(2, "leaf"))
    agents[2].register("leaf", leaf)
    for _ in range(50):
        future = agents[0].rpc_async(1, "middle")
        assert started.acquire(timeout=PATIENCE)
        future.cancel()
    for agent in agents:
        eventually(lambda agent=agent: agent.activity()[:2] == (0, 0))
