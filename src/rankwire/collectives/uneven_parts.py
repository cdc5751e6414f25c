"""Collectives on parts of different sizes: lists of one array per rank, and all_to_all by counts.

In ``all_gather`` and ``reduce_scatter`` the description contains all dtypes and shapes. In
``all_to_all`` all ranks first exchange tables of the sizes that they send and expect. Either way
all ranks find a disagreement before any element is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from operator import index
from typing import Any

import numpy as np

from rankwire.backends.base import Backend
from rankwire.collectives import algorithms, selection
from rankwire.collectives.exchange import Array, Exchange, describe, describe_many
from rankwire.collectives.operands import (
    Operand,
    copy_if_shared,
    kinds_of,
    make_target,
    new_like,
    operand,
    part_shape,
    store_result,
)
from rankwire.collectives.reductions import reduction_of
from rankwire.collectives.sequence import Plan
from rankwire.errors import CollectiveMismatchError, ConfigurationError

_ANY_COUNT = -1  # this rank accepts any number of rows
_OWN = "the array of this rank"


def is_list(value: object) -> bool:
    """Return whether an argument is a list of one array per rank, not a single array."""
    return isinstance(value, list | tuple)


def operands_of(values: Sequence[Any], name: str, count: int) -> list[Operand]:
    """Return one operand per rank; raise if there are not ``count`` values."""
    found = [operand(value, f"{name}[{at}]") for at, value in enumerate(values)]
    if len(found) != count:
        raise ConfigurationError(f"{name} has {len(found)} arrays, there are {count} ranks")
    return found


def targets_of(values: Sequence[Any], count: int) -> list[Operand]:
    """Return one writable operand per rank."""
    targets = operands_of(values, "out", count)
    for at, target in enumerate(targets):
        target.check_writable(f"out[{at}]")
    return targets


def parts_of(backend: Backend, value: Any) -> list[Operand]:
    """Return the parts that a root scatters: the items of a list, or equal parts of dim 0."""
    if is_list(value):
        return operands_of(value, "array", backend.world_size)
    source = operand(value)
    shape = part_shape(backend, source)
    flats = algorithms.split(source.flat(), backend.world_size)
    return [source.part(flat, shape) for flat in flats]


def all_gather(backend: Backend, source: Operand, out: Sequence[Any]) -> Plan:
    """Fill ``out[i]`` with the array of rank i."""
    targets = targets_of(out, backend.world_size)
    targets[backend.rank].check_like(source, source.shape, f"out[{backend.rank}]", _OWN)
    description = describe_many("all_gather into a list", each=kinds_of(targets))
    return description, _gather_steps(source, targets, out, selection.all_gather_parts)


def gather(backend: Backend, source: Operand, root: int, out: Sequence[Any]) -> Plan:
    """Fill ``out[i]`` at the root with the array of rank i; all have one dtype and shape."""
    targets = targets_of(out, backend.world_size)
    for at, target in enumerate(targets):
        target.check_like(source, source.shape, f"out[{at}]", _OWN)
    description = describe("gather", f"root {root}", source.dtype_name, source.shape)
    move = partial(selection.gather_parts, root=root)
    return description, _gather_steps(source, targets, out, move)


def _gather_steps(
    source: Operand,
    targets: Sequence[Operand],
    out: Sequence[Any],
    move: Callable[[Exchange, Array, Sequence[Array]], None],
) -> Callable[[Exchange], Any]:
    def run(x: Exchange) -> Any:
        flats = [target.flat() for target in targets]
        own = _bytes_to_send(source, targets, targets[x.rank])
        move(x, own, [flat.view(np.uint8) for flat in flats])
        for target, flat in zip(targets, flats, strict=True):
            store_result(target, flat)
        return out

    return run


def reduce_scatter(backend: Backend, arrays: Sequence[Any], op: Any, out: Any) -> Plan:
    """Reduce array i of all ranks into ``out`` of rank i."""
    sources = operands_of(arrays, "array", backend.world_size)
    first = sources[0]
    for at, source in enumerate(sources):
        if source.dtype_name != first.dtype_name:
            raise ConfigurationError(
                f"array[{at}] is {source.dtype_name}, array[0] is {first.dtype_name}; "
                "one reduce_scatter takes arrays of one dtype"
            )
    mine = sources[backend.rank]
    target = make_target(mine, mine.shape, out)
    r = reduction_of(op, first)

    def run(x: Exchange) -> Any:
        result = target.flat()
        parts = [r.contribution(copy_if_shared(source.flat(), target)) for source in sources]
        selection.reduce_scatter_parts(x, parts, result, r)
        return store_result(target, result)

    return describe_many("reduce_scatter of a list", r.op, each=kinds_of(sources)), run


def all_to_all(backend: Backend, arrays: Sequence[Any], out: Any) -> Plan:
    """Send array i to rank i, and fill ``out[i]`` with the array from rank i."""
    sources = operands_of(arrays, "array", backend.world_size)
    if not is_list(out):
        raise ConfigurationError(
            "all_to_all of a list of arrays needs out=, a list of arrays to fill"
        )
    targets = targets_of(out, backend.world_size)
    said = [
        (part.array.nbytes, _digest_of(part.dtype_name, part.shape))
        for part in (*sources, *targets)
    ]
    table = np.array(said, np.int64).reshape(-1)

    def run(x: Exchange) -> Any:
        flats = [target.flat() for target in targets]
        sent = [_bytes_to_send(source, targets) for source in sources]
        received = [flat.view(np.uint8) for flat in flats]
        check = partial(_check_tables, x, unit="bytes")
        selection.all_to_all_parts(x, table, sent, received, check)
        for target, flat in zip(targets, flats, strict=True):
            store_result(target, flat)
        return out

    return "all_to_all of lists()", run


def all_to_all_by_counts(
    source: Operand,
    send_counts: Sequence[int] | None,
    recv_counts: Sequence[int] | None,
    out: Any,
    size: int,
) -> Plan:
    """Send ``send_counts[i]`` rows to rank i, and join the rows from all ranks."""
    if send_counts is None:
        raise ConfigurationError("recv_counts without send_counts; give both, or send_counts")
    if not source.shape:
        raise ConfigurationError("an array without dim 0 has no parts to send")
    given = None if out is None else operand(out, "out")
    sent = _check_counts("send_counts", send_counts, size)
    expected = [_ANY_COUNT] * size
    if recv_counts is not None:
        expected = _check_counts("recv_counts", recv_counts, size)
    if sum(sent) != source.shape[0]:
        raise ConfigurationError(
            f"send_counts {sent} sum up to {sum(sent)}, dim 0 of the array is {source.shape[0]}"
        )

    def run(x: Exchange) -> Any:
        table = np.array([*sent, *expected], np.int64)
        counts = _check_tables(x, algorithms.all_gather_by_doubling(x, table), unit="rows")
        received = [from_rank[x.rank] for from_rank in counts]
        row = int(np.prod(source.shape[1:], dtype=np.int64))
        shape = (sum(received), *source.shape[1:])
        target = new_like(source, shape) if given is None else given
        target.check_like(source, shape, "out")
        own, result = copy_if_shared(source.flat(), target), target.flat()
        parts = algorithms.cut(own, [row * count for count in sent])
        places = algorithms.cut(result, [row * count for count in received])
        algorithms.all_to_all_directly(x, parts, places)
        return store_result(target, result)

    return describe("all_to_all uneven", source.dtype_name, source.shape[1:]), run


def _check_tables(x: Exchange, tables: Sequence[Array], *, unit: str) -> list[list[int]]:
    """Return how much each rank sends to each; raise unless every receiver expects that.

    A table lists the sizes that a rank sends to each rank, then those that it expects from each. An
    entry is a size, alone or followed by a digest of dtype and shape.
    """
    said = np.concatenate(tables).reshape(x.size, 2, x.size, -1)
    sent, expected = said[:, 0], said[:, 1].swapaxes(0, 1)
    is_same = ((sent == expected) | (expected == _ANY_COUNT)).all(axis=2)
    if not is_same.all():
        src, dst = np.argwhere(~is_same)[0].tolist()
        sends, expects = int(sent[src, dst, 0]), int(expected[src, dst, 0])
        what = f"rank {src} sends {sends} {unit} to rank {dst}, which expects {expects}"
        if sends == expects:
            what += " of another dtype or shape"
        raise CollectiveMismatchError(what).during(peer=src if dst == x.rank else dst)
    sizes: list[list[int]] = sent[:, :, 0].tolist()
    return sizes


@lru_cache(maxsize=1024)
def _digest_of(dtype_name: str, shape: tuple[int, ...]) -> int:
    words = f"{dtype_name} {shape}".encode()
    return int.from_bytes(blake2b(words, digest_size=8).digest(), "little", signed=True)


def _bytes_to_send(
    source: Operand, targets: Sequence[Operand], same: Operand | None = None
) -> Array:
    """Return the bytes of an operand: a copy if a result may overwrite them while others read.

    ``same`` is the target that gets these same bytes, and may be the source itself.
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


def _check_counts(name: str, counts: Sequence[int], size: int) -> list[int]:
    try:
        checked = [index(count) for count in counts]
    except TypeError as error:
        raise ConfigurationError(f"{name} are whole numbers of rows: {error}") from error
    if len(checked) != size:
        raise ConfigurationError(f"{name} must have length {size}, not {len(checked)}")
    if min(checked) < 0:
        raise ConfigurationError(f"{name} {checked} has a negative count")
    return checked
