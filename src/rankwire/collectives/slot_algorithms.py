"""Algorithms in shared memory: the steps of operations whose ranks share slots (``slots``).

A rank writes its slot, meets all others and reads their slots, so no rank writes to the user's
memory before all ranks are known to be in the same operation. Reductions are in rank order. Except
for ``all_reduce``, callers ensure that everything fits into a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rankwire.collectives.exchange import Array, Exchange, blocks
from rankwire.collectives.reductions import Reduction
from rankwire.collectives.slots import SharedSlots
from rankwire.wire.frames import Buffer, Message

# Up to here, for all ranks together, each rank reduces everything: one meeting less outweighs the
# reading.
REDUCE_ALONE_UP_TO = 256 << 10
# The pieces of an array that does not fit. 16 MiB among 2 ranks take 2.43 ms if each reads the
# other's memory, 2.05 in pieces of 256 KiB, 1.60 in 512 KiB, 2.01 in 1 MiB; 64 MiB among 4 ranks on
# 2 cores take 44, 45, 31 and 28 ms.
PIECE_NBYTES = 1 << 20


def meet(x: Exchange, shared: SharedSlots) -> None:
    """Wait for all ranks."""
    shared.begin(x, _BYTES, 0)
    shared.publish(x, 0)
    shared.meet(x)


def all_reduce(x: Exchange, shared: SharedSlots, source: Array, out: Array, r: Reduction) -> None:
    """Reduce ``source`` of all ranks into ``out`` of all ranks, in pieces if it does not fit."""
    if source.nbytes <= shared.slot_nbytes:
        _all_reduce_piece(x, shared, source, out, r)
        return
    step = min(PIECE_NBYTES, shared.slot_nbytes) // source.itemsize
    for start in range(0, source.size, step):
        piece = slice(start, start + step)
        _all_reduce_piece(x, shared, source[piece], out[piece], r)


def _all_reduce_piece(
    x: Exchange, shared: SharedSlots, source: Array, out: Array, r: Reduction
) -> None:
    rows = shared.put(x, source)
    if x.size == 2:  # a rank reads its own array, which is in its cache
        r.fold_two(*((source, rows[1]) if x.rank == 0 else (rows[0], source)), out)
    elif x.size * source.nbytes <= REDUCE_ALONE_UP_TO:
        r.fold(rows, x.size, out)
    else:
        _share_the_work(x, shared, rows, out, r)


def _share_the_work(
    x: Exchange, shared: SharedSlots, rows: Sequence[Array], out: Array, r: Reduction
) -> None:
    count = out.size
    bounds = [at * count // x.size for at in range(x.size + 1)]
    own = slice(bounds[x.rank], bounds[x.rank + 1])
    results = shared.begin(x, out.dtype, count)
    fold_rows([row[own] for row in rows], results[x.rank][own], r)
    shared.publish_and_meet(x, out.nbytes)
    for rank, result in enumerate(results):
        part = slice(bounds[rank], bounds[rank + 1])
        out[part] = result[part]


def fold_rows(rows: Sequence[Array], out: Array, r: Reduction) -> None:
    """Reduce the rows into ``out``, in blocks that stay in the cache."""
    for low, high in blocks(out.size, out.dtype):
        r.fold([row[low:high] for row in rows], len(rows), out[low:high])


def reduce(
    x: Exchange, shared: SharedSlots, source: Array, out: Array | None, r: Reduction
) -> None:
    """Reduce ``source`` of all ranks into ``out`` of the root, where it is given."""
    rows = shared.put(x, source)
    if out is not None:
        fold_rows(rows, out, r)


def reduce_scatter(
    x: Exchange, shared: SharedSlots, source: Array, out: Array, r: Reduction
) -> None:
    """Reduce the part of this rank into ``out``: 15 calls fewer than with lists of parts."""
    rows = shared.put(x, source)
    start = x.rank * out.size
    fold_rows([row[start : start + out.size] for row in rows], out, r)


def reduce_scatter_parts(
    x: Exchange, shared: SharedSlots, parts: Sequence[Array], out: Array, r: Reduction
) -> None:
    """Reduce the part of this rank into ``out``; parts may differ in size."""
    rows = shared.begin(x, out.dtype, sum(part.size for part in parts))
    np.concatenate(parts, out=rows[x.rank])
    shared.publish_and_meet(x, rows[x.rank].nbytes)
    start = sum(part.size for part in parts[: x.rank])
    fold_rows([row[start : start + out.size] for row in rows], out, r)


def broadcast(x: Exchange, shared: SharedSlots, array: Array, root: int) -> None:
    """Copy the root's array to all ranks."""
    if x.rank == root:
        shared.put(x, array)
        return
    rows = shared.begin(x, array.dtype, array.size)
    shared.publish_and_meet(x)
    array[...] = rows[root]


def gather(x: Exchange, shared: SharedSlots, own: Array, out: Array | None) -> None:
    """Fill ``out``, where given, with the parts of all ranks: 7 calls fewer than with lists."""
    rows = shared.put(x, own)
    if out is not None:
        count = own.size
        for rank, row in enumerate(rows):
            out[rank * count : (rank + 1) * count] = own if rank == x.rank else row


def gather_parts(
    x: Exchange, shared: SharedSlots, own: Array, parts: Sequence[Array] | None, most: int
) -> None:
    """Fill the parts of all ranks, where given; the longest has ``most`` elements."""
    rows = shared.begin(x, own.dtype, most)
    rows[x.rank][: own.size] = own
    shared.publish_and_meet(x, own.nbytes)
    for rank, part in enumerate(parts or ()):
        part[...] = own if rank == x.rank else rows[rank][: part.size]


def all_to_all_parts(
    x: Exchange,
    shared: SharedSlots,
    table: Array,
    sent: Sequence[Array],
    check: Callable[[Sequence[Array]], list[list[int]]],
) -> list[Array] | None:
    """Publish this rank's table and parts; return each rank's bytes, None if some do not fit."""
    others = [*sent[: x.rank], *sent[x.rank + 1 :]]  # without this rank's own part
    head, nbytes = table.nbytes, table.nbytes + sum(part.nbytes for part in others)
    rows = shared.begin(x, _BYTES, shared.slot_nbytes)
    rows[x.rank][:head] = table.view(np.uint8)
    if others and nbytes <= shared.slot_nbytes:
        np.concatenate(others, out=rows[x.rank][head:nbytes])
    shared.publish_and_meet(x, nbytes)
    sizes = check([row[:head].view(table.dtype) for row in rows])
    if max(shared.sizes(x)) > shared.slot_nbytes:
        return None
    found = []
    for src, to_each in enumerate(sizes):
        before = sum(to_each[: x.rank]) - (to_each[src] if src < x.rank else 0)
        found.append(rows[src][head + before : head + before + to_each[x.rank]])
    found[x.rank] = sent[x.rank]
    return found


def all_to_all(x: Exchange, shared: SharedSlots, own: Array, out: Array) -> None:
    """Give part i to rank i, and read the parts for this rank."""
    rows = shared.put(x, own)
    count = own.size // x.size
    for rank, row in enumerate(rows):
        out[rank * count : (rank + 1) * count] = row[x.rank * count : (x.rank + 1) * count]


def spread(x: Exchange, shared: SharedSlots, message: Message) -> list[bytearray] | None:
    """Return the bytes of all ranks; None on all ranks if those of some rank do not fit."""
    buffers, nbytes = message
    slots = shared.put_buffers(x, buffers, nbytes)
    sizes = shared.sizes(x)
    if max(sizes) > shared.slot_nbytes:
        return None
    return [bytearray(slot[:size].data) for slot, size in zip(slots, sizes, strict=True)]


def distribute(
    x: Exchange, shared: SharedSlots, messages: Sequence[Message]
) -> list[bytearray] | None:
    """Return each rank's payload for this one; None if the messages of a rank do not fit."""
    ends = np.cumsum([nbytes for _, nbytes in messages], dtype=np.int64)
    buffers: list[Buffer] = [ends.tobytes()]
    for pieces, _ in messages:
        buffers.extend(pieces)
    slots = shared.put_buffers(x, buffers, ends.nbytes + int(ends[-1]) if messages else 0)
    sizes = shared.sizes(x)
    if max(sizes) > shared.slot_nbytes:
        return None
    return [_part_of(slot[:size], x.rank, x.size) for slot, size in zip(slots, sizes, strict=True)]


def _part_of(slot: Array, rank: int, size: int) -> bytearray:
    head = 8 * size
    if slot.size < head:
        return bytearray()
    ends = [0, *slot[:head].view(np.int64).tolist()]
    return bytearray(slot[head + max(ends[rank], 0) : head + max(ends[rank + 1], 0)].data)


_BYTES = np.dtype(np.uint8)
