"""Worlds in one process: every rank of it as an object, all closed at the end.

A *world maker* is what ``check_backend`` and ``run_ranks`` take: called with a number of ranks and
options of the backend, it returns a context manager that gives the list of backends in rank order.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from rankwire.backends.base import Backend
from rankwire.backends.simulated import SimulatedBackend
from rankwire.backends.sub import SubBackend
from rankwire.backends.tcp import TcpBackend
from rankwire.errors import InvalidWorldSizeError
from rankwire.mesh.dialing import Transport
from rankwire.testing.ranks import in_parallel

MakeWorld = Callable[..., AbstractContextManager[list[Backend]]]


@contextmanager
def simulated_world(world_size: int, **options: Any) -> Iterator[list[Backend]]:
    """Ranks of the simulated backend."""
    with _closed_at_the_end(SimulatedBackend.create_group(world_size, **options)) as world:
        yield world


@contextmanager
def tcp_world(
    world_size: int, *, transport: Transport = "auto", **options: Any
) -> Iterator[list[Backend]]:
    """Ranks of the TCP backend over loopback, each with its own sockets."""
    if world_size < 1:
        raise InvalidWorldSizeError(world_size)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    address = f"127.0.0.1:{listener.getsockname()[1]}"

    def join(rank: int) -> Backend:
        mine = listener if rank == 0 else None
        return TcpBackend(rank, world_size, address, transport=transport, listener=mine, **options)

    ranks = in_parallel([partial(join, rank) for rank in range(world_size)])
    with _closed_at_the_end(ranks) as world:
        yield world


def sub_world(make_parent: MakeWorld) -> MakeWorld:
    """Return a maker of groups inside worlds of another kind.

    A group is all ranks of a larger world but rank 0.
    """

    @contextmanager
    def make(world_size: int, **options: Any) -> Iterator[list[Backend]]:
        with make_parent(world_size + 1, **options) as parents:
            if world_size < 1:
                SubBackend(parents[0], [])
            members = range(1, world_size + 1)
            ranks = in_parallel(
                [partial(SubBackend, parents[rank], list(members)) for rank in members]
            )
            with _closed_at_the_end(ranks) as world:
                yield world

    return make


@contextmanager
def _closed_at_the_end(ranks: Iterable[Backend]) -> Iterator[list[Backend]]:
    world = list(ranks)
    try:
        yield world
    finally:
        for backend in world:
            backend.close()
