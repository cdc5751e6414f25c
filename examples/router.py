"""A router gives questions to workers that crash now and then, and every question is answered.

    rankwire run --on-failure restart --max-restarts 20 -n 1 examples/router.py \
        : -n 3 --name worker examples/router_worker.py --crash 0.02

A worker takes a batch of vectors and says for each which of its prototypes is nearest. The router
has one batch under way at each worker. If a worker crashes, its batch goes back to the others, and
the worker gets the next one when the launcher has restarted it.

Without `--on-failure restart` the first crash ends the job.
"""

import argparse
import queue
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from router_worker import DIMENSIONS, PROTOTYPES, prototypes

import rankwire

BATCH = 64


class Router:
    """Has all questions answered, each by some worker."""

    def __init__(self, agent: rankwire.RpcAgent, questions: np.ndarray) -> None:
        self.agent = agent
        self.questions = questions
        self.answers = np.zeros(questions.shape[:2], int)
        self.open: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(len(questions)):
            self.open.put(number)

    def feed(self, worker: int) -> Counter[str]:
        """Give a worker one question after the other, and wait for it when it has crashed."""
        counts = Counter[str]()
        while True:
            try:
                number = self.open.get_nowait()
            except queue.Empty:
                return counts
            try:
                self.answers[number] = self.agent.to(worker).worker.classify(self.questions[number])
                counts[f"answered by rank {worker}"] += 1
            except rankwire.PeerLostError:
                self.open.put(number)
                counts["asked again"] += 1
                self.agent.backend.wait_for(worker)


def main() -> None:
    parser = argparse.ArgumentParser(description="Have workers that crash answer questions.")
    parser.add_argument("--batches", type=int, default=400)
    batches = parser.parse_args().batches
    random = np.random.default_rng(1)
    labels = random.integers(PROTOTYPES, size=(batches, BATCH))
    noise = random.normal(scale=0.3, size=(batches, BATCH, DIMENSIONS))
    with rankwire.connect() as backend, rankwire.RpcAgent(backend) as agent:
        router, workers = Router(agent, prototypes()[labels] + noise), backend.roles["worker"]
        begin = time.perf_counter()
        with ThreadPoolExecutor(len(workers)) as pool:
            counts = sum(pool.map(router.feed, workers), Counter())
        seconds, right = time.perf_counter() - begin, (router.answers == labels).mean()
        print(f"{batches} batches in {seconds:.1f} s, {right:.1%} right")
        for what, count in sorted(counts.items()):
            print(f"  {what}: {count}")
        agent.stop("worker")


if __name__ == "__main__":
    main()
