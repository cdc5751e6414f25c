"""Compare the speed of this checkout with an earlier commit, interleaved in one run.

::

    python -m benchmarks.compare COMMIT [--rounds 6] [--seconds 0.5] [--only call,tcp_call]

Each round measures both versions, each with two fresh processes, in alternating order. The table
has the median of the rounds and their ratio; above 1 this checkout is slower. Nothing else should
run on the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.command import progress_bar
from benchmarks.processes import ChildError, die_with_parent, free_address

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
RUN_SLACK = 60.0  # seconds for starting and for torch's import


Figure = Callable[[str, int, float], float]  # address, rank and seconds to microseconds


def figures() -> dict[str, Figure]:
    """Return the figures by name."""
    found: dict[str, Figure] = {}
    for name, transport in (("", "auto"), ("tcp_", "tcp")):
        found |= {
            f"{name}call": _in_agent(transport, _call),
            f"{name}64_in_flight": _in_agent(transport, _in_flight),
            f"{name}all_reduce_8B": _in_backend(transport, _all_reduce(8)),
            f"{name}all_reduce_1MiB": _in_backend(transport, _all_reduce(MIB)),
            f"{name}ping_pong_1kB": _in_backend(transport, _ping_pong),
        }
    if importlib.util.find_spec("torch") is not None:
        found["torch_all_reduce_8B"] = _torch_all_reduce
    return found


def main() -> None:
    """Run the comparison, or one process of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=6, metavar="N", help="default: 6")
    parser.add_argument("--seconds", type=float, default=0.5, metavar="S", help="for each figure")
    parser.add_argument("--only", metavar="NAME,...", help=f"of: {', '.join(figures())}")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(figures())
    if unknown := set(names) - set(figures()):
        parser.error(f"no such figure: {', '.join(sorted(unknown))}; known: {', '.join(figures())}")
    if options.rank is not None:
        die_with_parent()
        print(json.dumps(figures()[names[0]](options.address, options.rank, options.seconds)))
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            packed = subprocess.check_output(["git", "archive", options.commit, "src"], cwd=ROOT)
        except subprocess.CalledProcessError:
            parser.error(f"{options.commit} is no commit of this repository")
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        versions = {"before": Path(folder) / "src", "now": ROOT / "src"}
        try:
            report(options.commit, compare(versions, names, options))
        except ChildError as error:
            sys.exit(f"{error.reason}\n{error.stderr}")


def compare(
    versions: dict[str, Path], names: list[str], options: argparse.Namespace
) -> dict[str, dict[str, list[float]]]:
    """Return the microseconds of each figure and version, one for each round."""
    times: dict[str, dict[str, list[float]]] = {
        name: {version: [] for version in versions} for name in names
    }
    with progress_bar(Console(stderr=True)) as bar:
        task = bar.add_task("comparing", total=options.rounds * len(names) * len(versions))
        for number in range(options.rounds):
            for name in names:
                order = list(versions) if number % 2 else list(reversed(versions))
                for version in order:
                    took = measure(versions[version], name, options)
                    times[name][version].append(took)
                    bar.advance(task)
    return times


def measure(source: Path, name: str, options: argparse.Namespace) -> float:
    """Run one figure with the package in a folder, and return what rank 0 measured."""
    address = free_address()
    command = [sys.executable, "-m", "benchmarks.compare", options.commit, "--only", name]
    command += ["--seconds", str(options.seconds), "--address", address, "--rank"]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{source}{os.pathsep}{ROOT}",
        # The installed entry point is this checkout's; the other commit may not have its module.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd=source,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=RUN_SLACK + 10 * options.seconds) for rank in ranks]
    except subprocess.TimeoutExpired:
        raise ChildError(f"{name} did not end", "") from None
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.wait()
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        if rank.returncode not in (0, -signal.SIGKILL):
            raise ChildError(f"{name}: a rank ended with {rank.returncode}", errors.decode())
    return float(json.loads(outputs[0][0]))


def report(commit: str, times: dict[str, dict[str, list[float]]]) -> None:
    """Print the medians, their ratio and the range of the ratios of single rounds."""
    table = Table(title=f"microseconds, this checkout against {commit}")
    for column in ("figure", "before", "now", "ratio", "ratios of rounds"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    ratios = []
    for name, by_version in times.items():
        before, now = median(by_version["before"]), median(by_version["now"])
        single = sorted(n / b for b, n in zip(by_version["before"], by_version["now"], strict=True))
        ratios.append(now / before)
        spread = f"{single[0]:.2f} to {single[-1]:.2f}"
        table.add_row(name, f"{before:.2f}", f"{now:.2f}", f"{now / before:.3f}", spread)
    table.add_row("mean of the ratios", "", "", f"{sum(ratios) / len(ratios):.3f}", "")
    Console(width=100).print(table)


def _time(step: Callable[[], object], seconds: float, *, steps: int = 1) -> float:
    """Return the median microseconds of a step, which does so many operations."""
    end = perf_counter() + seconds / 4
    while perf_counter() < end:
        step()
    taken: list[float] = []
    before = perf_counter()
    end = before + seconds
    while before < end:
        step()
        after = perf_counter()
        taken.append(after - before)
        before = after
    return median(taken) * 1e6 / steps


def _in_backend(transport: Any, program: Callable[..., float]) -> Figure:
    def run(address: str, rank: int, seconds: float) -> float:
        import rankwire

        with rankwire.TcpBackend(rank, 2, address, transport=transport) as backend:
            return program(rankwire, backend, seconds)

    return run


def _in_agent(transport: Any, program: Callable[..., float]) -> Figure:
    def with_agent(rankwire: Any, backend: Any, seconds: float) -> float:
        with rankwire.RpcAgent(backend) as agent:
            agent.register("noop", lambda: None)
            backend.barrier()
            return program(agent, seconds) if backend.rank == 0 else 0.0

    return _in_backend(transport, with_agent)


def _call(agent: Any, seconds: float) -> float:
    return _time(lambda: agent.rpc_sync(1, "noop"), seconds)


def _in_flight(agent: Any, seconds: float) -> float:
    def batch() -> None:
        for future in [agent.rpc_async(1, "noop") for _ in range(64)]:
            future.result()

    return _time(batch, seconds, steps=64)


def _agreed(rankwire: Any, backend: Any, step: Callable[[], object], seconds: float) -> float:
    """Have both ranks do as many steps as fit into the time by rank 0's count."""
    for _ in range(20):
        step()
    start = perf_counter()
    for _ in range(20):
        step()
    guess = max(50, int(20 * seconds / (perf_counter() - start)))
    count = rankwire.broadcast_object(backend, guess, root=0)
    taken: list[float] = []
    before = perf_counter()
    for _ in range(count):
        step()
        after = perf_counter()
        taken.append(after - before)
        before = after
    return median(taken) * 1e6


def _all_reduce(nbytes: int) -> Callable[..., float]:
    def program(rankwire: Any, backend: Any, seconds: float) -> float:
        import numpy as np

        array = np.zeros(nbytes // 8)
        return _agreed(rankwire, backend, lambda: rankwire.all_reduce(backend, array), seconds)

    return program


def _ping_pong(rankwire: Any, backend: Any, seconds: float) -> float:
    data = bytes(1000)

    def step() -> None:
        if backend.rank == 0:
            backend.send(data, 1)
            backend.recv(1)
        else:
            backend.recv(0)
            backend.send(data, 0)

    return _agreed(rankwire, backend, step, seconds)


def _torch_all_reduce(address: str, rank: int, seconds: float) -> float:
    import torch
    import torch.distributed as dist

    import rankwire.torch  # noqa: F401

    dist.init_process_group("rankwire", init_method=f"tcp://{address}", rank=rank, world_size=2)
    tensor = torch.zeros(2)
    for _ in range(50):
        dist.all_reduce(tensor)
    count = torch.tensor([2000 * max(1, int(seconds * 4))])
    dist.broadcast(count, 0)
    taken = []
    for _ in range(int(count)):
        before = perf_counter()
        dist.all_reduce(tensor)
        taken.append(perf_counter() - before)
    dist.destroy_process_group()
    return median(taken) * 1e6


if __name__ == "__main__":
    main()
