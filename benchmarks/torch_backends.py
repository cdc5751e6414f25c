"""torch.distributed on Gloo and on rankwire, interleaved in one program.

Run with ``python -m benchmarks.torch_backends``. The ranks are forked and have a group of each
backend; every figure is measured on one and then on the other, ``ROUNDS`` times, and the best
median of each counts: other work on the machine only ever adds. Renews the table in
``docs/from-torch-distributed.md``.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rankwire.torch  # noqa: F401  (registers the backend)

ROUNDS = 5
PAGE = Path(__file__).parents[1] / "docs" / "from-torch-distributed.md"
BEGIN, END = "<!-- figures -->\n", "<!-- end of figures -->\n"
BACKENDS = ("gloo", "rankwire")
KIB, MIB = 1 << 10, 1 << 20

Group = dist.ProcessGroup
# What is repeated, and how often a round.
Exercise = tuple[Callable[[Group], None], int]


def exercises(size: int) -> dict[str, Exercise]:
    """Return what is measured with so many ranks."""
    rank = dist.get_rank()
    small, middle, large = (torch.ones(count // 4) for count in (8, MIB, 64 * MIB))

    def gather(nbytes: int) -> Callable[[Group], None]:
        part, whole = torch.ones(nbytes // 4 // size), torch.ones(nbytes // 4)
        return lambda group: dist.all_gather_single(whole, part, group=group)

    def reduce_scatter(nbytes: int) -> Callable[[Group], None]:
        part, whole = torch.ones(nbytes // 4 // size), torch.ones(nbytes // 4)
        return lambda group: dist.reduce_scatter_single(part, whole, group=group)

    def ping_pong(group: Group) -> None:
        if rank == 0:
            dist.send(small, 1, group=group)
            dist.recv(small, 1, group=group)
        elif rank == 1:
            dist.recv(small, 0, group=group)
            dist.send(small, 0, group=group)

    def begin_and_wait(group: Group) -> None:
        work = dist.all_reduce(small, group=group, async_op=True)
        work.wait()

    found: dict[str, Exercise] = {
        "all_reduce 8 B": (lambda group: dist.all_reduce(small, group=group), 300),
        "all_reduce 8 B, async and wait": (begin_and_wait, 300),
        "all_reduce 1 MiB": (lambda group: dist.all_reduce(middle, group=group), 60),
        "all_reduce 64 MiB": (lambda group: dist.all_reduce(large, group=group), 4),
        "barrier": (lambda group: dist.barrier(group), 300),
        "ping-pong 8 B": (ping_pong, 300),
    }
    if size == 2:
        found |= {
            "all_gather 4 KiB": (gather(4 * KIB), 300),
            "all_gather 16 MiB": (gather(16 * MIB), 10),
            "reduce_scatter 4 KiB": (reduce_scatter(4 * KIB), 300),
            "reduce_scatter 16 MiB": (reduce_scatter(16 * MIB), 10),
        }
    return found | {
        "DDP step, 10 M parameters": (training(by_ddp), 4),
        "fully_shard step, 10 M parameters": (training(by_fully_shard), 4),
    }


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(10)))


def by_ddp(group: Group) -> nn.Module:
    return DistributedDataParallel(model(), process_group=group)


def by_fully_shard(group: Group) -> nn.Module:
    mesh = dist.DeviceMesh.from_group(group, "cpu")
    trained = model()
    for layer in trained:
        fully_shard(layer, mesh=mesh)
    fully_shard(trained, mesh=mesh)
    return trained


def training(make: Callable[[Group], nn.Module]) -> Callable[[Group], None]:
    """Return a step of training; the model is made with the first."""
    made: dict[Group, tuple[nn.Module, torch.optim.Optimizer]] = {}
    data = torch.randn(8, 1000)

    def step(group: Group) -> None:
        if group not in made:
            trained = make(group)
            made[group] = trained, torch.optim.SGD(trained.parameters(), 0.01)
        trained, optimizer = made[group]
        loss = trained(data).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def be_rank(rank: int, size: int, path: str, results: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", store=dist.FileStore(path, size), rank=rank, world_size=size,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    best: dict[str, dict[str, float]] = {}
    for name, (exercise, count) in exercises(size).items():
        for group in groups.values():
            exercise(group)
        for _ in range(ROUNDS):
            for backend, group in groups.items():
                seconds = median(lambda: exercise(group), count, group)  # noqa: B023
                known = best.setdefault(name, {}).get(backend, seconds)
                best[name][backend] = min(known, seconds)
    if rank == 0:
        results.send(best)
    dist.barrier()
    dist.destroy_process_group()


def median(run: Callable[[], None], count: int, group: Group) -> float:
    dist.barrier(group)
    times = []
    for _ in range(count):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return statistics.median(times)


def measure(size: int) -> dict[str, dict[str, float]]:
    """Return the seconds of each figure on each backend, by the clock of rank 0."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=be_rank, args=(rank, size, f"{folder}/store", theirs))
            for rank in range(size)
        ]
        for rank in ranks:
            rank.start()
        theirs.close()
        figures: dict[str, dict[str, float]] = ours.recv()
        for rank in ranks:
            rank.join()
    return figures


def shown(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 0.001 else f"{seconds * 1e3:.2f} ms"


def main() -> None:
    lines = ["| | Gloo | rankwire | times as fast |", "|---|---:|---:|---:|"]
    for size in (2, 4):
        for name, seconds in measure(size).items():
            gloo, ours = seconds["gloo"], seconds["rankwire"]
            cells = f"{shown(gloo)} | {shown(ours)} | {gloo / ours:.1f}"
            lines.append(f"| {name}, {size} ranks | {cells} |")
            print(lines[-1], flush=True)
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after)


if __name__ == "__main__":
    main()
