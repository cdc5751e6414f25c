"""Coalesced collectives: many arrays in one operation. Small arrays are sent together.

Arrays are numpy arrays or dense torch tensors on the CPU. Until an operation in the background is
done, do not change its arrays or read its results. Every function is safe from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from rankwire.backends.base import Backend
from rankwire.collectives import selection
from rankwire.collectives.algorithms import cut, split
from rankwire.collectives.exchange import Array, Exchange, describe_many
from rankwire.collectives.operands import (
    Operand,
    copy_if_shared,
    kinds_of,
    make_target,
    operand,
    part_shape,
)
from rankwire.collectives.operation import Operation
from rankwire.collectives.reductions import Op, name_of, reduction_of
from rankwire.collectives.sequence import collective
from rankwire.errors import ConfigurationError

if TYPE_CHECKING:
    from typing import Unpack

    from rankwire.collectives.signatures import (
        A,
        Async,
        AsyncInto,
        Blocking,
        BlockingInto,
    )
    from rankwire.collectives.work import Work


# The most bytes in a bundle: less than a slot, and it stays in the cache.
_TOGETHER = 1 << 20
# Arrays up to this size are sent together; larger ones gain nothing.
_COALESCE_UP_TO = 1 << 20


@overload
def all_reduce_coalesced(
    backend: Backend, arrays: Sequence[A], op: Op = ..., **how: Unpack[Blocking]
) -> list[A]: ...
@overload
def all_reduce_coalesced(
    backend: Backend, arrays: Sequence[A], op: Op = ..., **how: Unpack[Async]
) -> Work[list[A]]: ...
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

    def move(x: Exchange, indices: list[int], flats: list[Array]) -> None:
        joined = flats[0] if len(flats) == 1 else np.concatenate(flats)
        r = reductions[indices[0]]
        selection.all_reduce(x, r.contribution(joined), joined, r, ordered=False)
        _hand_out(joined, flats)

    run = partial(_run, _bundles(targets), targets, move)
    return describe_many("all_reduce_coalesced", name_of(op), each=kinds_of(targets)), run


@overload
def all_gather_coalesced(
    backend: Backend, arrays: Sequence[A], **how: Unpack[BlockingInto[Sequence[A]]]
) -> list[A]: ...
@overload
def all_gather_coalesced(
    backend: Backend, arrays: Sequence[A], **how: Unpack[AsyncInto[Sequence[A]]]
) -> Work[list[A]]: ...
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

    def move(x: Exchange, indices: list[int], results: list[Array]) -> None:
        if len(indices) == 1:
            own = copy_if_shared(sources[indices[0]].flat(), targets[indices[0]])
            selection.all_gather(x, own, results[0])
            return
        flats = [sources[index].flat().view(np.uint8) for index in indices]
        rows = np.empty((x.size, sum(flat.size for flat in flats)), np.uint8)
        selection.all_gather(x, np.concatenate(flats), rows.reshape(-1))
        columns = cut(rows.T, [flat.size for flat in flats])
        for result, column in zip(results, columns, strict=True):
            result.view(np.uint8).reshape(column.T.shape)[...] = column.T

    run = partial(_run, _bundles(sources, by_dtype=False, most=_TOGETHER), targets, move)
    return describe_many("all_gather_coalesced", each=kinds_of(sources)), run


@overload
def reduce_scatter_coalesced(
    backend: Backend, arrays: Sequence[A], op: Op = ..., **how: Unpack[BlockingInto[Sequence[A]]]
) -> list[A]: ...
@overload
def reduce_scatter_coalesced(
    backend: Backend, arrays: Sequence[A], op: Op = ..., **how: Unpack[AsyncInto[Sequence[A]]]
) -> Work[list[A]]: ...
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

    def move(x: Exchange, indices: list[int], flats: list[Array]) -> None:
        r = reductions[indices[0]]
        if len(indices) == 1:
            own = copy_if_shared(sources[indices[0]].flat(), targets[indices[0]])
            selection.reduce_scatter(x, r.contribution(own), flats[0], r)
            return
        parts = [split(sources[index].flat(), x.size) for index in indices]
        whole = np.concatenate([part[rank] for rank in range(x.size) for part in parts])
        joined = np.empty(whole.size // x.size, whole.dtype)
        selection.reduce_scatter(x, r.contribution(whole), joined, r)
        _hand_out(joined, flats)

    run = partial(_run, _bundles(sources, most=_TOGETHER), targets, move)
    return describe_many("reduce_scatter_coalesced", name_of(op), each=kinds_of(sources)), run


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


def _run(
    bundles: Sequence[list[int]],
    targets: Sequence[Operand],
    move: Callable[[Exchange, list[int], list[Array]], None],
    x: Operation,
) -> list[Any]:
    if not bundles:
        selection.meet(x)
    for part, indices in enumerate(bundles):
        x.begin_part(part)
        flats = [targets[index].flat() for index in indices]
        move(x, indices, flats)
        x.settle()
        for index, flat in zip(indices, flats, strict=True):
            targets[index].store(flat)
    return [target.value for target in targets]


def _hand_out(joined: Array, flats: Sequence[Array]) -> None:
    for flat, part in zip(flats, cut(joined, [flat.size for flat in flats]), strict=True):
        if flat is not joined:
            flat[...] = part


def _bundles(
    operands: Sequence[Operand], *, by_dtype: bool = True, most: int | None = None
) -> list[list[int]]:
    """Return the indices of the arrays that travel together, at most ``most`` bytes at once."""
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
