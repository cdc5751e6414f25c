"""Serving until told to stop: by any rank, by the launcher, by the end of who is served for."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from launched import COMMAND, Launched
from rankwire import (
    ChannelClosedError,
    ConfigurationError,
    DeadlineExceededError,
    PeerLostError,
    RpcAgent,
)
from rankwire.testing import in_parallel, simulated_world, sub_world, tcp_world
from rpc.agents import agents_of

WORLDS = [tcp_world, simulated_world, sub_world(tcp_world)]


@pytest.fixture(params=WORLDS, ids=["tcp", "simulated", "sub"])
def agents(request):
    with request.param(3) as world, agents_of(world, 0) as agents:
        yield agents


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_a_stop_of_any_rank_ends_serving_on_all(agents, threads):
    serving = [threads.submit(agent.serve) for agent in agents]
    agents[1].register("hello", lambda: "served")
    assert agents[2].rpc_sync(1, "hello") == "served"
    assert not any(agent.stopped for agent in agents)
    agents[2].stop()
    assert [future.result(10) for future in serving] == [True] * 3
    assert all(agent.stopped for agent in agents)
    assert agents[2].rpc_sync(1, "hello") == "served"  # until they are closed


def test_a_stop_is_for_the_ranks_that_are_named(agents):
    agents[0].stop(1, 1)
    assert [agent.stopped for agent in agents] == [False, True, False]
    agents[0].stop(0, 2)
    assert all(agent.stopped for agent in agents)


def test_a_stop_counts_before_serving_and_for_good(agents):
    agents[0].stop(1)
    for _ in range(2):
        assert agents[1].serve(timeout=30)


def test_serving_for_some_time_can_be_repeated(agents, threads):
    assert agents[1].serve(timeout=0) is False
    assert agents[1].serve(timeout=0.05) is False
    serving = threads.submit(agents[1].serve, timeout=30)
    agents[0].stop()
    assert serving.result(10) is True


def test_a_stop_reaches_a_rank_whose_functions_are_all_busy():
    with tcp_world(2) as world:
        caller, callee = RpcAgent(world[0]), RpcAgent(world[1], workers=1)
        go_on = threading.Event()
        callee.register("hang", lambda: go_on.wait(20))
        calls = [caller.rpc_async(1, "hang") for _ in range(3)]
        caller.stop(1, timeout=10)
        assert callee.stopped
        go_on.set()
        assert all(call.result(10) for call in calls)
        caller.close()
        callee.close()


def test_a_function_may_stop_its_own_rank_and_others(agents, threads):
    agents[1].register("enough", agents[1].stop)
    serving = [threads.submit(agent.serve) for agent in agents]
    agents[0].rpc_sync(1, "enough")
    assert all(future.result(10) for future in serving)


def test_many_threads_of_all_ranks_may_serve_and_stop_at_once(agents):
    def serve(agent):
        return agent.serve(timeout=30)

    def stop(agent):
        agent.stop()
        return agent.stopped

    doing = [lambda f=f, a=a: f(a) for f in (serve, stop, serve, stop) for a in agents]
    assert in_parallel(doing, timeout=40) == [True] * len(doing)


def test_the_loss_of_rank_0_is_raised(threads):
    with simulated_world(3) as world, agents_of(world, 0) as agents:
        serving = [threads.submit(agent.serve) for agent in agents[1:]]
        unmoved = threads.submit(agents[2].serve, until_lost=None)
        world[0].network.kill(0)
        for future in serving:
            with pytest.raises(PeerLostError) as info:
                future.result(10)
            assert info.value.peer == 0
            assert info.value.op == "serve"
        assert not unmoved.done()
        agents[1].stop(2)
        assert unmoved.result(10)


def test_another_rank_may_be_the_one_that_is_served_for(threads):
    with simulated_world(3) as world, agents_of(world, 0) as agents:
        serving = threads.submit(agents[2].serve, until_lost=1)
        world[0].network.kill(1)
        with pytest.raises(PeerLostError) as info:
            serving.result(10)
        assert info.value.peer == 1


@pytest.mark.parametrize("make_world", WORLDS[:2])  # to close a group is not to leave
def test_serving_ends_in_good_order_when_rank_0_has_left_so(make_world, threads):
    with make_world(3) as world:
        agents = [RpcAgent(backend) for backend in world]
        serving = [threads.submit(agent.serve) for agent in agents[1:]]
        agents[0].close()
        world[0].close()
        assert [future.result(10) for future in serving] == [True] * 2
        for agent in agents:
            agent.close(grace=0)


def test_serving_ends_when_all_others_have_left(threads):
    with simulated_world(3) as world:
        agents = [RpcAgent(backend) for backend in world]
        agents[1].close()
        world[1].close()
        assert agents[0].serve(timeout=0.05) is False  # there is another one
        agents[0].close()
    with simulated_world(2) as world:
        agents = [RpcAgent(backend) for backend in world]
        serving = threads.submit(agents[0].serve)
        agents[1].close()
        world[1].close()
        assert serving.result(10)
        agents[0].close()


@pytest.mark.parametrize("what", ["agent", "backend"])
def test_serving_ends_with_its_agent_and_its_backend(what, threads):
    with tcp_world(2) as world, agents_of(world, 0) as agents:
        serving = threads.submit(agents[1].serve)
        (agents if what == "agent" else world)[1].close()
        assert serving.result(10) is True


def test_ranks_that_are_gone_need_not_be_told():
    with simulated_world(3) as world, agents_of(world, 0) as agents:
        agents[1].close()
        world[1].close()
        world[0].network.kill(2)
        agents[0].stop(timeout=10)
        assert agents[0].stopped


def test_a_rank_that_does_not_answer_is_named_and_the_others_know():
    with tcp_world(3) as world:
        agents = [RpcAgent(backend) for backend in world[:2]]  # rank 2 has no agent
        with pytest.raises(DeadlineExceededError) as info:
            agents[0].stop(timeout=0.3)
        assert (info.value.op, info.value.waiting_for) == ("stop", [2])
        assert agents[0].stopped
        assert agents[1].stopped
        for agent in agents:
            agent.close(grace=0)


def test_wrong_arguments_are_refused(agents):
    for wrong in ({"until_lost": 3}, {"until_lost": "0"}, {"timeout": -1}):
        with pytest.raises(ConfigurationError):
            agents[1].serve(**wrong)
    with pytest.raises(ConfigurationError):
        agents[1].stop(3)
    agents[1].close()
    with pytest.raises(ChannelClosedError, match="closed"):
        agents[1].stop()


def test_the_signal_of_a_launcher_is_left_alone_in_other_threads_and_by_other_handlers(agents):
    def handler(number, frame):
        """The program's own."""

    before = signal.signal(signal.SIGTERM, handler)
    try:
        agents[0].serve(timeout=0)
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


PROGRAM = """
import os, signal, threading, time
import rankwire

def tell_when_it_serves():
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.005)
    print("pid", os.getpid(), flush=True)

with rankwire.connect() as backend, rankwire.RpcAgent(backend) as agent:
    backend.barrier()
    try:
        threading.Thread(target=tell_when_it_serves).start()
        is_over = agent.serve(until_lost=None)
    except KeyboardInterrupt:
        print("interrupted", agent.stopped, flush=True)
        raise
    is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    print("over", is_over, agent.stopped, is_default, flush=True)
"""


def test_the_launcher_asks_and_ranks_leave_in_good_order(tmp_path):
    script = tmp_path / "serve.py"
    script.write_text(PROGRAM)
    launched = Launched([*COMMAND, "-n", "2", "--no-prefix", str(script)])
    try:
        launched.read_pids(2)
        launched.send(signal.SIGTERM)
        _, stdout, stderr = launched.wait(30)
    finally:
        launched.close()
    assert stdout.count("over True True True") == 2, stdout + stderr
    assert "lost" not in stderr
    assert "Traceback" not in stderr


def test_an_interrupt_ends_serve(tmp_path):
    script = tmp_path / "serve.py"
    script.write_text(PROGRAM)
    launched = Launched([*COMMAND, "-n", "1", "--no-prefix", str(script)])
    try:
        launched.read_pids(1)
        os.kill(launched.pids[0], signal.SIGINT)
        _, stdout, stderr = launched.wait(30)
    finally:
        launched.close()
    assert "interrupted False" in stdout, stdout + stderr


def test_serving_ends_with_an_error_when_no_rank_is_left_and_one_was_lost(threads):
    with simulated_world(3) as world, RpcAgent(world[0]) as agent:
        serving = threads.submit(agent.serve)
        world[0].network.kill(2)
        world[1].close()
        assert isinstance(serving.exception(10), PeerLostError)


def test_serving_goes_on_while_others_may_come_back(threads, monkeypatch):
    with simulated_world(2) as world, RpcAgent(world[0]) as agent:
        world[0].mesh.ranks_return = True
        world[0].network.kill(1)
        assert agent.serve(timeout=0.5) is False
