"""A worker of `router.py`, which starts it."""

import argparse
import os
import signal

import numpy as np

import rankwire

DIMENSIONS, PROTOTYPES = 32, 10


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--crash", type=float, default=0.01, help="probability for each batch")
    worker = Worker(parser.parse_args().crash)
    with (
        rankwire.connect() as backend,
        rankwire.RpcAgent(backend, serve={"worker": worker}) as agent,
    ):
        agent.serve()  # until the router stops it, or has left


if __name__ == "__main__":
    main()
