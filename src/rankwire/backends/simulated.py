"""SimulatedBackend: all ranks of a world in one process, with injected faults.

It uses the same connections, inboxes and call ports as worlds of processes, over streams in memory,
to test programs without processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rankwire.backends.arguments import check_world
from rankwire.backends.base import Backend
from rankwire.backends.faults import FaultPlan
from rankwire.backends.roles import roles_of_world
from rankwire.backends.simulated_mesh import SimulatedMesh
from rankwire.backends.simulated_network import Network
from rankwire.clock import REAL_TIME, Clock
from rankwire.errors import ConfigurationError
from rankwire.wire.frames import DEFAULT_MAX_MESSAGE_NBYTES

DEFAULT_QUEUE_NBYTES = 64 << 20  # NATS lets a slow consumer keep as much pending


class SimulatedBackend(Backend):
    """One rank of a world in this process, made by ``create_group``.

    Every method is safe from any thread. Data is copied when it is sent, so the sender may change
    its buffers on return; the receiver owns what it receives.

    Attributes:
        network: Shared by all ranks of the world; ``network.kill(rank)`` and
            ``network.break_link(a, b)`` inject faults.
    """

    _SHOWN = ("create_group", "network")

    def __init__(self, mesh: SimulatedMesh) -> None:
        super().__init__(mesh)
        self.network = mesh.network

    @classmethod
    def create_group(
        cls,
        world_size: int,
        *,
        timeout: float | None = None,
        max_message_nbytes: int = DEFAULT_MAX_MESSAGE_NBYTES,
        queue_nbytes: int = DEFAULT_QUEUE_NBYTES,
        faults: FaultPlan | None = None,
        clock: Clock = REAL_TIME,
        roles: Sequence[str] | None = None,
    ) -> list[Self]:
        """Return the ranks of a new world; the index is the rank.

        Args:
            world_size: The number of ranks, at least 1.
            timeout: Default seconds for operations; None uses ``RANKWIRE_TIMEOUT``, or else 60.
            max_message_nbytes: Largest message sent or accepted.
            queue_nbytes: Maximum of unread bytes from one rank to another; above it, the sender
                waits. A larger message may be sent when there is no other. Calls have their own
                queues. A rank that waits for a message reads those before it and keeps them, as on
                a network.
            faults: The faults to inject; their times count from now. The world takes a copy.
            clock: The clock that all ranks and faults use.
            roles: The role of each rank, such as ``["trainer", "rollout", "rollout"]``.

        Raises:
            InvalidWorldSizeError: Less than one rank.
            ConfigurationError: Another argument is invalid, such as a fault for a rank that does
                not exist.
        """
        check_world(0, world_size)
        if queue_nbytes < 1:
            raise ConfigurationError(f"a queue holds at least 1 byte, not {queue_nbytes!r}")
        names = roles_of_world(roles, world_size)
        faults = FaultPlan() if faults is None else faults
        faults.check(world_size)
        network = Network(world_size, queue_nbytes=queue_nbytes, faults=faults, clock=clock)
        meshes = [
            SimulatedMesh(rank, network, timeout=timeout, max_message_nbytes=max_message_nbytes)
            for rank in range(world_size)
        ]
        world = [cls(mesh) for mesh in meshes]
        for backend in world:
            backend.roles = names
        network.start(meshes)
        return world
