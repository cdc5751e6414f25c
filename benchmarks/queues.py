"""Queues: items of 1 KiB from 2 producers to 1 consumer, beside those that others would use.

Run it alone with ``python -m benchmarks.queues``; it takes less than a minute. Each row is the
median of several runs, in which all kinds take turns. The consumer owns the queue, as a learner
would. ``multiprocessing.Queue`` collects what is put in a thread and sends it later; so its row for
single items is compared with both of ours.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import rankwire
from rankwire.testing import run_ranks

ITEM = bytes(1024)
CAPACITY = 1024
PRODUCERS = 2
FETCH = 128


def take_items(backend: rankwire.Backend, count: int, is_batched: bool) -> float:
    """Put or take items, by the rank; return the consumer's items a second."""
    with rankwire.RpcAgent(backend) as agent:
        queue = agent.queue("items", capacity=CAPACITY, producers=range(1, PRODUCERS + 1))
        backend.barrier()
        began = time.perf_counter()
        if backend.rank == 0:
            taken = sum(1 for _ in queue.items(fetch=FETCH if is_batched else 1))
            assert taken == PRODUCERS * count
        elif is_batched:
            queue.put_many([ITEM] * count)
            queue.end()
        else:
            for _ in range(count):
                queue.put(ITEM)
            queue.end()
        return PRODUCERS * count / (time.perf_counter() - began)


def measure_rankwire(count: int, *, is_batched: bool) -> float:
    """Return the items a second of our queue, one at a time or many in a call."""
    rates = run_ranks(1 + PRODUCERS, take_items, count, is_batched, processes=True)
    return float(rates[0])


def produce(queue: Any, count: int) -> None:
    """Put items into a queue of multiprocessing."""
    for _ in range(count):
        queue.put(ITEM)
    queue.put(None)


def measure_multiprocessing(count: int) -> float:
    """Return the items a second of ``multiprocessing.Queue``."""
    context = multiprocessing.get_context("fork")
    queue: Any = context.Queue(CAPACITY)
    producers = [context.Process(target=produce, args=(queue, count)) for _ in range(PRODUCERS)]
    began = time.perf_counter()
    for producer in producers:
        producer.start()
    ended = taken = 0
    while ended < PRODUCERS:
        is_end = queue.get() is None
        ended += is_end
        taken += not is_end
    seconds = time.perf_counter() - began
    for producer in producers:
        producer.join()
    return taken / seconds


def measure_ray(count: int) -> float:
    """Return the items a second of ``ray.util.queue``."""
    import ray
    from ray.util.queue import Queue

    ray.init(num_cpus=PRODUCERS + 1, include_dashboard=False, log_to_driver=False)
    try:
        queue = Queue(maxsize=CAPACITY)
        remote = ray.remote(produce)
        began = time.perf_counter()
        producers = [remote.remote(queue, count) for _ in range(PRODUCERS)]
        ended = 0
        while ended < PRODUCERS:
            ended += queue.get() is None
        seconds = time.perf_counter() - began
        ray.get(producers)
    finally:
        ray.shutdown()
    return PRODUCERS * count / seconds


def main() -> None:
    """Measure all kinds in turn, and print a table with ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--count", type=int, default=20_000, help="items of each producer")
    options = parser.parse_args()
    count, batched = options.count, "rankwire, put_many and items(fetch=128)"
    kinds: dict[str, Callable[[], float]] = {
        batched: lambda: measure_rankwire(count, is_batched=True),
        "rankwire, put and get": lambda: measure_rankwire(count // 5, is_batched=False),
        "multiprocessing.Queue": lambda: measure_multiprocessing(count),
    }
    if importlib.util.find_spec("ray") is not None:
        kinds["ray.util.queue"] = lambda: measure_ray(count // 20)
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(options.repeats):
        for kind, measure in kinds.items():
            rates[kind].append(measure())
    best = median(rates[batched])
    print(f"{'items of 1 KiB, 2 producers, 1 consumer':42} {'items/s':>10} {'ours is':>9}")
    for kind, found in rates.items():
        print(f"{kind:42} {median(found):10,.0f} {best / median(found):8.2f}x")


if __name__ == "__main__":
    main()
