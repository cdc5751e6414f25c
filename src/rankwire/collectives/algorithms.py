"""Algorithms: the steps of each operation over messages, given rank, size, send and receive.

Arrays are flat and contiguous. An algorithm writes to the user's memory only after it has received
from all ranks, or has met them. Reductions are in rank order unless a function says otherwise. Each
element is computed once, or in the same way on all ranks, so results are equal bit for bit.
``docs/collective-algorithms.md`` lists the steps and bytes of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from rankwire.collectives.exchange import (
    Arriving,
    Exchange,
    Piece,
    blocks,
    receive_array,
    receive_pieces,
    scratch,
)
from rankwire.collectives.reductions import Reduction

Array = np.ndarray[Any, Any]

# A socket takes this much even if its peer does not read.
_MUCH = 64 << 10

# The first step of each phase; the rounds of a phase follow it.
_MEET = 0x100
_GATHER = 0x200
_REDUCE = 0x300
SPREAD_STEP = _SPREAD = 0x400
_RING = 0x1000


def split(array: Array, parts: int) -> list[Array]:
    """Split an array into parts whose sizes differ by at most one element."""
    count = array.size
    return [array[i * count // parts : (i + 1) * count // parts] for i in range(parts)]


def cut(array: Array, counts: Iterable[int]) -> list[Array]:
    """Cut an array into parts with the given numbers of elements."""
    return [array[start:stop] for start, stop in pairwise(accumulate(counts, initial=0))]


def pad(array: Array, count: int) -> Array:
    """Return the array, extended with zeros to ``count`` elements if it has fewer."""
    if array.size == count:
        return array
    longer = np.zeros(count, array.dtype)
    longer[: array.size] = array
    return longer


def meet(x: Exchange) -> None:
    """Wait for all ranks, in log2(N) rounds (dissemination: Hensgen, Finkel, Manber 1988)."""
    distance, step = 1, _MEET
    while distance < x.size:
        x.send_buffers((x.rank + distance) % x.size, step, (), 0)
        x.receive((x.rank - distance) % x.size, step, 0)
        distance, step = 2 * distance, step + 1


def meet_before_much(x: Exchange, nbytes: int) -> None:
    """Meet if the message is large: a sender that blocks in it does not learn of failures."""
    if nbytes >= _MUCH:
        meet(x)


def all_gather_by_doubling(x: Exchange, own: Array) -> list[Array]:
    """Return the parts of all ranks, in log2(N) rounds (Bruck et al. 1997): for small parts."""
    rows = np.empty((x.size, own.size), own.dtype)
    rows[0] = own
    have, step = 1, _GATHER
    while have < x.size:
        count = min(have, x.size - have)
        x.send((x.rank - have) % x.size, step, rows[:count].reshape(-1))
        # Row i is the part of rank (rank + i) % N.
        arriving = rows[have : have + count].reshape(-1)
        x.receive_into((x.rank + have) % x.size, step, arriving)
        have, step = have + count, step + 1
    return [rows[rank - x.rank] for rank in range(x.size)]


def all_gather_directly(
    x: Exchange, own: Array, parts: Sequence[Array], *, has_met: bool = False
) -> None:
    """Fill the parts of all ranks by direct messages; ``has_met`` says that all are in it."""
    step = _SPREAD if has_met else _GATHER
    arriving = _expect_much(x, step, parts)
    if not has_met:
        meet_before_much(x, max(part.nbytes for part in parts))
    for dst in x.others:
        x.send(dst, step, own)
    _take_in(x, step, parts, arriving)


def gather_directly(x: Exchange, own: Array, parts: Sequence[Array] | None, root: int) -> None:
    """Fill the parts of all ranks at the root."""
    if parts is None:
        meet(x)
        x.send(root, _GATHER, own)
    else:
        arriving = _expect_much(x, _GATHER, parts)
        meet(x)
        _take_in(x, _GATHER, parts, arriving)


def scatter_directly(x: Exchange, parts: Sequence[Array] | None, own: Array, root: int) -> None:
    """Send each rank its part from the root."""
    if x.rank == root:
        assert parts is not None
        for dst in x.others:
            x.send(dst, _SPREAD, parts[dst])
    else:
        x.receive_into(root, _SPREAD, own)


def all_to_all_directly(x: Exchange, sent: Sequence[Array], received: Sequence[Array]) -> None:
    """Exchange a part with every other rank."""
    arriving = _expect_much(x, _SPREAD, received)
    for dst in x.others:
        x.send(dst, _SPREAD, sent[dst])
    _take_in(x, _SPREAD, received, arriving)
    received[x.rank][...] = sent[x.rank]


def _expect_much(x: Exchange, step: int, parts: Sequence[Array]) -> dict[int, Arriving]:
    # They arrive in place while this rank sends.
    return {
        src: x.expect_into(src, step, parts[src])
        for src in reversed(x.others)
        if parts[src].nbytes >= _MUCH
    }


def _take_in(
    x: Exchange, step: int, parts: Sequence[Array], arriving: Mapping[int, Arriving]
) -> None:
    """Receive all parts; copy the small ones only when all have arrived."""
    pieces: list[Piece | None] = [None] * x.size
    for src in reversed(x.others):
        if src in arriving:
            x.take_in(arriving[src])
        else:
            pieces[src] = x.receive_piece(src, step, parts[src])
    _copy_pieces(pieces, parts)


def _copy_pieces(pieces: Sequence[Piece | None], parts: Sequence[Array]) -> None:
    for piece, part in zip(pieces, parts, strict=True):
        if piece is not None:
            piece.copy_into(part)


def broadcast_by_tree(x: Exchange, array: Array, root: int) -> None:
    """Send along a binomial tree, in log2(N) rounds."""
    place = (x.rank - root) % x.size
    bit = 1
    while bit < x.size and not place & bit:
        bit *= 2
    _receive_after_meeting(x, (place - bit + root) % x.size if place else None, array)
    bit //= 2
    while bit:
        if place + bit < x.size:
            x.send((place + bit + root) % x.size, _SPREAD, array)
        bit //= 2


def broadcast_directly(x: Exchange, array: Array, root: int) -> None:
    """Send from the root to every rank: for one host, where ranks read the root's memory."""
    _receive_after_meeting(x, None if x.rank == root else root, array)
    if x.rank == root:
        for dst in x.others:
            x.send(dst, _SPREAD, array)


def _receive_after_meeting(x: Exchange, src: int | None, array: Array) -> None:
    if src is None:
        meet(x)
    elif array.nbytes < _MUCH:
        meet(x)
        x.receive_into(src, _SPREAD, array)
    else:
        arriving = x.expect_into(src, _SPREAD, array)
        meet(x)
        x.take_in(arriving)


def broadcast_by_scattering(x: Exchange, array: Array, root: int) -> None:
    """Scatter the array and gather its parts everywhere (van de Geijn): for a slow root link."""
    meet(x)
    parts = split(array, x.size)
    scatter_directly(x, parts, parts[x.rank], root)
    own = parts[x.rank]
    for dst in x.others:
        if dst != root:
            x.send(dst, _GATHER, own)
    if x.rank != root:
        for src in reversed(x.others):
            x.receive_into(src, _GATHER, parts[src])


def all_reduce_by_exchange(x: Exchange, source: Array, out: Array, r: Reduction) -> None:
    """Exchange the whole arrays between two ranks and reduce on both: for small arrays."""
    other = 1 - x.rank
    x.send(other, _REDUCE, source)
    theirs = receive_array(x, other, _REDUCE, source)
    if x.offers:
        x.settle()
    if x.rank == 0:
        r.fold_two(source, theirs, out)
    else:
        r.fold_two(theirs, source, out)


def all_reduce_by_gathering(x: Exchange, source: Array, out: Array, r: Reduction) -> None:
    """Gather all contributions by doubling and reduce them on every rank: for small arrays."""
    rows = all_gather_by_doubling(x, source)
    x.settle()
    r.fold(rows, x.size, out)


def all_reduce_directly(x: Exchange, source: Array, out: Array, r: Reduction) -> None:
    """Reduce one part on each rank, then gather all parts everywhere.

    This sends as few bytes as a ring, without its chain of waits. On one host every rank reads the
    others' memory block by block and reduces in the cache.
    """
    parts = split(out, x.size)
    own = parts[x.rank]
    # A rank sends its result after it has read this one's contribution to it, so the result may
    # arrive there even if ``out`` is ``source``.
    arriving = _expect_much(x, _SPREAD, parts)
    reduce_scatter_directly(x, split(source, x.size), own, r)
    for dst in x.others:
        x.send(dst, _SPREAD, own)
    _take_in(x, _SPREAD, parts, arriving)


def reduce_scatter_directly(x: Exchange, parts: Sequence[Array], out: Array, r: Reduction) -> None:
    """Reduce the part of this rank, to which every other rank sends its contribution."""
    meet_before_much(x, max(part.nbytes for part in parts))
    for dst in x.others:
        x.send(dst, _REDUCE, parts[dst])
    own = parts[x.rank]
    _fold_blocks(receive_pieces(x, _REDUCE, [own] * x.size), own, out, x.rank, r)


def _fold_blocks(
    pieces: Sequence[Piece | None], own: Array, out: Array, rank: int, r: Reduction
) -> None:
    fetched, spare = scratch(own.dtype)
    for start, stop in blocks(own.size, own.dtype):

        def in_rank_order(start: int = start, stop: int = stop) -> Iterator[Array]:
            for piece in pieces:
                yield (own[start:stop] if piece is None else piece.block(start, stop, fetched))

        r.fold(in_rank_order(), len(pieces), out[start:stop], own=rank, spare=spare)
    for piece in pieces:
        if piece is not None:
            piece.release()


def all_reduce_by_doubling(x: Exchange, source: Array, out: Array, r: Reduction) -> None:
    """Exchange totals with ever more distant partners, in log2(N) rounds of the whole array.

    Recursive doubling, in the order of the tree. Ranks beyond a power of two use a partner.
    """
    inner = 1 << (x.size.bit_length() - 1)
    extra = x.size - inner
    total = source.copy()
    if x.rank >= inner:
        x.send(x.rank - inner, _REDUCE, total)
        x.receive_into(x.rank - inner, _SPREAD, out)
        return
    received = np.empty_like(total)
    if x.rank < extra:
        x.receive_into(x.rank + inner, _REDUCE, received)
        r.merge(total, received)
    distance, step = 1, _REDUCE + 1
    while distance < inner:
        partner = x.rank ^ distance
        x.send(partner, step, total)
        x.receive_into(partner, step, received)
        x.settle()
        lower, upper = (total, received) if x.rank < partner else (received, total)
        r.merge(lower, upper)
        total, received = lower, upper
        distance, step = 2 * distance, step + 1
    r.finish(total, x.size)
    if x.rank < extra:
        x.send(x.rank + inner, _SPREAD, total)
    out[...] = total
    x.settle()


def all_reduce_by_ring(x: Exchange, source: Array, out: Array, r: Reduction) -> None:
    """Pass parts around a ring, first to reduce and then to gather them, in 2 (N - 1) steps.

    Patarasuk and Yuan 2009. Part i is reduced in the order of the ranks from i + 1 on.
    """
    meet(x)
    if out is not source:
        out[...] = source
    parts = split(out, x.size)
    right, left = (x.rank + 1) % x.size, (x.rank - 1) % x.size
    fetched, _ = scratch(out.dtype)
    step = _RING
    for turn in range(1, x.size):
        x.send(right, step, parts[(x.rank - turn) % x.size])
        mine = parts[(x.rank - turn - 1) % x.size]
        piece = x.receive_piece(left, step, mine)
        for start, stop in blocks(mine.size, mine.dtype):
            r.merge(mine[start:stop], piece.block(start, stop, fetched))
        piece.release()
        step += 1
    x.settle()
    r.finish(parts[x.rank], x.size)
    for turn in range(x.size - 1):
        x.send(right, step, parts[(x.rank - turn) % x.size])
        mine = parts[(x.rank - turn - 1) % x.size]
        x.receive_into(left, step, mine)
        step += 1


def reduce_by_gathering(
    x: Exchange, source: Array, out: Array | None, root: int, r: Reduction
) -> None:
    """Send all contributions to the root, which reduces them: for small arrays."""
    meet(x)
    if x.rank != root:
        x.send(root, _REDUCE, source)
        return
    assert out is not None
    _fold_blocks(receive_pieces(x, _REDUCE, [source] * x.size), source, out, x.rank, r)


def reduce_by_scattering(
    x: Exchange, source: Array, out: Array | None, root: int, r: Reduction
) -> None:
    """Reduce one part on each rank, then gather the parts at the root."""
    parts = split(source, x.size)
    own = np.empty_like(parts[x.rank]) if out is None else split(out, x.size)[x.rank]
    reduce_scatter_directly(x, parts, own, r)
    if x.rank != root:
        x.send(root, _GATHER, own)
        return
    assert out is not None
    results = split(out, x.size)
    _copy_pieces(receive_pieces(x, _GATHER, results), results)
