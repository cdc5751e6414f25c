"""Many threads, many processes, many calls: every reply to its caller, and nothing left over."""

import os
import random
import signal
import threading
import time

import pytest

from rankwire import PeerLostError, RpcAgent
from rankwire.testing import in_parallel, run_ranks, simulated_world, tcp_world
from real_time import Deadline

WORKERS = 4


@pytest.fixture(params=["tcp", "unix", "simulated"])
def agents(request):
    make = simulated_world if request.param == "simulated" else tcp_world
    options = {} if request.param == "simulated" else {"transport": request.param}
    with make(2, **options) as world:
        agents = [RpcAgent(backend, workers=WORKERS) for backend in world]
        yield agents
        for agent in agents:
            agent.close(grace=5.0)


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
    assert agents[0]._port.in_flight() == 0


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
    assert not agents[0]._caller._futures
    assert agents[0]._port.in_flight() == 0
    deadline = Deadline(5)
    while agents[1]._server.active and not deadline.expired:
        time.sleep(0.001)
    assert not agents[1]._server.active


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


def die_while_called(backend):
    """Rank 1 is killed while the others wait for it in every kind of call."""
    agent = RpcAgent(backend)
    agent.register("die", lambda: os.kill(os.getpid(), signal.SIGKILL))
    agent.register("nap", lambda: time.sleep(20))
    agent.register("fine", lambda: "fine")
    backend.barrier()
    if backend.rank == 1:
        time.sleep(20)
    errors = []

    def wait():
        with pytest.raises(PeerLostError) as info:
            agent.rpc_sync(1, "nap")
        errors.append((time.monotonic(), info.value))

    threads = [threading.Thread(target=wait) for _ in range(5)]
    for thread in threads:
        thread.start()
    future = agent.rpc_async(1, "nap")
    time.sleep(0.3)
    begin = time.monotonic()
    if backend.rank == 0:
        with pytest.raises(PeerLostError):
            agent.rpc_sync(1, "die")
    for thread in threads:
        thread.join(10)
    error = future.exception(10)
    assert isinstance(error, PeerLostError)
    assert [e.peer for _, e in errors] == [1] * 5
    assert all(e.may_have_run for _, e in errors)
    assert agent.rpc_sync(2 - backend.rank, "fine") == "fine"
    backend.send(b"done", 2 - backend.rank)
    backend.recv(2 - backend.rank)
    agent.close()
    return max(at for at, _ in errors) - begin


def run_and_lose_a_rank(backend_name):
    """As run_ranks, where the death of rank 1 is part of the plan."""
    import multiprocessing
    import socket

    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    results = context.Queue()
    processes = [
        context.Process(target=survive, args=(rank, address, backend_name, results))
        for rank in range(3)
    ]
    for process in processes:
        process.start()
    try:
        return dict(results.get(timeout=40) for _ in range(2))
    finally:
        for process in processes:
            process.join(10)
            process.kill()
            process.join()
        results.close()
        results.join_thread()


def survive(rank, address, transport, results):
    from rankwire import TcpBackend

    with TcpBackend(rank, 3, address, transport=transport) as backend:
        results.put((rank, die_while_called(backend)))


@pytest.mark.fault(43, "calls to a killed rank fail and say that they may have run")
@pytest.mark.parametrize("backend", ["tcp", "unix"])
def test_a_killed_rank_fails_every_call_to_it_and_the_others_go_on(backend):
    seconds = run_and_lose_a_rank(backend)
    assert sorted(seconds) == [0, 2]
    assert max(seconds.values()) < 2.0  # the promise is 0.1 s on an idle machine
