"""torch's own RPC and rankwire's, interleaved in one program.

Run with ``python -m benchmarks.torch_rpc``. Two forked ranks have both; every figure is measured on
one and then on the other, ``ROUNDS`` times, and the best median of each counts: other work on the
machine only ever adds. Before each there is a pause: torch's threads go on polling for a while
after a call, and what follows at once takes three times as long. Renews the table in
``docs/from-torch-rpc.md``.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed.autograd
import torch.distributed.rpc as stock

import rankwire.torch.rpc as ours
from benchmarks.torch_backends import BEGIN, END, shown

ROUNDS = 5
PAUSE = 0.3  # seconds
PAGE = Path(__file__).parents[1] / "docs" / "from-torch-rpc.md"
KINDS = {"torch": stock, "rankwire": ours}
AUTOGRAD = {"torch": torch.distributed.autograd, "rankwire": ours.autograd}
KIB, MIB = 1 << 10, 1 << 20
AT_ONCE = 64
PEER = "rank1"

# What is repeated, how often a round, and how many calls it makes at once.
Exercise = tuple[Callable[[], Any], int, int]


def nothing() -> None:
    pass


def same(value: torch.Tensor) -> torch.Tensor:
    return value


def answered() -> torch.futures.Future[None]:
    answer: torch.futures.Future[None] = torch.futures.Future()
    answer.set_result(None)
    return answer


@stock.functions.async_execution
def later_by_torch() -> torch.futures.Future[None]:
    return answered()


@ours.functions.async_execution
def later_by_rankwire() -> torch.futures.Future[None]:
    return answered()


LATER = {"torch": later_by_torch, "rankwire": later_by_rankwire}


class Counter:
    """An object with a method."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> int:
        self.count += 1
        return self.count


def exercises(kind: str) -> dict[str, Exercise]:
    """Return what is measured."""
    rpc, autograd = KINDS[kind], AUTOGRAD[kind]
    counter = rpc.remote(PEER, Counter)
    counter.rpc_sync().add()
    weight = torch.ones(16, 16, requires_grad=True)

    def echo(nbytes: int) -> Callable[[], Any]:
        tensor = torch.ones(nbytes // 4)
        return lambda: rpc.rpc_sync(PEER, same, args=(tensor,))

    def at_once() -> None:
        for call in [rpc.rpc_async(PEER, nothing) for _ in range(AT_ONCE)]:
            call.wait()

    def step() -> None:
        with autograd.context() as context:
            loss = rpc.rpc_sync(PEER, torch.matmul, args=(weight, weight)).sum()
            autograd.backward(context, [loss])

    return {
        "no-op `rpc_sync`": (lambda: rpc.rpc_sync(PEER, nothing), 500, 1),
        "no-op `rpc_async().wait()`": (lambda: rpc.rpc_async(PEER, nothing).wait(), 500, 1),
        f"no-op `rpc_async`, {AT_ONCE} at once, each": (at_once, 30, AT_ONCE),
        "no-op with `async_execution`": (lambda: rpc.rpc_sync(PEER, LATER[kind]), 500, 1),
        "`remote().to_here()`": (lambda: rpc.remote(PEER, int).to_here(), 300, 1),
        "method of an RRef": (lambda: counter.rpc_sync().add(), 500, 1),
        "echo of a tensor of 8 B": (echo(8), 300, 1),
        "echo of a tensor of 1 MiB": (echo(MIB), 50, 1),
        "echo of a tensor of 64 MiB": (echo(64 * MIB), 5, 1),
        "forward, backward and end of a context over one call": (step, 100, 1),
    }


def be_rank(rank: int, ports: dict[str, int], results: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for kind, rpc in KINDS.items():
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{ports[kind]}")
        rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        results.send(measured())
    results.close()  # if it fails, the other one has none left open
    for rpc in KINDS.values():
        rpc.shutdown()


def measured() -> dict[str, dict[str, float]]:
    """Return the seconds of each figure with each of the two."""
    best: dict[str, dict[str, float]] = {}
    of_kind = {kind: exercises(kind) for kind in KINDS}
    for name in of_kind["torch"]:
        for _ in range(ROUNDS):
            for kind, known in of_kind.items():
                run, count, calls = known[name]
                sleep(PAUSE)
                seconds = median(run, count) / calls
                best.setdefault(name, {})
                best[name][kind] = min(best[name].get(kind, seconds), seconds)
    return best


def median(run: Callable[[], Any], count: int) -> float:
    run()
    times = []
    for _ in range(count):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return statistics.median(times)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def measure() -> dict[str, dict[str, float]]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    ports = {kind: free_port() for kind in KINDS}
    ranks = [
        context.Process(target=be_rank, args=(rank, ports, sender), daemon=True)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    sender.close()
    figures: dict[str, dict[str, float]] = receiver.recv()
    for rank in ranks:
        rank.join()
    return figures


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    lines = ["| | torch | rankwire | times as fast |", "|---|---:|---:|---:|"]
    for name, seconds in measure().items():
        theirs, own = seconds["torch"], seconds["rankwire"]
        lines.append(f"| {name} | {shown(theirs)} | {shown(own)} | {theirs / own:.1f} |")
        print(lines[-1], flush=True)
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after)


if __name__ == "__main__":
    main()
