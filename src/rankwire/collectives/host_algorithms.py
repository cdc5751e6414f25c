"""Algorithms over several hosts: shared memory inside each host, messages between hosts.

Up: the ranks of a host write their slots and meet. Across: the leaders of all hosts exchange the
data of their hosts, with functions that the caller has chosen. Down: each leader writes the result
to its slot, and the ranks of its host meet again. So no rank writes to the user's memory or returns
before all ranks are known to be in the same operation. Larger arrays go through in pieces, of the
same size on all hosts. Reductions combine the ranks of a host, then the hosts, each in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np

from rankwire.collectives import algorithms
from rankwire.collectives.algorithms import cut
from rankwire.collectives.exchange import Array, Exchange
from rankwire.collectives.reductions import Reduction
from rankwire.collectives.slot_algorithms import fold_rows
from rankwire.collectives.slots import Hosts, SharedSlots, SubExchange
from rankwire.wire.frames import Message

Meet = Callable[[Exchange], None]
AllReduce = Callable[[Exchange, Array, Array, Reduction], None]
Broadcast = Callable[[Exchange, Array, int], None]
Reduce = Callable[[Exchange, Array, Array | None, int, Reduction], None]


def meet(x: Exchange, hosts: Hosts, meet: Meet) -> None:
    """Wait for all ranks."""
    inside = hosts.inside(x)
    meet(inside)
    if hosts.place == 0:
        meet(hosts.across(x))
    meet(inside)


def all_reduce(
    x: Exchange, hosts: Hosts, source: Array, out: Array, r: Reduction, all_reduce: AllReduce
) -> None:
    """Reduce ``source`` of all ranks into ``out`` of all ranks."""
    inside, slots = hosts.inside(x), _slots(hosts)
    for start, stop in _pieces(source.size, hosts.slot_nbytes // source.itemsize):
        rows = slots.put(inside, source[start:stop])
        results = slots.begin(inside, source.dtype, stop - start)
        if hosts.place == 0:
            fold_rows(rows, results[0], r.of_parts)
            all_reduce(hosts.across(x), results[0], results[0], r.of_parts)
            x.settle()
            r.finish(results[0], x.size)
        slots.publish_and_meet(inside)
        out[start:stop] = results[0]


def reduce(
    x: Exchange,
    hosts: Hosts,
    source: Array,
    out: Array | None,
    root: int,
    r: Reduction,
    reduce: Reduce,
    meet: Meet,
) -> None:
    """Reduce ``source`` of all ranks into ``out`` of the root, through one rank per host."""
    inside, across, host, place = _lead_to(x, hosts, root)
    total = None if across is None else np.empty_like(source)
    reduce(inside, source, total, place, r.of_parts)
    if across is not None:
        assert total is not None
        reduce(across, total, out, host, r.of_parts)
        x.settle()
        if out is not None:
            r.finish(out, x.size)
    meet(inside)


def broadcast(
    x: Exchange, hosts: Hosts, array: Array, root: int, broadcast: Broadcast, meet: Meet
) -> None:
    """Copy the root's array to all ranks, through one rank per host."""
    inside, across, host, place = _lead_to(x, hosts, root)
    meet(inside)
    if across is not None:
        broadcast(across, array, host)
    broadcast(inside, array, place)


def all_gather(x: Exchange, hosts: Hosts, own: Array, parts: Sequence[Array]) -> None:
    """Fill the parts of all ranks, which may differ in size."""
    inside, slots = hosts.inside(x), _slots(hosts)
    longest = max(part.size for part in parts)
    for start, stop in _pieces(longest, hosts.slot_nbytes // own.itemsize // x.size):
        pieces = [part[start:stop] for part in parts]
        mine = own[start:stop]
        rows = slots.begin(inside, own.dtype, stop - start)
        rows[inside.rank][: mine.size] = mine
        slots.publish_and_meet(inside)
        results = slots.begin(inside, own.dtype, sum(piece.size for piece in pieces))
        by_host = [[pieces[rank].size for rank in group] for group in hosts.groups]
        if hosts.place == 0:
            whole = cut(results[0], [sum(sizes) for sizes in by_host])
            ours = zip(rows, by_host[hosts.here], strict=True)
            np.concatenate([row[:size] for row, size in ours], out=whole[hosts.here])
            algorithms.all_gather_directly(hosts.across(x), whole[hosts.here], whole)
            x.settle()
        slots.publish_and_meet(inside)
        found = cut(results[0], list(chain(*by_host)))
        for rank, piece in zip(chain(*hosts.groups), found, strict=True):
            pieces[rank][...] = piece


def reduce_scatter(
    x: Exchange, hosts: Hosts, parts: Sequence[Array], out: Array, r: Reduction
) -> None:
    """Reduce the part of this rank into ``out``; parts may differ in size."""
    inside, slots = hosts.inside(x), _slots(hosts)
    longest = max(part.size for part in parts)
    for start, stop in _pieces(longest, hosts.slot_nbytes // out.itemsize // x.size):
        pieces = [part[start:stop] for part in parts]
        sizes = [piece.size for piece in pieces]
        rows = slots.begin(inside, out.dtype, sum(sizes))
        np.concatenate(pieces, out=rows[hosts.place])
        slots.publish_and_meet(inside)
        ours = [sizes[rank] for rank in hosts.groups[hosts.here]]
        results = slots.begin(inside, out.dtype, sum(ours))
        if hosts.place == 0:
            parts_of_rows = [cut(row, sizes) for row in rows]
            by_host = [_fold_parts(parts_of_rows, group, r.of_parts) for group in hosts.groups]
            algorithms.reduce_scatter_directly(hosts.across(x), by_host, results[0], r.of_parts)
            x.settle()
            r.finish(results[0], x.size)
        slots.publish_and_meet(inside)
        out[start:stop] = cut(results[0], ours)[hosts.place]


def spread(x: Exchange, hosts: Hosts, message: Message, most: int) -> list[bytearray] | None:
    """Return the bytes of all ranks; None on all if they exceed ``most`` or a slot."""
    inside, slots = hosts.inside(x), _slots(hosts)
    rows = slots.put_buffers(inside, *message)
    sizes = slots.sizes(inside)
    results = slots.begin(inside, np.dtype(np.uint8), slots.slot_nbytes)
    nbytes = 0
    if hosts.place == 0:
        across = hosts.across(x)
        table = _all_sizes(across, hosts, sizes)
        total = table.nbytes + int(table.sum())
        if total <= min(most, hosts.slot_nbytes):
            nbytes = total
            head, body = results[0][: table.nbytes], results[0][table.nbytes : total]
            head.view(np.int64)[...] = table
            by_host = [int(table[group].sum()) for group in hosts.groups]
            parts = cut(body, by_host)
            pieces = [row[:size] for row, size in zip(rows, sizes, strict=True)]
            np.concatenate(pieces, out=parts[hosts.here])
            algorithms.all_gather_directly(across, parts[hosts.here], parts, has_met=True)
            x.settle()
    slots.publish_and_meet(inside, nbytes)
    total = slots.sizes(inside)[0]
    return _split_by_rank(results[0][:total], hosts, x.size) if total else None


def _all_sizes(across: SubExchange, hosts: Hosts, sizes: list[int]) -> Array:
    widest = max(len(group) for group in hosts.groups)
    ours = np.zeros(widest, np.int64)
    ours[: len(sizes)] = sizes
    table = np.empty(sum(len(group) for group in hosts.groups), np.int64)
    told = algorithms.all_gather_by_doubling(across, ours)
    for group, row in zip(hosts.groups, told, strict=True):
        table[group] = row[: len(group)]
    return table


def _split_by_rank(whole: Array, hosts: Hosts, size: int) -> list[bytearray]:
    sizes = whole[: 8 * size].view(np.int64).tolist()
    ranks = [rank for group in hosts.groups for rank in group]
    found = [bytearray()] * size
    for rank, part in zip(
        ranks, cut(whole[8 * size :], [sizes[rank] for rank in ranks]), strict=True
    ):
        found[rank] = bytearray(part.data)
    return found


def _slots(hosts: Hosts) -> SharedSlots:
    assert hosts.slots is not None  # or x.hosts would be None
    return hosts.slots


def _lead_to(
    x: Exchange, hosts: Hosts, root: int
) -> tuple[SubExchange, SubExchange | None, int, int]:
    """Return the exchange inside this host and, if this rank leads it, that across leaders.

    Also return the root's rank across leaders, and the rank of this host's leader inside it.
    """
    leaders = hosts.leaders(root)
    place = hosts.groups[hosts.here].index(leaders[hosts.here])
    across = hosts.across(x, root) if hosts.place == place else None
    return hosts.inside(x), across, leaders.index(root), place


def _pieces(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of pieces of at most ``most`` elements; for 0 elements, one empty piece."""
    most = max(1, most)
    for start in range(0, max(1, count), most):
        yield start, min(start + most, count)


def _fold_parts(rows: list[list[Array]], ranks: list[int], r: Reduction) -> Array:
    counts = [rows[0][rank].size for rank in ranks]
    total = np.empty(sum(counts), r.dtype)
    for rank, part in zip(ranks, cut(total, counts), strict=True):
        fold_rows([row[rank] for row in rows], part, r)
    return total
