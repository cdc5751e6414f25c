"""A no-op on eight ranks: ``call_all``, a loop of ``rpc_async``, torch's RPC and Ray.

Run with ``python -m benchmarks.group_calls``. Each row starts eight processes, and shows the best
median of ``ROUNDS``. Peers that are not installed are left out, and the table says so.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import rankwire
from rankwire.backends.tcp import TcpBackend

RANKS, CALLS, ROUNDS, WARM = 8, 200, 5, 50


def nothing() -> None:
    """Do nothing."""


def best_median(call: Callable[[], Any]) -> float:
    """Return the seconds of one call."""
    for _ in range(WARM):
        call()
    medians = []
    for _ in range(ROUNDS):
        seconds = []
        for _ in range(CALLS):
            begin = perf_counter()
            call()
            seconds.append(perf_counter() - begin)
        medians.append(statistics.median(seconds))
    return min(medians)


def rankwire_rank(rank: int, port: int, results: Connection) -> None:
    """Be a rank; measure on rank 0."""
    backend = TcpBackend(rank, RANKS, f"127.0.0.1:{port}")
    with backend, rankwire.RpcAgent(backend) as agent:
        agent.register("nothing", nothing)
        backend.barrier()
        if rank > 0:
            agent.serve()
            return

        def loop() -> None:
            for future in [agent.rpc_async(each, "nothing") for each in range(RANKS)]:
                future.result()

        results.send(
            {
                "call_all": best_median(lambda: agent.call_all("nothing")),
                "call_all, by its tree": best_median(
                    lambda: agent.call_all("nothing", collect=[0])
                ),
                "loop of rpc_async": best_median(loop),
            }
        )
        agent.stop()


def torch_rank(rank: int, port: int, results: Connection) -> None:
    """The same with torch's RPC."""
    import torch.distributed.rpc as rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=RANKS, rpc_backend_options=options)
    if rank == 0:

        def loop() -> None:
            for future in [rpc.rpc_async(f"rank{each}", nothing) for each in range(RANKS)]:
                future.wait()

        results.send({"torch: loop of rpc_async": best_median(loop)})
    rpc.shutdown()


def in_processes(be_rank: Callable[[int, int, Connection], None]) -> dict[str, float]:
    """Run a function as each rank, and return what rank 0 has measured."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=be_rank, args=(rank, port, sending), daemon=True)
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    if not receiving.poll(60):
        raise TimeoutError("rank 0 has not measured anything within 60 s")
    found: dict[str, float] = receiving.recv()
    for process in ranks:
        process.join(10)
    return found


def by_ray() -> dict[str, float]:
    """Measure a list of calls of Ray actors."""
    import ray

    ray.init(num_cpus=RANKS, logging_level="ERROR")

    @ray.remote
    class Actor:
        def nothing(self) -> None:
            pass

    actors = [Actor.remote() for _ in range(RANKS)]
    found = best_median(lambda: ray.get([actor.nothing.remote() for actor in actors]))
    ray.shutdown()
    return {"Ray: list of actor calls": found}


def main() -> None:
    """Measure, and print a table."""
    found = in_processes(rankwire_rank)
    if find_spec("torch"):
        found |= in_processes(torch_rank)
    if find_spec("ray"):
        found |= by_ray()
    own = found["call_all"]
    print(f"| no-op on {RANKS} ranks | us | times call_all |\n|---|---:|---:|")
    for name, seconds in found.items():
        print(f"| {name} | {seconds * 1e6:.0f} | {seconds / own:.2f} |")
    for peer in ("torch", "ray"):
        if not find_spec(peer):
            print(f"{peer} is not installed: left out")


if __name__ == "__main__":
    main()
