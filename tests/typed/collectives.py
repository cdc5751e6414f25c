"""Collectives give back what they take: arrays, tensors, lists of them, and any value."""

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import rankwire
from rankwire import Backend, Work

Floats = NDArray[np.float32]


class Tensor:
    """To a type checker, all that a tensor has to have."""

    shape: tuple[int, ...]
    dtype: object

    def __setitem__(self, key: Any, value: Any) -> None: ...


def arrays(backend: Backend, floats: Floats, tensor: Tensor, out: Floats | None) -> None:
    assert_type(rankwire.all_reduce(backend, floats), Floats)
    assert_type(rankwire.all_reduce(backend, tensor, "max", ordered=True), Tensor)
    assert_type(rankwire.all_reduce(backend=backend, array=floats, out=out, timeout=5), Floats)
    assert_type(rankwire.reduce(backend, floats, 1, "mean"), Floats | None)
    assert_type(rankwire.broadcast(backend, tensor, root=1), Tensor)
    assert_type(rankwire.all_gather(backend, tensor), Tensor)
    assert_type(rankwire.gather(backend, floats, out=out), Floats | None)
    assert_type(rankwire.scatter(backend, floats), Floats)
    assert_type(rankwire.scatter(backend, floats if backend.rank == 0 else None), Floats)
    assert_type(rankwire.scatter(backend, None, out=floats), Floats)
    assert_type(rankwire.scatter(backend), Any)
    assert_type(rankwire.reduce_scatter(backend, tensor), Tensor)
    assert_type(rankwire.all_to_all(backend, floats, send_counts=[1, 2]), Floats)
    rankwire.barrier(backend, timeout=5)


def arrays_in_the_background(backend: Backend, floats: Floats, tensor: Tensor) -> None:
    assert_type(rankwire.all_reduce(backend, floats, async_op=True), Work[Floats])
    assert_type(rankwire.all_reduce(backend, tensor, async_op=True, timeout=5).wait(), Tensor)
    assert_type(rankwire.all_reduce(backend, tensor, async_op=False), Tensor)
    assert_type(rankwire.reduce(backend, floats, async_op=True), Work[Floats | None])
    assert_type(rankwire.broadcast(backend, floats, async_op=True).result(), Floats)
    assert_type(rankwire.all_gather(backend, floats, out=floats, async_op=True), Work[Floats])
    assert_type(rankwire.barrier(backend, async_op=True), Work[None])


def one_array_for_each_rank(backend: Backend, floats: Floats, parts: list[Tensor]) -> None:
    assert_type(rankwire.all_gather(backend, floats, out=[floats]), list[Floats])
    assert_type(rankwire.gather(backend, floats, out=[floats]), list[Floats] | None)
    assert_type(rankwire.scatter(backend, parts), Tensor)
    assert_type(rankwire.reduce_scatter(backend, parts, async_op=True), Work[Tensor])
    assert_type(rankwire.all_to_all(backend, parts), list[Tensor])
    assert_type(rankwire.all_to_all(backend, parts, out=parts, async_op=True), Work[list[Tensor]])


def many_arrays(backend: Backend, floats: Floats, tensors: tuple[Tensor, ...]) -> None:
    assert_type(rankwire.all_reduce_coalesced(backend, tensors, op="mean"), list[Tensor])
    assert_type(rankwire.all_gather_coalesced(backend, [floats]), list[Floats])
    work = rankwire.reduce_scatter_coalesced(backend, [floats], out=[floats], async_op=True)
    assert_type(work, Work[list[Floats]])


def values(backend: Backend, codec: rankwire.Codec) -> None:
    name = f"rank {backend.rank}"
    assert_type(rankwire.all_gather_object(backend, name, codec=codec), list[str])
    assert_type(rankwire.all_gather_object(backend, (name, backend.rank)), list[tuple[str, int]])
    assert_type(rankwire.all_gather_object(backend, name, async_op=True), Work[list[str]])
    assert_type(rankwire.gather_object(backend, name), list[str] | None)
    assert_type(rankwire.broadcast_object(backend, name), str)
    assert_type(rankwire.broadcast_object(backend, name if backend.rank == 0 else None), str)
    assert_type(rankwire.broadcast_object(backend), Any)
    assert_type(rankwire.scatter_object(backend, [name] if backend.rank == 0 else None), str)
    assert_type(rankwire.scatter_object(backend, root=1), Any)
    assert_type(rankwire.all_to_all_object(backend, [name, name]), list[str])
    expected: dict[str, int] = rankwire.broadcast_object(backend)
    assert_type(expected, dict[str, int])


def mistakes(backend: Backend, floats: Floats) -> None:
    rankwire.all_reduce(backend, 5.0)  # error: No overload variant of "all_reduce"
    rankwire.all_reduce(backend, [5.0])  # error: No overload variant of "all_reduce"
    rankwire.all_reduce(backend, np.float32(5))  # error: No overload variant of "all_reduce"
    rankwire.all_reduce(floats, backend)  # error: No overload variant of "all_reduce"
    rankwire.all_reduce(backend, floats, op="maximum")  # error: No overload variant of "all_reduce"
    rankwire.reduce(backend, floats, op="avg")  # error: No overload variant of "reduce"
    rankwire.broadcast(backend, floats, timout=5)  # error: Unexpected keyword argument "timout"
    rankwire.all_reduce(backend, floats, out=5)  # error: No overload variant of "all_reduce"
    rankwire.all_reduce(backend, floats, async_op=1)  # error: No overload variant of "all_reduce"
    rankwire.all_reduce(backend, floats).wait()  # error: has no attribute "wait"
    rankwire.gather_object(backend, 1)[0]  # error: is not indexable
