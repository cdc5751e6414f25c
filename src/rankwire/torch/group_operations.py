"""Operations and arguments of process groups that rankwire's collectives do not have."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import rankwire
from rankwire.backends.base import Backend
from rankwire.collectives.operations import all_gather
from rankwire.collectives.reductions import PremulSum
from rankwire.errors import ConfigurationError, DeadlineExceededError
from rankwire.torch.devices import plain
from rankwire.torch.work_handles import as_torch, seconds_of

# By number: looking up the enum takes 1 us more, as each access makes a new object.
_OPS = {
    int(ReduceOp.SUM): "sum",
    int(ReduceOp.AVG): "mean",
    int(ReduceOp.PRODUCT): "product",
    int(ReduceOp.MIN): "min",
    int(ReduceOp.MAX): "max",
    int(ReduceOp.BAND): "bitwise_and",
    int(ReduceOp.BOR): "bitwise_or",
    int(ReduceOp.BXOR): "bitwise_xor",
}


def op_of(reduce_op: Any) -> Any:
    """Return rankwire's op for a ``ReduceOp``, or raise ``ConfigurationError``."""
    kind = reduce_op.op if type(reduce_op) is ReduceOp else reduce_op
    op = _OPS.get(int(kind))
    if op is not None:
        return op
    if reduce_op == ReduceOp.PREMUL_SUM:
        return PremulSum(reduce_op.factor)
    raise ConfigurationError(f"rankwire has no reduction {reduce_op}")


def add_sparse(backend: Backend, tensor: torch.Tensor, op: object, timeout: float | None) -> None:
    """Replace a sparse tensor by its sum over all ranks, added up in rank order."""
    if op != "sum":
        raise ConfigurationError("sparse tensors can only be summed (ReduceOp.SUM)")
    own = tensor.coalesce()
    indices, values = own.indices().contiguous(), own.values().contiguous()
    counts = torch.empty(backend.world_size, dtype=torch.int64)
    all_gather(backend, torch.tensor([values.shape[0]]), out=counts, timeout=timeout)
    of_all = counts.tolist()
    all_indices = [indices.new_empty((indices.shape[0], count)) for count in of_all]
    all_values = [values.new_empty((count, *values.shape[1:])) for count in of_all]
    all_gather(backend, indices, out=all_indices, timeout=timeout)
    all_gather(backend, values, out=all_values, timeout=timeout)
    total = torch.sparse_coo_tensor(
        torch.cat(all_indices, 1), torch.cat(all_values), tensor.shape, check_invariants=False
    )
    tensor.copy_(total.coalesce())


def monitored_barrier(
    group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait for all ranks, and name those that do not arrive in time. torch's own is for Gloo only.

    Args:
        group: A process group; the default one if None. Other backends' groups are passed to torch.
        timeout: The group's timeout if None.
        wait_all_ranks: Ignored on rankwire: every rank always names all missing ranks.

    Raises:
        DistBackendError: Ranks are missing; the text and ``__cause__.waiting_for`` name them.
    """
    chosen = dist.group.WORLD if group is None else group
    ranks = getattr(chosen, "ranks", None)
    if isinstance(ranks, Backend):
        meet_monitored(ranks, timeout)
    else:
        dist.monitored_barrier(group, timeout, wait_all_ranks)


def meet_monitored(ranks: Backend, timeout: timedelta | None) -> None:
    """Run a barrier whose error has Gloo's wording."""
    with as_torch:
        try:
            rankwire.barrier(ranks, timeout=seconds_of(timeout))
        except DeadlineExceededError as error:
            late = ", ".join(map(str, error.waiting_for))
            text = f"[Rank {ranks.rank}]: Ranks {late} failed to pass monitoredBarrier: {error}"
            raise dist.DistBackendError(text) from error


# -- arguments of torch's calls --------------------------------------------------------------------


def options_of(kind: type[Any], given: Any) -> Any:
    """Return torch's options; older forms of a call pass an op, or nothing."""
    if type(given) is kind:
        return given
    if given is None:
        return kind()
    if isinstance(given, dist.ReduceOp | dist.ReduceOp.RedOpType):
        options = kind()
        options.reduceOp = given
        return options
    return given


def only_tensor(tensors: Any) -> torch.Tensor:
    """Return the one tensor that a call is about."""
    if isinstance(tensors, torch.Tensor):
        return plain(tensors)
    if len(tensors) != 1:
        raise ConfigurationError(f"one tensor a rank, not {len(tensors)}")
    only = tensors[0]
    return only if type(only) is torch.Tensor else plain(only)


def only_list(lists: Any) -> list[torch.Tensor]:
    """Return the one list of tensors that a call is about."""
    if lists and isinstance(lists[0], torch.Tensor):
        return [plain(tensor) for tensor in lists]
    if len(lists) != 1:
        raise ConfigurationError(f"one list of tensors a rank, not {len(lists)}")
    return [plain(tensor) for tensor in lists[0]]


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a one-dimensional view, or the tensor itself if it is not contiguous."""
    tensor = plain(tensor)
    return tensor.view(-1) if tensor.is_contiguous() else tensor


def bytes_view(flat: Any) -> memoryview:
    """Return the bytes of a flat array."""
    view: memoryview = flat.view(np.uint8).data
    return view


def cut(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return parts of these sizes along dimension 0."""
    return list(torch.split(tensor, list(sizes)))
