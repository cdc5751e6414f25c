"""A resolver: functions that are found by a rule, asked anew for every call."""

import asyncio
import gc
import logging
import threading
import time
import weakref
from concurrent.futures import Future
from functools import partial

import pytest

from rankwire import (
    ConfigurationError,
    FunctionNotFoundError,
    OverloadedError,
    RankwireError,
    RemoteError,
    RpcAgent,
    SimulatedBackend,
)
from rankwire.rpc.registry import Resolver
from rankwire.testing import simulated_world, tcp_world
from rpc.callee import SOON
from worlds import eventually


def add(a, b):
    return a + b


async def later(value):
    await asyncio.sleep(0)
    return value


class Counter:
    """An object whose methods are called; there is a new bound method each time."""

    def __init__(self):
        self.count = 0

    def up(self):
        self.count += 1
        return self.count


class Program:
    """What the resolver of rank 1 gives out, and which names it was asked for."""

    def __init__(self):
        self.functions = {"add": add, "later": later}
        self.asked = []

    def resolve(self, name):
        self.asked.append(name)
        found = self.functions.get(name)
        if isinstance(found, BaseException):
            raise found
        return found


@pytest.fixture
def program():
    return Program()


@pytest.fixture(params=[simulated_world, tcp_world], ids=["simulated", "tcp"])
def agents(request, program):
    with request.param(2) as world:
        agents = [RpcAgent(world[0]), RpcAgent(world[1], resolve=program.resolve)]
        yield agents
        for agent in agents:
            agent.close(grace=1.0)


# -- what a resolver gives -------------------------------------------------------------------------


def test_a_function_that_is_not_registered_is_resolved(agents):
    assert agents[0].rpc_sync(1, "add", 2, b=3) == 5
    assert agents[0].rpc_async(1, "add", 2, 3).result(SOON) == 5
    assert agents[1].functions() == []


def test_a_coroutine_is_resolved_and_runs_on_the_event_loop(agents):
    assert agents[0].rpc_sync(1, "later", 4) == 4
    assert agents[0].rpc_sync(1, "later", 5) == 5


def test_a_resolved_function_may_return_a_future(agents, program):
    future = Future()
    program.functions["defer"] = lambda: future
    call = agents[0].rpc_async(1, "defer")
    future.set_result(1)
    assert call.result(SOON) == 1


def test_registered_names_come_first(agents, program):
    agents[1].register("add", lambda a, b: "registered")
    assert agents[0].rpc_sync(1, "add", 2, 3) == "registered"
    assert program.asked == []
    agents[1].unregister("add")
    assert agents[0].rpc_sync(1, "add", 2, 3) == 5


def test_what_is_withdrawn_cannot_be_called_any_more(agents, program):
    assert agents[0].rpc_sync(1, "add", 2, 3) == 5
    del program.functions["add"]
    with pytest.raises(FunctionNotFoundError, match="no function 'add' is registered there"):
        agents[0].rpc_sync(1, "add", 2, 3)
    assert program.asked == ["add", "add"]


def test_large_and_nested_calls_are_resolved_too(agents, program):
    program.functions["size"] = len
    program.functions["outer"] = lambda data: agents[1].rpc_sync(1, "size", data)
    assert agents[0].rpc_sync(1, "outer", bytes(200_000)) == 200_000


# -- what it refuses -------------------------------------------------------------------------------


def test_the_reason_why_there_is_none_reaches_the_caller(agents, program):
    program.functions["os.system"] = FunctionNotFoundError(
        "os.system", reason="module 'os' is not among those allowed; name it in allow=[...]"
    )
    with pytest.raises(FunctionNotFoundError) as info:
        agents[0].rpc_sync(1, "os.system", "true")
    assert info.value.name == "os.system"
    assert info.value.reason == "module 'os' is not among those allowed; name it in allow=[...]"
    assert "can be called there: module 'os' is not among" in str(info.value)
    assert info.value.peer == 1


def test_without_a_reason_the_reply_has_the_registered_names(agents, program):
    agents[1].register("mul", lambda a, b: a * b)
    program.functions["nothing"] = FunctionNotFoundError("nothing")
    for name in ("nothing", "unknown"):
        with pytest.raises(FunctionNotFoundError, match=r"registered: mul") as info:
            agents[0].rpc_sync(1, name)
        assert (info.value.known, info.value.reason) == (["mul"], "")


def test_another_error_of_the_library_reaches_the_caller_as_remote(agents, program):
    program.functions["f"] = ConfigurationError("it is not ready to be called")
    with pytest.raises(RemoteError) as info:
        agents[0].rpc_sync(1, "f")
    assert info.value.remote_type == "rankwire.errors.ConfigurationError"
    assert info.value.remote_message == "it is not ready to be called"
    program.functions["f"] = OverloadedError("come back later")
    with pytest.raises(OverloadedError, match="come back later"):
        agents[0].rpc_sync(1, "f")


@pytest.mark.parametrize("error", [KeyError("oops"), SystemExit(3)])
def test_a_mistake_of_the_resolver_is_a_refusal_and_is_logged(agents, program, caplog, error):
    program.functions["f"] = error
    with caplog.at_level(logging.WARNING, "rankwire"):
        with pytest.raises(FunctionNotFoundError, match=type(error).__name__):
            agents[0].rpc_sync(1, "f")
    assert "resolving 'f' raised" in caplog.text
    assert agents[0].rpc_sync(1, "add", 1, 1) == 2  # serving goes on


def test_what_is_not_callable_is_refused(agents, program):
    program.functions["f"] = 3
    with pytest.raises(FunctionNotFoundError, match="needs a function, not int"):
        agents[0].rpc_sync(1, "f")


@pytest.mark.parametrize("name", ["\0room", "\0anything", "", "x" * 2000, "a\nb"])
def test_names_that_cannot_be_registered_are_not_asked_for(agents, program, name):
    with pytest.raises(RankwireError):
        agents[0].rpc_sync(1, name, 1)
    assert program.asked == []


def test_a_long_reason_is_made_short(agents, program):
    program.functions["f"] = FunctionNotFoundError("f", reason="\x1b[2J" + "x" * 10**6)
    with pytest.raises(FunctionNotFoundError) as info:
        agents[0].rpc_sync(1, "f")
    assert len(info.value.reason) <= 8192
    assert "\x1b" not in info.value.reason


def test_a_closing_agent_does_not_ask(agents, program):
    go_on, entered = threading.Event(), threading.Event()
    agents[1].register("hold", lambda: (entered.set(), go_on.wait(10)))
    held = agents[0].rpc_async(1, "hold")
    assert entered.wait(10)
    closing = threading.Thread(target=agents[1].close)
    closing.start()
    while not agents[1]._server._draining:
        time.sleep(0.001)
    with pytest.raises(RankwireError, match="closing"):
        agents[0].rpc_sync(1, "add", 1, 2)
    go_on.set()
    held.result(SOON)
    closing.join(10)
    assert program.asked == []


def test_a_rule_is_a_function():
    (backend,) = SimulatedBackend.create_group(1)
    with backend, pytest.raises(ConfigurationError, match="resolve is a function, not dict"):
        RpcAgent(backend, resolve={"add": add})


# -- what is learned -------------------------------------------------------------------------------


def test_what_is_learned_of_a_function_is_known_the_next_time():
    counter = Counter()
    gives = {"plain": lambda: add, "method": lambda: counter.up, "partial": lambda: partial(add, 1)}
    resolver = Resolver(lambda name: gives[name]())
    for name in gives:
        first = resolver.find(name)
        assert not first.is_slow
        first.is_slow = True
        assert resolver.find(name).is_slow
        resolver.find(name).is_slow = False
        assert not first.is_slow
    assert resolver.find("method").target() == 1


def test_what_a_function_is_made_of_is_seen_through():
    resolver = Resolver(lambda name: partial(later, 1) if name == "partial" else Later().__call__)
    assert resolver.find("partial").is_async
    assert resolver.find("method").is_async
    assert not Resolver(lambda name: add).find("add").is_async


class Later:
    async def __call__(self):
        return 1


class Unhashable:
    __hash__ = None

    def __call__(self):
        return 1


def test_what_cannot_be_noted_is_called_all_the_same():
    resolver = Resolver(lambda name: Unhashable())
    assert resolver.find("f").target() == 1


def test_nothing_that_was_given_is_kept(agents, program):
    counter = Counter()
    alive = weakref.ref(counter)
    program.functions["up"] = counter.up
    assert agents[0].rpc_sync(1, "up") == 1
    assert agents[0].rpc_sync(1, "up") == 2
    del counter, program.functions["up"]
    agents[0].rpc_sync(1, "add", 1, 2)  # the thread that ran it has something else in its hands
    gc.collect()
    assert alive() is None


def test_a_slow_function_does_not_keep_others_waiting_the_second_time(agents, program):
    go_on = threading.Event()
    program.functions["nap"] = partial(time.sleep, 0.01)
    program.functions["hold"] = go_on.wait
    agents[0].rpc_sync(1, "nap")
    # The callee learns it after it has replied.
    eventually(lambda: agents[1]._registry.resolve("nap").is_slow)
    held = agents[0].rpc_async(1, "hold")
    assert agents[0].rpc_sync(1, "add", 1, 2) == 3
    go_on.set()
    assert held.result(SOON) is True
