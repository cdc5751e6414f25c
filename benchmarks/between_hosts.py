"""What is left of a network's speed: rankwire beside one raw TCP stream, between two hosts.

Run with ``python -m benchmarks.between_hosts`` as root. The hosts are two network namespaces with a
cable whose speed is limited (``tc tbf``). Everything is measured in turn, ``ROUNDS`` times, and the
medians are printed as a share of what the raw stream does in the same run: one way for messages,
both ways at once for collectives, which send as much as they receive. Needs ``rankwire[tls]``.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import socket
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import numpy as np

from rankwire import TcpBackend, all_gather, all_reduce, broadcast
from rankwire.launch.certificates import make_certificates

ROUNDS = 3
NBYTES = 64 << 20
RATES = {"1 Gbit/s": "1gbit", "10 Gbit/s": "10gbit", "no limit": ""}
ADDRESSES = ("10.78.0.1", "10.78.0.2")
PORT, RAW_PORT = 29510, 29500
CLONE_NEWNET = 0x40000000
SECRET = "b" * 32

Exercise = Callable[[], None]
Mode = Callable[[int], dict[str, Any]]  # the options of a rank


@contextlib.contextmanager
def two_hosts(rate: str) -> Iterator[tuple[str, str]]:
    """Make two namespaces and a cable between them."""
    names = tuple(f"rwbench-{os.getpid()}-{host}" for host in range(2))
    try:
        for name in names:
            run("ip", "netns", "add", name)
        cable = f"type veth peer name eth0 netns {names[1]}".split()
        run("ip", "-n", names[0], "link", "add", "eth0", *cable)
        for name, address in zip(names, ADDRESSES, strict=True):
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            if rate:
                limit = f"root tbf rate {rate} burst 256kb latency 20ms".split()
                run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *limit)
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def serve(rank: int, namespace: str, modes: list[Mode], asked: Connection) -> None:
    """Be one rank: do what is asked for, and tell how long it took."""
    with open(f"/run/netns/{namespace}") as network:
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    raw = raw_stream(rank)
    with contextlib.ExitStack() as stack:
        backends = [
            stack.enter_context(TcpBackend(rank, 2, f"{ADDRESSES[0]}:{PORT + at}", **mode(rank)))
            for at, mode in enumerate(modes)
        ]
        exercises = [raw_exercises(rank, raw), *(exercises_of(backend) for backend in backends)]
        while (what := asked.recv()) is not None:
            which, name = what
            exercise = exercises[which][name]
            backends[0].barrier()
            start = perf_counter()
            exercise()
            backends[0].barrier()
            asked.send(perf_counter() - start)


def raw_stream(rank: int) -> socket.socket:
    if rank == 1:
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection((ADDRESSES[0], RAW_PORT))
    with socket.create_server((ADDRESSES[0], RAW_PORT)) as listener:
        return listener.accept()[0]


def raw_exercises(rank: int, raw: socket.socket) -> dict[str, Exercise]:
    """Send 64 MiB from memory to memory that is there: one way, or both ways at once."""
    data, room = np.ones(NBYTES, np.uint8), np.zeros(NBYTES, np.uint8)

    def one_way() -> None:
        if rank == 0:
            raw.sendall(data)
        else:
            receive_all()

    def both_ways() -> None:
        sending = threading.Thread(target=raw.sendall, args=(data[: NBYTES // 2],))
        sending.start()
        receive_all(NBYTES // 2)
        sending.join()

    def receive_all(nbytes: int = NBYTES) -> None:
        got, view = 0, memoryview(room)
        while got < nbytes:
            got += raw.recv_into(view[got:nbytes])

    return {"message": one_way, "all_gather": both_ways}


def exercises_of(backend: TcpBackend) -> dict[str, Exercise]:
    array, out = np.ones(NBYTES // 4, np.float32), np.zeros(NBYTES // 4, np.float32)
    gathered = np.zeros(NBYTES // 4, np.float32)
    half = array[: array.size // 2]

    def message() -> None:
        if backend.rank == 0:
            backend.send(array, 1)
        else:
            backend.recv_into(out, 0)

    def array_message() -> None:
        if backend.rank == 0:
            backend.send_array(array, 1)
        else:
            backend.recv_array(0, out=out)

    return {
        "message": message,
        "array": array_message,
        "broadcast": lambda: broadcast(backend, array),
        "all_gather": lambda: all_gather(backend, half, out=gathered),
        "all_reduce": lambda: all_reduce(backend, array, "max"),
    }


# How much of 64 MiB goes each way.
SHARES = {"message": 1.0, "array": 1.0, "broadcast": 1.0, "all_gather": 0.5, "all_reduce": 1.0}


def measure(names: tuple[str, str], modes: dict[str, Mode]) -> dict[str, list[float]]:
    """Return the speeds of all, in bytes a second."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in names]
    ranks = [
        context.Process(target=serve, args=(rank, name, list(modes.values()), pipes[rank][1]))
        for rank, name in enumerate(names)
    ]
    for rank in ranks:
        rank.start()
    speeds: dict[str, list[float]] = {}
    plan = [(0, "raw", "message"), (0, "raw", "all_gather")]
    plan += [(at, mode, name) for at, mode in enumerate(modes, 1) for name in SHARES]
    for _ in range(ROUNDS):
        for which, mode, name in plan:
            for own, _ in pipes:
                own.send((which, name))
            seconds = max(own.recv() for own, _ in pipes)
            speeds.setdefault(f"{mode} {name}", []).append(NBYTES * SHARES[name] / seconds)
    for own, _ in pipes:
        own.send(None)
    for rank in ranks:
        rank.join()
    return speeds


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = make_certificates(f"{folder}/tls", 2)
        modes: dict[str, Mode] = {
            "insecure": lambda rank: {"security": "insecure"},
            "sealed": lambda rank: {"secret": SECRET, "security": "auth"},
            "sealed, MAC": lambda rank: {"secret": SECRET, "security": "auth", "integrity": "mac"},
            "TLS": lambda rank: {"secret": SECRET, "tls": files[rank]},
        }
        rows = [(mode, name) for mode in modes for name in SHARES]
        columns = {}
        for title, rate in RATES.items():
            with two_hosts(rate) as names:
                columns[title] = measure(names, modes)
    print(f"| | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    raws = [statistics.median(speeds["raw message"]) for speeds in columns.values()]
    print(f"| one raw TCP stream | {' | '.join(f'{raw / 1e6:,.0f} MB/s' for raw in raws)} |")
    for mode, name in [("both ways at once", "raw all_gather"), *rows]:
        key = name if name.startswith("raw") else f"{mode} {name}"
        medians = [statistics.median(speeds[key]) for speeds in columns.values()]
        shares = (f"{median / raw:.0%}" for median, raw in zip(medians, raws, strict=True))
        print(f"| {name}, {mode} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
