"""Deferred replies: a function returns a future, and its thread is free until that is done."""

import asyncio
import logging
import math
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from interrupts import Interrupt, every_interrupt
from rankwire import (
    ChannelClosedError,
    CircularCallError,
    DeadlineExceededError,
    PeerLostError,
    RemoteError,
    RpcAgent,
    UnsupportedTypeError,
    current_call,
)
from rankwire.mesh.calls import OWN, IncomingCall
from rankwire.rpc.messages import encode_request
from rankwire.testing import in_parallel, simulated_world, tcp_world
from rpc.agents import agents_of
from rpc.callee import SOON, WORLDS, pair
from worlds import (
    PATIENCE,
    Running,
    eventually,
    nursery,
    process_world,
    runtime_folder_of_its_own,
)


@pytest.fixture(scope="module", autouse=True)
def shared_nursery():
    with nursery():
        yield


@pytest.fixture(autouse=True)
def folder(shared_nursery):
    """Who is killed leaves the file of its socket here."""
    with runtime_folder_of_its_own():
        yield


class Waiting:
    """Rank 1 of a test's world: the futures that its functions have returned, by name."""

    def __init__(self, agent):
        self.agent = agent
        self.futures = {}
        self.calls = {}
        agent.register("defer", self.defer)

    def defer(self, name):
        self.calls[name] = current_call()
        self.futures[name] = Future()
        return self.futures[name]

    def future(self, name):
        """Return the future of a call, once that has come."""
        return eventually(lambda: self.futures.get(name))

    def is_served(self):
        return bool(self.agent.activity().in_service)


@pytest.fixture(params=[simulated_world, tcp_world], ids=["simulated", "tcp"])
def agents(request):
    with request.param(2) as world, agents_of(world, 0.5, workers=1) as agents:
        yield agents


@pytest.fixture
def caller(agents):
    return agents[0]


@pytest.fixture
def callee(agents):
    return Waiting(agents[1])


# -- how the future ends ---------------------------------------------------------------------------


def test_the_caller_gets_the_result_of_the_future(caller, callee):
    call = caller.rpc_async(1, "defer", "a")
    callee.future("a").set_result({"x": [1, 2]})
    assert call.result(SOON) == {"x": [1, 2]}
    eventually(lambda: not callee.is_served())


def test_the_caller_gets_the_error_of_the_future(caller, callee):
    call = caller.rpc_async(1, "defer", "a")
    callee.future("a").set_exception(KeyError("not there"))
    error = call.exception(SOON)
    assert isinstance(error, RemoteError)
    assert (error.remote_type, error.remote_message) == ("KeyError", "'not there'")


def test_a_traceback_of_the_future_begins_where_the_error_was_raised(caller, agents):
    def fail():
        raise ValueError("no")

    with ThreadPoolExecutor(1) as executor:
        agents[1].register("submit", lambda: executor.submit(fail))
        with pytest.raises(RemoteError) as info:
            caller.rpc_sync(1, "submit")
    assert "in fail" in info.value.remote_traceback


def test_a_future_that_the_callee_cancels_says_so(caller, callee):
    call = caller.rpc_async(1, "defer", "a")
    assert callee.future("a").cancel()
    error = call.exception(SOON)
    assert isinstance(error, RemoteError)
    assert error.remote_type == "CancelledError"
    assert not callee.calls["a"].cancelled


def test_a_future_that_is_done_already_is_answered_at_once(caller, agents):
    def done(value):
        future = Future()
        future.set_result(value)
        return future

    agents[1].register("done", done)
    assert caller.rpc_sync(1, "done", 3) == 3


def test_a_result_that_cannot_be_sent_is_told_to_the_caller(caller, callee):
    call = caller.rpc_async(1, "defer", "a")
    callee.future("a").set_result(object())
    error = call.exception(SOON)
    assert isinstance(error, RemoteError)
    assert UnsupportedTypeError.__name__ in error.remote_type


class Broken(Future):
    def add_done_callback(self, fn):
        raise RuntimeError("a class of the user's own")


def test_a_future_that_cannot_be_waited_for_is_an_error_of_the_function(caller, agents):
    agents[1].register("broken", Broken)
    with pytest.raises(RemoteError, match="a class of the user's own"):
        caller.rpc_sync(1, "broken")
    assert not agents[1]._server.replies.deferred.check()
    eventually(lambda: not agents[1].activity().in_service)


@pytest.mark.parametrize("size", [1, 100_000, 1_000_000])  # in one frame, by a thread, lent
def test_results_of_every_size_arrive(caller, callee, size):
    call = caller.rpc_async(1, "defer", "a")
    array = np.arange(size)
    callee.future("a").set_result(array)
    np.testing.assert_array_equal(call.result(SOON), array)
    eventually(lambda: not callee.is_served())


def test_with_copy_a_result_is_read_when_the_future_is_done(caller, agents):
    future = Future()
    agents[1].register("get", lambda: future, copy=True)
    array = np.zeros(1_000_000)
    call = caller.rpc_async(1, "get")
    eventually(lambda: agents[1].activity().in_service)
    future.set_result(array)
    array[:] = 1.0
    assert not call.result(SOON).any()


def test_a_function_may_return_the_future_of_another_call(caller, agents):
    caller.register("double", lambda x: 2 * x)
    agents[1].register("ask", lambda x: agents[1].rpc_async(0, "double", x))
    assert caller.rpc_sync(1, "ask", 4) == 8
    with pytest.raises(RemoteError) as info:
        caller.rpc_sync(1, "ask", None)
    assert info.value.remote_type == "TypeError"


def test_a_coroutine_may_return_a_future(caller, agents):
    future = Future()

    async def later():
        await asyncio.sleep(0)
        return future

    agents[1].register("later", later)
    call = caller.rpc_async(1, "later")
    (served,) = eventually(lambda: list(agents[1]._server.active.values()))
    eventually(lambda: served.deferred is not None)
    assert not served.needs_event_loop
    future.set_result("done")
    assert call.result(SOON) == "done"


def test_a_request_that_is_handled_by_hand_may_return_a_future(agents):
    future, called = Future(), []
    agents[1].register("get", lambda: called.append(threading.current_thread()) or future)
    encoded, _ = encode_request(agents[1].codec, "get", 5.0, [], (), {})
    agents[1].handle_request(IncomingCall(1, 1, bytearray().join(encoded), OWN))
    assert called == [threading.current_thread()]
    assert agents[1].activity().in_service
    future.set_result(1)
    assert not agents[1].activity().in_service


# -- many at once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
def test_a_thousand_calls_wait_although_there_is_one_worker(world):
    with pair(world, workers=1) as (caller, callee):
        calls = [caller.rpc_async(1, "defer", number) for number in range(1000)]
        eventually(lambda: len(callee.deferred()) == 1000)
        assert caller.rpc_sync(1, "echo", "free") == "free"
        assert caller.rpc_sync(1, "settle", "released") == 1000
        assert [call.result(SOON) for call in calls] == ["released"] * 1000


def test_a_batch_of_callers_gets_one_result_when_the_last_has_arrived(agents):
    """As a parameter server does: gradients are summed, and all get the same weights."""
    lock, sums, waiting = threading.Lock(), [], []

    def push(gradient):
        with lock:
            waiting.append((mine := Future(), gradient))
            if len(waiting) < 8:
                return mine
            batch, waiting[:] = waiting[:], []
        sums.append(total := sum(gradient for _, gradient in batch))
        for future, _ in batch:
            future.set_result(total)
        return mine

    agents[1].register("push", push)

    def trainer(number):
        return [agents[0].rpc_sync(1, "push", number + step) for step in range(20)]

    totals = in_parallel([lambda n=n: trainer(n) for n in range(8)])
    assert len({tuple(told) for told in totals}) == 1
    assert totals[0] == sums
    assert sum(sums) == sum(n + step for n in range(8) for step in range(20))


@pytest.mark.parametrize("world", WORLDS)
def test_threads_that_end_cancel_and_call_at_once_lose_no_reply(world):
    with pair(world, workers=2) as (caller, callee):
        ended = threading.Event()

        def call(thread):
            values = set()
            for number in range(40):
                future = caller.rpc_async(1, "defer", f"{thread}.{number}")
                if number % 5 == 4:
                    future.cancel()
                else:
                    values.add(future.result(PATIENCE))
            return values

        def settle():
            while not ended.is_set():
                caller.rpc_sync(1, "settle", "fine")

        settling = Running(settle)
        told = in_parallel([lambda t=t: call(t) for t in range(6)])
        ended.set()
        settling.result()
        assert told == [{"fine"}] * 6
        eventually(lambda: not callee.deferred())


# -- calls that are not waited for any more --------------------------------------------------------


def test_the_deadline_ends_the_call_and_cancels_the_future(caller, callee):
    with pytest.raises(DeadlineExceededError):
        caller.rpc_sync(1, "defer", "a", timeout=0.3)
    eventually(callee.future("a").cancelled)
    assert callee.calls["a"].expired
    eventually(lambda: not callee.is_served())


def test_the_callee_looks_at_the_deadline_itself(caller, callee):
    """The caller says nothing: here it does not even know that it is a caller."""
    encoded, _ = encode_request(callee.agent.codec, "defer", 0.2, [], ("a",), {})
    callee.agent.handle_request(IncomingCall(1, 1, bytearray().join(encoded), OWN))
    eventually(callee.future("a").cancelled)
    eventually(lambda: not callee.is_served())


def test_a_future_that_runs_and_never_ends_holds_nothing_beyond_the_deadline(caller, callee):
    encoded, _ = encode_request(callee.agent.codec, "defer", 0.3, [], ("a",), {})
    callee.agent.handle_request(IncomingCall(1, 1, bytearray().join(encoded), OWN))
    future = callee.future("a")
    assert future.set_running_or_notify_cancel()
    eventually(lambda: not callee.is_served())
    assert not callee.agent._server.replies.deferred.check()
    future.set_result("nobody hears of it")


def test_a_call_without_a_deadline_waits_on(caller, callee):
    call = caller.rpc_async(1, "defer", "a", timeout=math.inf)
    callee.future("a")
    time.sleep(0.3)  # several looks of the standby
    assert not call.done()
    callee.future("a").set_result(1)
    assert call.result(SOON) == 1


def test_a_caller_that_cancels_cancels_the_future(caller, callee):
    call = caller.rpc_async(1, "defer", "a")
    future = callee.future("a")
    assert call.cancel()
    eventually(future.cancelled)
    assert callee.calls["a"].cancelled
    assert not callee.calls["a"].expired
    eventually(lambda: not callee.is_served())


def test_a_cancel_that_comes_before_the_future_is_returned_cancels_it(caller, agents):
    future, entered, go_on = Future(), threading.Event(), threading.Event()

    def slow():
        entered.set()
        go_on.wait(PATIENCE)
        return future

    agents[1].register("slow", slow)
    call = caller.rpc_async(1, "slow")
    assert entered.wait(PATIENCE)
    (served,) = agents[1]._server.active.values()
    call.cancel()
    eventually(lambda: served.cancelled)
    go_on.set()
    eventually(future.cancelled)


def test_a_cancel_reaches_the_call_whose_future_was_returned(caller, agents):
    seen = []

    async def wait():
        seen.append(current_call())
        await asyncio.sleep(PATIENCE)

    caller.register("wait", wait)
    agents[1].register("ask", lambda: agents[1].rpc_async(0, "wait"))
    call = caller.rpc_async(1, "ask")
    eventually(lambda: seen)
    call.cancel()
    eventually(lambda: seen[0].cancelled)
    eventually(lambda: not caller.activity().in_service)


class Stubborn(Future):
    def cancel(self):
        raise RuntimeError("it does not want to")


def test_a_future_that_raises_when_it_is_cancelled_does_no_harm(caller, agents, caplog):
    agents[1].register("stubborn", Stubborn)
    with caplog.at_level(logging.ERROR, "rankwire"):
        call = caller.rpc_async(1, "stubborn")
        eventually(lambda: agents[1].activity().in_service)
        call.cancel()
        eventually(lambda: "it does not want to" in caplog.text)
    assert not agents[1].activity().in_service


def test_the_call_of_a_killed_caller_is_cancelled():
    with process_world(2) as ranks:
        for rank in ranks:
            make = "__import__('rpc.callee').callee.Callee(backend)"
            rank.call("eval", f"globals().update(callee={make})")
        ranks[0].start("eval", "callee.agent.rpc_sync(1, 'defer', 'a')")
        eventually(lambda: ranks[1].call("eval", "callee.deferred()"))
        ranks[0].kill()
        eventually(lambda: ranks[1].call("eval", "callee.abandoned()") == ["a"])
        eventually(lambda: not ranks[1].call("eval", "callee.agent.activity().in_service"))


@pytest.mark.parametrize("world", ["unix", "tcp"])
def test_a_killed_callee_fails_the_calls_that_wait(world):
    with pair(world) as (caller, callee):
        calls = [caller.rpc_async(1, "defer", number) for number in range(10)]
        eventually(lambda: len(callee.deferred()) == 10)
        callee.rank.kill()
        errors = [call.exception(SOON) for call in calls]
        assert [type(error) for error in errors] == [PeerLostError] * 10
        assert all(error.may_have_run for error in errors)


# -- closing ---------------------------------------------------------------------------------------


def test_closing_waits_for_futures_as_for_functions(caller, callee):
    call = caller.rpc_async(1, "defer", "a")
    future = callee.future("a")
    closing = Running(callee.agent.close, 10.0)
    eventually(lambda: callee.agent._server._draining)
    future.set_result("in time")
    assert call.result(SOON) == "in time"
    closing.result()
    assert closing.seconds < 9.0


def test_closing_cancels_futures_that_are_not_done(caller, callee):
    call = caller.rpc_async(1, "defer", "a")
    future = callee.future("a")
    callee.agent.close(grace=0.05)
    assert future.cancelled()
    error = call.exception(SOON)
    assert isinstance(error, ChannelClosedError)
    assert error.may_have_run


def test_closing_does_not_wait_for_a_future_that_runs(caller, callee):
    call = caller.rpc_async(1, "defer", "a")
    assert callee.future("a").set_running_or_notify_cancel()
    callee.agent.close(grace=0.05)
    assert isinstance(call.exception(SOON), ChannelClosedError)
    callee.future("a").set_result("nobody hears of it")


def test_the_end_of_the_backend_cancels_futures(caller, callee):
    caller.rpc_async(1, "defer", "a")
    future = callee.future("a")
    callee.agent.backend.close()
    eventually(future.cancelled)


# -- interrupts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [8, pytest.param(200_000, marks=pytest.mark.slow)])
def test_an_interrupt_of_the_thread_that_ends_a_future_loses_no_reply(nbytes):
    with tcp_world(2) as world:
        with RpcAgent(world[0]) as caller, RpcAgent(world[1]) as agent:
            callee = Waiting(agent)

            def run(interrupting):
                callee.futures.clear()
                call = caller.rpc_async(1, "defer", "a", timeout=PATIENCE)
                future = callee.future("a")
                eventually(lambda: future._done_callbacks)
                with suppress(Interrupt), interrupting:
                    future.set_result(bytes(nbytes))
                assert call.result(SOON) == bytes(nbytes)
                eventually(lambda: not callee.is_served())

            assert every_interrupt(run) >= 3


def test_a_future_whose_end_was_interrupted_before_its_callbacks_is_answered(caller, agents):
    class Cut(Future):
        def _invoke_callbacks(self):
            raise KeyboardInterrupt

    future = Cut()
    agents[1].register("get", lambda: future)
    call = caller.rpc_async(1, "get")
    eventually(lambda: future._done_callbacks)
    with pytest.raises(KeyboardInterrupt):
        future.set_result("all the same")
    assert call.result(SOON) == "all the same"


# -- whose calls a callback makes ------------------------------------------------------------------


def test_a_callback_of_a_calls_future_is_part_of_the_call_that_made_it(caller, agents):
    seen = []

    def chain():
        result = Future()

        def go_on(inner):
            seen.append(current_call())
            nested = agents[1].rpc_async(0, "chain_of", timeout=PATIENCE)
            nested.add_done_callback(lambda last: result.set_result(last.result()))

        agents[1].rpc_async(0, "echo", 1).add_done_callback(go_on)
        return result

    def chain_of():
        call = current_call()
        return [list(pair) for pair in call.chain], call.deadline.limit

    caller.register("echo", lambda x: x)
    caller.register("chain_of", chain_of)
    agents[1].register("chain", chain)
    links, limit = caller.rpc_sync(1, "chain", timeout=7.0)
    assert links == [[1, "chain"]]
    assert limit <= 7.0
    assert (seen[0].name, current_call()) == ("chain", None)


def test_a_callback_of_a_plain_future_is_part_of_the_call_that_ends_it(caller, callee):
    seen = []

    def release():
        future = callee.futures["a"]
        future.add_done_callback(lambda _: seen.append(current_call().name))
        future.set_result(1)

    callee.agent.register("release", release)
    call = caller.rpc_async(1, "defer", "a")
    callee.future("a")
    caller.rpc_sync(1, "release")
    assert call.result(SOON) == 1
    assert seen == ["release"]


def test_a_cycle_through_a_future_that_was_returned_is_found(caller, agents):
    """A coroutine blocks its event loop with a call that waits for a coroutine of the same loop."""

    async def outer():
        return caller.rpc_sync(1, "between")

    async def inner():
        return 1

    caller.register("outer", outer)
    caller.register("inner", inner)
    agents[1].register("between", lambda: agents[1].rpc_async(0, "inner"))
    with pytest.raises(RemoteError) as info:
        agents[1].rpc_sync(0, "outer", timeout=PATIENCE)
    assert CircularCallError.__name__ in info.value.remote_type


@pytest.mark.parametrize(("name", "ranks"), [("bank.py", 2), ("average.py", 4)])
def test_the_examples_of_the_page_print_what_they_are_said_to_print(tmp_path, name, ranks):
    page = (Path(__file__).parents[2] / "docs" / "calls.md").read_text()
    script = re.search(rf"```python\n(# {name}.*?)```", page, flags=re.DOTALL)[1]
    command = f"$ rankwire run -n {ranks} {name}\n"
    expected = re.search(rf"```console\n{re.escape(command)}(.*?)```", page, flags=re.DOTALL)[1]
    expected = expected.strip().splitlines()
    (tmp_path / name).write_text(script)
    run = subprocess.run(
        [sys.executable, "-m", "rankwire", "run", "-n", str(ranks), name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert sorted(run.stdout.splitlines()) == expected, run.stderr
