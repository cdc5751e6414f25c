"""Open MPI by mpi4py, on numpy arrays, with its default options.

On one host Open MPI goes through shared memory and, for large messages, reads the peer's memory
where the kernel allows it. A waiting rank polls and never sleeps; with more ranks than cores it
yields its core between two polls.
"""

from __future__ import annotations

from mpi4py import MPI

from . import Array


class Rank:
    def __init__(self, rank: int, world_size: int, address: str) -> None:
        # `mpirun` has decided who is who, and where the others are.
        self._comm = MPI.COMM_WORLD
        self.rank = self._comm.rank
        self.world_size = self._comm.size
        if self.world_size != world_size:
            # A launcher of another MPI starts worlds of one rank each.
            raise RuntimeError(f"mpirun made a world of {self.world_size}, not of {world_size}")

    def pack(self, array: Array) -> Array:
        return array

    def all_reduce(self, payload: Array) -> None:
        self._comm.Allreduce(MPI.IN_PLACE, payload)

    def broadcast(self, payload: Array, root: int) -> None:
        self._comm.Bcast(payload, root=root)

    def all_gather(self, payload: Array, out: Array) -> None:
        self._comm.Allgather(payload, out)

    def reduce_scatter(self, payload: Array, out: Array) -> None:
        self._comm.Reduce_scatter_block(payload, out)

    def barrier(self) -> None:
        self._comm.Barrier()

    def send(self, payload: Array, dst: int) -> None:
        self._comm.Send(payload, dst)

    def recv(self, payload: Array, src: int) -> None:
        self._comm.Recv(payload, src)

    def close(self) -> None:
        """Nothing: mpi4py leaves the world when the interpreter ends."""
