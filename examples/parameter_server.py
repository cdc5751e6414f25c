"""Asynchronous training with a parameter server.

    rankwire run -n 4 examples/parameter_server.py

Rank 0 holds the parameters. Every other rank trains on a shard of its own: it pulls the parameters,
computes a gradient and pushes it, without waiting for the others, unless it is too far ahead of the
slowest (``--staleness``). Any number of ranks from 2 on.

The model is a real one, a network with one hidden layer that learns to read digits. The data set is
generated, from fixed seeds: seven-segment digits at random places, with random contrast, in noise.
"""

import os

# The ranks share this host's cores: BLAS threads in each would only get in each other's way.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import threading
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import rankwire

HEIGHT, WIDTH, HIDDEN, CLASSES = 14, 10, 128, 10
BATCH, RATE, PINGS = 64, 0.1, 1000
# The segments of a digit in its 9 x 5 pixels, and which of them are lit in the digits 0 to 9.
SEGMENTS = {"a": np.s_[0, :], "b": np.s_[:5, 4], "c": np.s_[4:, 4], "d": np.s_[8, :]}
SEGMENTS |= {"e": np.s_[4:, 0], "f": np.s_[:5, 0], "g": np.s_[4, :]}
LIT = ["abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg"]

Arrays = list[np.ndarray]


def draw_digits(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `count` images, one a row, and the digits they show."""
    glyphs = np.zeros((CLASSES, 9, 5), np.float32)
    for digit, segments in enumerate(LIT):
        for segment in segments:
            glyphs[digit][SEGMENTS[segment]] = 1
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, count)
    images = np.zeros((count, HEIGHT, WIDTH), np.float32)
    for image, label, (y, x) in zip(images, labels, random.integers(0, 6, (count, 2)), strict=True):
        image[y : y + 9, x : x + 5] = glyphs[label]
    images *= random.uniform(0.8, 1.6, (count, 1, 1)).astype(np.float32)
    images += 0.25 * random.standard_normal(images.shape, np.float32)
    return images.reshape(count, -1), labels


def new_parameters() -> Arrays:
    shapes = [(HEIGHT * WIDTH, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,)]
    random = np.random.default_rng(0)
    return [0.1 * random.standard_normal(shape, np.float32) for shape in shapes]


def predict(parameters: Arrays, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the hidden layer and the probabilities of the digits."""
    w1, b1, w2, b2 = parameters
    hidden = np.maximum(images @ w1 + b1, 0)
    scores = hidden @ w2 + b2
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, scores / scores.sum(axis=1, keepdims=True)


def gradient(parameters: Arrays, images: np.ndarray, labels: np.ndarray) -> tuple[Arrays, float]:
    """Return the gradient of the cross-entropy, and the cross-entropy itself."""
    hidden, probabilities = predict(parameters, images)
    rows = np.arange(len(labels))
    loss = -float(np.log(probabilities[rows, labels] + 1e-9).mean())
    probabilities[rows, labels] -= 1
    probabilities /= len(labels)
    back = (probabilities @ parameters[2].T) * (hidden > 0)
    return [images.T @ back, back.sum(0), hidden.T @ probabilities, probabilities.sum(0)], loss


class ParameterServer:
    """What rank 0 lets the workers call: each public method is a function of that name.

    Calls of several workers run at once, hence the lock.
    """

    def __init__(self, steps: int, workers: int, staleness: int) -> None:
        self.parameters = new_parameters()
        self.step, self.steps, self.loss = 0, steps, 0.0
        self.staleness = staleness
        self.pushed = dict.fromkeys(range(1, workers + 1), 0)
        self.waiting: dict[int, Future[bool]] = {}  # workers that are too far ahead
        self.reports: list[dict[str, np.ndarray]] = []
        self.lock = threading.Lock()

    def pull(self) -> Arrays:
        """Return a copy: while it is on its way, another worker may push."""
        with self.lock:
            return [array.copy() for array in self.parameters]

    def push(self, gradients: Arrays, loss: float) -> "bool | Future[bool]":
        """Apply a gradient; return whether to go on.

        To a worker that is too far ahead of the slowest, that is said later: what is returned is
        a future, and no thread waits meanwhile.
        """
        call = rankwire.current_call()
        assert call is not None
        worker = call.src
        with self.lock:
            for array, change in zip(self.parameters, gradients, strict=True):
                array -= RATE * change
            self.step += 1
            self.loss += (loss - self.loss) * (0.01 if self.step > 1 else 1)
            self.pushed[worker] += 1
            goes_on = self.step < self.steps
            newest = min(self.pushed.values()) + self.staleness if goes_on else self.step
            released = [each for each in self.waiting if self.pushed[each] <= newest]
            futures = [self.waiting.pop(each) for each in released]
            answer: bool | Future[bool]
            answer = goes_on if self.pushed[worker] <= newest else Future()
            if isinstance(answer, Future):
                self.waiting[worker] = answer
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_result(goes_on)
        return answer

    def ping(self) -> None:
        """Do nothing: to measure what a call costs."""

    def report(self, latencies: dict[str, np.ndarray]) -> None:
        """Keep what a worker has measured."""
        self.reports.append(latencies)


def serve(backend: rankwire.Backend, agent: rankwire.RpcAgent, steps: int, staleness: int) -> None:
    console = Console(highlight=False)
    images, labels = draw_digits(2000, seed=0)
    server = ParameterServer(steps, backend.world_size - 1, staleness)
    agent.register("parameters", server)

    def show_progress() -> str:
        share = (predict(server.pull(), images)[1].argmax(axis=1) == labels).mean()
        bar = f"{'━' * round(20 * server.step / steps):╌<20}"
        console.print(f"step {server.step:6} {bar} loss {server.loss:.3f} accuracy {share:6.1%}")
        return f"test accuracy {share:.1%}"

    backend.barrier()  # from here on, the workers call
    console.print(f"workers: {backend.world_size - 1}; data: seven-segment digits, generated")
    started = time.monotonic()
    while not agent.serve(timeout=0.5):  # until a worker says stop
        show_progress()
    seconds = time.monotonic() - started
    result = show_progress()
    backend.barrier()  # by now, the workers have reported
    nbytes = sum(array.nbytes for array in server.parameters)
    table = Table("call", "carries", "p50", "p99", title="latency, all workers at once")
    for name, size in (("ping", 0), ("pull", nbytes), ("push", nbytes)):
        taken = np.concatenate([report[name] for report in server.reports])
        p50, p99 = np.percentile(taken, [50, 99]) * 1e6
        table.add_row(name, f"{size:,} bytes", f"{p50:.0f} µs", f"{p99:.0f} µs")
    console.print(table)
    console.print(f"{result} after {server.step} steps in {seconds:.1f} s")
    console.print(f"{2 * server.step / seconds:,.0f} calls per second")


def work(backend: rankwire.Backend, agent: rankwire.RpcAgent) -> None:
    images, labels = draw_digits(20_000, seed=backend.rank)
    random = np.random.default_rng(backend.rank)
    latencies: dict[str, list[float]] = {"pull": [], "push": [], "ping": []}

    def timed(name: str, *args: object) -> Any:
        start = time.perf_counter()
        result = agent.rpc_sync(0, f"parameters.{name}", *args)
        latencies[name].append(time.perf_counter() - start)
        return result

    backend.barrier()
    is_going_on = True
    while is_going_on:
        batch = random.integers(0, len(labels), BATCH)
        is_going_on = timed("push", *gradient(timed("pull"), images[batch], labels[batch]))
    agent.stop(0)  # training is over
    for _ in range(PINGS):
        timed("ping")
    taken = {name: np.array(seconds) for name, seconds in latencies.items()}
    agent.to(0, ParameterServer, name="parameters").report(taken)
    backend.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12_000, help="gradients to apply in all")
    parser.add_argument(
        "--staleness", type=int, default=16, help="how far a worker may be ahead of the slowest"
    )
    arguments = parser.parse_args()
    with rankwire.connect() as backend, rankwire.RpcAgent(backend) as agent:
        if backend.world_size < 2:
            raise SystemExit("a parameter server needs a worker: run with -n 2 or more")
        if backend.rank == 0:
            serve(backend, agent, arguments.steps, arguments.staleness)
        else:
            work(backend, agent)
