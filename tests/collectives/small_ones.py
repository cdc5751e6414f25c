"""Small collectives by name, for ranks in threads and in processes; what each makes of them."""

import time
from typing import Any, NamedTuple

import numpy as np

import rankwire

# A name, and what distinguishes it: arrays of 8 bytes unless it says otherwise.
_ARRAYS = {
    "": lambda rank: np.full(1, rank + 1.0),
    "int64": lambda rank: np.full(1, rank + 1),
    "two halves": lambda rank: np.full(2, rank + 1.0, np.float32),
    "another shape": lambda rank: np.full((1, 1), rank + 1.0),
    "empty": lambda rank: np.full(0, rank + 1.0),
    "large": lambda rank: np.full(40_000, rank + 1.0),
    "wrong": lambda rank: ["no array"],
}


class Outcome(NamedTuple):
    """How an operation went on one rank; times are monotonic, and the same for all of a host."""

    value: Any
    error: BaseException | None
    began: float
    ended: float
    is_untouched: bool  # the array is what it was before


def attempt(
    backend: Any, name: str, *, after: float = 0.0, timeout: float = 10.0, **options: Any
) -> Outcome:
    """Run one, such as ``"all_reduce int64"``, and tell how it went."""
    kind, _, which = name.partition(" ")
    array = _ARRAYS[which](backend.rank) if which in _ARRAYS else _ARRAYS[""](backend.rank)
    before = np.copy(array)
    time.sleep(after)
    began = time.monotonic()
    value, error = None, None
    try:
        value = _run(backend, kind, which, array, {"timeout": timeout, **options})
    except BaseException as raised:
        error = raised
    ended = time.monotonic()
    return Outcome(value, error, began, ended, bool(np.array_equal(array, before)))


def _run(backend: Any, kind: str, which: str, array: Any, options: dict[str, Any]) -> Any:
    match kind:
        case "all_reduce":
            op = "max" if which == "max" else "sum"
            result = rankwire.all_reduce(
                backend, array, op, ordered=which == "ordered", **_but(options, which)
            )
        case "broadcast":
            root = 1 if which == "root 1" else 0
            result = rankwire.broadcast(backend, array, root, **options)
        case "barrier":
            result = rankwire.barrier(backend, **options)
        case "all_gather":
            result = rankwire.all_gather(backend, array, **options)
        case "all_gather_object":
            result = rankwire.all_gather_object(backend, backend.rank, **options)
        case _:
            raise AssertionError(kind)
    if isinstance(result, rankwire.Work):
        result = result.wait()
    return result.tolist() if isinstance(result, np.ndarray) else result


def _but(options: dict[str, Any], which: str) -> dict[str, Any]:
    """Return the options with what changes nothing for the other ranks."""
    if which == "in the background":
        return {**options, "async_op": True}
    if which == "elsewhere":
        return {**options, "out": np.zeros(1)}
    return options


def agree(backend: Any, first: int) -> list[Any]:
    """Run some that all ranks call alike; nothing of earlier ones may be in what they give."""
    got: list[Any] = []
    for number in range(first, first + 4):
        array = np.full(1, 1000.0 * number + backend.rank)
        got += rankwire.all_reduce(backend, array, timeout=10).tolist()
        root = number % backend.world_size
        array = np.full(1, 10.0 * number + backend.rank)
        got += rankwire.broadcast(backend, array, root, timeout=10).tolist()
        got.append(rankwire.barrier(backend, timeout=10))
    return got


def agreed(first: int, size: int) -> list[Any]:
    """Return what ``agree`` returns."""
    got: list[Any] = []
    for number in range(first, first + 4):
        total = size * 1000.0 * number + sum(range(size))
        got += [total, 10.0 * number + number % size, None]
    return got


def overtake(backend: Any, numbers: int, *, in_background: bool) -> list[Any]:
    """Begin pairs of a large one and a small one, the large one perhaps in the background."""
    got = []
    for number in range(numbers):
        large = np.full(40_000, 1.0 + number)
        work = rankwire.all_reduce(backend, large, async_op=in_background, timeout=10)
        small = rankwire.all_reduce(backend, np.full(1, 10.0 * number), timeout=10)
        if in_background:
            work.wait()
        got.append((large[-1], small[0]))
    return [(float(one), float(other)) for one, other in got]


def epoch(backend: Any) -> int:
    """Return the number after the last one that has failed here, and of which all were told."""
    return backend.operations.epoch


def fail_and_go_on(backend: Any, *, timeout: float = 10.0) -> list[Any]:
    """Begin one in the background, and at once another one; return the error and the value."""
    work = rankwire.all_reduce(backend, np.ones(1), async_op=True, timeout=timeout)
    value = rankwire.all_reduce(backend, np.full(1, 10.0), timeout=10).tolist()
    try:
        return [work.wait(), value]
    except rankwire.RankwireError as error:
        return [error, value]


def for_ever(backend: Any) -> None:
    """Reduce 8 bytes until something goes wrong."""
    while True:
        rankwire.all_reduce(backend, np.ones(1), timeout=10)
