"""What protection costs: calls and large messages between two processes over TCP on loopback.

Run with ``python -m benchmarks.protection``. The modes are measured in turn, ``ROUNDS`` times, and
the median of the rounds' medians is printed. Needs ``rankwire[tls]``.
"""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
from time import perf_counter

from rankwire import RpcAgent, TcpBackend
from rankwire.launch.certificates import make_certificates

ROUNDS = 5
CALLS = 2000
MESSAGES = 12
LARGE_NBYTES = 64 << 20


def modes(folder: str) -> dict[str, list[dict]]:
    """Return the options of both ranks."""
    files = make_certificates(f"{folder}/tls", 2)
    return {
        "plain": [{}] * 2,
        "sealed, CRC of bulk": [{"security": "auth"}] * 2,
        "sealed, MAC of bulk": [{"security": "auth", "integrity": "mac"}] * 2,
        "TLS 1.3": [{"tls": files[rank]} for rank in range(2)],
    }


def run_rank(rank: int, address: str, options: dict, listener: socket.socket | None) -> list[float]:
    with TcpBackend(
        rank, 2, address, listener=listener, transport="tcp", secret="b" * 32, **options
    ) as backend:
        with RpcAgent(backend) as agent:
            agent.register("nothing", lambda: None)
            backend.barrier()
            call = measure_calls(agent) if rank == 0 else 0.0
            backend.barrier()
        large = measure_messages(backend)
        backend.barrier()
        return [call, large]


def measure_calls(agent: RpcAgent) -> float:
    times = []
    for _ in range(CALLS):
        start = perf_counter()
        agent.rpc_sync(1, "nothing")
        times.append(perf_counter() - start)
    return statistics.median(times)


def measure_messages(backend: TcpBackend) -> float:
    """Time one large message and a short answer."""
    times = []
    data = os.urandom(1 << 20) * (LARGE_NBYTES >> 20)
    for _ in range(MESSAGES):
        start = perf_counter()
        if backend.rank == 0:
            backend.send(data, 1)
            backend.recv(1)
        else:
            backend.recv(0)
            backend.send(b"", 0)
        times.append(perf_counter() - start)
    return statistics.median(times)


def measure(options: list[dict]) -> list[float]:
    """Run two ranks, this process and a child."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    child = os.fork()
    if child == 0:
        listener.close()
        run_rank(1, address, options[1], None)
        os._exit(0)
    figures = run_rank(0, address, options[0], listener)
    os.waitpid(child, 0)
    return figures


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        candidates = modes(folder)
        rounds: dict[str, list[list[float]]] = {name: [] for name in candidates}
        for _ in range(ROUNDS):
            for name, options in candidates.items():
                rounds[name].append(measure(options))
    print("| | no-op call p50 | 64 MiB message |\n|---|---:|---:|")
    for name, figures in rounds.items():
        call, large = (statistics.median(column) for column in zip(*figures, strict=True))
        print(f"| {name} | {call * 1e6:.1f} us | {large * 1e3:.1f} ms |")


if __name__ == "__main__":
    main()
