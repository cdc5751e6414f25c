"""Leaving ``with RpcAgent(...)``: it serves until the other agents of its name have left too."""

import itertools
import signal
import threading
import time
from concurrent.futures import wait
from contextlib import suppress

import pytest

from children import Child
from interrupts import Interrupt, every_interrupt
from launched import COMMAND, Launched
from rankwire import FunctionNotFoundError, RpcAgent, SubBackend
from rankwire.mesh.presence import Presence
from rankwire.testing import in_parallel, simulated_world, sub_world, tcp_world
from worlds import PATIENCE, Running, eventually

WORLDS = [tcp_world, simulated_world, sub_world(tcp_world)]


@pytest.fixture(params=WORLDS, ids=["tcp", "simulated", "sub"])
def world(request):
    with request.param(3) as made:
        yield made


class Rank:
    """A rank with an agent, used by a thread of its own; it leaves when it is told to."""

    def __init__(self, backend, **options):
        self.backend = backend
        self.options = options
        self.open, self.go, self.error = threading.Event(), threading.Event(), None
        self.running = Running(self._run)
        assert self.open.wait(PATIENCE)

    def _run(self):
        with RpcAgent(self.backend, **self.options) as self.agent:
            self.agent.register("hello", lambda: "served")
            self.open.set()
            assert self.go.wait(PATIENCE)
            if self.error is not None:
                raise self.error

    def leave(self):
        self.go.set()


def served(caller, rank):
    return caller.agent.rpc_sync(rank, "hello") == "served"


def test_ranks_that_are_done_serve_until_the_last_leaves(world):
    ranks = [Rank(backend) for backend in world]
    ranks[1].leave()
    ranks[2].leave()
    for _ in range(20):
        assert served(ranks[0], 1)
        assert served(ranks[0], 2)
        time.sleep(0.005)
    ranks[0].leave()
    for rank in ranks:
        rank.running.result()


def test_no_time_limit_ends_it(world):
    for backend in world:
        backend.timeout = 0.05
    ranks = [Rank(backend, timeout=PATIENCE) for backend in world]
    ranks[1].leave()
    time.sleep(0.3)
    assert served(ranks[0], 1)
    ranks[0].leave()
    ranks[2].leave()
    for rank in ranks:
        rank.running.result()


def test_an_exception_leaves_at_once_and_is_not_waited_for(world):
    ranks = [Rank(backend) for backend in world]
    ranks[1].error = KeyError("wrong")
    ranks[1].leave()
    assert isinstance(ranks[1].running.error(), KeyError)
    ranks[0].leave()
    assert served(ranks[2], 0)
    ranks[2].leave()
    ranks[0].running.result()
    ranks[2].running.result()


def test_a_rank_that_has_left_the_world_is_not_waited_for(world):
    ranks = [Rank(backend) for backend in world]
    ranks[0].leave()
    ranks[1].leave()
    if type(world[2]) is SubBackend:
        world[2].close()
    else:
        world[2].close(error=RuntimeError("given up"))
    ranks[0].running.result()
    ranks[1].running.result()
    ranks[2].leave()
    ranks[2].running.result()


def test_explicit_closing_does_not_wait_and_is_not_waited_for(world):
    first, second = Rank(world[0]), Rank(world[1])
    third = RpcAgent(world[2])
    third.close()
    first.agent.close()
    second.leave()
    second.running.result()
    first.leave()
    first.running.result()


def test_a_rank_that_never_opened_an_agent_is_not_waited_for(world):
    ranks = [Rank(backend) for backend in world[:2]]
    for rank in ranks:
        rank.leave()
    for rank in ranks:
        rank.running.result()


def test_agents_of_another_name_are_not_waited_for(world):
    one, other = Rank(world[0], name="one"), Rank(world[1], name="other")
    one.leave()
    one.running.result()
    other.leave()
    other.running.result()


def test_an_agent_that_opens_while_another_leaves_is_waited_for(world):
    first, second = Rank(world[0]), Rank(world[1])
    first.leave()
    third = Rank(world[2])
    second.leave()
    assert served(third, 0)
    assert served(third, 1)
    third.leave()
    for rank in (first, second, third):
        rank.running.result()


def test_agents_of_one_thread_leave_one_after_the_other(world):
    with RpcAgent(world[0]) as a, RpcAgent(world[1]) as b, RpcAgent(world[2]):
        b.register("hello", lambda: "served")
        assert a.rpc_sync(1, "hello") == "served"


def test_agents_that_other_threads_have_made_leave_one_after_the_other(world):
    agents = in_parallel([lambda backend=backend: RpcAgent(backend) for backend in world])
    with agents[0], agents[1], agents[2]:
        pass


def test_a_second_agent_of_the_same_name_leaves_too(world):
    for _ in range(3):
        ranks = [Rank(backend) for backend in world]
        for rank in ranks:
            rank.leave()
        for rank in ranks:
            rank.running.result()


def test_an_agent_serves_no_call_while_it_tells_the_others_that_it_is_open(world, monkeypatch):
    """A call that comes then would not find the functions that the program registers next."""
    is_telling, go = threading.Event(), threading.Event()
    caller, tell = RpcAgent(world[0]), Presence.open

    def open_slowly(presence):
        is_telling.set()
        assert go.wait(PATIENCE)
        tell(presence)

    monkeypatch.setattr(Presence, "open", open_slowly)
    making = Running(RpcAgent, world[1])
    assert is_telling.wait(PATIENCE)
    call = caller.rpc_async(1, "hello", timeout=PATIENCE)
    assert not wait([call], 0.2).done
    go.set()
    with pytest.raises(FunctionNotFoundError):
        call.result()
    making.result().close()
    caller.close()


def test_a_rank_that_only_serves_is_left_when_all_others_are_done(world):
    """``serve`` returns when rank 0 has left the world: rank 0 must not wait for it meanwhile."""
    returned = []

    def serve(backend):
        with backend, RpcAgent(backend) as agent:
            returned.append(agent.serve(until_lost=0))

    if type(world[0]) is SubBackend:
        pytest.skip("a rank that closes a group is still in the world")
    serving = [Running(serve, backend) for backend in world[1:]]
    with world[0], RpcAgent(world[0]) as agent:
        agent.stop(0)
        for rank in (1, 2):
            with pytest.raises(FunctionNotFoundError):
                agent.rpc_sync(rank, "nothing")
    for running in serving:
        running.result()
    assert returned == [True, True]


def test_a_rank_that_was_told_to_stop_serving_may_still_call(world):
    done = []

    def serve(backend, name):
        with RpcAgent(backend, name=name) as agent:
            agent.serve(until_lost=None)
            done.append(agent.rpc_sync(0, "hello"))

    for turn in range(10):  # of another name each: a stop does not wait for one that was closed
        name = f"turn {turn}"
        serving = [Running(serve, backend, name) for backend in world[1:]]
        with RpcAgent(world[0], name=name) as agent:
            agent.register("hello", lambda: "served")
            agent.stop()
        for running in serving:
            running.result()
    assert done == ["served"] * 20


def test_a_rank_that_a_stop_has_not_reached_is_not_waited_for(world):
    """Its last agent is closed when it is told, and its next one only serves."""
    RpcAgent(world[1]).close()
    with RpcAgent(world[0]) as agent:
        agent.stop(1)
        later = RpcAgent(world[1])
        serving = Running(later.serve, until_lost=None)
        eventually(lambda: later._port.presence._number > 1)
    assert not later.stopped
    later.close()
    serving.result()


def test_closing_the_agent_or_the_backend_elsewhere_ends_the_leaving(world):
    ranks = [Rank(backend) for backend in world]
    ranks[0].leave()
    ranks[1].leave()
    while not all(rank.agent._port.presence._number > 1 for rank in ranks[:2]):
        time.sleep(0.001)
    ranks[0].agent.close()
    ranks[0].running.result()
    world[1].close()
    ranks[1].running.result()
    ranks[2].leave()
    ranks[2].running.result()


def test_a_killed_simulated_rank_and_its_others_leave():
    with simulated_world(3) as world:
        ranks = [Rank(backend) for backend in world]
        ranks[0].leave()
        ranks[1].leave()
        world[0].network.kill(2)
        ranks[0].running.result()
        ranks[1].running.result()
        ranks[2].leave()
        ranks[2].running.result()


def test_a_world_of_one_rank_leaves_at_once():
    with tcp_world(1) as world, RpcAgent(world[0]) as agent:
        agent.register("hello", lambda: "served")
        assert agent.rpc_sync(0, "hello") == "served"


def test_without_a_coordinator_leaving_does_not_wait():
    with tcp_world(3) as world:
        ranks = [Rank(backend) for backend in world[1:]]
        ranks[0].leave()
        world[0].close()  # it coordinates
        ranks[0].running.result()
        ranks[1].leave()
        ranks[1].running.result()


def test_an_interrupt_anywhere_in_leaving_does_not_keep_the_others(world):
    turns = itertools.count()

    def run(interrupting):
        name = f"turn {next(turns)}"
        other = Rank(world[1], name=name)
        agent = RpcAgent(world[0], name=name)
        threading.Timer(0.02, other.leave).start()
        with suppress(Interrupt), interrupting:
            agent._serve_until_all_leave()
        agent.close(grace=0.0)
        other.leave()
        other.running.result()

    every_interrupt(run)


PROGRAM = """
import os, signal, sys, threading, time
import rankwire
with rankwire.connect(timeout=1) as backend, rankwire.RpcAgent(backend) as agent:
    agent.register("f", lambda: "served")
    backend.barrier()
    if backend.rank == 0:
        {rank_0}
    else:
        print("pid", os.getpid(), flush=True)
print("left")
"""


def launch(tmp_path, rank_0, *options, ranks=3):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(rank_0=rank_0))
    return [*COMMAND, "-n", str(ranks), *options, str(path)]


def test_a_job_that_takes_longer_than_the_time_limit_of_its_operations(tmp_path):
    work = 'for _ in range(5): time.sleep(0.5); assert agent.rpc_sync(1, "f") == "served"'
    ended = Child(launch(tmp_path, work)).result(timeout=60)
    assert ended.returncode == 0, ended
    assert ended.stdout.count("left") == 3


def test_a_killed_rank_is_not_waited_for(tmp_path):
    work = "time.sleep(0.2); os.kill(os.getpid(), signal.SIGKILL)"
    ended = Child(launch(tmp_path, work, "--on-failure", "continue")).result(timeout=60)
    assert ended.stdout.count("left") == 2


def test_a_rank_that_was_started_anew_serves_until_the_others_leave(tmp_path):
    work = """
        lost = threading.Event()
        back = threading.Event()
        backend.on_peer_lost(lambda error: lost.set())
        backend.on_peer_joined(lambda rank, incarnation: back.set())
        agent.rpc_async(1, "die")
        assert lost.wait(30) and back.wait(30)
        time.sleep(0.5)
        while True:
            try:
                print(agent.rpc_sync(1, "f"))
                break
            except rankwire.FunctionNotFoundError:
                time.sleep(0.01)"""
    path = tmp_path / "program.py"
    text = PROGRAM.format(rank_0=work).replace(
        "    backend.barrier()",
        """    agent.register("die", lambda: os.kill(os.getpid(), signal.SIGKILL))
    if not backend.incarnation: backend.barrier()""",
    )
    path.write_text(text)
    command = [*COMMAND, "-n", "3", "--on-failure", "restart", str(path)]
    ended = Child(command).result(timeout=60)
    assert ended.returncode == 0, ended
    assert "[rank 0] served" in ended.stdout
    assert ended.stdout.count("left") == 3


def test_ctrl_c_ends_the_leaving_at_once(tmp_path):
    # A pytest in the background of a shell ignores SIGINT, and so would what it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    launched = Launched(launch(tmp_path, "time.sleep(60)"))
    try:
        launched.read_pids(2)
        launched.send(signal.SIGINT)
        code, stdout, _ = launched.wait()
        assert code == 130
        assert "left" not in stdout
    finally:
        signal.signal(signal.SIGINT, before)
        launched.close()
