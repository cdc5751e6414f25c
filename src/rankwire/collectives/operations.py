"""The collectives on arrays.

All ranks of the backend must call the same functions in the same order with matching arguments.
Otherwise all of them raise ``CollectiveMismatchError``. If a rank's arguments are invalid, the
other ranks raise ``CollectiveAbortedError``.

Arrays are numpy arrays or dense torch tensors on the CPU; a result is of the kind of the argument.
Until an operation in the background is done, do not change its arrays or read its result. Every
function is safe from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from rankwire.backends.arguments import check_rank
from rankwire.backends.base import Backend
from rankwire.collectives import selection, uneven_parts
from rankwire.collectives.exchange import Array, Exchange, describe
from rankwire.collectives.operands import (
    Operand,
    copy_if_shared,
    make_root_target,
    make_target,
    operand,
    pack_part,
    part_shape,
    store_result,
    unpack_part,
)
from rankwire.collectives.reductions import Op, Reduction, reduction_of
from rankwire.collectives.sequence import collective

if TYPE_CHECKING:
    from typing import Unpack

    from rankwire.collectives.signatures import (
        A,
        AnyArray,
        Async,
        AsyncInto,
        Blocking,
        BlockingInto,
        Counts,
        Parts,
    )
    from rankwire.collectives.work import Work


@overload
def all_reduce(
    backend: Backend, array: A, op: Op = ..., *, ordered: bool = ..., **how: Unpack[BlockingInto[A]]
) -> A: ...
@overload
def all_reduce(
    backend: Backend,
    array: A,
    op: Op = ...,
    *,
    ordered: bool = ...,
    **how: Unpack[AsyncInto[A]],
) -> Work[A]: ...
@collective
def all_reduce(
    backend: Backend,
    array: Any,
    op: Op = "sum",
    *,
    out: Any = None,
    ordered: bool = False,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Reduce an array over all ranks; every rank gets the result.

    Args:
        backend: The group.
        array: This rank's contribution, and the result.
        op: ``sum``, ``mean``, ``product``, ``min``, ``max``, ``bitwise_and``, ``bitwise_or`` or
            ``bitwise_xor``; or ``PremulSum(factor)`` or ``("premul_sum", factor)``: each rank
            multiplies its contribution first. float16 and bfloat16 are added up in float32.
        out: Where the result goes instead; ``array`` is then unchanged.
        ordered: Reduce in rank order for every size and number of ranks. Either way all ranks get
            the same result, bit for bit.
        async_op: Return a ``Work`` at once.
        timeout: Seconds for the whole operation; None is the backend's default.

    Returns:
        ``array``, or ``out`` if given; or the ``Work`` whose ``wait`` returns it.

    Raises:
        CollectiveMismatchError: Ranks called different operations.
        PeerLostError: A rank is lost.
        CollectiveAbortedError: Another rank failed in this operation or had invalid arguments, or
            failed in the operation before, which had succeeded here.
        DeadlineExceededError: ``waiting_for`` lists the missing ranks.
    """
    source = operand(array)
    target = source if out is None else make_target(source, source.shape, out)
    target.check_writable("array")
    r = reduction_of(op, source)

    def run(x: Exchange) -> Any:
        own = source.flat()
        result = own if target is source else target.flat()
        if target is not source:
            own = copy_if_shared(own, target)
        selection.all_reduce(x, r.contribution(own), result, r, ordered=ordered)
        return store_result(target, result)

    kind = "ordered all_reduce" if ordered else "all_reduce"
    return describe(kind, r.op, source.dtype_name, source.shape), run


@overload
def reduce(
    backend: Backend, array: A, root: int = ..., op: Op = ..., **how: Unpack[BlockingInto[A]]
) -> A | None: ...
@overload
def reduce(
    backend: Backend, array: A, root: int = ..., op: Op = ..., **how: Unpack[AsyncInto[A]]
) -> Work[A | None]: ...
@collective
def reduce(
    backend: Backend,
    array: Any,
    root: int = 0,
    op: Op = "sum",
    *,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Reduce an array over all ranks; the root gets the result, the others None.

    Args:
        backend: The group.
        array: This rank's contribution; unchanged.
        root: The rank that gets the result.
        op: As for ``all_reduce``.
        out: At the root: where the result goes; it may be ``array``.
        async_op: Return a ``Work`` at once.
        timeout: Seconds for the whole operation; None is the backend's default.
    """
    source = operand(array)
    target = make_root_target(backend, source, source.shape, root, out)
    r = reduction_of(op, source)
    run = _move_whole(source, target, partial(selection.reduce, root=root, r=r), r)
    return describe("reduce", r.op, f"root {root}", source.dtype_name, source.shape), run


@overload
def broadcast(backend: Backend, array: A, root: int = ..., **how: Unpack[Blocking]) -> A: ...
@overload
def broadcast(backend: Backend, array: A, root: int = ..., **how: Unpack[Async]) -> Work[A]: ...
@collective
def broadcast(
    backend: Backend,
    array: Any,
    root: int = 0,
    *,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Copy the root's array into the arrays of all ranks, which have its dtype and shape.

    Returns:
        ``array``, or the ``Work`` whose ``wait`` returns it.
    """
    target = operand(array)
    root = check_rank(root, backend.world_size)
    if backend.rank != root:
        target.check_writable("array")

    def run(x: Exchange) -> Any:
        flat = target.flat()
        selection.broadcast(x, flat, root)
        if x.rank != root:
            target.store(flat)
        return target.value

    return describe("broadcast", f"root {root}", target.dtype_name, target.shape), run


@overload
def all_gather(backend: Backend, array: A, **how: Unpack[BlockingInto[A]]) -> A: ...
@overload
def all_gather(backend: Backend, array: A, **how: Unpack[AsyncInto[A]]) -> Work[A]: ...
@overload
def all_gather(
    backend: Backend, array: AnyArray, *, out: Parts, **how: Unpack[Blocking]
) -> Parts: ...
@overload
def all_gather(
    backend: Backend, array: AnyArray, *, out: Parts, **how: Unpack[Async]
) -> Work[Parts]: ...
@collective
def all_gather(
    backend: Backend,
    array: Any,
    *,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Return the arrays of all ranks in rank order, joined along dim 0.

    Arrays of shape ``(k, ...)`` give one of shape ``(N * k, ...)``; 0-d arrays give ``(N,)``. If
    ``out`` is a list of N arrays, the array of rank i goes to ``out[i]``, which must have its dtype
    and shape. These may differ between ranks. The arrays in ``out`` must not overlap.
    """
    source = operand(array)
    if uneven_parts.is_list(out):
        return uneven_parts.all_gather(backend, source, out)
    shape = (backend.world_size * source.rows, *source.shape[1:])
    run = _move_whole(source, make_target(source, shape, out), selection.all_gather)
    return describe("all_gather", source.dtype_name, source.shape), run


@overload
def gather(
    backend: Backend, array: A, root: int = ..., **how: Unpack[BlockingInto[A]]
) -> A | None: ...
@overload
def gather(
    backend: Backend, array: A, root: int = ..., **how: Unpack[AsyncInto[A]]
) -> Work[A | None]: ...
@overload
def gather(
    backend: Backend, array: AnyArray, root: int = ..., *, out: Parts, **how: Unpack[Blocking]
) -> Parts | None: ...
@overload
def gather(
    backend: Backend, array: AnyArray, root: int = ..., *, out: Parts, **how: Unpack[Async]
) -> Work[Parts | None]: ...
@collective
def gather(
    backend: Backend,
    array: Any,
    root: int = 0,
    *,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Return the arrays of all ranks at the root, joined as by ``all_gather``; None elsewhere.

    All arrays have one dtype and shape, even if ``out`` at the root is a list of N arrays.
    """
    source = operand(array)
    if uneven_parts.is_list(out) and backend.rank == check_rank(root, backend.world_size):
        return uneven_parts.gather(backend, source, root, out)
    shape = (backend.world_size * source.rows, *source.shape[1:])
    target = make_root_target(backend, source, shape, root, out)
    run = _move_whole(source, target, partial(selection.gather, root=root))
    return describe("gather", f"root {root}", source.dtype_name, source.shape), run


@overload
def scatter(
    backend: Backend,
    array: None = ...,
    root: int = ...,
    *,
    out: None = ...,
    async_op: bool = ...,
    timeout: float | None = ...,
) -> Any: ...
@overload
def scatter(
    backend: Backend, array: A | Sequence[A] | None, root: int = ..., **how: Unpack[BlockingInto[A]]
) -> A: ...
@overload
def scatter(
    backend: Backend,
    array: A | Sequence[A] | None,
    root: int = ...,
    **how: Unpack[AsyncInto[A]],
) -> Work[A]: ...
@collective
def scatter(
    backend: Backend,
    array: Any = None,
    root: int = 0,
    *,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Split the root's array along dim 0 into N equal parts and return this rank's part.

    Args:
        backend: The group.
        array: At the root: shape ``(N * k, ...)``; or a list of N arrays of any dtypes and shapes,
            the i-th for rank i. Other ranks' arrays are ignored.
        root: The rank whose array is scattered.
        out: Where this rank's part goes; dtype and shape must match.
        async_op: Return a ``Work`` at once.
        timeout: Seconds for the whole operation; None is the backend's default.
    """
    root = check_rank(root, backend.world_size)
    if backend.rank == root:
        sources = uneven_parts.parts_of(backend, array)
        mine = make_target(sources[root], sources[root].shape, out)
    wanted = None if out is None else operand(out, "out")
    if wanted is not None:
        wanted.check_writable("out")

    def run(x: Exchange) -> Any:
        if x.rank != root:
            found = selection.distribute(x, [])
            return unpack_part(selection.payload_from(x, root, found), wanted)
        flats = [copy_if_shared(source.flat(), mine) for source in sources]
        messages = [pack_part(*part) for part in zip(sources, flats, strict=True)]
        selection.distribute(x, messages)
        result = mine.flat()
        result[...] = flats[root]
        return store_result(mine, result)

    return describe("scatter", f"root {root}"), run


@overload
def reduce_scatter(
    backend: Backend, array: A | Sequence[A], op: Op = ..., **how: Unpack[BlockingInto[A]]
) -> A: ...
@overload
def reduce_scatter(
    backend: Backend, array: A | Sequence[A], op: Op = ..., **how: Unpack[AsyncInto[A]]
) -> Work[A]: ...
@collective
def reduce_scatter(
    backend: Backend,
    array: Any,
    op: Op = "sum",
    *,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Reduce over all ranks and return this rank's part: dim 0 divided by N.

    Args:
        backend: The group.
        array: Shape ``(N * k, ...)``; or a list of N arrays of one dtype, the i-th for rank i,
            whose shapes may differ. Unchanged.
        op: As for ``all_reduce``.
        out: Where the part goes: shape ``(k, ...)``, or that of this rank's array in the list.
        async_op: Return a ``Work`` at once.
        timeout: Seconds for the whole operation; None is the backend's default.
    """
    if uneven_parts.is_list(array):
        return uneven_parts.reduce_scatter(backend, array, op, out)
    source = operand(array)
    target = make_target(source, part_shape(backend, source), out)
    r = reduction_of(op, source)
    run = _move_whole(source, target, partial(selection.reduce_scatter, r=r), r)
    return describe("reduce_scatter", r.op, source.dtype_name, source.shape), run


@overload
def all_to_all(
    backend: Backend,
    array: A,
    *,
    send_counts: Counts = ...,
    recv_counts: Counts = ...,
    **how: Unpack[BlockingInto[A]],
) -> A: ...
@overload
def all_to_all(
    backend: Backend,
    array: A,
    *,
    send_counts: Counts = ...,
    recv_counts: Counts = ...,
    **how: Unpack[AsyncInto[A]],
) -> Work[A]: ...
@overload
def all_to_all(
    backend: Backend, array: Sequence[A], **how: Unpack[BlockingInto[list[A]]]
) -> list[A]: ...
@overload
def all_to_all(
    backend: Backend, array: Sequence[A], **how: Unpack[AsyncInto[list[A]]]
) -> Work[list[A]]: ...
@collective
def all_to_all(
    backend: Backend,
    array: Any,
    *,
    send_counts: Sequence[int] | None = None,
    recv_counts: Sequence[int] | None = None,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Send part i of dim 0 to rank i, and return the parts from all ranks, joined in rank order.

    Args:
        backend: The group.
        array: Shape ``(N * k, ...)``, or ``(sum(send_counts), ...)``; or a list of N arrays of any
            dtypes and shapes, the i-th for rank i. Unchanged.
        send_counts: Rows for each rank, if the parts are not equal. On all ranks or on none.
        recv_counts: Rows from each rank; if given, they are checked against what the others send.
        out: Where the result goes. With a list: a list of N arrays, the i-th with the dtype and
            shape of what rank i sends to this one, which is checked.
        async_op: Return a ``Work`` at once.
        timeout: Seconds for the whole operation; None is the backend's default.

    Returns:
        An array of the same shape; with counts, of as many rows as the others send. Or ``out``.
    """
    if uneven_parts.is_list(array) and send_counts is recv_counts is None:
        return uneven_parts.all_to_all(backend, array, out)
    source = operand(array)
    if send_counts is not None or recv_counts is not None:
        return uneven_parts.all_to_all_by_counts(
            source, send_counts, recv_counts, out, backend.world_size
        )
    part_shape(backend, source)
    run = _move_whole(source, make_target(source, source.shape, out), selection.all_to_all)
    return describe("all_to_all", source.dtype_name, source.shape), run


@overload
def barrier(backend: Backend, **how: Unpack[Blocking]) -> None: ...
@overload
def barrier(backend: Backend, **how: Unpack[Async]) -> Work[None]: ...
@collective
def barrier(backend: Backend, *, async_op: bool = False, timeout: float | None = None) -> Any:
    """Wait until every rank has called this, at a cost of log2(N) messages per rank."""
    return "barrier()", selection.meet


def _move_whole(
    source: Operand,
    target: Operand | None,
    move: Callable[[Exchange, Array, Any], None],
    r: Reduction | None = None,
) -> Callable[[Exchange], Any]:
    """Return the steps that ``move`` an array, or its contribution to ``r``, into the target."""

    def run(x: Exchange) -> Any:
        result = None if target is None else target.flat()
        own = source.flat() if target is None else copy_if_shared(source.flat(), target)
        move(x, own if r is None else r.contribution(own), result)
        return store_result(target, result)

    return run
