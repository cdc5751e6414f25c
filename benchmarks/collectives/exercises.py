"""The operations as something to repeat: the same call on the same arrays every time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.collectives.candidates import Array, Rank
from benchmarks.collectives.figures import Figure, Operation

ITEM_NBYTES = 4
# Small integers, whose sums over many ranks float32 still holds exactly.
PATTERN_PERIOD = 1021


@dataclass(frozen=True)
class Exercise:
    """An operation that all ranks do together.

    Attributes:
        run: do it once.
        verify: called after the first run; raises ``AssertionError`` if the result is wrong.
    """

    run: Callable[[], object]
    verify: Callable[[], None]


def prepare(rank: Rank, figure: Figure) -> Exercise:
    """Allocate what one rank needs for the operation."""
    return EXERCISES[figure.operation](rank, figure.nbytes // ITEM_NBYTES)


def all_reduce(rank: Rank, length: int) -> Exercise:
    array = pattern(length, rank.rank)

    def verify() -> None:
        ranks = rank.world_size
        check(array, pattern(length, 0) * ranks + sum(range(ranks)), "all_reduce")
        # However often zeros are added up, they stay what they are.
        array[:] = 0

    return Exercise(partial(rank.all_reduce, rank.pack(array)), verify)


def barrier(rank: Rank, length: int) -> Exercise:
    return Exercise(rank.barrier, lambda: None)


def broadcast(rank: Rank, length: int) -> Exercise:
    # Not from rank 0: it has the clock, and a root may be done before anyone has the data.
    root = rank.world_size - 1
    array = pattern(length, rank.rank)
    return Exercise(
        partial(rank.broadcast, rank.pack(array), root),
        lambda: check(array, pattern(length, root), "broadcast"),
    )


def all_gather(rank: Rank, length: int) -> Exercise:
    share = length // rank.world_size
    array, out = pattern(share, rank.rank), np.zeros(share * rank.world_size, dtype=np.float32)

    def verify() -> None:
        for other, part in enumerate(out.reshape(rank.world_size, share)):
            check(part, pattern(share, other), "all_gather")

    return Exercise(partial(rank.all_gather, rank.pack(array), rank.pack(out)), verify)


def reduce_scatter(rank: Rank, length: int) -> Exercise:
    share = length // rank.world_size
    array, out = pattern(length, rank.rank), np.zeros(share, dtype=np.float32)

    def verify() -> None:
        ranks = rank.world_size
        whole = pattern(length, 0) * ranks + sum(range(ranks))
        check(out, whole[rank.rank * share : (rank.rank + 1) * share], "reduce_scatter")

    return Exercise(partial(rank.reduce_scatter, rank.pack(array), rank.pack(out)), verify)


def ping_pong(rank: Rank, length: int) -> Exercise:
    """Rank 0 sends and gets it back; rank 1 returns what it received; others have no part."""
    sent, received = pattern(length, 0), np.zeros(length, dtype=np.float32)
    ping, pong = rank.pack(sent), rank.pack(received)

    def serve() -> None:
        rank.send(ping, 1)
        rank.recv(pong, 1)

    def give_back() -> None:
        rank.recv(pong, 0)
        rank.send(pong, 0)

    if rank.rank > 1:
        return Exercise(lambda: None, lambda: None)
    return Exercise(give_back if rank.rank else serve, lambda: check(received, sent, "ping-pong"))


EXERCISES: dict[Operation, Callable[[Rank, int], Exercise]] = {
    "all_reduce": all_reduce,
    "barrier": barrier,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "ping_pong": ping_pong,
}


def pattern(length: int, rank: int) -> Array:
    """Return an array that no other rank has, and that is not the same everywhere."""
    return (np.arange(length) % PATTERN_PERIOD + rank).astype(np.float32)


def check(found: Array, expected: Array, operation: str) -> None:
    if not np.array_equal(found, expected):
        raise AssertionError(f"{operation} of {found.nbytes} bytes gave a wrong result")
