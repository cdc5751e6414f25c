"""Collectives on lists: one array for each rank, separate in memory, of sizes of their own.

The elements go straight between the users' arrays. What is only moved travels as bytes, whatever
its dtype. In ``all_gather`` and ``reduce_scatter`` every rank has the whole list, so its dtypes and
shapes are a part of the operation's words, and ranks that do not agree never take each other's
bytes. In ``all_to_all`` each rank knows only what it sends and expects: all tell that to all, and a
disagreement is found by all of them before an element has moved.

Each function checks its arguments and returns the operation's words and its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np

from rankwire.backends.base import Backend
from rankwire.collectives import selection
from rankwire.collectives.algorithms import split
from rankwire.collectives.exchange import Array, Exchange
from rankwire.collectives.fingerprints import describe, describe_many
from rankwire.collectives.operands import Operand, operand
from rankwire.collectives.targets import apart, part_shape, reduction_of, stored, target_for
from rankwire.errors import CollectiveMismatchError, ConfigurationError

Steps = tuple[str, Callable[[Exchange], Any]]


def is_list(value: object) -> bool:
    """Whether an argument is one array for each rank, and not one for all."""
    return isinstance(value, list | tuple)


def operands_of(values: Sequence[Any], name: str, count: int) -> list[Operand]:
    """Return one operand for each rank.

    Raises:
        ConfigurationError: They are not so many.
        UnsupportedTypeError: One of them is no array or tensor that can be carried.
    """
    found = [operand(value, f"{name}[{at}]") for at, value in enumerate(values)]
    if len(found) != count:
        raise ConfigurationError(f"{name} has {len(found)} arrays, there are {count} ranks")
    return found


def targets_of(values: Sequence[Any], count: int) -> list[Operand]:
    """Return where the results of all ranks go; they can be written."""
    targets = operands_of(values, "out", count)
    for at, target in enumerate(targets):
        target.check_writable(f"out[{at}]")
    return targets


def parts_of(backend: Backend, value: Any) -> list[Operand]:
    """Return what a root has for each rank: a list, or equal parts of dim 0."""
    if is_list(value):
        return operands_of(value, "array", backend.world_size)
    source = operand(value)
    shape = part_shape(backend, source)
    return [source.part(flat, shape) for flat in split(source.flat(), backend.world_size)]


def all_gather(backend: Backend, source: Operand, out: Sequence[Any]) -> Steps:
    """Fill an array for each rank with that of the rank."""
    targets = targets_of(out, backend.world_size)
    _check_own(targets[backend.rank], source, f"out[{backend.rank}]")

    def run(x: Exchange) -> Any:
        flats = [target.flat() for target in targets]
        own = _bytes_apart(source, targets, targets[x.rank])
        selection.all_gather_parts(x, own, [flat.view(np.uint8) for flat in flats])
        for target, flat in zip(targets, flats, strict=True):
            stored(target, flat)
        return out

    return describe_many("all_gather into a list", each=_kinds(targets)), run


def gather(backend: Backend, source: Operand, root: int, out: Sequence[Any]) -> Steps:
    """Fill an array for each rank with that of the rank, at the root. All are alike."""
    targets = targets_of(out, backend.world_size)
    for at, target in enumerate(targets):
        _check_own(target, source, f"out[{at}]")

    def run(x: Exchange) -> Any:
        flats = [target.flat() for target in targets]
        own = _bytes_apart(source, targets, targets[x.rank])
        selection.gather_parts(x, own, [flat.view(np.uint8) for flat in flats], root)
        for target, flat in zip(targets, flats, strict=True):
            stored(target, flat)
        return out

    return describe("gather", f"root {root}", source.dtype_name, source.shape), run


def reduce_scatter(backend: Backend, arrays: Sequence[Any], op: Any, out: Any) -> Steps:
    """Reduce array i of all ranks into ``out`` of rank i."""
    sources = operands_of(arrays, "array", backend.world_size)
    first = sources[0]
    for at, source in enumerate(sources):
        if source.dtype_name != first.dtype_name:
            raise ConfigurationError(
                f"array[{at}] is {source.dtype_name}, array[0] is {first.dtype_name}; "
                "what is reduced at once has one dtype"
            )
    mine = sources[backend.rank]
    target = target_for(mine, mine.shape, out)
    r = reduction_of(op, first)

    def run(x: Exchange) -> Any:
        result = target.flat()
        parts = [r.contribution(apart(source.flat(), target)) for source in sources]
        selection.reduce_scatter_parts(x, parts, result, r)
        return stored(target, result)

    return describe_many("reduce_scatter of a list", r.op, each=_kinds(sources)), run


def all_to_all(backend: Backend, arrays: Sequence[Any], out: Any) -> Steps:
    """Send array i to rank i, and fill an array for each rank with what it sends to this one."""
    sources = operands_of(arrays, "array", backend.world_size)
    if not is_list(out):
        raise ConfigurationError("a list of arrays to send wants out= as a list of arrays to fill")
    targets = targets_of(out, backend.world_size)
    said = [
        (part.array.nbytes, _digest_of(part.dtype_name, part.shape))
        for part in (*sources, *targets)
    ]
    table = np.array(said, np.int64).reshape(-1)

    def run(x: Exchange) -> Any:
        flats = [target.flat() for target in targets]
        sent = [_bytes_apart(source, targets) for source in sources]
        received = [flat.view(np.uint8) for flat in flats]
        selection.all_to_all_parts(x, table, sent, received, lambda told: _agreed(x, told))
        for target, flat in zip(targets, flats, strict=True):
            stored(target, flat)
        return out

    return "all_to_all of lists()", run


def _agreed(x: Exchange, told: Sequence[Array]) -> list[list[int]]:
    """Return how many bytes each rank has for each, if all say that they expect just that.

    Raises:
        CollectiveMismatchError: One of them expects something else.
    """
    said = np.concatenate(told).reshape(x.size, 2, x.size, 2)
    sent, expected = said[:, 0], said[:, 1].swapaxes(0, 1)
    is_same = sent == expected
    if not is_same.all():
        src, dst = np.argwhere(~is_same.all(axis=2))[0].tolist()
        sends, expects = int(sent[src, dst, 0]), int(expected[src, dst, 0])
        what = f"rank {src} sends {sends} bytes to rank {dst}, which expects {expects}"
        if sends == expects:
            what += " of another dtype or shape"
        raise CollectiveMismatchError(what).during(peer=src if dst == x.rank else dst)
    sizes: list[list[int]] = sent[:, :, 0].tolist()
    return sizes


@lru_cache(maxsize=1024)
def _digest_of(dtype_name: str, shape: tuple[int, ...]) -> int:
    """Return a number for a dtype and shape."""
    words = f"{dtype_name} {shape}".encode()
    return int.from_bytes(blake2b(words, digest_size=8).digest(), "little", signed=True)


def _bytes_apart(source: Operand, targets: Sequence[Operand], same: Operand | None = None) -> Array:
    """Return what to send, as bytes: a copy, if a result may overwrite it while others read it.

    Args:
        source: What is sent.
        targets: What is written meanwhile.
        same: The one of them that gets just these bytes, and may be the source itself.
    """
    flat = source.flat().view(np.uint8)
    for target in targets:
        if np.may_share_memory(source.array, target.array):
            if target is not same or not _is_same_memory(source, target):
                return flat.copy()
    return flat


def _is_same_memory(a: Operand, b: Operand) -> bool:
    here, there = a.array.__array_interface__, b.array.__array_interface__
    return bool(here["data"][0] == there["data"][0] and a.array.strides == b.array.strides)


def _check_own(target: Operand, source: Operand, name: str) -> None:
    if (target.dtype_name, target.shape) != (source.dtype_name, source.shape):
        raise ConfigurationError(
            f"{name} is {target.dtype_name} {target.shape}, "
            f"the array of this rank is {source.dtype_name} {source.shape}"
        )


def _kinds(operands: Sequence[Operand]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((value.dtype_name, value.shape) for value in operands)
