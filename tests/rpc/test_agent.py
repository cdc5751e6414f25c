"""RpcAgent: what goes beyond the conformance suite."""

import asyncio
import dataclasses
import enum
import functools
import gc
import math
import os
import threading
import time

import numpy as np
import pytest

from rankwire import (
    ChannelClosedError,
    Codec,
    ConfigurationError,
    DeadlineExceededError,
    OverloadedError,
    PeerLostError,
    RpcAgent,
    SimulatedBackend,
    SubBackend,
    UnsupportedTypeError,
)
from rankwire.rpc import call_inquiries
from rankwire.testing import in_parallel, simulated_world, sub_world, tcp_world
from rankwire.wire.frames import DEFAULT_MAX_MESSAGE_NBYTES, Channel
from real_time import Deadline
from rpc.agents import agents_of
from worlds import eventually


@pytest.fixture
def agents():
    with tcp_world(2) as world, agents_of(world, 2.0) as agents:
        yield agents


def test_the_default_message_limit_is_one_gibibyte(agents):
    assert DEFAULT_MAX_MESSAGE_NBYTES == 2**30
    assert agents[0].backend.max_message_nbytes == 2**30


def test_the_readme_forms_of_register(agents):
    def add(a, b):
        return a + b

    agents[1].register("add", add)

    @agents[1].register
    def subtract(a, b):
        return a - b

    @agents[1].register("times")
    def multiply(a, b):
        return a * b

    assert agents[1].functions() == ["add", "subtract", "times"]
    assert agents[0].rpc_sync(1, "times", 3, b=4) == 12
    assert agents[1].lookup("add") is add


class Server:
    def __init__(self):
        self.value = 0

    def push(self, value):
        self.value += value

    async def pull(self):
        return self.value


def test_an_object_is_registered_by_its_methods(agents):
    server = Server()
    assert agents[1].register("params", server) is server
    assert agents[1].register(Server()) is not None
    names = ["Server.pull", "Server.push", "params.pull", "params.push"]
    assert agents[1].functions() == names
    agents[0].rpc_sync(1, "params.push", 4)
    agents[0].to(1).params.push(3)
    assert agents[0].to(1).params.pull() == 7
    assert agents[0].rpc_sync(1, "Server.pull") == 0
    agents[1].unregister("params")
    assert agents[1].functions() == names[:2]


@pytest.mark.parametrize("thing", [7, [1, 2], {"a": 1}, object(), np.zeros(2), 3.5])
def test_what_is_neither_a_function_nor_has_methods_is_refused(agents, thing):
    with pytest.raises(ConfigurationError, match="cannot be registered"):
        agents[0].register(thing)
    with pytest.raises(ConfigurationError, match="cannot be registered"):
        agents[0].register("thing", thing)
    with pytest.raises(ConfigurationError, match="cannot be registered"):
        agents[0].register("thing")(thing)
    with pytest.raises(ConfigurationError, match="cannot be registered"):
        agents[0].register("thing", None)
    assert agents[0].functions() == []


def test_a_function_without_a_name_needs_one(agents):
    nameless = functools.partial(max, 3)
    with pytest.raises(ConfigurationError, match="has no name of its own"):
        agents[1].register(nameless)
    agents[1].register("most", nameless)
    assert agents[0].rpc_sync(1, "most", 5) == 5


def test_a_function_registered_at_both_ends_stands_for_its_name(agents):
    def double(x):
        return 2 * x

    for agent in agents:
        agent.register(double)
    assert agents[0].rpc_sync(1, double, 4) == 8
    with pytest.raises(ConfigurationError, match="not registered on this rank"):
        agents[0].rpc_sync(1, print)


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Config:
    name: str
    weights: np.ndarray
    colour: Colour = Colour.RED


def test_registered_classes_travel(agents):
    for agent in agents:
        agent.codec.register(Colour)
        agent.codec.register(Config)
    agents[1].register("same", lambda config: config)
    got = agents[0].rpc_sync(1, "same", Config("a", np.arange(3.0)))
    assert (got.name, got.colour) == ("a", Colour.RED)
    assert np.array_equal(got.weights, [0, 1, 2])


def test_a_class_that_is_not_registered_is_named_with_its_place(agents):
    with pytest.raises(UnsupportedTypeError) as info:
        agents[0].rpc_sync(1, "same", 1, {"opt": Colour.RED})
    assert info.value.path == 'args[1]["opt"]'
    assert "rpc_sync 'same'" in str(info.value)


def test_arguments_are_sent_before_rpc_async_returns(agents):
    agents[1].register("total", lambda x: float(x.sum()))
    array = np.ones(500_000)
    future = agents[0].rpc_async(1, "total", array)
    array[:] = 5
    assert future.result(10) == 500_000


def test_a_codec_may_be_shared():
    codec = Codec(types=[Colour])
    with tcp_world(2) as world, agents_of(world, codec=codec) as agents:
        agents[1].register("same", lambda x: x)
        assert agents[0].rpc_sync(1, "same", Colour.RED) is Colour.RED


def test_calls_wait_for_an_agent_that_starts_later():
    with tcp_world(2) as (first, second):
        caller = RpcAgent(first)
        future = caller.rpc_async(1, "late")
        time.sleep(0.1)
        callee = RpcAgent(second)
        # The request was waiting: it is served as soon as there is an agent, before anything is
        # registered.
        assert "FunctionNotFoundError" in repr(future.exception(10))
        callee.close()
        caller.close()


def test_a_spoofed_reply_from_another_peer_is_ignored():
    with tcp_world(3) as world, agents_of(world) as agents:
        go_on = threading.Event()
        agents[1].register("wait", lambda: go_on.wait(10) and "genuine")
        agents[2].register("hello", lambda: "from 2")
        assert agents[0].rpc_sync(2, "hello") == "from 2"
        future = agents[0].rpc_async(1, "wait")
        # Rank 2 answers with the id of the call that rank 1 is working on.
        (connection,) = agents[2]._port._incoming
        envelope = (agents[2]._port.service, Channel.REPLY, future.request_id)
        connection.send(envelope, agents[2]._server.replies.value("spoofed"), Deadline(1))
        assert agents[0].rpc_sync(2, "hello") == "from 2"
        assert not future.done()
        go_on.set()
        assert future.result(10) == "genuine"


def test_too_many_calls_in_flight_wait_and_then_fail():
    with tcp_world(2) as world:
        caller, callee = RpcAgent(world[0], max_in_flight=3), RpcAgent(world[1])
        go_on = threading.Event()
        callee.register("wait", lambda: go_on.wait(10))
        futures = [caller.rpc_async(1, "wait") for _ in range(3)]
        with pytest.raises(OverloadedError, match="3 calls to rank 1 are in flight"):
            caller.rpc_sync(1, "wait", timeout=0.1)
        threading.Timer(0.1, go_on.set).start()
        assert caller.rpc_sync(1, "wait", timeout=10) is True  # there was room in time
        assert all(future.result(10) for future in futures)
        caller.close()
        callee.close()


def test_large_calls_in_both_directions_at_once_do_not_block_each_other(agents):
    """Both ends send more than the sockets hold before either reads."""
    for agent in agents:
        agent.register("echo", lambda x: x)
    big = np.ones(1_500_000)

    def call(rank):
        futures = [agents[rank].rpc_async(1 - rank, "echo", big) for _ in range(6)]
        return [float(future.result(30).sum()) for future in futures]

    assert in_parallel([lambda rank=rank: call(rank) for rank in (0, 1)]) == [[1.5e6] * 6] * 2


def test_an_agent_on_a_subgroup_uses_the_groups_ranks():
    with tcp_world(4) as world:
        subs = in_parallel([lambda r=r: SubBackend(world[r], [1, 3]) for r in (1, 3)])
        inner = [RpcAgent(sub) for sub in subs]
        outer = [RpcAgent(world[r]) for r in (1, 3)]
        for agent in (*inner, *outer):
            agent.register("who", lambda agent=agent: [agent.rank, agent.world_size])
        assert inner[0].rpc_sync(1, "who") == [1, 2]
        assert outer[0].rpc_sync(3, "who") == [3, 4]
        for agent in (*inner, *outer):
            agent.close()


@pytest.mark.fault(45, "closing ends every call in flight")
def test_closing_the_backend_ends_its_agents():
    with tcp_world(2) as world:
        caller, callee = [RpcAgent(backend) for backend in world]
        go_on = threading.Event()
        callee.register("wait", lambda: go_on.wait(10))
        future = caller.rpc_async(1, "wait")
        world[0].close()
        assert isinstance(future.exception(5), ChannelClosedError)
        go_on.set()
        with pytest.raises(ChannelClosedError):
            caller.rpc_sync(1, "wait", timeout=5)
        caller.close()
        callee.close()


def held():
    """Return the descriptors and the threads of this process."""
    numbers = os.listdir("/proc/self/fd")
    return len(numbers) - 1, set(threading.enumerate())  # without that of the listing


@pytest.mark.parametrize(
    "make_world", [tcp_world, simulated_world, sub_world(tcp_world), sub_world(simulated_world)]
)
def test_closing_only_the_backend_ends_all_that_its_agents_hold(make_world):
    async def wait(seconds):
        await asyncio.sleep(seconds)

    with make_world(2):  # what the first world of a process leaves behind for all later ones
        pass
    gc.collect()
    descriptors, threads = held()
    with make_world(2) as world:
        agents = [RpcAgent(backend) for backend in world]
        for agent in agents:
            agent.register("wait", wait)
        for agent in agents:
            agent.rpc_sync(1 - agent.rank, "wait", 0.0)
        running = agents[0].rpc_async(1, "wait", 60.0)
        eventually(lambda: agents[1].activity().in_service)
        for backend in world:
            backend.close()
        assert isinstance(running.exception(10), ChannelClosedError)
    eventually(lambda: held()[1] <= threads)
    eventually(lambda: held()[0] <= descriptors)
    for agent in agents:
        agent.close()


def test_a_rank_that_fails_says_why_before_its_coroutines_are_answered(monkeypatch):
    """The agent ends with its backend; what it cancels then must not pass for an orderly end."""
    started = threading.Event()

    async def wait():
        started.set()
        await asyncio.sleep(60)

    with tcp_world(2) as world, agents_of(world, 0) as agents:
        agents[1].register("wait", wait)
        future = agents[0].rpc_async(1, "wait")
        assert started.wait(10)
        formation = world[1].mesh.formation
        close = formation.close

        def close_late(*args):
            eventually(lambda: not agents[1].activity().in_service)
            close(*args)

        monkeypatch.setattr(formation, "close", close_late)
        world[1].close(error=ValueError("boom"))
        error = future.exception(10)
        assert isinstance(error, PeerLostError)
        assert "boom" in error.reason


def test_an_async_function_that_is_called_when_its_agent_has_ended_starts_no_thread():
    async def nothing():
        pass

    with simulated_world(1) as world:
        agent = RpcAgent(world[0])
        agent.register("nothing", nothing)
        agent._server.end(patience=0.0)
        with pytest.raises(ChannelClosedError):
            agent.rpc_sync(0, "nothing")
        assert not [t for t in threading.enumerate() if t.name == "rankwire-event-loop"]
        agent.close()


@pytest.mark.fault(46, "callers of a rank that left are told so")
def test_a_peer_that_has_left_is_told_from_one_that_died():
    with tcp_world(2) as world:
        caller, callee = [RpcAgent(backend) for backend in world]
        callee.register("hello", lambda: 1)
        assert caller.rpc_sync(1, "hello") == 1
        callee.close()
        world[1].close()
        for _ in range(3):
            with pytest.raises(ChannelClosedError):
                caller.rpc_sync(1, "hello", timeout=5)
        caller.close()


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 0},
        {"workers": "4"},
        {"max_in_flight": 0},
        {"max_queued_nbytes": 0},
        {"max_queued_nbytes": math.nan},
        {"timeout": -1},
        {"timeout": "5"},
        {"name": 5},
        {"name": b"rpc"},
        {"name": None},
        {"name": "\udc80"},
    ],
)
def test_wrong_settings_are_refused(options):
    (backend,) = SimulatedBackend.create_group(1)
    with pytest.raises(ConfigurationError):
        RpcAgent(backend, **options)
    backend.close()


def test_a_wrong_limit_of_a_call_or_of_closing_is_refused_and_harms_nothing(agents):
    agents[1].register("hello", lambda: 1)
    for timeout in ("5", -1, 10**400):
        for call in (agents[0].rpc_sync, agents[0].rpc_async):
            with pytest.raises(ConfigurationError):
                call(1, "hello", timeout=timeout)
        with pytest.raises(ConfigurationError):
            agents[0].close(grace=timeout)
    assert agents[0].rpc_sync(1, "hello") == 1


@pytest.mark.parametrize("rank", [np.int64(1), np.array(1), True])
def test_any_integer_is_a_rank_to_call(agents, rank, monkeypatch):
    # However long it takes on a busy machine to say what it is doing.
    monkeypatch.setattr(call_inquiries, "Deadline", lambda _, clock: Deadline(10, clock))
    go_on = threading.Event()
    agents[1].register("hello", lambda: 1)
    assert agents[0].rpc_sync(rank, "hello") == 1  # they are connected
    agents[1].register("wait", lambda: go_on.wait(10))
    with pytest.raises(DeadlineExceededError) as info:  # asks that rank what it is doing, too
        agents[0].rpc_sync(rank, "wait", timeout=0.3)
    go_on.set()
    assert type(info.value.peer) is int
    assert [type(waited) for waited in info.value.waiting_for] == [int]
    assert "wait" in info.value.detail


def test_the_default_timeout_is_the_backends():
    (backend,) = SimulatedBackend.create_group(1, timeout=0.2)
    with RpcAgent(backend) as agent:
        go_on = threading.Event()
        agent.register("wait", lambda: go_on.wait(10))
        with pytest.raises(DeadlineExceededError) as info:
            agent.rpc_sync(0, "wait")
        go_on.set()
        assert info.value.limit == 0.2
    backend.close()


def test_repr_tells(agents):
    assert repr(agents[0]) == "<RpcAgent 'rpc' on rank 0 of 2, 0 functions, 0 calls in flight>"
    agents[0].close()
    assert "closed" in repr(agents[0])


def test_small_calls_have_no_delayed_steps(agents):
    """A missing no-delay option or a slow hand-over shows as steps of tens of milliseconds."""
    agents[1].register("noop", lambda: None)
    times = []
    for _ in range(300):
        begin = time.perf_counter()
        agents[0].rpc_sync(1, "noop")
        times.append(time.perf_counter() - begin)
    assert sorted(times)[150] < 0.02
