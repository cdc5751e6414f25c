"""An operation that returns a handle raises for wrong arguments alone; the handle has the rest."""

import inspect
import os
import re
import signal
import threading
from collections import Counter
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

import rankwire
from rankwire import (
    ANY_RANK,
    ChannelClosedError,
    ConfigurationError,
    FaultPlan,
    InvalidRankError,
    MessageTooLargeError,
    NoConnectionError,
    PeerLostError,
    RpcAgent,
    SimulatedBackend,
    SubBackend,
    UnsupportedTypeError,
)
from rankwire.backends.handles import MessageHandle
from rankwire.observe.stacks import stacks
from rankwire.rpc.agent_calls import AgentCalls
from rankwire.testing import in_parallel, run_ranks
from worlds import PATIENCE, Running, eventually, tcp_world

ONES = np.ones(4)

# Each with the kind of operation that a fault plan counts it as.
CALLS = {
    "rpc_async": lambda agent: agent.rpc_async(1, "nothing", ONES),
    "to_async": lambda agent: agent.to_async(1).nothing(ONES),
}
SENDS = {
    "isend": lambda backend: backend.isend(b"x", 1),
    "isend_array": lambda backend: backend.isend_array(ONES, 1),
}
RECEIVES = {
    "irecv": lambda backend: backend.irecv(1),
    "irecv from any": lambda backend: backend.irecv(ANY_RANK),
    "irecv_into": lambda backend: backend.irecv_into(bytearray(8), 1),
    "irecv_array": lambda backend: backend.irecv_array(1, out=np.zeros(4)),
    "irecv_array from any": lambda backend: backend.irecv_array(ANY_RANK),
}
ARGUMENTS = {
    "barrier": (),
    "all_reduce_coalesced": ([ONES, ONES],),
    "all_gather_coalesced": ([ONES, ONES],),
    "reduce_scatter_coalesced": ([ONES, ONES],),
    "all_to_all_object": ([1, 2],),
    "scatter_object": ([1, 2],),
}
COLLECTIVES = {
    name: partial(function, async_op=True)
    for name, function in ((name, getattr(rankwire, name)) for name in rankwire.__all__)
    if inspect.isfunction(function) and "async_op" in inspect.signature(function).parameters
}
OPERATIONS = {**CALLS, **SENDS, **RECEIVES, **COLLECTIVES}
KINDS = {
    **dict.fromkeys(CALLS, "call"),
    **dict.fromkeys(SENDS, "message"),
    **dict.fromkeys(COLLECTIVES, "collective"),
}


def test_the_tables_have_every_operation_that_returns_a_handle():
    returning = {
        name
        for owner in (rankwire.Backend, AgentCalls)
        for name, function in inspect.getmembers(owner)
        if inspect.isfunction(function)
        and not name.startswith("_")
        and any(
            kind in str(inspect.signature(function).return_annotation)
            for kind in ("MessageHandle", "AsyncRemoteRank")
        )
    } | {"rpc_async"}  # which is overloaded
    assert returning == {name for name in OPERATIONS if name not in COLLECTIVES and " " not in name}


def failure_of(name, backend, agent):
    """Begin an operation, which must not raise; return the error of its handle."""
    args = ARGUMENTS.get(name, (ONES,)) if name in COLLECTIVES else ()
    handle = OPERATIONS[name](agent if name in CALLS else backend, *args)
    wait = handle.wait if isinstance(handle, MessageHandle) else handle.result
    with pytest.raises(Exception) as first:
        wait(PATIENCE)
    with pytest.raises(type(first.value)):
        wait(PATIENCE)
    assert handle.done()
    return first.value


def failures_of(names, backend, agent):
    return {name: failure_of(name, backend, agent) for name in names}


@contextmanager
def simulated_world(size=2, **options):
    backends = SimulatedBackend.create_group(size, timeout=PATIENCE, **options)
    try:
        yield backends
    finally:
        for backend in backends:
            backend.close()


@pytest.fixture(params=["simulated", "tcp"])
def world(request):
    make = partial(tcp_world, timeout=PATIENCE) if request.param == "tcp" else simulated_world
    with make(2) as backends:
        yield backends


def leave(world, agents):
    world[1].close()


def close(world, agents):
    world[0].close()


def close_agents(world, agents):
    for agent in agents:
        agent.close(grace=0.0)
    leave(world, agents)


@pytest.mark.parametrize("end", [leave, close, close_agents])
def test_the_handle_fails_if_the_backend_or_peer_is_closed(world, end):
    agents = [RpcAgent(backend, resolve={"nothing": len}.get) for backend in world]
    in_parallel([backend.barrier for backend in world])
    end(world, agents)
    for name, error in failures_of(OPERATIONS, world[0], agents[0]).items():
        assert isinstance(error, ChannelClosedError | PeerLostError), name
        op = "rpc_async" if name in CALLS else name.split(" ")[0]
        assert re.split(r"\W", error.op)[0] == op


def test_the_handle_fails_if_the_group_is_closed():
    with simulated_world(3) as backends:
        ends = backends[0], backends[2]
        group, _ = in_parallel([partial(SubBackend, backend, [0, 2]) for backend in ends])
        with RpcAgent(group) as agent:
            group.close()
            for name, error in failures_of(OPERATIONS, group, agent).items():
                assert isinstance(error, ChannelClosedError), name


@pytest.mark.parametrize("when", ["before the first message", "later"])
def test_the_handle_fails_if_the_peer_is_killed(when):
    with simulated_world() as backends:
        agents = [RpcAgent(backend) for backend in backends]
        if when == "later":
            in_parallel([backend.barrier for backend in backends])
        backends[0].network.kill(1)
        for name, error in failures_of(OPERATIONS, backends[0], agents[0]).items():
            assert error.peer == 1, name
        for agent in agents:
            agent.close()


@pytest.mark.parametrize("error", [None, OSError("the program's own"), ConfigurationError("x")])
def test_a_fault_plan_fails_the_handle(error):
    plan, count = FaultPlan(), Counter()
    for kind in KINDS.values():
        count[kind] += 1
        plan.fail(0, **{kind: count[kind]}, error=error)
    with simulated_world(faults=plan) as backends:
        agents = [RpcAgent(backend) for backend in backends]
        for name, failure in failures_of(KINDS, backends[0], agents[0]).items():
            assert type(failure) is (NoConnectionError if error is None else type(error)), name
        for agent in agents:
            agent.close()


def call_until_it_dies(backend):
    """Call a rank that is killed meanwhile; return how that is told."""
    functions = {"nothing": lambda array: None, "die": lambda: os.kill(os.getpid(), signal.SIGKILL)}
    with RpcAgent(backend, resolve=functions.get) as agent:
        backend.barrier()
        if backend.rank == 1:
            agent.serve()
        array = np.zeros(4_800_000, np.uint8)
        threading.Timer(0.05, agent.rpc_async, (1, "die")).start()
        while (error := agent.rpc_async(1, "nothing", array).exception()) is None:
            pass
        return type(error)


def test_a_callee_that_dies_while_a_request_is_sent_fails_the_future():
    outcome, _ = run_ranks(2, call_until_it_dies, processes=True, outcomes=True, timeout=PATIENCE)
    assert outcome.value is PeerLostError


def test_a_callee_that_is_lost_while_a_call_waits_for_its_turn_fails_the_future():
    over = threading.Event()
    with simulated_world() as backends:
        functions = {"wait": lambda: over.wait(PATIENCE) and None}
        agents = [RpcAgent(each, resolve=functions.get, max_in_flight=1) for each in backends]
        first = agents[0].rpc_async(1, "wait")
        calling = Running(agents[0].rpc_async, 1, "wait")
        eventually(lambda: "in wait_for_room" in stacks())
        backends[0].network.kill(1)
        assert isinstance(calling.result().exception(PATIENCE), PeerLostError)
        assert isinstance(first.exception(PATIENCE), PeerLostError)
        over.set()
        for agent in agents:
            agent.close()


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
def test_wrong_arguments_raise_at_once(closed):
    backends = SimulatedBackend.create_group(2, timeout=PATIENCE, max_message_nbytes=4096)
    backend = backends[0]
    agent = RpcAgent(backend)
    if closed:
        backend.close()
    large = np.ones(4096)
    for begin, kind in [
        (lambda: agent.rpc_async(2, "nothing"), InvalidRankError),
        (lambda: agent.to_async(2), InvalidRankError),
        (lambda: agent.rpc_async(1, "nothing", object()), UnsupportedTypeError),
        (lambda: agent.rpc_async(1, "nothing", large), MessageTooLargeError),
        (lambda: agent.rpc_async(1, "nothing", timeout="x"), ConfigurationError),
        (lambda: backend.isend(b"x", 2), InvalidRankError),
        (lambda: backend.isend(b"x", 1, tag=-1), ConfigurationError),
        (lambda: backend.isend(object(), 1), ConfigurationError),
        (lambda: backend.isend(large, 1), MessageTooLargeError),
        (lambda: backend.isend_array("text", 1), UnsupportedTypeError),
        (lambda: backend.irecv(2), InvalidRankError),
        (lambda: backend.irecv(1, tag="x"), ConfigurationError),
        (lambda: backend.irecv_into(b"read-only", 1), ConfigurationError),
        (lambda: rankwire.all_reduce(backend, "text", async_op=True), UnsupportedTypeError),
        (lambda: rankwire.broadcast(backend, ONES, 2, async_op=True), InvalidRankError),
    ]:
        with pytest.raises(kind):
            begin()
    with pytest.raises(ConfigurationError):
        SimulatedBackend.create_group(1)[0].irecv(ANY_RANK)
    agent.close()
    for each in backends:
        each.close()


def test_hooks_are_undone_if_the_agent_is_closed():
    undone = []

    class Thing:
        pass

    codec = rankwire.Codec()

    def take(thing, sending):
        sending.undo(lambda: undone.append(1))

    codec.register(Thing, take=take, build=lambda state, receiving: Thing())
    backends = SimulatedBackend.create_group(2)
    agent = RpcAgent(backends[0], codec=codec)
    agent.close()
    assert isinstance(agent.rpc_async(1, "nothing", Thing()).exception(), ChannelClosedError)
    assert undone == [1]
    for backend in backends:
        backend.close()
