"""Serving: every request gets exactly one reply, whatever it is and whatever the function does."""

import asyncio
import threading
import time

import numpy as np
import pytest

from rankwire import Codec, RpcAgent, SimulatedBackend
from rankwire.errors import (
    ChannelClosedError,
    ConfigurationError,
    DeadlineExceededError,
    FunctionNotFoundError,
    InvalidMessageError,
    RemoteError,
)
from rankwire.mesh.calls import OWN, IncomingCall
from rankwire.rpc.messages import decode_reply, encode_request
from rankwire.testing import simulated_world, tcp_world
from real_time import Deadline
from rpc.agents import agents_of
from worlds import eventually


@pytest.fixture
def world():
    backends = SimulatedBackend.create_group(2)
    yield backends
    for backend in backends:
        backend.close()


@pytest.fixture
def agents(world):
    agents = [RpcAgent(backend) for backend in world]
    yield agents
    for agent in agents:
        agent.close(grace=1.0)


def send_raw(agent, payload):
    """Send any bytes as a request and return the reply's bytes."""
    message = ([payload], len(payload))
    return agent._port.call(1, next(agent._caller._ids), message, Deadline(5)).wait(Deadline(5))


def test_a_malformed_request_is_answered(agents):
    for garbage in (b"", b"\0", b"garbage" * 50, bytes(100)):
        with pytest.raises(InvalidMessageError):
            decode_reply(agents[0].codec, send_raw(agents[0], garbage), 1, 5.0)
    agents[1].register("fine", lambda: 1)
    assert agents[0].rpc_sync(1, "fine") == 1


class Failing(Codec):
    """Breaks the contract of ``decode``."""

    def decode(self, payload, *args, **kwargs):
        if b"unlucky" in payload:
            raise LookupError("a defect")
        return super().decode(payload, *args, **kwargs)


def test_a_defect_in_accepting_a_call_is_answered_and_the_others_are_served(caplog):
    with tcp_world(2) as world:
        caller, callee = RpcAgent(world[0]), RpcAgent(world[1], codec=Failing())
        callee.register("echo", lambda value: value)
        values = ["lucky" if n % 3 else "unlucky" for n in range(300)]
        calls = [caller.rpc_async(1, "echo", value, timeout=30) for value in values]
        for value, call in zip(values, calls, strict=True):
            if value == "lucky":
                assert call.result() == value
            else:
                with pytest.raises(RemoteError, match="a defect"):
                    call.result()
        for agent in (caller, callee):
            agent.close(grace=0.5)
    assert "could not be accepted" in caplog.text


def test_a_reply_of_an_unknown_id_is_dropped(agents):
    call = IncomingCall(0, 123456, bytearray(), OWN)
    answers = agents[1]._server.replies
    answers.send(call, answers.value(1), Deadline(5))
    assert agents[0].activity().in_flight == 0


class Unprintable(BaseException):
    def __init__(self, one, two):
        super().__init__()

    def __str__(self):
        raise SystemExit(3)


@pytest.mark.fault(25, "whatever a function raises becomes the caller's error, and serving goes on")
def test_any_exception_becomes_a_reply_and_the_server_survives(agents):
    def fail():
        raise Unprintable(1, 2)

    agents[1].register("fail", fail)
    threads = len(agents[1]._server.pool._threads)
    for _ in range(20):
        with pytest.raises(RemoteError) as info:
            agents[0].rpc_sync(1, "fail")
        assert "Unprintable" in info.value.remote_type
    assert len(agents[1]._server.pool._threads) >= threads  # one more where a call took long


def test_handle_request_serves_on_the_calling_thread(agents):
    served_by = []
    agents[1].register("who", lambda: served_by.append(threading.current_thread()))
    encoded, _ = encode_request(agents[1].codec, "who", 5.0, [], (), {})
    agents[1].handle_request(IncomingCall(0, 1, bytearray().join(encoded), OWN))
    assert served_by == [threading.current_thread()]


def test_a_call_that_does_not_say_where_its_reply_goes_is_not_taken_for_an_own_one(agents):
    served = []
    agents[1].register("serve", lambda: served.append(1))
    encoded, _ = encode_request(agents[1].codec, "serve", 5.0, [], (), {})
    with pytest.raises(ConfigurationError, match="origin"):
        agents[1].handle_request(IncomingCall(0, 1, bytearray().join(encoded), None))
    assert not served


def test_a_call_that_is_late_is_not_run(agents):
    ran = []
    go_on = threading.Event()
    agent = RpcAgent(agents[1].backend, name="one worker", workers=1)
    caller = RpcAgent(agents[0].backend, name="one worker")
    agent.register("block", lambda: go_on.wait(10))
    agent.register("run", lambda: ran.append(1))
    blocking = caller.rpc_async(1, "block")
    late = caller.rpc_async(1, "run", timeout=0.1)
    assert isinstance(late.exception(5), TimeoutError)
    (waiting,) = eventually(agent._server.pool.queue.jobs)
    # The callee counts from when it heard of it, on a busy machine later.
    eventually(lambda: waiting.cancelled or waiting.deadline.expired)
    go_on.set()
    blocking.result(5)
    eventually(lambda: not agent.activity().in_service)
    assert not ran
    caller.close()
    agent.close()


def test_the_calls_of_a_rank_that_died_are_cancelled(world):
    callee = RpcAgent(world[1])
    caller = RpcAgent(world[0])
    seen = threading.Event()
    started = threading.Event()

    def work():
        from rankwire import current_call

        started.set()
        deadline = Deadline(10)
        while not deadline.expired:
            if current_call().cancelled:
                seen.set()
                return
            time.sleep(0.002)

    callee.register("work", work)
    caller.rpc_async(1, "work")
    assert started.wait(5)
    world[0].network.kill(0)
    assert seen.wait(5)
    caller.close(grace=0)
    callee.close()


def test_nothing_is_left_in_any_table(agents):
    agents[1].register("echo", lambda x: x)
    for future in [agents[0].rpc_async(1, "echo", n) for n in range(200)]:
        future.result(10)
    with pytest.raises(FunctionNotFoundError):
        agents[0].rpc_sync(1, "none")
    eventually(lambda: not agents[1].activity().in_service)
    assert agents[0].activity().in_flight == 0
    eventually(lambda: agents[1]._server.pool.queue.running == 0)


# -- who cut a call short --------------------------------------------------------------------------


@pytest.fixture(params=[tcp_world, simulated_world])
def pair(request):
    """Two agents on TCP or simulated; the second has functions of both kinds."""
    with request.param(2) as world, agents_of(world, 0.5) as agents:
        ran = []

        async def run_async():
            ran.append("async")

        agents[1].register("sync", lambda: ran.append("sync"))
        agents[1].register("async", run_async)
        agents[1].ran = ran
        yield agents


@pytest.mark.parametrize("caller", [0, 1], ids=["other rank", "itself"])
@pytest.mark.parametrize("name", ["sync", "async"])
def test_a_request_that_comes_too_late_is_answered_as_late_and_not_as_cancelled(pair, caller, name):
    agent = pair[caller]
    request = encode_request(agent.codec, name, 0.0, [], (), {})
    reply = agent._port.call(1, next(agent._caller._ids), request, Deadline(10))
    with pytest.raises(DeadlineExceededError) as info:
        decode_reply(agent.codec, reply.wait(Deadline(10)), 1, 0.25)
    assert (info.value.limit, info.value.waiting_for) == (0.25, [1])
    assert not info.value.may_have_run
    assert not pair[1].ran


def error_of(agent, how, name, limit):
    """Make a call and return its error, if it has one."""
    if how == "rpc_async":
        return agent.rpc_async(1, name, timeout=limit).exception(10)
    try:
        agent.rpc_sync(1, name, timeout=limit)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("caller", [0, 1], ids=["other rank", "itself"])
@pytest.mark.parametrize("name", ["sync", "async"])
@pytest.mark.parametrize("how", ["rpc_sync", "rpc_async"])
def test_tiny_limits_end_with_the_value_or_the_deadline(pair, caller, name, how):
    agent = pair[caller]
    agent.rpc_sync(1, name)
    for limit in (0.0, 1e-9, 1e-5, 1e-4):
        for _ in range(20):
            error = error_of(agent, how, name, limit)
            if error is not None:
                assert isinstance(error, DeadlineExceededError)
                assert (error.limit, error.waiting_for) == (limit, [1])


def test_a_coroutine_that_cancels_itself_is_a_remote_error(pair):
    async def give_up():
        raise asyncio.CancelledError

    pair[1].register("give up", give_up)
    with pytest.raises(RemoteError) as info:
        pair[0].rpc_sync(1, "give up")
    assert info.value.remote_type == "CancelledError"


@pytest.mark.parametrize("caller", [0, 1], ids=["other rank", "itself"])
def test_the_caller_of_a_coroutine_whose_agent_closes_hears_of_the_closing(pair, caller):
    started = threading.Event()

    async def wait():
        started.set()
        await asyncio.sleep(60)

    pair[1].register("wait", wait)
    future = pair[caller].rpc_async(1, "wait")
    assert started.wait(10)
    pair[1].close(grace=0)
    error = future.exception(10)
    assert isinstance(error, ChannelClosedError)
    assert error.may_have_run


@pytest.mark.parametrize("is_async", [False, True])
def test_a_nested_wait_that_ends_with_the_agent_is_reported_as_closing(pair, is_async):
    release = threading.Event()
    pair[0].register("hang", lambda: release.wait(30))

    def relay():
        return pair[1].rpc_sync(0, "hang")

    async def relay_async():
        return await pair[1].rpc_async(0, "hang")

    pair[1].register("relay", relay_async if is_async else relay)
    future = pair[0].rpc_async(1, "relay")
    eventually(lambda: pair[1].activity().in_flight == 1)
    eventually(lambda: any(job.outgoing for job in pair[1]._server.active.values()))
    try:
        pair[1].close(grace=0)
        error = future.exception(10)
        assert isinstance(error, ChannelClosedError)
        assert error.may_have_run
    finally:
        release.set()


# -- results that change -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("nbytes", [10_000, 4 << 20])
@pytest.mark.parametrize("copy", [True, False])
def test_a_result_is_copied_before_it_can_change_if_that_was_asked_for(
    pair, monkeypatch, kind, nbytes, copy
):
    """Without, it is sent from where it is: what changes before it has left is seen."""
    array = np.zeros(nbytes, np.uint8)
    reply = pair[1]._port.reply

    def change_and_reply(*args, **kwargs):
        array[:] = 1
        reply(*args, **kwargs)

    async def get_async():
        return {"arrays": [array, b"a constant"]}

    function = get_async if kind == "async" else lambda: {"arrays": [array, b"a constant"]}
    assert pair[1].register("get", function, copy=copy) is function
    monkeypatch.setattr(pair[1]._port, "reply", change_and_reply)
    result = pair[0].rpc_sync(1, "get")["arrays"]
    assert set(result[0].tolist()) == {0 if copy else 1}
    assert result[1] == b"a constant"


def test_a_decorator_may_ask_for_the_copy(pair):
    @pair[1].register(copy=True)
    def first():
        return 1

    @pair[1].register("other", copy=True)
    def second():
        return 2

    functions = pair[1]._registry.functions
    assert functions["first"].copies
    assert functions["other"].copies
    assert not functions["sync"].copies
    assert (pair[0].rpc_sync(1, "first"), pair[0].rpc_sync(1, "other")) == (1, 2)


@pytest.mark.parametrize("grace", [0.05, 0.0])
def test_closing_names_the_functions_that_still_run_if_they_had_time_to_end(agents, caplog, grace):
    entered, leave = threading.Semaphore(0), threading.Event()

    def hold():
        entered.release()
        leave.wait(20.0)

    for name in ("first", "second"):
        agents[1].register(name, hold)
        agents[0].rpc_async(1, name)
        assert entered.acquire(timeout=10.0)
    try:
        agents[1].close(grace=grace)
    finally:
        leave.set()
    warning = "'first' and 'second' still run while its agent is closed"
    assert (warning in caplog.text) if grace else (caplog.text == "")
