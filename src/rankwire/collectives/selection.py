"""Selection: which algorithm for which size and number of ranks.

All ranks decide alike, from data that all have. The limits were measured on one host
(``docs/collective-algorithms.md``); between hosts the number of messages and bytes decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rankwire.collectives import algorithms, host_algorithms, slot_algorithms
from rankwire.collectives.algorithms import Array
from rankwire.collectives.exchange import Exchange
from rankwire.collectives.reductions import Reduction
from rankwire.collectives.slots import Hosts
from rankwire.wire.frames import Message, Payload

# The limits are in bytes per rank, unless they say otherwise.
# Up to here two ranks exchange whole arrays.
EXCHANGE_UP_TO = 64 << 10
# Up to here, for all ranks together, every rank gets everything: fewer rounds outweigh the bytes.
GATHER_UP_TO = 128 << 10
# Up to here many ranks exchange the whole array in every round.
DOUBLE_UP_TO = 256 << 10
DOUBLE_FROM_RANKS = 8
# From here on, ranks on several hosts form a ring.
RING_FROM_RANKS = 64
# Up to here a broadcast uses a tree, and a reduction takes place at the root.
TREE_UP_TO = 256 << 10
# Up to here, for all ranks together, objects go to all hosts, even if only one rank needs them.
SPREAD_UP_TO = 256 << 10
# If a rank's share of a slot is smaller, ranks send messages instead: each of the many pieces would
# be a round trip between hosts.
LEAST_PIECE = 4 << 10


def all_reduce(x: Exchange, source: Array, out: Array, r: Reduction, *, ordered: bool) -> None:
    """Reduce ``source`` of all ranks into ``out`` of all ranks."""
    nbytes = source.nbytes
    if x.shared is not None:
        slot_algorithms.all_reduce(x, x.shared, source, out, r)
    elif x.hosts is not None and not ordered and not r.is_wide:
        across = partial(all_reduce, ordered=False)
        host_algorithms.all_reduce(x, x.hosts, source, out, r, across)
    elif x.size == 2 and nbytes <= EXCHANGE_UP_TO:
        algorithms.all_reduce_by_exchange(x, source, out, r)
    elif x.size * nbytes <= GATHER_UP_TO or x.size == 1:
        algorithms.all_reduce_by_gathering(x, source, out, r)
    elif ordered or r.is_wide:
        algorithms.all_reduce_directly(x, source, out, r)
    else:
        _all_reduce_much(x, source, out, r)


def _all_reduce_much(x: Exchange, source: Array, out: Array, r: Reduction) -> None:
    if x.size >= DOUBLE_FROM_RANKS and source.nbytes <= DOUBLE_UP_TO:
        algorithms.all_reduce_by_doubling(x, source, out, r)
    elif x.size >= RING_FROM_RANKS and not x.is_one_host:
        algorithms.all_reduce_by_ring(x, source, out, r)
    else:
        algorithms.all_reduce_directly(x, source, out, r)


def reduce(x: Exchange, source: Array, out: Array | None, root: int, r: Reduction) -> None:
    """Reduce ``source`` of all ranks into ``out`` of the root."""
    if x.shared is not None and source.nbytes <= x.shared.slot_nbytes:
        slot_algorithms.reduce(x, x.shared, source, out, r)
    elif x.hosts is not None and not r.is_wide:
        host_algorithms.reduce(x, x.hosts, source, out, root, r, reduce, meet)
    elif source.nbytes <= TREE_UP_TO:
        algorithms.reduce_by_gathering(x, source, out, root, r)
    else:
        algorithms.reduce_by_scattering(x, source, out, root, r)


def broadcast(x: Exchange, array: Array, root: int) -> None:
    """Copy the root's array to all ranks."""
    if x.shared is not None and array.nbytes <= x.shared.slot_nbytes:
        slot_algorithms.broadcast(x, x.shared, array, root)
    elif x.hosts is not None:
        host_algorithms.broadcast(x, x.hosts, array, root, broadcast, meet)
    elif x.size <= 2 or (array.nbytes > TREE_UP_TO and x.is_one_host):
        algorithms.broadcast_directly(x, array, root)
    elif array.nbytes <= TREE_UP_TO:
        algorithms.broadcast_by_tree(x, array, root)
    else:
        algorithms.broadcast_by_scattering(x, array, root)


def all_gather(x: Exchange, own: Array, out: Array) -> None:
    """Fill ``out`` with the parts of all ranks."""
    if x.shared is not None and own.nbytes <= x.shared.slot_nbytes:
        slot_algorithms.gather(x, x.shared, own, out)
    else:
        all_gather_parts(x, own, algorithms.split(out, x.size))


def all_gather_parts(x: Exchange, own: Array, parts: Sequence[Array]) -> None:
    """Fill the parts of all ranks, of any sizes and anywhere in memory."""
    longest = max(part.size for part in parts)
    most = longest * own.itemsize
    if x.shared is not None and most <= x.shared.slot_nbytes:
        slot_algorithms.gather_parts(x, x.shared, own, parts, longest)
    elif x.hosts is not None and _passes(x, x.hosts, x.size * most):
        host_algorithms.all_gather(x, x.hosts, own, parts)
    elif x.size * most <= GATHER_UP_TO:
        rows = algorithms.all_gather_by_doubling(x, algorithms.pad(own, longest))
        for part, row in zip(parts, rows, strict=True):
            part[...] = row[: part.size]
    else:
        algorithms.all_gather_directly(x, own, parts)
        parts[x.rank][...] = own


def gather(x: Exchange, own: Array, out: Array | None, root: int) -> None:
    """Fill ``out`` of the root with the parts of all ranks."""
    gather_parts(x, own, None if out is None else algorithms.split(out, x.size), root)


def gather_parts(x: Exchange, own: Array, parts: Sequence[Array] | None, root: int) -> None:
    """Fill the parts of all ranks at the root, of one size and anywhere in memory."""
    if x.shared is not None and own.nbytes <= x.shared.slot_nbytes:
        slot_algorithms.gather_parts(x, x.shared, own, parts, own.size)
        return
    algorithms.gather_directly(x, own, parts, root)
    if parts is not None:
        parts[root][...] = own


def reduce_scatter(x: Exchange, source: Array, out: Array, r: Reduction) -> None:
    """Reduce part i of ``source`` of all ranks into ``out`` of rank i."""
    if x.shared is not None and source.nbytes <= x.shared.slot_nbytes:
        slot_algorithms.reduce_scatter(x, x.shared, source, out, r)
    else:
        reduce_scatter_parts(x, algorithms.split(source, x.size), out, r)


def reduce_scatter_parts(x: Exchange, parts: Sequence[Array], out: Array, r: Reduction) -> None:
    """Reduce part i of all ranks into ``out`` of rank i; parts may differ in size."""
    if x.shared is not None and sum(part.nbytes for part in parts) <= x.shared.slot_nbytes:
        slot_algorithms.reduce_scatter_parts(x, x.shared, parts, out, r)
    elif (
        x.hosts is not None
        and _passes(x, x.hosts, x.size * max(part.nbytes for part in parts))
        and not r.is_wide
    ):
        host_algorithms.reduce_scatter(x, x.hosts, parts, out, r)
    else:
        algorithms.reduce_scatter_directly(x, parts, out, r)


def all_to_all(x: Exchange, own: Array, out: Array) -> None:
    """Send part i of ``own`` to rank i; fill ``out`` with the parts for this rank."""
    if x.shared is not None and own.nbytes <= x.shared.slot_nbytes:
        slot_algorithms.all_to_all(x, x.shared, own, out)
        return
    algorithms.meet_before_much(x, own.nbytes // x.size)
    algorithms.all_to_all_directly(x, algorithms.split(own, x.size), algorithms.split(out, x.size))


def all_to_all_parts(
    x: Exchange,
    table: Array,
    sent: Sequence[Array],
    received: Sequence[Array],
    check: Callable[[Sequence[Array]], list[list[int]]],
) -> None:
    """Send part i to rank i, once ``check`` has found all sizes in the tables of all ranks."""
    if x.shared is not None and table.nbytes <= x.shared.slot_nbytes:
        found = slot_algorithms.all_to_all_parts(x, x.shared, table, sent, check)
        if found is not None:
            for part, bytes_of_it in zip(received, found, strict=True):
                part[...] = bytes_of_it
            return
    else:
        check(algorithms.all_gather_by_doubling(x, table))
    algorithms.all_to_all_directly(x, sent, received)


def meet(x: Exchange) -> None:
    """Wait for all ranks."""
    if x.shared is not None:
        slot_algorithms.meet(x, x.shared)
    elif x.hosts is not None:
        host_algorithms.meet(x, x.hosts, meet)
    else:
        algorithms.meet(x)


def spread(x: Exchange, message: Message) -> list[bytearray] | None:
    """Meet, and return the bytes of all ranks if they fit; None if ranks must send them."""
    if x.shared is not None:
        return slot_algorithms.spread(x, x.shared, message)
    if x.hosts is not None:
        return host_algorithms.spread(x, x.hosts, message, SPREAD_UP_TO)
    algorithms.meet(x)  # no rank knows how much the others are about to send
    return None


def distribute(x: Exchange, messages: Sequence[Message]) -> list[bytearray] | None:
    """Meet, and return each rank's payload for this one, or None if it must be received.

    ``messages`` has one for each rank, or is empty if this rank sends nothing.
    """
    if x.shared is not None:
        found = slot_algorithms.distribute(x, x.shared, messages)
        if found is not None:
            return found
    else:
        meet(x)
    for dst in x.others if messages else ():
        x.send_buffers(dst, algorithms.SPREAD_STEP, *messages[dst])
    return None


def payload_from(x: Exchange, src: int, found: Sequence[bytearray] | None) -> Payload:
    """Return a rank's payload for this one from ``spread`` or ``distribute``, or receive it."""
    return x.receive(src, algorithms.SPREAD_STEP) if found is None else found[src]


def _passes(x: Exchange, hosts: Hosts, nbytes: int) -> bool:
    return nbytes <= hosts.slot_nbytes or hosts.slot_nbytes // x.size >= LEAST_PIECE
