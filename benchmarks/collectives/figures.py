"""What is measured: the operations, their sizes, and the numbers of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Operation = Literal[
    "all_reduce", "barrier", "broadcast", "all_gather", "reduce_scatter", "ping_pong"
]

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True)
class Figure:
    """The time one operation takes, a median.

    Attributes:
        operation: what the ranks do.
        world_size: how many ranks do it.
        nbytes: of float32; for ``all_gather`` of the result, for ``ping_pong`` of the message that
            goes there and back.
    """

    operation: Operation
    world_size: int
    nbytes: int = 0

    @property
    def key(self) -> str:
        """What the JSON calls it."""
        size = f"_{self.size.lower().replace(' ', '')}" if self.nbytes else ""
        return f"{self.operation}{size}_{self.world_size}ranks"

    @property
    def label(self) -> str:
        """What the tables call it."""
        return f"{self.name}, {self.world_size} ranks"

    @property
    def name(self) -> str:
        """The label without the number of ranks."""
        operation = self.operation.replace("ping_pong", "ping-pong")
        return f"{operation} {self.size}" if self.nbytes else operation

    @property
    def size(self) -> str:
        """The bytes in the largest unit that keeps them whole."""
        for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
            if self.nbytes >= unit:
                return f"{self.nbytes // unit} {name}"
        return f"{self.nbytes} B"


FIGURES: tuple[Figure, ...] = (
    *(
        Figure("all_reduce", 2, nbytes)
        for nbytes in (8, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
    ),
    Figure("barrier", 2),
    *(Figure("broadcast", 2, nbytes) for nbytes in (MIB, 64 * MIB)),
    *(Figure("all_gather", 2, nbytes) for nbytes in (MIB, 64 * MIB)),
    Figure("reduce_scatter", 2, MIB),
    Figure("ping_pong", 2, 64 * MIB),
    *(Figure("all_reduce", 4, nbytes) for nbytes in (8, 4 * KIB, MIB, 64 * MIB)),
    Figure("barrier", 4),
    # Growth with ranks; 2 and 4 are above.
    *(
        figure
        for world_size in (8, 16)
        for figure in (
            Figure("all_reduce", world_size, 4 * KIB),
            Figure("all_reduce", world_size, MIB),
            Figure("barrier", world_size),
        )
    ),
)
WORLD_SIZES = tuple(sorted({figure.world_size for figure in FIGURES}))


def figures_of(world_size: int) -> tuple[Figure, ...]:
    """Return what a world of that many ranks measures, in order."""
    return tuple(figure for figure in FIGURES if figure.world_size == world_size)
