"""Selection: which algorithm for which size and number of ranks.

All ranks decide alike, from what all of them know. The limits were measured on one host
(``docs/collectives.md`` has the figures); between hosts the number of messages and of bytes
decides. Pure.
"""

from __future__ import annotations

from rankwire.collectives import algorithms
from rankwire.collectives.algorithms import Array
from rankwire.collectives.exchange import Exchange
from rankwire.collectives.reductions import Reduction

# Up to here two ranks give each other everything.
EXCHANGE_UP_TO = 64 << 10
# Up to here, for all ranks together, everything is sent to everyone: one round is worth more than
# the bytes.
GATHER_UP_TO = 128 << 10
# Up to here the whole array is exchanged in every round, if more than a few ranks take part.
DOUBLE_UP_TO = 256 << 10
DOUBLE_FROM_RANKS = 8
# With more ranks than this on several hosts, each talks to two neighbours only.
RING_FROM_RANKS = 64
# Up to here a broadcast goes along a tree, and a reduction to the root itself.
TREE_UP_TO = 256 << 10


def all_reduce(x: Exchange, source: Array, out: Array, r: Reduction, *, ordered: bool) -> None:
    """Reduce ``source`` of all ranks into ``out`` of all ranks."""
    nbytes = source.nbytes
    if x.size == 2 and nbytes <= EXCHANGE_UP_TO:
        algorithms.all_reduce_by_exchange(x, source, out, r)
    elif x.size * nbytes <= GATHER_UP_TO or x.size == 1:
        algorithms.all_reduce_by_gathering(x, source, out, r)
    elif not ordered and not r.is_wide and x.size >= DOUBLE_FROM_RANKS and nbytes <= DOUBLE_UP_TO:
        algorithms.all_reduce_by_doubling(x, source, out, r)
    elif not ordered and not r.is_wide and x.size >= RING_FROM_RANKS and not x.is_one_host:
        algorithms.all_reduce_by_ring(x, source, out, r)
    else:
        algorithms.all_reduce_directly(x, source, out, r)


def reduce(x: Exchange, source: Array, out: Array | None, root: int, r: Reduction) -> None:
    """Reduce ``source`` of all ranks into ``out`` of the root."""
    if source.nbytes <= TREE_UP_TO:
        algorithms.reduce_by_gathering(x, source, out, root, r)
    else:
        algorithms.reduce_by_scattering(x, source, out, root, r)


def broadcast(x: Exchange, array: Array, root: int) -> None:
    """Copy the root's array to all ranks."""
    if x.size <= 2 or (array.nbytes > TREE_UP_TO and x.is_one_host):
        algorithms.broadcast_directly(x, array, root)
    elif array.nbytes <= TREE_UP_TO:
        algorithms.broadcast_by_tree(x, array, root)
    else:
        algorithms.broadcast_by_scattering(x, array, root)


def all_gather(x: Exchange, own: Array, out: Array) -> None:
    """Fill ``out`` with the parts of all ranks."""
    parts = algorithms.split(out, x.size)
    if x.size * own.nbytes <= GATHER_UP_TO:
        for part, row in zip(parts, algorithms.all_gather_by_doubling(x, own), strict=True):
            part[...] = row
    else:
        algorithms.meet_before_much(x, own.nbytes)
        algorithms.all_gather_directly(x, own, parts, algorithms.GATHER_STEP)
        parts[x.rank][...] = own
