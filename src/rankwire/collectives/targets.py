"""Targets: where the result of a collective goes, and in which parts. Pure, but for copying."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rankwire.backends.arguments import check_rank
from rankwire.backends.base import Backend
from rankwire.collectives.algorithms import Array
from rankwire.collectives.operands import Operand, new_like, operand
from rankwire.collectives.premultiplied import PremultipliedSum, factor_of
from rankwire.collectives.reductions import Reduction, reduction
from rankwire.errors import ConfigurationError

# Arrays up to this size are sent together by the coalesced operations; larger ones gain nothing.
_COALESCE_UP_TO = 1 << 20


def apart(own: Array, target: Operand) -> Array:
    """Return what to send: a copy, if the result may overwrite it while others still read it."""
    return own.copy() if np.may_share_memory(own, target.array) else own


def reduction_of(op: Any, source: Operand) -> Reduction:
    """Return how to combine arrays of this kind.

    Raises:
        ConfigurationError: The op is not known, or means nothing for this dtype.
    """
    if source.is_opaque:
        raise ConfigurationError(f"{source.dtype_name} can be moved, but not reduced")
    if isinstance(op, str):
        return reduction(op, source.array.dtype, source.is_bfloat16)
    return PremultipliedSum(source.array.dtype, factor_of(op), is_bfloat16=source.is_bfloat16)


def target_at_root(
    backend: Backend, source: Operand, shape: tuple[int, ...], root: int, out: Any
) -> Operand | None:
    """Return where the root's result goes; None on other ranks."""
    root = check_rank(root, backend.world_size)
    if backend.rank != root:
        return None
    return target_for(source, shape, out)


def target_for(source: Operand, shape: tuple[int, ...], out: Any) -> Operand:
    """Return where a result goes: new memory, or what the user gave for it."""
    if out is None:
        return new_like(source, shape)
    target = operand(out, "out")
    target.check_like(source, shape, "out")
    return target


def part_shape(backend: Backend, source: Operand) -> tuple[int, ...]:
    """Return the shape of one of N equal parts along dim 0."""
    count = backend.world_size
    if not source.shape or source.shape[0] % count:
        raise ConfigurationError(
            f"dim 0 of an array of shape {source.shape} is not evenly divisible among {count} ranks"
        )
    return (source.shape[0] // count, *source.shape[1:])


def stored(target: Operand | None, flat: np.ndarray[Any, Any] | None) -> Any:
    """Return the user's view of a target, with a result in it; None where there is no target."""
    if target is None or flat is None:
        return None
    if target.has_gaps:
        target.store(flat)
    return target.value


def bundles(
    targets: Sequence[Operand], *, by_dtype: bool = True, most: int | None = None
) -> list[list[int]]:
    """Return the indices of arrays that travel together.

    Args:
        targets: The arrays.
        by_dtype: Whether only those of one dtype can.
        most: The most bytes that do, if there is a limit.
    """
    bundles: list[list[int]] = []
    open_bundles: dict[str, tuple[list[int], int]] = {}
    for index, target in enumerate(targets):
        nbytes = target.array.nbytes
        if nbytes > _COALESCE_UP_TO:
            bundles.append([index])
            continue
        key = target.dtype_name if by_dtype else ""
        bundle, total = open_bundles.get(key, ([], 0))
        if bundle and most is not None and total + nbytes > most:
            bundle, total = [], 0
        if not bundle:
            bundles.append(bundle)
        bundle.append(index)
        open_bundles[key] = bundle, total + nbytes
    return bundles
