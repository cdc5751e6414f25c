"""Coalesced collectives: many arrays in one operation. Small arrays are sent together.

Arrays are numpy arrays or dense torch tensors on the CPU. Until an operation in the background is
done, do not change its arrays or read its results. Every function is safe from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rankwire.backends.base import Backend
from rankwire.collectives import selection
from rankwire.collectives.algorithms import split
from rankwire.collectives.exchange import Array, Exchange
from rankwire.collectives.fingerprints import describe_many
from rankwire.collectives.operands import (
    Operand,
    copy_if_shared,
    kinds_of,
    make_target,
    operand,
    part_shape,
    store_result,
)
from rankwire.collectives.reductions import Op, name_of, reduction_of
from rankwire.collectives.sequence import collective
from rankwire.errors import ConfigurationError

# The most bytes in a bundle: less than a slot, and it stays in the cache.
_TOGETHER = 1 << 20
# Arrays up to this size are sent together; larger ones gain nothing.
_COALESCE_UP_TO = 1 << 20


@collective
def all_reduce_coalesced(
    backend: Backend,
    arrays: Sequence[Any],
    op: Op = "sum",
    *,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Reduce many arrays in place; arrays of one dtype are sent together.

    Returns:
        The list of the arrays, or the ``Work`` whose ``wait`` returns it.
    """
    targets = [operand(array) for array in arrays]
    reductions = [reduction_of(op, target) for target in targets]
    for target in targets:
        target.check_writable("an array")

    def run(x: Exchange) -> list[Any]:
        if not targets:
            selection.meet(x)
        for part, indices in enumerate(_bundles(targets)):
            flats = [targets[index].flat() for index in indices]
            joined = flats[0] if len(flats) == 1 else np.concatenate(flats)
            r = reductions[indices[0]]
            x.begin_part(part)
            selection.all_reduce(x, r.contribution(joined), joined, r, ordered=False)
            x.settle()
            _hand_out(joined, [targets[index] for index in indices], flats)
        return [target.value for target in targets]

    words = describe_many("all_reduce_coalesced", name_of(op), each=kinds_of(targets))
    return words, run, async_op, timeout


@collective
def all_gather_coalesced(
    backend: Backend,
    arrays: Sequence[Any],
    *,
    out: Sequence[Any] | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Gather many arrays: for each, the arrays of all ranks in rank order, joined along dim 0.

    Args:
        backend: The group.
        arrays: This rank's contributions, of any dtypes and shapes; unchanged.
        out: Where the results go: for an array of shape ``(k, ...)`` one of ``(N * k, ...)``. None
            creates them.
        async_op: Return a ``Work`` at once.
        timeout: Seconds for the whole operation; None is the backend's default.

    Returns:
        The list of the results, or the ``Work`` whose ``wait`` returns it.
    """
    sources = _operands(arrays)
    size = backend.world_size
    shapes = [(size * source.rows, *source.shape[1:]) for source in sources]
    targets = _targets(sources, shapes, out)

    def run(x: Exchange) -> list[Any]:
        if not sources:
            selection.meet(x)
        for part, indices in enumerate(_bundles(sources, by_dtype=False, most=_TOGETHER)):
            x.begin_part(part)
            results = [targets[index].flat() for index in indices]
            if len(indices) == 1:
                own = copy_if_shared(sources[indices[0]].flat(), targets[indices[0]])
                selection.all_gather(x, own, results[0])
            else:
                flats = [sources[index].flat().view(np.uint8) for index in indices]
                rows = np.empty((x.size, sum(flat.size for flat in flats)), np.uint8)
                selection.all_gather(x, np.concatenate(flats), rows.reshape(-1))
                start = 0
                for flat, result in zip(flats, results, strict=True):
                    grid = result.view(np.uint8).reshape(x.size, flat.size)
                    grid[...] = rows[:, start : start + flat.size]
                    start += flat.size
            x.settle()
            for index, result in zip(indices, results, strict=True):
                store_result(targets[index], result)
        return [target.value for target in targets]

    words = describe_many("all_gather_coalesced", each=kinds_of(sources))
    return words, run, async_op, timeout


@collective
def reduce_scatter_coalesced(
    backend: Backend,
    arrays: Sequence[Any],
    op: Op = "sum",
    *,
    out: Sequence[Any] | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Reduce many arrays and return this rank's part of each: dim 0 divided by N.

    Args:
        backend: The group.
        arrays: Each of shape ``(N * k, ...)``; unchanged.
        op: As for ``all_reduce``.
        out: Where the parts go, each of shape ``(k, ...)``. None creates them.
        async_op: Return a ``Work`` at once.
        timeout: Seconds for the whole operation; None is the backend's default.

    Returns:
        The list of the parts, or the ``Work`` whose ``wait`` returns it.
    """
    sources = _operands(arrays)
    reductions = [reduction_of(op, source) for source in sources]
    targets = _targets(sources, [part_shape(backend, source) for source in sources], out)

    def run(x: Exchange) -> list[Any]:
        if not sources:
            selection.meet(x)
        for part, indices in enumerate(_bundles(sources, most=_TOGETHER)):
            x.begin_part(part)
            r = reductions[indices[0]]
            flats = [targets[index].flat() for index in indices]
            if len(indices) == 1:
                own = copy_if_shared(sources[indices[0]].flat(), targets[indices[0]])
                selection.reduce_scatter(x, r.contribution(own), flats[0], r)
                joined = flats[0]
            else:
                cut = [split(sources[index].flat(), x.size) for index in indices]
                whole = np.concatenate([parts[rank] for rank in range(x.size) for parts in cut])
                joined = np.empty(whole.size // x.size, whole.dtype)
                selection.reduce_scatter(x, r.contribution(whole), joined, r)
            x.settle()
            _hand_out(joined, [targets[index] for index in indices], flats)
        return [target.value for target in targets]

    words = describe_many("reduce_scatter_coalesced", name_of(op), each=kinds_of(sources))
    return words, run, async_op, timeout


def _operands(arrays: Sequence[Any]) -> list[Operand]:
    return [operand(array, f"array[{at}]") for at, array in enumerate(arrays)]


def _targets(
    sources: Sequence[Operand], shapes: Sequence[tuple[int, ...]], out: Sequence[Any] | None
) -> list[Operand]:
    wanted = [None] * len(sources) if out is None else list(out)
    if len(wanted) != len(sources):
        raise ConfigurationError(f"out has {len(wanted)} arrays, there are {len(sources)} to send")
    return [
        make_target(source, shape, given)
        for source, shape, given in zip(sources, shapes, wanted, strict=True)
    ]


def _hand_out(joined: Array, targets: Sequence[Operand], flats: Sequence[Array]) -> None:
    """Copy parts of a joined result to their targets."""
    start = 0
    for target, flat in zip(targets, flats, strict=True):
        if flat is not joined:
            flat[...] = joined[start : start + flat.size]
        target.store(flat)
        start += flat.size


def _bundles(
    operands: Sequence[Operand], *, by_dtype: bool = True, most: int | None = None
) -> list[list[int]]:
    """Return the indices of the arrays that are sent together, at most ``most`` bytes at once."""
    bundles: list[list[int]] = []
    open_bundles: dict[str, tuple[list[int], int]] = {}
    for index, value in enumerate(operands):
        nbytes = value.array.nbytes
        if nbytes > _COALESCE_UP_TO:
            bundles.append([index])
            continue
        key = value.dtype_name if by_dtype else ""
        bundle, total = open_bundles.get(key, ([], 0))
        if bundle and most is not None and total + nbytes > most:
            bundle, total = [], 0
        if not bundle:
            bundles.append(bundle)
        bundle.append(index)
        open_bundles[key] = bundle, total + nbytes
    return bundles
