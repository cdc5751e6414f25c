"""torch.distributed on Gloo, with its default options, on torch tensors.

Gloo has one transport here, TCP, and picks the interface by the host's name; on one host the
traffic goes over loopback whatever it picks.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from . import TIMEOUT, Array

# The older names still work in torch 2.13 and warn; either is faster than a list of tensors.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Rank:
    def __init__(self, rank: int, world_size: int, address: str) -> None:
        # Ranks share the cores; more threads a rank would only take them from each other.
        torch.set_num_threads(1)
        self.rank = rank
        self.world_size = world_size
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{address}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT),
        )

    def pack(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array)

    def all_reduce(self, payload: torch.Tensor) -> None:
        dist.all_reduce(payload)

    def broadcast(self, payload: torch.Tensor, root: int) -> None:
        dist.broadcast(payload, src=root)

    def all_gather(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        all_gather_single(out, payload)

    def reduce_scatter(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        reduce_scatter_single(out, payload)

    def barrier(self) -> None:
        dist.barrier()

    def send(self, payload: torch.Tensor, dst: int) -> None:
        dist.send(payload, dst)

    def recv(self, payload: torch.Tensor, src: int) -> None:
        dist.recv(payload, src)

    def close(self) -> None:
        dist.destroy_process_group()
