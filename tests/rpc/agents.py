"""An agent on each rank of a world, closed at the end of the test."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rankwire import RpcAgent


@contextmanager
def agents_of(world: list[Any], grace: float = 5.0, **options: Any) -> Iterator[list[RpcAgent]]:
    """Make the agents; they have ``grace`` seconds to close."""
    agents = [RpcAgent(backend, **options) for backend in world]
    yield agents
    for agent in agents:
        agent.close(grace)
