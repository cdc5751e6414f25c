"""Actors play, a learner learns and publishes its policy while they go on playing.

    rankwire run -n 4 examples/actor_learner.py

Rank 0 is the learner, every other rank an actor (any number of ranks from 2 on will do). Episodes
go through a queue: an actor takes a place in it before it plays, so no actor plays far ahead, and
the learner drops episodes of policies that are more than two versions old.

The game is a small world of 6 x 6 fields: from the upper left corner to the goal G, around the pits
O, in a wind that blows the player aside in one of ten moves. A move costs 0.04, the goal gives 1, a
pit takes 1, and both end the episode. The learner uses Q-learning: a table of what each move is
worth on each field.
"""

import argparse
import contextlib

import numpy as np

import rankwire

WORLD = ["S.....", "..O.O.", "......", ".O.O..", "....O.", ".O...G"]
SIZE = len(WORLD)
MOVES = [(-1, 0), (0, 1), (1, 0), (0, -1)]
PRIZES = {"G": 1.0, "O": -1.0}
LONGEST_EPISODE, WIND, DISCOUNT = 60, 0.1, 0.98
EPISODES_PER_UPDATE, RATE = 24, 0.03

Step = tuple[int, int, float]  # the field, the move made there, its reward


def play(values: np.ndarray, curiosity: float, random: np.random.Generator) -> list[Step]:
    """Play one episode by the best moves of `values`, or with a probability by any move."""
    row, column = 0, 0
    steps: list[Step] = []
    while len(steps) < LONGEST_EPISODE and (not steps or abs(steps[-1][2]) < 0.1):
        field, any_move = row * SIZE + column, int(random.integers(len(MOVES)))
        move = any_move if random.random() < curiosity else int(values[field].argmax())
        down, right = MOVES[int(random.integers(len(MOVES))) if random.random() < WIND else move]
        row, column = min(max(row + down, 0), SIZE - 1), min(max(column + right, 0), SIZE - 1)
        steps.append((field, move, PRIZES.get(WORLD[row][column], 0.0) - 0.04))
    return steps


def improve(values: np.ndarray, episode: list[Step]) -> float:
    """Learn from one episode, backwards; return the sum of its rewards."""
    future = 0.0
    for field, move, reward in reversed(episode):
        values[field, move] += RATE * (reward + DISCOUNT * future - values[field, move])
        future = values[field].max()
    return sum(reward for _, _, reward in episode)


def learn(agent: rankwire.RpcAgent, episodes: rankwire.Queue[list[Step]], updates: int) -> None:
    values = np.zeros((SIZE * SIZE, len(MOVES)))
    rewards: list[float] = []
    agent.backend.barrier()
    for version in range(updates):
        batch = episodes.get(EPISODES_PER_UPDATE, min_version=version - 2)
        rewards += [improve(values, episode) for episode in batch]
        policy = version + 1, values, max(1 - 2 * version / updates, 0.02)
        for call in [agent.to_async(a).set_policy(*policy) for a in range(1, agent.world_size)]:
            call.result()
        if version % 50 == 49:
            print(f"policy {version + 1:4}, mean reward {np.mean(rewards[-200:]):+.2f}")
    episodes.end()
    stats = episodes.stats()
    print(f"{stats.produced} episodes played: {stats.consumed} used, {stats.stale} too old")
    print(f"mean reward {np.mean(rewards[:200]):+.2f} -> {np.mean(rewards[-200:]):+.2f}")


def act(agent: rankwire.RpcAgent, episodes: rankwire.Queue[list[Step]]) -> None:
    random = np.random.default_rng(agent.rank)
    policy = 0, np.zeros((SIZE * SIZE, len(MOVES))), 1.0

    @agent.register
    def set_policy(version: int, values: np.ndarray, curiosity: float) -> None:
        nonlocal policy
        policy = version, values, curiosity  # arrays that a call brings belong to the callee

    agent.backend.barrier()  # from here on, the learner calls
    with contextlib.suppress(rankwire.QueueEndedError):
        while True:
            with episodes.slot() as slot:
                version, values, curiosity = policy
                slot.put(play(values, curiosity, random), version=version)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=400, help="policies to publish")
    updates = parser.parse_args().updates
    with rankwire.connect() as backend, rankwire.RpcAgent(backend) as agent:
        if backend.world_size < 2:
            raise SystemExit("a learner needs an actor: run with -n 2 or more")
        episodes = agent.queue("episodes", capacity=2 * EPISODES_PER_UPDATE)
        learn(agent, episodes, updates) if backend.rank == 0 else act(agent, episodes)
