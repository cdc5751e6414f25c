"""Random collectives, the same on all ranks of a world, each compared with what numpy gives.

Runs in the processes of the ranks: every one draws the same operations from the same seed.
"""

import random

import numpy as np

import rankwire
from rankwire import SubBackend

DTYPES = ["float32", "float64", "int64", "uint8", "float16"]
OPS = {"sum": np.add, "max": np.maximum, "min": np.minimum}
SIZES = [0, 1, 3, 64, 1000, 5000, 70_000]


CHANGE_EVERY = 100  # operations; then there are other groups


def run(backend, seed, count, sizes=SIZES):
    """Do ``count`` operations, in the world and in groups of it; return how many were compared."""
    draw = random.Random(seed)
    done = 0
    for start in range(0, count, CHANGE_EVERY):
        groups = _drawn_groups(backend, draw)
        for _ in range(min(CHANGE_EVERY, count - start)):
            done += _run_one(draw, *draw.choice(groups), sizes)
        for group, _ in groups[1:]:
            if group is not None:
                group.close()
    return done


def _drawn_groups(backend, draw):
    """Return the world and some groups of it, each with its members; None where we are in none."""
    ranks = list(range(backend.world_size))
    groups = [(backend, ranks)]
    for size in range(2, len(ranks) + 1) if len(ranks) > 2 else ():
        members = sorted(draw.sample(ranks, size))
        groups.append((SubBackend(backend, members) if backend.rank in members else None, members))
    return groups


def _run_one(draw, group, members, sizes):
    """Do one operation; return whether this rank was in it."""
    length, dtype, op = draw.choice(sizes), draw.choice(DTYPES), draw.choice(list(OPS))
    kind, where = draw.choice(list(KINDS)), draw.random()
    number = draw.randrange(1 << 30)
    if group is None:
        return False
    data = [_array(number + rank, length, dtype, len(members)) for rank in members]
    KINDS[kind](group, data, op, int(where * len(members)))
    return True


def _array(seed, length, dtype, parts):
    """Return an array whose length can be divided; small whole numbers, so that sums are exact."""
    values = np.random.default_rng(seed).integers(0, 7, length * parts)
    return values.astype(dtype)


def _reduced(data, op):
    total = data[0].copy()
    for array in data[1:]:
        total = OPS[op](total, array)
    return total


def _all_reduce(group, data, op, root):
    array = data[group.rank].copy()
    assert rankwire.all_reduce(group, array, op) is array
    np.testing.assert_array_equal(array, _reduced(data, op))


def _reduce(group, data, op, root):
    result = rankwire.reduce(group, data[group.rank], root, op)
    if group.rank == root:
        np.testing.assert_array_equal(result, _reduced(data, op))
    else:
        assert result is None


def _broadcast(group, data, op, root):
    array = data[group.rank].copy()
    rankwire.broadcast(group, array, root)
    np.testing.assert_array_equal(array, data[root])


def _all_gather(group, data, op, root):
    np.testing.assert_array_equal(
        rankwire.all_gather(group, data[group.rank]), np.concatenate(data)
    )


def _gather(group, data, op, root):
    result = rankwire.gather(group, data[group.rank], root)
    if group.rank == root:
        np.testing.assert_array_equal(result, np.concatenate(data))


def _scatter(group, data, op, root):
    part = rankwire.scatter(group, data[root] if group.rank == root else None, root)
    np.testing.assert_array_equal(part, np.split(data[root], len(data))[group.rank])


def _reduce_scatter(group, data, op, root):
    part = rankwire.reduce_scatter(group, data[group.rank], op)
    np.testing.assert_array_equal(part, np.split(_reduced(data, op), len(data))[group.rank])


def _all_to_all(group, data, op, root):
    result = rankwire.all_to_all(group, data[group.rank])
    parts = [np.split(array, len(data))[group.rank] for array in data]
    np.testing.assert_array_equal(result, np.concatenate(parts))


def _uneven(group, data, op, root):
    size, each = len(data), len(data[0]) // len(data)
    counts = [dst * each // (size - 1) for dst in range(size)]  # the first gets nothing
    rows = sum(counts)
    result = rankwire.all_to_all(group, data[group.rank][:rows], send_counts=counts)
    begin = sum(counts[: group.rank])
    parts = [array[begin : begin + counts[group.rank]] for array in data]
    np.testing.assert_array_equal(result, np.concatenate(parts))


def _cut(array, size):
    """Cut an array into parts of different lengths; the first has nothing."""
    return np.split(array, [part * len(array) // sum(range(size)) for part in _triangles(size)])


def _triangles(size):
    return [at * (at + 1) // 2 for at in range(size - 1)]


def _lists(group, data, op, root):
    size, rank = len(data), group.rank
    if size == 1:
        return
    parts = [_cut(array, size) for array in data]
    out = [np.full_like(parts[src][src], 9) for src in range(size)]
    rankwire.all_gather(group, parts[rank][rank], out=out)
    for src, array in enumerate(out):
        np.testing.assert_array_equal(array, parts[src][src])
    result = rankwire.reduce_scatter(group, parts[rank], op)
    np.testing.assert_array_equal(result, _reduced([part[rank] for part in parts], op))
    out = [np.full_like(part[rank], 9) for part in parts]
    rankwire.all_to_all(group, parts[rank], out=out)
    for src, array in enumerate(out):
        np.testing.assert_array_equal(array, parts[src][rank])
    part = rankwire.scatter(group, parts[root] if rank == root else None, root)
    np.testing.assert_array_equal(part, parts[root][rank])
    out = [np.full_like(array, 9) for array in data] if rank == root else None
    rankwire.gather(group, data[rank], root, out=out)
    for array, sent in zip(out or (), data, strict=False):
        np.testing.assert_array_equal(array, sent)


def _many(group, data, op, root):
    size = len(data)
    arrays = [data[group.rank], data[group.rank].astype("int32"), data[group.rank][:size]]
    for at, whole in enumerate(rankwire.all_gather_coalesced(group, arrays)):
        sent = [[array, array.astype("int32"), array[:size]][at] for array in data]
        np.testing.assert_array_equal(whole, np.concatenate(sent))
    for at, part in enumerate(rankwire.reduce_scatter_coalesced(group, arrays, op)):
        sent = [[array, array.astype("int32"), array[:size]][at] for array in data]
        np.testing.assert_array_equal(part, np.split(_reduced(sent, op), size)[group.rank])


def _coalesced(group, data, op, root):
    arrays = [data[group.rank].copy(), data[group.rank].astype("int32"), data[group.rank][:1] + 1]
    rankwire.all_reduce_coalesced(group, arrays, op)
    first = _reduced([array[:1] + 1 for array in data], op)
    totals = [_reduced(data, op), _reduced([array.astype("int32") for array in data], op), first]
    for array, total in zip(arrays, totals, strict=True):
        np.testing.assert_array_equal(array, total)


def _barrier(group, data, op, root):
    rankwire.barrier(group)


def _in_background(group, data, op, root):
    arrays = [array.copy() for array in (data[group.rank], data[group.rank])]
    works = [rankwire.all_reduce(group, array, op, async_op=True) for array in arrays]
    for work, array in zip(works, arrays, strict=True):
        work.wait()
        np.testing.assert_array_equal(array, _reduced(data, op))


def _objects(group, data, op, root):
    own = data[group.rank]
    for got, sent in zip(rankwire.all_gather_object(group, own), data, strict=True):
        np.testing.assert_array_equal(got, sent)
    word = {"from": group.rank}
    assert rankwire.broadcast_object(group, word, root) == {"from": root}
    words = [f"{group.rank} to {dst}" for dst in range(len(data))]
    assert rankwire.all_to_all_object(group, words) == [
        f"{src} to {group.rank}" for src in range(len(data))
    ]
    assert rankwire.scatter_object(group, words, root) == f"{root} to {group.rank}"
    gathered = rankwire.gather_object(group, word, root)
    if group.rank == root:
        assert gathered == [{"from": src} for src in range(len(data))]


KINDS = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "uneven all_to_all": _uneven,
    "all_reduce_coalesced": _coalesced,
    "lists": _lists,
    "many at once": _many,
    "barrier": _barrier,
    "in the background": _in_background,
    "objects": _objects,
}
