"""Data loaders on ranks of their own stream batches to trainers, which set the pace.

    rankwire run -n 4 examples/data_loaders.py      2 trainers, each with a loader

A loader runs ahead of its trainer by 8 batches; then it is suspended at its `yield`.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

import rankwire

Batch = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
TRUTH = np.arange(1.0, 9.0)


def batches(seed: int, count: int) -> Iterator[Batch]:
    """Make batches of inputs and noisy targets."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        inputs = random.normal(size=(64, len(TRUTH)))
        yield inputs, inputs @ TRUTH + random.normal(scale=0.1, size=64)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=300)
steps = parser.parse_args().steps

with rankwire.connect() as backend, rankwire.RpcAgent(backend) as agent:
    agent.register(batches)
    half = backend.world_size // 2
    backend.barrier()  # the loaders have registered
    if backend.rank < half:
        trainers = rankwire.SubBackend(backend, range(half))
        weights = np.zeros(len(TRUTH))
        loader = agent.stream(half + backend.rank, batches, backend.rank, steps, window=8)
        for inputs, targets in loader:
            gradient = inputs.T @ (inputs @ weights - targets) / len(targets)
            weights -= 0.1 * rankwire.all_reduce(trainers, gradient, op="mean")
        if backend.rank == 0:
            print(f"{loader.count} batches, largest error {np.abs(weights - TRUTH).max():.3f}")
