"""Actors play, a learner learns and publishes its policy while they go on playing.

    rankwire run -n 4 examples/actor_learner.py

Rank 0 is the learner, every other rank an actor (any number of ranks from 2 on will do). Both sides
call each other: actors submit the episodes they played, the learner pushes each new policy to all
actors at once, in the middle of their games.

The game is a small world of 6 x 6 fields: from the upper left corner to the goal G, around the pits
O, in a wind that blows the player aside in one of ten moves. A move costs 0.04, the goal gives 1, a
pit takes 1, and both end the episode. The learner uses Q-learning: a table of what each move is
worth on each field.
"""

import argparse
import contextlib
import queue
import time

import numpy as np

import rankwire

WORLD = [
    "S.....",
    "..O.O.",
    "......",
    ".O.O..",
    "....O.",
    ".O...G",
]
SIZE = len(WORLD)
MOVES = [(-1, 0), (0, 1), (1, 0), (0, -1)]
PRIZES = {"G": 1.0, "O": -1.0}
LONGEST_EPISODE, WIND, DISCOUNT = 60, 0.1, 0.98
EPISODES_PER_UPDATE, RATE = 24, 0.03

Episode = tuple[np.ndarray, np.ndarray, np.ndarray]


def play(values: np.ndarray, curiosity: float, random: np.random.Generator) -> Episode:
    """Play one episode; return the fields visited, the moves made there, and their rewards.

    The move is the best that `values` knows, or with the probability `curiosity` any.
    """
    row, column = 0, 0
    fields, moves, rewards = [], [], []
    for _ in range(LONGEST_EPISODE):
        field = row * SIZE + column
        is_curious = random.random() < curiosity
        move = int(random.integers(len(MOVES)) if is_curious else values[field].argmax())
        blown = int(random.integers(len(MOVES))) if random.random() < WIND else move
        row = min(max(row + MOVES[blown][0], 0), SIZE - 1)
        column = min(max(column + MOVES[blown][1], 0), SIZE - 1)
        prize = PRIZES.get(WORLD[row][column], 0.0)
        fields.append(field)
        moves.append(move)
        rewards.append(prize - 0.04)
        if prize:
            break
    return np.array(fields), np.array(moves), np.array(rewards)


def improve(values: np.ndarray, episode: Episode) -> None:
    """Learn from one episode, backwards: each field learns from the one that came after it."""
    future = 0.0
    for field, move, reward in zip(*(array[::-1] for array in episode), strict=True):
        values[field, move] += RATE * (reward + DISCOUNT * future - values[field, move])
        future = values[field].max()


def learn(backend: rankwire.Backend, agent: rankwire.RpcAgent, updates: int) -> None:
    actors = range(1, backend.world_size)
    # Bounded, so that nothing is learned from policies that are long out of date.
    episodes: queue.Queue[Episode] = queue.Queue(2 * EPISODES_PER_UPDATE)

    @agent.register
    def submit(fields: np.ndarray, moves: np.ndarray, rewards: np.ndarray) -> None:
        with contextlib.suppress(queue.Full):  # the learner is behind: it misses some
            episodes.put_nowait((fields, moves, rewards))

    backend.barrier()  # from here on, the actors call
    values = np.zeros((SIZE * SIZE, len(MOVES)))
    rewards: list[float] = []
    printed = time.monotonic()
    for version in range(1, updates + 1):
        for _ in range(EPISODES_PER_UPDATE):
            episode = episodes.get(timeout=30)
            improve(values, episode)
            rewards.append(float(episode[2].sum()))
        curiosity = max(1 - 2 * version / updates, 0.02)
        for sent in [agent.rpc_async(a, "set_policy", values, curiosity) for a in actors]:
            sent.result()
        if time.monotonic() - printed > 0.5 or version == updates:
            printed = time.monotonic()
            recent = np.mean(rewards[-200:])
            print(f"policy {version:4}, {len(rewards):6} episodes, mean reward {recent:+.2f}")

    agent.stop(*actors)
    played = {actor: agent.to(actor).played() for actor in actors}
    print(f"episodes played: {', '.join(f'{n} by rank {actor}' for actor, n in played.items())}")
    for row, line in enumerate(WORLD):
        best = values[row * SIZE : (row + 1) * SIZE].argmax(axis=1)
        print(" ".join(c if c in PRIZES else "↑→↓←"[b] for c, b in zip(line, best, strict=True)))
    print(f"mean reward {np.mean(rewards[:200]):+.2f} -> {np.mean(rewards[-200:]):+.2f}")


def act(backend: rankwire.Backend, agent: rankwire.RpcAgent) -> None:
    random = np.random.default_rng(backend.rank)
    policy = np.zeros((SIZE * SIZE, len(MOVES))), 1.0
    count = 0

    @agent.register
    def set_policy(values: np.ndarray, curiosity: float) -> None:
        nonlocal policy
        policy = values, curiosity  # arrays that a call brings belong to the callee

    @agent.register
    def played() -> int:
        return count

    backend.barrier()
    while not agent.stopped:
        agent.rpc_sync(0, "submit", *play(*policy, random))
        count += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=400, help="policies to publish")
    options = parser.parse_args()
    with rankwire.connect() as backend, rankwire.RpcAgent(backend) as agent:
        if backend.world_size < 2:
            raise SystemExit("a learner needs an actor: run with -n 2 or more")
        learn(backend, agent, options.updates) if backend.rank == 0 else act(backend, agent)
