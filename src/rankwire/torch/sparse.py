"""Sparse tensors: their sum over all ranks, which are of the same shape.

Each rank has elements of its own number and at its own places. All ranks gather all of them and add
them up, in rank order: what is summed is small, or it would not be sparse.
"""

from __future__ import annotations

import torch

from rankwire.backends.base import Backend
from rankwire.collectives.operations import all_gather
from rankwire.errors import ConfigurationError


def add_sparse(backend: Backend, tensor: torch.Tensor, op: object, timeout: float | None) -> None:
    """Replace a sparse tensor by its sum over all ranks.

    Raises:
        ConfigurationError: The op is another one.
    """
    if op != "sum":
        raise ConfigurationError("sparse tensors are added up; there is no other op for them")
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
