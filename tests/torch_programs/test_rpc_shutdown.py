"""torch RPC: ``shutdown`` waits for calls and for the workers that are left."""

import itertools
import logging
import os
import signal
import threading

import pytest

torch = pytest.importorskip("torch")

from rpc_ranks import run_workers, worker  # noqa: E402

import rankwire.torch.rpc as rpc  # noqa: E402
from rankwire.rendezvous.runtime_dir import sweep_socket_files  # noqa: E402
from rankwire.torch.rpc.session import current  # noqa: E402
from worlds import eventually  # noqa: E402

ALLOW = [__name__]


def add(a, b):
    return a + b


def wait_forever():
    threading.Event().wait()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Counter:
    value = 0


def count(counter):
    counter.local_value().value += 1
    return rpc.get_worker_info().name


def wait_until_lost(name):
    with pytest.raises(RuntimeError, match="is lost"):
        rpc.rpc_sync(name, wait_forever)


class Log(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []
        logging.getLogger("rankwire").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


def start_chain(hops, ranks):
    """Have calls made that nobody waits for, each by the one before."""
    Chain.hops += 1
    if hops:
        here = ranks.index(rpc.get_worker_info().id)
        to = worker(ranks[(here + 1) % len(ranks)])
        rpc.rpc_async(to, start_chain, args=(hops - 1, ranks))


class Chain:
    hops = 0


def test_a_graceful_end_waits_for_calls_that_nobody_waits_for():
    hops = 30

    def check(rank):
        if rank == 0:
            start_chain(hops, [0, 1, 2])
        rpc.shutdown()
        return Chain.hops

    assert sum(run_workers(3, check, allow=ALLOW)) == hops + 1


def test_a_dead_worker_does_not_take_along_those_that_wait_or_work():
    def check(rank):
        log = Log()
        if rank == 2:
            die()
        if rank == 1:
            wait_until_lost("worker2")  # and by then worker0 waits in shutdown
            sums = [rpc.rpc_sync("worker0", add, args=(1, n)) for n in range(20)]
            assert sums == list(range(1, 21))
        rpc.shutdown()
        assert not rpc._is_current_rpc_agent_set()
        return [line for line in log.lines if "shut down without" in line]

    told = run_workers(3, check, allow=ALLOW, killed=[2])
    for line in told[0] + told[1]:
        assert "the workers shut down without WorkerInfo(id=2, name=worker2): rank 2" in line
    assert [len(lines) for lines in told[:2]] == [1, 1]


@pytest.mark.parametrize("dying", [[0], [1], [0, 1], [0, 3]])
def test_the_others_end_together_whichever_worker_dies(dying):
    def check(rank):
        if rank in dying:
            wait_forever()
        if rank == 2:
            for victim in dying:
                rpc.rpc_async(worker(victim), die)
                wait_until_lost(worker(victim))
            start_chain(10, [each for each in range(5) if each not in dying])
        rpc.shutdown()
        return Chain.hops

    hops = run_workers(5, check, allow=ALLOW, killed=dying)
    assert sum(count for count in hops if count) == 11
    sweep_socket_files()  # if rank 0 is killed, the next world does it


def test_a_worker_that_leaves_at_once_is_not_waited_for():
    def check(rank):
        rpc.shutdown(graceful=rank != 1)

    run_workers(3, check)


def test_calls_to_a_worker_that_shuts_down_say_so():
    def check(rank):
        if rank == 0:
            with pytest.raises(RuntimeError, match="not all workers came to shutdown"):
                rpc.shutdown(timeout=0.3)
            return
        counter = rpc.remote("worker0", Counter)
        calls = (rpc.rpc_sync("worker0", count, args=(counter,)) for _ in itertools.count())
        with pytest.raises(RuntimeError, match=r"is closing|has left"):
            set(calls)

    run_workers(2, check, allow=ALLOW, graceful=False)


@pytest.mark.parametrize("dying", [None, 2])
def test_a_worker_that_lives_and_does_not_come_is_named(dying):
    def check(rank):
        if rank == 1:
            eventually(lambda: 0 not in current().agent.backend.alive)
            rpc.shutdown(graceful=False)
            return
        if rank == dying:
            die()
        if rank == 0:
            if dying:
                wait_until_lost(worker(dying))
            with pytest.raises(RuntimeError, match=r"not all workers came to shutdown.*rank 1"):
                rpc.shutdown(timeout=0.5)
        elif not dying:
            with pytest.raises(RuntimeError, match=r"not all workers came to shutdown"):
                rpc.shutdown(timeout=0.5)

    run_workers(3, check, allow=ALLOW, killed=[dying])
