"""Futures of calls: their verbs, ``await``, and a ``cancel`` that reaches the callee."""

import asyncio
import concurrent.futures
import contextlib
import gc
import inspect
import sys
import threading
import time
import weakref

import pytest

from rankwire import DeadlineExceededError, RemoteError
from rankwire.testing import simulated_world, tcp_world
from rpc.agents import agents_of
from worlds import Running, eventually


@pytest.fixture(params=[simulated_world, tcp_world], ids=["simulated", "tcp"])
def agents(request):
    with request.param(2) as world, agents_of(world, 2.0) as agents:
        agents[1].register("add", lambda a, b: a + b)
        go_on = threading.Event()
        agents[0].go_on = go_on
        agents[1].register("wait", lambda: go_on.wait(20))
        agents[1].register("fail", lambda: 1 / 0)
        assert agents[0].rpc_sync(1, "add", 1, 1) == 2  # they are connected
        yield agents
        go_on.set()


def test_as_completed_works_although_no_thread_waits_for_a_result(agents):
    futures = [agents[0].rpc_async(1, "add", n, n) for n in range(50)]
    done = {future.result() for future in concurrent.futures.as_completed(futures, timeout=10)}
    assert done == {2 * n for n in range(50)}


def test_a_future_has_what_the_base_class_gives_it(agents):
    """It makes its own attributes; in a newer Python there may be others."""
    future = agents[0].rpc_async(1, "wait")
    for name, value in vars(concurrent.futures.Future()).items():
        assert type(getattr(future, name)) is type(value) or name == "_condition"
    assert isinstance(future._condition, threading.Condition)
    assert future._condition is future._condition
    agents[0].go_on.set()
    assert future.result(10) is True


def test_every_function_of_when_ended_is_called(agents):
    future, told = agents[0].rpc_async(1, "wait"), []
    for number in range(3):
        future.when_ended(lambda ended, number=number: told.append((number, ended.failure)))
    assert not told
    agents[0].go_on.set()
    assert future.result(10) is True
    assert told == [(0, None), (1, None), (2, None)]
    future.when_ended(lambda ended: told.append("at once"))
    assert told[3:] == ["at once"]


def test_what_stands_for_a_future_is_freed_with_it_without_the_collector(agents):
    class Standing:
        def __init__(self, future):
            self.future = future
            future.when_ended(self.end)

        def end(self, future):
            pass

    gc.disable()
    try:
        early = Standing(agents[0].rpc_async(1, "wait"))
        agents[0].go_on.set()
        assert early.future.result(10) is True
        late = Standing(early.future)
        gone = [weakref.ref(early), weakref.ref(late)]
        del early, late
        eventually(lambda: not any(one() for one in gone))  # another thread may be telling them
    finally:
        gc.enable()


def test_a_reply_is_decoded_once_by_any_thread(agents):
    """The thread that calls and the one that reads may both see it, and what hooks do counts."""
    built = []
    codec = agents[0].codec
    codec.register(
        Counted, take=lambda value, _: 1, build=lambda _, __: built.append(1) or Counted()
    )
    agents[0].register("make", Counted)
    futures = [agents[0].rpc_async(0, "make") for _ in range(500)]
    assert all(type(future.result(10)) is Counted for future in futures)
    assert len(built) == 500


class Counted:
    """Travels by hooks."""


def test_threads_may_wait_for_futures_of_several_agents_in_any_order(agents):
    """``concurrent.futures.wait`` takes the locks of all, ordered by the futures' addresses."""
    agents[0].register("nap", lambda seconds: time.sleep(seconds))
    here, there = ([agent.rpc_async(dst, "nap", 1.0) for _ in range(8)] for agent, dst in
                   ((agents[0], 1), (agents[1], 0)))  # fmt: skip
    pairs = [(a, b) for a in here for b in there]
    orders = [[p for p in pairs if id(p[0]) < id(p[1])], [p for p in pairs if id(p[0]) > id(p[1])]]
    ready = threading.Barrier(2)

    def look(chosen):
        ready.wait(10)
        for _ in range(300):
            for pair in chosen:
                concurrent.futures.wait(pair, 0)

    looking = [threading.Thread(target=look, args=(order,), daemon=True) for order in orders]
    with a_thread_switch_every(1e-6):
        for thread in looking:
            thread.start()
        for thread in looking:
            thread.join(20)
    assert not any(thread.is_alive() for thread in looking)
    # A lock of its own: whoever holds one does not keep another future from being looked at.
    taken = []
    with here[0]._condition:
        thread = threading.Thread(
            target=lambda: taken.append(here[1]._condition.acquire(timeout=5)), daemon=True
        )
        thread.start()
        thread.join(10)
    assert taken == [True]


@contextlib.contextmanager
def a_thread_switch_every(seconds):
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("first", ["wait", "cancel", "callback", "result"])
def test_a_callback_added_at_the_moment_of_the_reply_is_called(agents, first):
    """Its condition is made by the first who needs it, perhaps while the reply is read."""
    for number in range(200):
        future = agents[0].rpc_async(1, "add", number, 1)
        told = threading.Event()
        helper = threading.Thread(target=agents[0].rpc_sync, args=(1, "add", 0, 0))
        helper.start()  # reads the other reply as well
        if first == "wait":
            assert concurrent.futures.wait([future], 10).done == {future}
        elif first == "callback":
            future.add_done_callback(lambda _, told=told: told.set())
            assert told.wait(10)
        elif first == "cancel" and future.cancel():
            assert future.cancelled()
            helper.join()
            continue
        assert future.result(10) == number + 1
        helper.join()


def test_exception_gives_the_remote_error(agents):
    error = agents[0].rpc_async(1, "fail").exception(10)
    assert isinstance(error, RemoteError)
    assert error.remote_type == "ZeroDivisionError"
    assert "rpc_async 'fail'" in str(error)


def test_the_calls_own_deadline_ends_it_although_no_thread_waits(agents):
    future = agents[0].rpc_async(1, "wait", timeout=0.1)
    finished = threading.Event()
    future.add_done_callback(lambda _: finished.set())
    assert finished.wait(15)
    error = future.exception()
    assert isinstance(error, DeadlineExceededError)
    assert (error.limit, error.may_have_run) == (0.1, True)


def test_waiting_in_vain_does_not_end_the_call(agents):
    future = agents[0].rpc_async(1, "wait")
    with pytest.raises(TimeoutError):
        future.result(0.05)
    assert not future.done()
    agents[0].go_on.set()
    assert future.result(10) is True


@pytest.mark.fault(44, "a cancelled future is settled at once")
def test_a_cancelled_future_is_settled_at_once(agents):
    future = agents[0].rpc_async(1, "wait")
    assert future.cancel()
    assert future.cancelled()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    assert not agents[0].activity().in_flight
    done = agents[0].rpc_async(1, "add", 1, 2)
    assert done.result(10) == 3
    assert not done.cancel()


@pytest.mark.fault(44, "cancelled calls leave nothing in any table")
def test_many_cancelled_calls_leave_nothing(agents):
    agents[1].register("never", lambda: time.sleep(0.01))
    for _ in range(300):
        agents[0].rpc_async(1, "never").cancel()
    assert agents[0].activity().in_flight == 0
    assert agents[0].rpc_sync(1, "add", 1, 1) == 2


def test_cancelling_the_awaiting_task_cancels_the_call(agents):
    async def main():
        future = agents[0].rpc_async(1, "wait")

        async def wait():
            return await future

        task = asyncio.create_task(wait())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return future

    assert asyncio.run(main()).cancelled()


def test_awaiting_raises_the_remote_error(agents):
    async def main():
        await agents[0].rpc_async(1, "fail")

    with pytest.raises(RemoteError):
        asyncio.run(main())


def test_a_callback_may_make_calls(agents):
    results = []
    finished = threading.Event()

    def call_again(future):
        results.append(future.result())
        results.append(agents[0].rpc_sync(1, "add", 10, 20, timeout=10))
        finished.set()

    agents[0].rpc_async(1, "add", 1, 2).add_done_callback(call_again)
    assert finished.wait(10)
    assert results == [3, 30]


def test_repr_tells(agents):
    future = agents[0].rpc_async(1, "wait")
    assert "'wait' on rank 1" in repr(future)
    agents[0].go_on.set()
    future.result(10)
    assert "done" in repr(future)


def test_no_interrupt_separates_taking_the_lock_of_a_future_from_noting_it(agents):
    future = agents[0].rpc_async(1, "add", 1, 1)
    # By a function in C, in which no signal handler runs; those of ``Condition`` are in Python.
    assert inspect.isbuiltin(future._condition.__enter__)
    assert inspect.isbuiltin(future._condition.__exit__)
    assert future.result() == 2


# -- replies that no thread waits for --------------------------------------------------------------


def without_looks(agent):
    """Keep the standby from looking after replies: whoever reads them has to be told by others."""
    agent._caller.futures.check = lambda: False


@pytest.mark.parametrize("way", ["wait", "as_completed", "callback", "await"])
def test_a_reply_is_read_as_it_comes_although_no_thread_waits_for_it(agents, way):
    without_looks(agents[0])
    for number in range(50):
        future = agents[0].rpc_async(1, "add", number, 1)
        if way == "wait":
            assert concurrent.futures.wait([future], 10).done == {future}
        elif way == "as_completed":
            assert list(concurrent.futures.as_completed([future], 10)) == [future]
        elif way == "callback":
            told = threading.Event()
            future.add_done_callback(lambda _, told=told: told.set())
            assert told.wait(10)
        else:

            async def main(future=future):
                return await asyncio.wait_for(future, 10)

            assert asyncio.run(main()) == number + 1


def test_a_thread_that_stops_reading_leaves_replies_to_other_readers(agents):
    """It had the reading role when somebody else asked to be called back."""
    without_looks(agents[0])
    gates = [threading.Event(), threading.Event()]
    agents[1].register("pass", lambda gate: gates[gate].wait(20))
    for _ in range(20):
        for gate in gates:
            gate.clear()
        attended = agents[0].rpc_async(1, "pass", 0)
        reader = Running(agents[0].rpc_sync, 1, "pass", 1)
        eventually(lambda: any(inbox.is_read for inbox in agents[0]._port._calls.inboxes()))
        told = threading.Event()
        attended.add_done_callback(lambda _, told=told: told.set())
        gates[1].set()
        assert reader.result() is True
        gates[0].set()
        assert told.wait(10)


def test_calls_that_are_done_do_not_pile_up_behind_one_that_is_not(agents):
    waiting = agents[0].rpc_async(1, "wait")
    waiting.add_done_callback(lambda _: None)
    for number in range(200):
        concurrent.futures.wait([agents[0].rpc_async(1, "add", number, 1)], 10)
    (inbox,) = agents[0]._port._calls.inboxes()
    assert len(inbox._attended) <= 12
    assert not waiting.done()


def test_many_callbacks_are_called_while_threads_call_and_wait(agents):
    """Readers come and go, and the poller is one of them."""
    without_looks(agents[0])
    told = threading.Semaphore(0)

    def call_back():
        for number in range(200):
            agents[0].rpc_async(1, "add", number, 1).add_done_callback(lambda _: told.release())

    def call():
        return [agents[0].rpc_sync(1, "add", number, 2) for number in range(200)]

    running = [Running(call_back), Running(call), Running(call_back), Running(call)]
    assert running[1].result() == running[3].result() == list(range(2, 202))
    for _ in range(400):
        assert told.acquire(timeout=10)


# -- errors that were not retrieved --------------------------------------------------------------


def logged(caplog):
    return [r.getMessage() for r in caplog.records if "has not retrieved" in r.getMessage()]


def test_an_error_that_is_not_retrieved_is_logged_once(agents, caplog):
    future = agents[0].rpc_async(1, "fail")
    eventually(future.done)
    assert logged(caplog) == []
    del future
    (text,) = eventually(lambda: logged(caplog))
    assert "ZeroDivisionError" in text
    assert "rpc_async 'fail'" in text
    assert "peer 1" in text
    agents[0].rpc_async(1, "fail")  # dropped before it ends
    eventually(lambda: len(logged(caplog)) == 2)


def test_an_error_that_is_dealt_with_elsewhere_is_not_logged(agents, caplog):
    agents[0].rpc_async(1, "fail").disregard()
    future = agents[0].rpc_async(1, "fail")
    eventually(future.done)
    future.disregard()
    del future
    agents[0].rpc_async(1, "add", 1)  # logged after the others would have been
    (text,) = eventually(lambda: logged(caplog))
    assert "rpc_async 'add'" in text


def ask_for_the_result(future):
    with pytest.raises(RemoteError):
        future.result(10)


def ask_in_a_callback(future):
    told = threading.Event()
    future.add_done_callback(lambda done: (done.exception(), told.set()))
    assert told.wait(10)


def ask_by_awaiting(future):
    with pytest.raises(RemoteError):
        asyncio.run(awaited(future))


@pytest.mark.parametrize(
    "ask",
    [lambda future: future.exception(10), ask_for_the_result, ask_in_a_callback, ask_by_awaiting],
    ids=["exception", "result", "callback", "await"],
)
def test_an_error_that_was_retrieved_is_not_logged(agents, caplog, ask):
    ask(agents[0].rpc_async(1, "fail"))
    assert logged(caplog) == []


async def awaited(future):
    return await future


def test_what_was_cancelled_or_ended_by_closing_is_not_logged(agents, caplog):
    agents[0].rpc_async(1, "wait").cancel()
    agents[0].rpc_async(1, "wait")
    agents[0].close(grace=0.0)
    assert logged(caplog) == []


def test_a_result_that_is_not_retrieved_is_not_logged(agents, caplog):
    future = agents[0].rpc_async(1, "add", 1, 1)
    eventually(future.done)
    del future
    assert logged(caplog) == []
