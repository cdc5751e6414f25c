"""An evaluation farm: one rank hands out work, the others do it, and none of it is lost.

    rankwire run -n 4 --on-failure continue examples/evaluation_farm.py
    rankwire run -n 4 --on-failure continue examples/evaluation_farm.py --kill

Rank 0 has checkpoints of a model to be scored on shards of a test set, and every other rank scores.
To score twice does no harm (``idempotent=True``), so what a lost rank had at hand is given to
others. With ``--kill`` one rank dies half-way.
"""

import argparse
import os
import signal
from itertools import product

import numpy as np

import rankwire

WIDTH, ROWS, SHARDS = 64, 4000, 25


class Evaluator:
    """Scores checkpoints; every rank makes the test set of itself, from a fixed seed."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.rows = random.standard_normal((SHARDS, ROWS, WIDTH), np.float32)
        self.labels = self.rows @ np.ones(WIDTH, np.float32) > 0

    def score(self, piece: tuple[np.ndarray, int]) -> int:
        """Return how many rows of a shard a checkpoint gets right."""
        weights, shard = piece
        return int(((self.rows[shard] @ weights > 0) == self.labels[shard]).sum())

    def die(self) -> None:
        """Die as a process does that runs out of memory."""
        os.kill(os.getpid(), signal.SIGKILL)


def checkpoints(count: int) -> list[np.ndarray]:
    """Return weights that come closer to the right ones."""
    noise = np.random.default_rng(1).standard_normal((count, WIDTH)).astype(np.float32)
    return [1 + noise[n] * (count - n) / 4 for n in range(count)]


def hand_out(agent: rankwire.RpcAgent, weights: list[np.ndarray], kill: bool) -> np.ndarray:
    """Have every checkpoint scored on every shard; return the share that each gets right."""
    right = np.zeros(len(weights), int)
    pieces = list(product(weights, range(SHARDS)))
    scores = agent.map("score", pieces, idempotent=True, progress=True)
    for outcome in scores:
        right[outcome.index // SHARDS] += outcome.value
        if kill and scores.count > len(pieces) // 2:
            victim = agent.world_size - 1
            try:
                agent.to(victim).die()
            except rankwire.PeerLostError as error:
                print(f"rank {victim} is lost: {error.reason}; others do its work")
            kill = False
    return right / (SHARDS * ROWS)


def main() -> None:
    parser = argparse.ArgumentParser(description="Score checkpoints on many ranks.")
    parser.add_argument("--checkpoints", type=int, default=20, help="how many (default 20)")
    parser.add_argument("--kill", action="store_true", help="have one rank die half-way")
    options = parser.parse_args()
    with rankwire.connect() as backend, rankwire.RpcAgent(backend) as agent:
        if backend.world_size < 2 + options.kill:
            raise SystemExit("one rank hands out work, the others do it")
        if backend.rank != 0:
            evaluator = Evaluator()
            agent.register("score", evaluator.score)
            agent.register("die", evaluator.die)
        backend.barrier()
        if backend.rank == 0:
            weights = checkpoints(options.checkpoints)
            shares = hand_out(agent, weights, options.kill)
            best = int(shares.argmax())
            print(
                f"{len(weights)} checkpoints scored, the best is number {best}: {shares[best]:.1%}"
            )
            agent.stop()
        else:
            agent.serve()


if __name__ == "__main__":
    main()
