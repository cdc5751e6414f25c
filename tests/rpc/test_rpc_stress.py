"""Many threads, many processes, many calls: every reply to its caller, and nothing left over."""

import random
import threading
import time

import pytest

from rankwire import PeerLostError, RpcAgent
from rankwire.testing import in_parallel, run_ranks, simulated_world, tcp_world
from rpc.agents import agents_of
from worlds import eventually, process_world, runtime_folder_of_its_own

WORKERS = 4


@pytest.fixture(params=["tcp", "unix", "simulated"])
def agents(request):
    make = simulated_world if request.param == "simulated" else tcp_world
    options = {} if request.param == "simulated" else {"transport": request.param}
    with make(2, **options) as world, agents_of(world, workers=WORKERS) as agents:
        yield agents


@pytest.mark.fault(40, "each reply reaches the thread that called, however many call")
def test_a_hundred_threads_call_one_peer_and_replies_come_out_of_order(agents):
    naps = random.Random(1)

    def answer(number, nap):
        if nap:
            time.sleep(nap)
        return number

    agents[1].register("answer", answer)

    def call(thread):
        for number in range(10):
            value = thread * 1000 + number
            nap = naps.choice([0, 0, 0, 0.001, 0.003])
            assert agents[0].rpc_sync(1, "answer", value, nap) == value

    in_parallel([lambda t=t: call(t) for t in range(100)])
    assert agents[0].activity().in_flight == 0


@pytest.mark.parametrize(
    "agents",
    [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("tcp", "simulated")), "unix"],
    indirect=True,
)
def test_ten_thousand_asynchronous_calls_need_no_more_threads(agents):
    agents[1].register("echo", lambda x: x)
    agents[0].rpc_sync(1, "echo", 0)
    before = threading.active_count()
    most = before
    futures = []
    for number in range(10_000):
        futures.append(agents[0].rpc_async(1, "echo", number))
        if number % 500 == 0:
            most = max(most, threading.active_count())
    assert [future.result(30) for future in futures] == list(range(10_000))
    # The callee's workers, a few that wait to become one (more on a busy machine), and not one for
    # any call.
    assert most <= before + 20 * WORKERS
    assert agents[0].activity().in_flight == 0
    eventually(lambda: not agents[1].activity().in_service)


def call_every_rank(backend):
    with RpcAgent(backend) as agent:
        agent.register("who", lambda caller: [backend.rank, caller])
        backend.barrier()
        for _ in range(50):
            for dst in range(backend.world_size):
                assert agent.rpc_sync(dst, "who", backend.rank) == [dst, backend.rank]
        futures = [
            (dst, agent.rpc_async(dst, "who", backend.rank))
            for _ in range(50)
            for dst in range(backend.world_size)
        ]
        for dst, future in futures:
            assert future.result() == [dst, backend.rank]
        backend.barrier()
    return backend.rank


@pytest.mark.parametrize("backend", [pytest.param("tcp", marks=pytest.mark.slow), "unix"])
def test_every_ordered_pair_of_four_processes_calls_at_once(backend):
    assert run_ranks(4, call_every_rank, backend=backend, processes=True) == [0, 1, 2, 3]


@pytest.mark.fault(43, "calls to a killed rank fail and say that they may have run")
@pytest.mark.parametrize("backend", ["tcp", "unix"])
def test_a_killed_rank_fails_every_call_to_it_and_the_others_go_on(backend):
    run = "__import__('rpc.doomed').doomed.{}(backend)"
    with runtime_folder_of_its_own(), process_world(3, transport=backend) as ranks:
        doomed = ranks[1].start("eval", run.format("be_called_to_death"))
        survivors = [ranks[rank].start("eval", run.format("survive")) for rank in (0, 2)]
        for survivor in survivors:
            errors, answer = survivor.result()
            assert [type(error) for error in errors] == [PeerLostError] * 6
            assert all((error.peer, error.may_have_run) == (1, True) for error in errors)
            assert answer == "fine"
        with pytest.raises((EOFError, OSError, AssertionError)):
            doomed.result()
