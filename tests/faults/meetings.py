"""Every collective, with what it changes and what it must give; for ranks that are killed in it.

Written for groups of three whose slots have 128 KiB, ``SEGMENT_NBYTES`` in all. The root is rank 0.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import rankwire
from rankwire import Backend

SIZE = 3
SLOT_NBYTES = 128 << 10
SEGMENT_NBYTES = 2 * SIZE * SLOT_NBYTES
SMALL = 12
LARGE = 12_000  # elements that fit into a slot, of which ranks share the work
TOO_LARGE = 40_000  # two pieces and a bit
PIECE = SLOT_NBYTES // 8
_UNTOUCHED = -1.0

Array = np.ndarray[Any, Any]


class Meeting(NamedTuple):
    """One collective on one rank, ready to be called.

    Attributes:
        call: Takes ``timeout``; returns what the collective does.
        expected: What that is to be.
        changed: The arrays that it writes to.
    """

    call: Callable[..., Any]
    expected: Any
    changed: list[Array]

    def is_right(self, result: Any) -> bool:
        return _same(result, self.expected)


def _same(one: Any, other: Any) -> bool:
    if isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return np.array_equal(one, other) if isinstance(other, np.ndarray) else one == other


def _own(rank: int, count: int) -> Array:
    return np.arange(count) * (rank + 2.0) + rank


def _all(group: Backend, count: int) -> list[Array]:
    return [_own(rank, count) for rank in range(group.world_size)]


def _new(count: int) -> Array:
    return np.full(count, _UNTOUCHED)


def _barrier(group: Backend) -> Meeting:
    return Meeting(partial(rankwire.barrier, group), None, [])


def _all_reduce(count: int, group: Backend) -> Meeting:
    array = _own(group.rank, count)
    call = partial(rankwire.all_reduce, group, array)
    return Meeting(call, sum(_all(group, count)), [array])


def _all_reduce_coalesced(group: Backend) -> Meeting:
    arrays = [_own(group.rank, SMALL), _own(group.rank, SMALL).astype(np.float32)]
    totals: list[Any] = [sum(_all(group, SMALL)), sum(_all(group, SMALL)).astype(np.float32)]
    return Meeting(partial(rankwire.all_reduce_coalesced, group, arrays), totals, arrays)


def _reduce(count: int, group: Backend) -> Meeting:
    array, out = _own(group.rank, count), _new(count)
    if group.rank:
        return Meeting(partial(rankwire.reduce, group, array), None, [])
    call = partial(rankwire.reduce, group, array, out=out)
    return Meeting(call, sum(_all(group, count)), [out])


def _broadcast(count: int, group: Backend) -> Meeting:
    array = _own(group.rank, count)
    return Meeting(partial(rankwire.broadcast, group, array), _own(0, count), [array])


def _all_gather(count: int, group: Backend) -> Meeting:
    out = _new(count * group.world_size)
    call = partial(rankwire.all_gather, group, _own(group.rank, count), out=out)
    return Meeting(call, np.concatenate(_all(group, count)), [out])


def _gather(group: Backend) -> Meeting:
    array, out = _own(group.rank, SMALL), _new(SMALL * group.world_size)
    if group.rank:
        return Meeting(partial(rankwire.gather, group, array), None, [])
    call = partial(rankwire.gather, group, array, out=out)
    return Meeting(call, np.concatenate(_all(group, SMALL)), [out])


def _scatter(group: Backend) -> Meeting:
    whole, out = _own(0, SMALL * group.world_size), _new(SMALL)
    array = whole if group.rank == 0 else None
    expected = np.split(whole, group.world_size)[group.rank]
    return Meeting(partial(rankwire.scatter, group, array, out=out), expected, [out])


def _reduce_scatter(count: int, group: Backend) -> Meeting:
    whole, out = count * group.world_size, _new(count)
    call = partial(rankwire.reduce_scatter, group, _own(group.rank, whole), out=out)
    total: Any = sum(_all(group, whole))
    return Meeting(call, np.split(total, group.world_size)[group.rank], [out])


def _all_to_all(count: int, group: Backend) -> Meeting:
    whole = count * group.world_size
    out = _new(whole)
    call = partial(rankwire.all_to_all, group, _own(group.rank, whole), out=out)
    parts = [np.split(array, group.world_size)[group.rank] for array in _all(group, whole)]
    return Meeting(call, np.concatenate(parts), [out])


def _uneven(group: Backend) -> Meeting:
    counts = [SMALL * (rank + 1) for rank in range(group.world_size)]
    out = _new(counts[group.rank] * group.world_size)
    array = _own(group.rank, sum(counts))
    call = partial(rankwire.all_to_all, group, array, send_counts=counts, out=out)
    start = sum(counts[: group.rank])
    parts = [whole[start : start + counts[group.rank]] for whole in _all(group, sum(counts))]
    return Meeting(call, np.concatenate(parts), [out])


def _lengths(group: Backend, count: int) -> list[int]:
    return [count * (rank + 1) for rank in range(group.world_size)]


def _all_gather_into_a_list(count: int, group: Backend) -> Meeting:
    lengths = _lengths(group, count)
    out = [_new(length) for length in lengths]
    call = partial(rankwire.all_gather, group, _own(group.rank, lengths[group.rank]), out=out)
    return Meeting(call, [_own(rank, length) for rank, length in enumerate(lengths)], out)


def _reduce_scatter_of_a_list(count: int, group: Backend) -> Meeting:
    lengths = _lengths(group, count)
    out = _new(lengths[group.rank])
    arrays = [_own(group.rank, length) for length in lengths]
    call = partial(rankwire.reduce_scatter, group, arrays, out=out)
    return Meeting(call, sum(_all(group, lengths[group.rank])), [out])


def _all_to_all_of_lists(count: int, group: Backend) -> Meeting:
    lengths = _lengths(group, count)
    out = [_new(lengths[group.rank]) for _ in lengths]
    arrays = [_own(group.rank, length) for length in lengths]
    call = partial(rankwire.all_to_all, group, arrays, out=out)
    return Meeting(call, _all(group, lengths[group.rank]), out)


def _values(group: Backend, nbytes: int) -> list[Any]:
    return [{"from": rank, "bytes": bytes([rank]) * nbytes} for rank in range(group.world_size)]


def _all_gather_object(nbytes: int, group: Backend) -> Meeting:
    values = _values(group, nbytes)
    call = partial(rankwire.all_gather_object, group, values[group.rank])
    return Meeting(call, values, [])


def _gather_object(group: Backend) -> Meeting:
    values = _values(group, SMALL)
    call = partial(rankwire.gather_object, group, values[group.rank])
    return Meeting(call, None if group.rank else values, [])


def _broadcast_object(group: Backend) -> Meeting:
    values = _values(group, SMALL)
    call = partial(rankwire.broadcast_object, group, values[group.rank])
    return Meeting(call, values[0], [])


def _scatter_object(group: Backend) -> Meeting:
    values = _values(group, SMALL)
    call = partial(rankwire.scatter_object, group, None if group.rank else values)
    return Meeting(call, values[group.rank], [])


def _all_to_all_object(group: Backend) -> Meeting:
    ranks = range(group.world_size)
    call = partial(rankwire.all_to_all_object, group, [(group.rank, dst) for dst in ranks])
    return Meeting(call, [(src, group.rank) for src in ranks], [])


# What goes through slots, and for what does not fit or is uneven, what goes by messages.
IN_SLOTS: dict[str, Callable[[Backend], Meeting]] = {
    "barrier": _barrier,
    "all_reduce": partial(_all_reduce, SMALL),
    "all_reduce with shared work": partial(_all_reduce, LARGE),
    "all_reduce in pieces": partial(_all_reduce, TOO_LARGE),
    "all_reduce_coalesced": _all_reduce_coalesced,
    "reduce": partial(_reduce, SMALL),
    "broadcast": partial(_broadcast, SMALL),
    "all_gather": partial(_all_gather, SMALL),
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": partial(_reduce_scatter, SMALL),
    "all_to_all": partial(_all_to_all, SMALL),
    "all_gather into a list": partial(_all_gather_into_a_list, SMALL),
    "reduce_scatter of a list": partial(_reduce_scatter_of_a_list, SMALL),
    "all_to_all of lists": partial(_all_to_all_of_lists, SMALL),
    "all_gather_object": partial(_all_gather_object, SMALL),
    "gather_object": _gather_object,
    "broadcast_object": _broadcast_object,
    "scatter_object": _scatter_object,
    "all_to_all_object": _all_to_all_object,
}
BY_MESSAGES: dict[str, Callable[[Backend], Meeting]] = {
    "uneven all_to_all": _uneven,
    "reduce that does not fit": partial(_reduce, TOO_LARGE),
    "broadcast that does not fit": partial(_broadcast, TOO_LARGE),
    "all_gather that does not fit": partial(_all_gather, TOO_LARGE),
    "reduce_scatter that does not fit": partial(_reduce_scatter, TOO_LARGE),
    "all_to_all that does not fit": partial(_all_to_all, TOO_LARGE),
    "all_gather into a list that does not fit": partial(_all_gather_into_a_list, TOO_LARGE),
    "reduce_scatter of a list that does not fit": partial(_reduce_scatter_of_a_list, TOO_LARGE),
    "all_to_all of lists that do not fit": partial(_all_to_all_of_lists, TOO_LARGE),
    "all_gather_object that does not fit": partial(_all_gather_object, 2 * SLOT_NBYTES),
}
MEETINGS = {**IN_SLOTS, **BY_MESSAGES}


def state_of(meeting: Meeting, before: list[Array]) -> str:
    """Return what is in the arrays that a collective was to change, given what had been there."""
    expected = meeting.expected if isinstance(meeting.expected, list) else [meeting.expected]
    triples = list(zip(meeting.changed, before, expected, strict=False))
    if all(np.array_equal(now, then) for now, then, _ in triples):
        return "untouched"
    if all(np.array_equal(now, then) or np.array_equal(now, to) for now, then, to in triples):
        return "whole"
    if all(_is_done_in_order(*triple) for triple in triples):
        return "whole pieces"
    return "broken"


def _is_done_in_order(now: Array, then: Array, to: Array) -> bool:
    """Whether the first pieces are done, and the others untouched."""
    return any(
        np.array_equal(now[:done], to[:done]) and np.array_equal(now[done:], then[done:])
        for done in range(0, now.size, PIECE)
    )
