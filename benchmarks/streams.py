"""Compare streams with gRPC's server streaming and Ray's generators, in one run.

::

    python -m benchmarks.streams [--rounds 3] [--seconds 0.5]

A producer in another process yields items of 1 KiB, then of 1 MiB (a numpy array; bytes for gRPC).
Each round measures every candidate, and the table has the medians. Ray is left out unless it is
installed (``pip install ray``).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.command import progress_bar
from benchmarks.processes import die_with_parent, free_address

SIZES = {"1 KiB": 1 << 10, "1 MiB": 1 << 20}
COUNTS = {"1 KiB": 5_000, "1 MiB": 1_000}  # of one stream; more follow until the time is up


def make_items(size: str) -> Iterator[Any]:
    """Yield items as a program has them: short texts of bytes, large arrays."""
    nbytes = SIZES[size]
    item: Any = bytes(nbytes) if nbytes < 65536 else np.zeros(nbytes, np.uint8)
    for _ in range(COUNTS[size]):
        yield item


def rate_of(read: Any, size: str, seconds: float) -> float:
    """Return the items a second of streams that ``read`` opens and reads to their ends."""
    read(size)  # connected, imported
    began, count = perf_counter(), 0
    while perf_counter() - began < seconds:
        count += read(size)
    return count / (perf_counter() - began)


# -- candidates ------------------------------------------------------------------------------------


def rankwire_stream(rank: int, address: str, size: str, seconds: float) -> float:
    """Read from an agent in another process."""
    import rankwire

    with rankwire.TcpBackend(rank, 2, address, secret="benchmark" * 4) as backend:
        with rankwire.RpcAgent(backend) as agent:
            agent.register(make_items)
            backend.barrier()
            if rank == 0:
                return 0.0
            return rate_of(
                lambda size: sum(1 for _ in agent.stream(0, make_items, size)), size, seconds
            )


def grpc_stream(rank: int, address: str, size: str, seconds: float) -> float:
    """Read from a gRPC server, whose items are bytes."""
    from concurrent import futures

    import grpc

    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    if rank == 0:

        def items(request: bytes, context: Any) -> Iterator[bytes]:
            return (bytes(memoryview(item)) for item in make_items(request.decode()))

        server = grpc.server(futures.ThreadPoolExecutor(2), options=options)
        handler = grpc.unary_stream_rpc_method_handler(items)
        handlers = {"items": handler}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("b", handlers),))
        server.add_insecure_port(address)
        server.start()
        print("null", flush=True)
        sys.stdin.read()
        return 0.0
    with grpc.insecure_channel(address, options=options) as channel:
        grpc.channel_ready_future(channel).result(20)
        call = channel.unary_stream("/b/items")
        return rate_of(lambda size: sum(1 for _ in call(size.encode())), size, seconds)


def ray_stream(rank: int, address: str, size: str, seconds: float) -> float:
    """Read from a generator of an actor."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    @ray.remote
    class Producer:
        def items(self, size: str) -> Iterator[Any]:
            yield from make_items(size)

    producer = Producer.remote()

    def read(size: str) -> int:
        stream = producer.items.options(num_returns="streaming").remote(size)
        return sum(ray.get(item) is not None for item in stream)

    try:
        return rate_of(read, size, seconds)
    finally:
        ray.shutdown()


CANDIDATES = {"rankwire": rankwire_stream, "gRPC": grpc_stream, "Ray": ray_stream}
MODULES = {"rankwire": "rankwire", "gRPC": "grpc", "Ray": "ray"}


# -- the run ---------------------------------------------------------------------------------------


def measure(name: str, size: str, seconds: float) -> float:
    """Return the items a second of one candidate, in processes of its own."""
    address = free_address()
    command = [sys.executable, "-m", "benchmarks.streams", "--one", name, size, str(seconds)]
    producer = None
    if name != "Ray":  # it starts its own
        producer = subprocess.Popen(
            [*command, address, "0"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
    try:
        done = subprocess.run([*command, address, "1"], stdout=subprocess.PIPE, timeout=120)
        done.check_returncode()
        return float(json.loads(done.stdout.splitlines()[-1]))
    finally:
        if producer is not None:
            producer.kill()
            producer.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        die_with_parent()
        name, size, seconds, address, rank = options.one
        print(json.dumps(CANDIDATES[name](int(rank), address, size, float(seconds))))
        return
    console = Console()
    names = [name for name, module in MODULES.items() if importlib.util.find_spec(module)]
    rates: dict[tuple[str, str], list[float]] = {}
    with progress_bar(console) as bar:
        task = bar.add_task("streams", total=options.rounds * len(names) * len(SIZES))
        for _ in range(options.rounds):
            for size in SIZES:
                for name in names:
                    rate = measure(name, size, options.seconds)
                    rates.setdefault((name, size), []).append(rate)
                    bar.advance(task)
    table = Table(*["items a second", *SIZES])
    for name in names:
        ours = {size: median(rates["rankwire", size]) for size in SIZES}
        row = []
        for size in SIZES:
            rate = median(rates[name, size])
            ratio = "" if name == "rankwire" else f" (rankwire: {ours[size] / rate:.1f}x)"
            row.append(f"{rate:,.0f}{ratio}")
        table.add_row(name, *row)
    console.print(table)
    for name in sorted(set(MODULES) - set(names)):
        console.print(f"{name} is not installed")


if __name__ == "__main__":
    main()
