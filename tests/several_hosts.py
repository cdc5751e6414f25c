"""Worlds whose ranks take themselves to be on several hosts, on this machine and without root.

Which host a rank is on is a text that it tells the others (``rendezvous.runtime_dir.host_id``);
here it is another one. Ranks of different hosts then use TCP and share nothing, as they would.
``faults.netns`` has hosts that are some.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

from msgspec.structs import replace

from rankwire import TcpBackend
from rankwire.backends.base import Backend
from rankwire.mesh.tcp_mesh import TcpMesh
from rankwire.testing import in_parallel
from rankwire.wire.control_messages import World
from worlds import RankProcess, address_of, bound_socket, free_port, spawn_ranks

# Two hosts alike; three ranks and one; three hosts whose ranks take turns.
PLACES = [(0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 2, 0, 2)]

_BE_ON = "setattr(__import__('sys').modules['rankwire.rendezvous.formation'], 'host_id', {})"


class MeshElsewhere(TcpMesh):
    """A rank that finds the ranks of its world on the hosts of ``places``."""

    places: ClassVar[Sequence[int]] = ()

    def on_formed(self, world: World) -> None:
        members = [
            replace(member, host_id=f"host {self.places[member.rank]}") for member in world.members
        ]
        super().on_formed(replace(world, members=members))


@contextlib.contextmanager
def threads_on(places: Sequence[int], **options: Any) -> Iterator[list[Backend]]:
    """A world in this process; ``places`` has the host of each rank."""
    size, listener = len(places), bound_socket()
    address = address_of(listener)

    kind = type("MeshElsewhere", (MeshElsewhere,), {"places": places})
    elsewhere = type("RankElsewhere", (TcpBackend,), {"_MESH": kind})

    def join(rank: int) -> Backend:
        mine = listener if rank == 0 else None
        return elsewhere(rank, size, address, listener=mine, **options)

    with contextlib.ExitStack() as stack:
        ranks = in_parallel([partial(join, rank) for rank in range(size)])
        yield [stack.enter_context(rank) for rank in ranks]


@contextlib.contextmanager
def processes_on(
    places: Sequence[int], *, of_rank: dict[int, dict[str, Any]] | None = None, **options: Any
) -> Iterator[list[RankProcess]]:
    """A world of processes; ``of_rank`` has options of some ranks alone."""
    with spawn_ranks(len(places)) as ranks:
        address = f"127.0.0.1:{free_port()}"
        for rank, place in zip(ranks, places, strict=True):
            rank.call("eval", _BE_ON.format(f"lambda: 'host {place}'"))
        own = of_rank or {}
        forming = [
            rank.form(len(ranks), address, **{**options, **own.get(rank.rank, {})})
            for rank in ranks
        ]
        for command in forming:
            command.result()
        yield ranks


def works_by_hosts(backend: Backend) -> bool:
    """Whether the ranks of each host have agreed to meet in shared memory."""
    return backend.operations.agreement.hosts is not None


@contextlib.contextmanager
def hosts_world(world_size: int, **options: Any) -> Iterator[list[Backend]]:
    """A world in this process on about half as many hosts as ranks, which take turns."""
    count = (world_size + 1) // 2
    with threads_on([rank % count for rank in range(world_size)], **options) as world:
        yield world
