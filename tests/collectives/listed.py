"""Worlds of every kind for collectives on lists, and arrays of sizes that matter to them."""

import contextlib
from functools import partial

import numpy as np

from rankwire import SubBackend
from rankwire.testing import in_parallel, simulated_world, tcp_world
from several_hosts import threads_on

LITTLE = 1 << 17  # a segment in which little is large
LIMIT = 60.0


@contextlib.contextmanager
def group_world(size):
    """A group of all ranks of a larger world but the first."""
    with simulated_world(size + 1, timeout=LIMIT) as world:
        members = list(range(1, size + 1))
        yield in_parallel([partial(SubBackend, world[rank], members) for rank in members])


def halves(size):
    """Two hosts whose ranks take turns."""
    return [rank % 2 for rank in range(size)]


WORLDS = {
    "simulated": lambda size: simulated_world(size, timeout=LIMIT),
    "shared": lambda size: tcp_world(size, timeout=LIMIT),
    "shared little": lambda size: tcp_world(size, timeout=LIMIT, segment_nbytes=LITTLE),
    "sockets": lambda size: tcp_world(size, timeout=LIMIT, transport="tcp"),
    "hosts": lambda size: threads_on(halves(size), timeout=LIMIT),
    "hosts little": lambda size: threads_on(halves(size), timeout=LIMIT, segment_nbytes=LITTLE),
    "group": group_world,
}
CASES = [
    (kind, size) for kind in WORLDS for size in (1, 2, 3, 4) if "hosts" not in kind or size > 2
]


def waited(result, async_op):
    return result.wait() if async_op else result


def numbers(shape, dtype, seed):
    """Return small whole numbers, whose sums are exact in every dtype."""
    random = np.random.default_rng(seed)
    return np.asarray(random.integers(0, 2 if dtype == "bool" else 8, shape)).astype(dtype)


def strided(array):
    """Return a copy of an array whose elements have gaps between them."""
    wide = np.zeros((*array.shape, 2), array.dtype)
    wide[..., 0] = array
    return wide[..., 0]
