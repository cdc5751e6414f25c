"""Tiny tasks over three workers: ``agent.map``, ``ProcessPoolExecutor``, and Ray's tasks.

Run it alone, with ``python -m benchmarks.pool``; it prints how many tasks a second each of them
does, and how that compares with the fastest of ``agent.map``. Ray is left out if it is not
installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import rankwire

WORKERS = 3
CHUNKS = (16, 64, 256, 1024)
DEPTHS = (2, 8)


def square(number: int) -> int:
    """Do almost nothing."""
    return number * number


def timed(work: Callable[[], int], count: int) -> float:
    """Return the tasks a second of the fastest of three runs, after one that warms up."""
    seconds = []
    for _ in range(4):
        begin = time.perf_counter()
        assert work() == count
        seconds.append(time.perf_counter() - begin)
    return count / min(seconds[1:])


def measure_map(backend: rankwire.Backend, count: int) -> dict[str, float]:
    """Measure ``agent.map``; called on every rank of a world."""
    rates = {}
    with rankwire.RpcAgent(backend) as agent:
        agent.register(square)
        backend.barrier()
        if backend.rank > 0:
            agent.serve()
            return {}
        for depth in DEPTHS:
            name = f"agent.map, chunk 1, depth {depth}"
            rates[name] = timed(
                lambda depth=depth: len(list(agent.map(square, range(count), depth=depth))), count
            )
        for chunk in CHUNKS:
            rates[f"agent.map, chunk {chunk}"] = timed(
                lambda chunk=chunk: len(list(agent.map(square, range(count), chunk=chunk))), count
            )
        agent.stop()
    return rates


def measure_processes(count: int) -> dict[str, float]:
    """Measure the executor of the standard library."""
    rates = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        for chunk in (1, *CHUNKS):
            rates[f"ProcessPoolExecutor, chunk {chunk}"] = timed(
                lambda chunk=chunk: len(list(pool.map(square, range(count), chunksize=chunk))),
                count,
            )
    return rates


def measure_ray(count: int) -> dict[str, float]:
    """Measure Ray's tasks, one a call and in chunks."""
    import ray

    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    one = ray.remote(square)
    many = ray.remote(lambda numbers: [square(number) for number in numbers])

    def in_chunks(chunk: int) -> int:
        parts = [range(begin, min(begin + chunk, count)) for begin in range(0, count, chunk)]
        return sum(map(len, ray.get([many.remote(list(part)) for part in parts])))

    try:
        rates = {
            "Ray tasks, chunk 1": timed(
                lambda: len(ray.get([one.remote(n) for n in range(count)])), count
            )
        }
        for chunk in CHUNKS:
            rates[f"Ray tasks, chunk {chunk}"] = timed(lambda chunk=chunk: in_chunks(chunk), count)
    finally:
        ray.shutdown()
    return rates


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=10_000)
    count = parser.parse_args().tasks
    with rankwire.local(WORKERS + 1) as world:
        rates = world.run(measure_map, count)[0]
    rates |= measure_processes(count)
    if importlib.util.find_spec("ray") is not None:
        rates |= measure_ray(count)
    best_of_one = max(rate for name, rate in rates.items() if "agent.map, chunk 1," in name)
    best = max(rate for name, rate in rates.items() if name.startswith("agent.map"))
    print(f"{count} tiny tasks over {WORKERS} workers")
    for name, rate in rates.items():
        is_one = "chunk 1" in name.partition(", depth")[0].split(", ")
        ratio = (best_of_one if is_one else best) / rate
        print(f"  {name:32} {rate:10,.0f} a second   map is {ratio:.1f} times as fast")


if __name__ == "__main__":
    main()
