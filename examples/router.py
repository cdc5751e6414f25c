"""A router gives questions to workers that crash now and then, and every question is answered.

    rankwire run -n 4 --on-failure restart --max-restarts 20 examples/router.py

Rank 0 is the router, every other rank a worker. A worker takes a batch of vectors and says for each
which of its prototypes is nearest; `--crash 0.02` makes it die in one of fifty batches. The router
has as many batches under way as there are workers. A batch whose worker is lost goes to another;
the worker is started anew by the launcher and is free again when it has joined.

Without `--on-failure restart` the first crash ends the job; with `--on-failure continue` the
workers become fewer.
"""

import argparse
import os
import queue
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import rankwire

BATCH, DIMENSIONS, PROTOTYPES = 64, 32, 10


def prototypes() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(PROTOTYPES, DIMENSIONS))


class Worker:
    """Answers, unless it crashes."""

    def __init__(self, crash: float) -> None:
        self.crash = crash
        self.prototypes = prototypes()
        self.random = np.random.default_rng(os.getpid())

    def classify(self, batch: np.ndarray) -> np.ndarray:
        """Return the nearest prototype of each vector."""
        if self.random.random() < self.crash:
            os.kill(os.getpid(), signal.SIGKILL)
        distances = np.linalg.norm(batch[:, None] - self.prototypes, axis=2)
        return np.asarray(distances.argmin(axis=1))


class Router:
    """Gives each batch to a worker that is free, again if that is lost."""

    def __init__(self, backend: rankwire.Backend, agent: rankwire.RpcAgent) -> None:
        self.agent = agent
        self.free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.counts = Counter[str]()
        for worker in range(1, backend.world_size):
            self.free.put(worker)
        backend.on_peer_joined(self.welcome)

    def welcome(self, worker: int, incarnation: int) -> None:
        """Give a worker work that was started anew."""
        self.count("came back")
        self.free.put(worker)

    def classify(self, batch: np.ndarray) -> np.ndarray:
        """Have some worker answer."""
        while True:
            worker = self.free.get()
            try:
                answer: np.ndarray = self.agent.rpc_sync(worker, "classify", batch)
            except rankwire.PeerLostError:
                self.count("asked again")
                continue
            self.free.put(worker)
            self.count(f"answered by rank {worker}")
            return answer

    def count(self, what: str) -> None:
        """Count what has happened."""
        with self.lock:
            self.counts[what] += 1


def route(backend: rankwire.Backend, agent: rankwire.RpcAgent, batches: int) -> None:
    router = Router(backend, agent)
    random = np.random.default_rng(1)
    labels = random.integers(PROTOTYPES, size=(batches, BATCH))
    noise = random.normal(scale=0.3, size=(batches, BATCH, DIMENSIONS))
    questions = prototypes()[labels] + noise
    begin = time.perf_counter()
    with ThreadPoolExecutor(backend.world_size - 1) as pool:
        answers = np.array(list(pool.map(router.classify, questions)))
    seconds = time.perf_counter() - begin
    print(f"{batches} batches in {seconds:.1f} s, {(answers == labels).mean():.1%} right")
    for what, count in sorted(router.counts.items()):
        print(f"  {what}: {count}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer questions by workers that crash.")
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--crash", type=float, default=0.01, help="probability for each batch")
    arguments = parser.parse_args()
    functions = {"classify": Worker(arguments.crash).classify}
    # Given to the agent as it is made: a worker that is back is asked at once.
    with (
        rankwire.connect() as backend,
        rankwire.RpcAgent(backend, resolve=functions.get) as agent,
    ):
        if backend.rank == 0:
            route(backend, agent, arguments.batches)
            agent.stop()
        else:
            agent.serve()


if __name__ == "__main__":
    main()
