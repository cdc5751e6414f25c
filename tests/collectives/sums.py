"""What collectives must give, computed with numpy alone, and worlds that count their messages."""

import contextlib
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

import rankwire
from rankwire.backends.simulated import SimulatedBackend
from rankwire.collectives.sequence import OperationSequence
from rankwire.testing import in_parallel, run_ranks

UFUNCS = {
    "sum": np.add,
    "mean": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
}
WHOLE = ["bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))]
FLOATS = ["float16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
DTYPES = [*WHOLE, *FLOATS, *COMPLEX]


def ops_of(dtype: Any) -> list[str]:
    """Return the ops that mean something for a dtype."""
    kind = np.dtype(dtype).kind
    if kind in "biu":
        return [op for op in UFUNCS if op != "mean"]
    ops = ["sum", "mean", "product"]
    return ops if kind == "c" else [*ops, "min", "max"]


def left_fold(arrays: list[Any], op: str = "sum") -> Any:
    """Combine arrays from the left, one after the other; float16 in float32, rounded once."""
    arrays = [np.asarray(array) for array in arrays]
    dtype = arrays[0].dtype
    if dtype.kind == "f" and dtype.itemsize == 2:
        arrays = [array.astype(np.float32) for array in arrays]
    with np.errstate(all="ignore"):
        total = reduce(UFUNCS[op], arrays)
        if op == "mean":
            total = total / arrays[0].dtype.type(len(arrays))
        return np.asarray(total).astype(dtype)


def bits(array: Any) -> bytes:
    """Return the elements as bytes; NaNs, whose payload nobody promises, are all alike."""
    plain = np.array(array)
    if plain.dtype.kind in "fc":
        plain[np.isnan(plain)] = np.nan
    return plain.tobytes()


def same(array: Any, expected: Any) -> bool:
    """Whether two arrays agree in dtype, shape and every bit; or both are None."""
    if array is None or expected is None:
        return array is expected
    alike = (array.dtype, array.shape) == (expected.dtype, expected.shape)
    return alike and bits(array) == bits(expected)


def values(shape: Any, dtype: Any = np.float64, seed: int = 0) -> Any:
    """Return numbers whose sum depends on the order in which they are added."""
    random = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return random.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        return random.integers(0, 100, shape).astype(dtype)
    spread = random.standard_normal(shape) * 10.0 ** random.integers(-3, 3, shape)
    if dtype.kind == "c":
        return np.asarray(spread + 1j * random.standard_normal(shape)).astype(dtype)
    return np.asarray(spread).astype(dtype)


# -- every operation on arrays ---------------------------------------------------------------------


class Collective(NamedTuple):
    """An operation and what it must return on a rank, from the arrays of all ranks.

    All of them take arrays of shape ``(N * k, ...)``. Those that need a root have the last rank.
    """

    call: Callable[..., Any]
    expected: Callable[[list[Any], int], Any]
    in_place: bool = False


def last(arrays: list[Any]) -> int:
    return len(arrays) - 1


def part(array: Any, rank: int, size: int) -> Any:
    rows = len(array) // size
    return array[rank * rows : (rank + 1) * rows]


def joined(arrays: list[Any]) -> Any:
    """Join arrays along dim 0; numpy would change their byte order."""
    return np.concatenate(arrays).astype(arrays[0].dtype)


def parts_for(arrays: list[Any], rank: int) -> Any:
    return joined([part(array, rank, len(arrays)) for array in arrays])


def uneven_counts(rows: int, size: int) -> list[int]:
    """Rank 0 gets all but one row for each of the others that can have one."""
    few = [1 if rank < rows else 0 for rank in range(1, size)]
    return [rows - sum(few), *few]


def uneven_parts_for(arrays: list[Any], rank: int) -> Any:
    counts = uneven_counts(len(arrays[0]), len(arrays))
    start = sum(counts[:rank])
    return joined([array[start : start + counts[rank]] for array in arrays])


def _uneven(b: Any, x: Any, **kw: Any) -> Any:
    return rankwire.all_to_all(b, x, send_counts=uneven_counts(len(x), b.world_size), **kw)


def _at_last(function: Any) -> Any:
    return lambda b, x, **kw: function(b, x, b.world_size - 1, **kw)


COLLECTIVES = {
    "all_reduce": Collective(
        rankwire.all_reduce, lambda arrays, rank: left_fold(arrays), in_place=True
    ),
    "reduce": Collective(
        _at_last(rankwire.reduce),
        lambda arrays, rank: left_fold(arrays) if rank == last(arrays) else None,
    ),
    "broadcast": Collective(
        _at_last(rankwire.broadcast), lambda arrays, rank: arrays[-1], in_place=True
    ),
    "all_gather": Collective(rankwire.all_gather, lambda arrays, rank: joined(arrays)),
    "gather": Collective(
        _at_last(rankwire.gather),
        lambda arrays, rank: joined(arrays) if rank == last(arrays) else None,
    ),
    "scatter": Collective(
        _at_last(rankwire.scatter), lambda arrays, rank: part(arrays[-1], rank, len(arrays))
    ),
    "reduce_scatter": Collective(
        rankwire.reduce_scatter,
        lambda arrays, rank: part(left_fold(arrays), rank, len(arrays)),
    ),
    "all_to_all": Collective(rankwire.all_to_all, parts_for),
    "uneven all_to_all": Collective(_uneven, uneven_parts_for),
}


# -- worlds ----------------------------------------------------------------------------------------


class CountingBackend(SimulatedBackend):
    """A rank that remembers what its collectives have sent: destination and size."""

    def __init__(self, mesh):
        super().__init__(mesh)
        self.sent = []
        self.messages.transmit = self._counting(self.messages.transmit)
        self.messages.offer = self._counting(self.messages.offer)

    def _counting(self, send):
        def counting(dst, envelope, message, deadline, **options):
            self.sent.append((dst, message[1]))
            return send(dst, envelope, message, deadline, **options)

        return counting


@contextlib.contextmanager
def counting_world(world_size: int, **options: Any) -> Iterator[list[CountingBackend]]:
    world = CountingBackend.create_group(world_size, **options)
    try:
        yield world
    finally:
        for backend in world:
            backend.close()


def on_all(world: list[Any], each: Callable[..., Any]) -> list[Any]:
    """Run ``each(backend)`` on all ranks of a world; return the results in rank order."""
    return in_parallel([lambda backend=backend: each(backend) for backend in world])


def everywhere(run: Callable[..., Any], world: list[Any]) -> list[Any]:
    """Call ``run`` with each rank's backend, all at once."""
    return on_all(world, run)


def run_algorithm(
    world_size: int, algorithm: Callable[..., Any], **options: Any
) -> tuple[list[Any], list[list[tuple[int, int]]]]:
    """Run ``algorithm(x)`` on all ranks; return the results, and what each rank sent."""

    def each(backend: CountingBackend) -> Any:
        return OperationSequence.of(backend).call("test", lambda: ("test()", algorithm))

    with counting_world(world_size, **options) as world:
        results = on_all(world, each)
        return results, [backend.sent for backend in world]


def run(world_size: int, each: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Run ``each(backend, *args)`` on all ranks of a new world."""
    return run_ranks(world_size, each, *args, **options)
