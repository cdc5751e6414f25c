"""Conformance checks of queues: they behave the same on every backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from rankwire.errors import (
    ChannelClosedError,
    ConfigurationError,
    DeadlineExceededError,
    OverloadedError,
    PeerLostError,
    QueueEndedError,
)
from rankwire.services.queue import Queue
from rankwire.services.queue_settings import QueueStats
from rankwire.testing.conformance.tools import agents_of, expect, leave, until
from rankwire.testing.ranks import MakeWorld, in_parallel


def is_exact(stats: QueueStats) -> bool:
    """Return whether each item that was put is counted in one place."""
    found = stats.consumed + stats.dropped + stats.stale + stats.queued + stats.leased
    return stats.produced == found


def items_of_a_queue_are_taken_once_and_in_order(make_world: MakeWorld) -> None:
    items = [None, "text", {"a": [1, 2.5]}, b"x" * 10_000, np.arange(100_000.0)]
    with agents_of(make_world, 3) as agents:
        queues = [agent.queue("q", owner=2, capacity=4) for agent in agents]
        for queue in queues:
            putting = partial(queues[0].put_many, items)
            in_parallel([putting, partial(_check_items, queue, items)])
        assert queues[1].stats().consumed == 3 * len(items)


def _check_items(queue: Queue[Any], items: list[Any]) -> None:
    for item in items:
        got = queue.get()
        assert np.array_equal(got, item) if isinstance(item, np.ndarray) else got == item


def a_full_queue_blocks_drops_or_refuses(make_world: MakeWorld) -> None:
    with agents_of(make_world, 2) as (owner, user):
        for when_full, left in (("drop_oldest", [2, 3]), ("drop_newest", [0, 1])):
            queue = user.queue(when_full, capacity=2, when_full=when_full)
            queue.put_many(range(4))
            assert owner.queue(when_full).get(2) == left
            assert queue.stats().dropped == 2
        queue = user.queue("refuse", capacity=2, when_full="refuse")
        assert expect(OverloadedError, lambda: queue.put_many(range(4))).accepted == 2
        queue = user.queue("block", capacity=2)
        late = expect(DeadlineExceededError, lambda: queue.put_many(range(4), timeout=0.05))
        assert (late.accepted, late.unconfirmed) == (2, 0)
        assert "it is full: 2 of 2 items" in str(late)
        assert queue.get(2) == [0, 1]
        late = expect(DeadlineExceededError, lambda: queue.get(timeout=0.05))
        assert "it is empty: 2 inserted, 2 consumed" in str(late)


def slots_and_batches_come_back(make_world: MakeWorld) -> None:
    with agents_of(make_world, 2) as (owner, user):
        queue = user.queue("q", capacity=2)
        with queue.slot() as first, queue.slot():
            expect(DeadlineExceededError, lambda: queue.put("no place", timeout=0.05))
            first.put("a")
        until(lambda: queue.stats().slots == 0)
        queue.put("b")
        with queue.get(ack=True) as batch:
            assert list(batch) == ["a"]
        queue.get(ack=True).give_back()
        until(lambda: queue.stats().queued == 1)
        queue.get(ack=True).ack()
        stats = owner.queue("q").stats()
        assert stats.consumed == stats.produced == 2
        expect(ConfigurationError, lambda: owner.queue("q", capacity=3))


def a_queue_ends_when_its_producers_have(make_world: MakeWorld) -> None:
    with agents_of(make_world, 3) as agents:
        queues = [agent.queue("q", capacity=2, producers=[0, 1]) for agent in agents]

        def produce(rank: int) -> list[int]:
            queues[rank].put_many(range(rank * 100, rank * 100 + 50))
            queues[rank].end()
            return []

        def consume() -> list[int]:
            return list(queues[2])

        runs: list[Callable[[], list[int]]] = [partial(produce, 0), partial(produce, 1), consume]
        got = in_parallel(runs)[2]
        assert sorted(got) == [*range(50), *range(100, 150)]
        expect(QueueEndedError, lambda: queues[1].put(1))


def a_rank_that_is_lost_gives_back_what_it_holds(make_world: MakeWorld) -> None:
    with agents_of(make_world, 3) as agents:
        queues = [agent.queue("q", capacity=4, producers=[1]) for agent in agents]
        queues[1].put_many("abc")
        batch = queues[2].get(2, ack=True)
        slot = queues[2].slot()
        slot.__enter__()
        assert queues[0].stats().leased == len(batch) == 2
        leave(agents[2].backend, ValueError("lost"))
        until(lambda: queues[0].stats().leased + queues[0].stats().slots == 0)
        assert is_exact(queues[0].stats())
        assert queues[0].get(3) == ["a", "b", "c"]
        leave(agents[1].backend, ValueError("lost"))
        assert expect(PeerLostError, queues[0].get).peer == 1


def the_users_of_a_lost_owner_learn_of_it(make_world: MakeWorld) -> None:
    with agents_of(make_world, 2) as agents:
        queue = agents[1].queue("q", capacity=2)

        def lose() -> None:
            until(lambda: queue.stats().waiting_producers > 0)
            leave(agents[0].backend, ValueError("lost"))

        def put() -> None:
            error = expect(PeerLostError, lambda: queue.put_many(range(5)))
            assert (error.peer, error.unconfirmed) == (0, 5)

        in_parallel([lose, put])
        expect(PeerLostError, queue.get)


def an_owner_that_closes_refuses_its_users(make_world: MakeWorld) -> None:
    with agents_of(make_world, 2) as (owner, user):
        queue = user.queue("q", capacity=2)

        def close() -> None:
            until(lambda: queue.stats().waiting_consumers > 0)
            owner.close()

        def get() -> None:
            expect(ChannelClosedError, queue.get)

        in_parallel([close, get])
