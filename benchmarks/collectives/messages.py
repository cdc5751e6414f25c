"""How many messages an operation takes, by the number of ranks, and how that is shown.

The counting is in ``benchmarks.collectives.counting``; this module needs no rankwire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from benchmarks.collectives.candidates import TIMEOUT
from benchmarks.collectives.results import MessageCount
from benchmarks.processes import Child

WORLD_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
CASE_COUNT = 5
"""How many operations are counted for each number of ranks."""


def measure_messages(world_sizes: Sequence[int], record: Callable[[MessageCount], None]) -> None:
    """Count in a process of its own; ``record`` gets each count as soon as it is in.

    Raises:
        ChildError: it died or did not answer in time; what was recorded holds.
    """
    sizes = ",".join(map(str, world_sizes))
    with Child(("-m", "benchmarks.collectives.counting", "--lines", "--ranks", sizes)) as child:
        for _ in range(CASE_COUNT * len(world_sizes)):
            record(msgspec.json.decode(child.read_line(2 * TIMEOUT), type=MessageCount))


def message_table(counts: Sequence[MessageCount]) -> list[list[str]]:
    """Return a head and one row an operation: the messages of the busiest rank, and of all."""
    sizes = sorted({each.world_size for each in counts})
    rows = [["", *map(str, sizes)]]
    for operation in dict.fromkeys(each.operation for each in counts):
        found = {each.world_size: each for each in counts if each.operation == operation}
        cells = [
            f"{found[size].most_messages} / {found[size].messages}" if size in found else "-"
            for size in sizes
        ]
        rows.append([operation, *cells])
    return rows
