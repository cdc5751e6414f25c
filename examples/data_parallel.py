"""Data-parallel training: every rank learns from its share of the data, all have the same model.

    rankwire run -n 4 examples/data_parallel.py      4 processes
    python examples/data_parallel.py --ranks 4       4 ranks in this process, simulated

The model is a small network of dense layers, written out in numpy. Gradients are averaged over the
ranks in *buckets*, while the backward pass goes on: as soon as the gradients of some layers fill a
bucket, its `all_reduce` starts in the background, and the earlier layers are computed meanwhile. At
the end every rank compares its model with one that a single process trained on all the data.
"""

import argparse
import os
import time
from itertools import pairwise

import numpy as np

import rankwire
from rankwire.testing import run_ranks

LAYERS = [64, 256, 256, 256, 10]
BUCKET_NBYTES = 512 << 10
RATE = 0.05

Layer = tuple[np.ndarray, np.ndarray]  # weights and biases


def new_model(seed: int = 0) -> list[Layer]:
    random = np.random.default_rng(seed)
    return [
        (random.standard_normal((inputs, outputs)) / np.sqrt(inputs), np.zeros(outputs))
        for inputs, outputs in pairwise(LAYERS)
    ]


def new_data(count: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Points around ten centres, and to which centre each belongs."""
    random = np.random.default_rng(seed)
    centres = random.standard_normal((LAYERS[-1], LAYERS[0]))
    labels = random.integers(LAYERS[-1], size=count)
    return centres[labels] + 0.8 * random.standard_normal((count, LAYERS[0])), labels


class Buckets:
    """Averages gradients over all ranks, in the background, several layers at a time."""

    def __init__(self, backend: rankwire.Backend) -> None:
        self._backend = backend
        self._filling: list[np.ndarray] = []
        self._on_the_way: list[rankwire.Work[list[np.ndarray]]] = []

    def add(self, *gradients: np.ndarray) -> None:
        """Take the gradients of a layer; they must not be touched until `wait` has returned."""
        self._filling += gradients
        if sum(gradient.nbytes for gradient in self._filling) >= BUCKET_NBYTES:
            self._send()

    def wait(self) -> None:
        """Return when all gradients are averaged, in place."""
        self._send()
        for work in self._on_the_way:
            work.wait()
        self._on_the_way = []

    def _send(self) -> None:
        if self._filling:
            work = rankwire.all_reduce_coalesced(
                self._backend, self._filling, op="mean", async_op=True
            )
            self._on_the_way.append(work)
            self._filling = []


class NoBuckets:
    """For a single process: there is nothing to average."""

    def add(self, *gradients: np.ndarray) -> None:
        """They are what they should be."""

    def wait(self) -> None:
        """They are what they should be."""


def train_step(
    model: list[Layer], points: np.ndarray, labels: np.ndarray, buckets: Buckets | NoBuckets
) -> float:
    """One step of gradient descent; returns the loss on these points."""
    activations = [points]
    for weights, biases in model[:-1]:
        activations.append(np.maximum(activations[-1] @ weights + biases, 0.0))
    scores = activations[-1] @ model[-1][0] + model[-1][1]
    chances = np.exp(scores - scores.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -np.log(chances[rows, labels]).mean()

    chances[rows, labels] -= 1.0
    signal = chances / len(labels)
    gradients: list[Layer] = []
    for index in reversed(range(len(model))):
        inputs = activations[index]
        gradient = (inputs.T @ signal, signal.sum(0))
        gradients.append(gradient)
        buckets.add(*gradient)  # its all_reduce runs while we go on with the layer before
        if index:
            signal = (signal @ model[index][0].T) * (inputs > 0)
    buckets.wait()
    for layer, gradient in zip(reversed(model), gradients, strict=True):
        for values, slope in zip(layer, gradient, strict=True):
            values -= RATE * slope
    return float(loss)


def train(backend: rankwire.Backend, steps: int, batch: int) -> list[Layer]:
    """Train on this rank's share of every batch."""
    points, labels = new_data(steps * batch)
    # Only rank 0's first model counts: the others begin with something else and receive it.
    model = new_model(seed=backend.rank)
    for layer in model:
        for values in layer:
            rankwire.broadcast(backend, values, root=0)
    buckets = Buckets(backend)
    share = batch // backend.world_size
    started = time.perf_counter()
    for step in range(steps):
        mine = slice(step * batch + backend.rank * share, step * batch + (backend.rank + 1) * share)
        loss = np.array(train_step(model, points[mine], labels[mine], buckets))
        if step % 10 == 0 or step == steps - 1:
            rankwire.all_reduce(backend, loss, op="mean")
            if backend.rank == 0:
                print(f"step {step:4}  loss {loss:.4f}", flush=True)
    if backend.rank == 0:
        milliseconds = (time.perf_counter() - started) / steps * 1e3
        print(f"{milliseconds:.1f} ms a step on {backend.world_size} ranks", flush=True)
    return model


def train_alone(steps: int, batch: int) -> list[Layer]:
    """Do the same in one process, on whole batches."""
    points, labels = new_data(steps * batch)
    model = new_model(seed=0)
    for step in range(steps):
        mine = slice(step * batch, (step + 1) * batch)
        train_step(model, points[mine], labels[mine], NoBuckets())
    return model


def run(backend: rankwire.Backend, steps: int, batch: int) -> None:
    if batch % backend.world_size:
        raise SystemExit(f"a batch of {batch} cannot be shared equally by {backend.world_size}")
    model = train(backend, steps, batch)
    alone = train_alone(steps, batch)
    difference = max(
        float(np.abs(ours - theirs).max())
        for layer, other in zip(model, alone, strict=True)
        for ours, theirs in zip(layer, other, strict=True)
    )
    differences = rankwire.all_gather_object(backend, difference)
    if backend.rank == 0:
        print(f"largest difference from training alone: {max(differences):.1e}")
    if difference > 1e-9:
        raise SystemExit(f"rank {backend.rank} has learned something else than one process does")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a share of each batch.")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=256, help="points in a step, for all ranks")
    parser.add_argument("--ranks", type=int, default=4, help="simulated ones, without rankwire run")
    options = parser.parse_args()
    if "RANKWIRE_RANK" in os.environ:
        with rankwire.connect() as backend:
            run(backend, options.steps, options.batch)
    else:
        run_ranks(options.ranks, run, options.steps, options.batch)


if __name__ == "__main__":
    main()
