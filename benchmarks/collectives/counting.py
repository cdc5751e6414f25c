"""Count the messages of every operation on the simulated backend, by the number of ranks.

Run it alone with ``python -m benchmarks.collectives.counting``; ``benchmarks.collectives.run``
includes it. Every rank is a thread of one process, and the counts do not depend on the machine.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.collectives.candidates import TIMEOUT
from benchmarks.collectives.candidates.rankwire_rank import Rank
from benchmarks.collectives.exercises import prepare
from benchmarks.collectives.figures import KIB, MIB, Figure
from benchmarks.collectives.messages import CASE_COUNT, WORLD_SIZES, message_table
from benchmarks.collectives.results import MessageCount
from benchmarks.processes import die_with_parent, exit_on_sigterm
from rankwire.backends.simulated import SimulatedBackend
from rankwire.backends.simulated_mesh import SimulatedMesh
from rankwire.testing import in_parallel


def cases(world_size: int) -> tuple[Figure, ...]:
    """Return what is counted: the operations, with a size for each algorithm chosen by size."""
    return (
        Figure("barrier", world_size),
        Figure("all_reduce", world_size, 4 * KIB),
        Figure("all_reduce", world_size, MIB),
        Figure("broadcast", world_size, MIB),
        Figure("all_gather", world_size, MIB),
    )


class CountingBackend(SimulatedBackend):
    """A simulated rank that knows how much it has sent.

    ``offer`` may be built on ``transmit`` or not: a message counts where it enters.
    """

    def __init__(self, mesh: SimulatedMesh) -> None:
        super().__init__(mesh)
        self.messages.transmit = partial(self._sending, self.messages.transmit)  # type: ignore[method-assign]
        self.messages.offer = partial(self._sending, self.messages.offer)  # type: ignore[method-assign]
        self._counting = threading.Lock()
        self._inside = threading.local()
        self.messages = 0
        self.nbytes = 0

    def _sending(
        self,
        method: Callable[..., Any],
        dst: int,
        envelope: Any,
        message: tuple[Any, int],
        deadline: Any,
        **options: Any,
    ) -> Any:
        is_outermost = not getattr(self._inside, "sending", False)
        self._inside.sending = True
        try:
            outcome = method(dst, envelope, message, deadline, **options)
        finally:
            self._inside.sending = not is_outermost
        if is_outermost:
            with self._counting:
                self.messages += 1
                self.nbytes += message[1]
        return outcome


def count(figure: Figure) -> MessageCount:
    """Do the operation once, in a new world, and check its result."""
    world = CountingBackend.create_group(figure.world_size, timeout=TIMEOUT)
    try:
        exercises = [prepare(Rank.on(backend), figure) for backend in world]
        in_parallel([exercise.run for exercise in exercises], timeout=TIMEOUT)
        for exercise in exercises:
            exercise.verify()
    finally:
        for backend in world:
            backend.close()
    return MessageCount(
        operation=figure.name,
        world_size=figure.world_size,
        messages=sum(backend.messages for backend in world),
        most_messages=max(backend.messages for backend in world),
        most_nbytes=max(backend.nbytes for backend in world),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.collectives.counting",
        description="Count the messages of every operation by the number of ranks.",
    )
    parser.add_argument(
        "--ranks", default=",".join(map(str, WORLD_SIZES)), metavar="N,...", help="numbers of ranks"
    )
    parser.add_argument("--lines", action="store_true", help="one line of JSON a count")
    arguments = parser.parse_args()
    exit_on_sigterm()
    if arguments.lines:
        die_with_parent()
    counts = []
    for world_size in map(int, arguments.ranks.split(",")):
        figures = cases(world_size)
        assert len(figures) == CASE_COUNT
        for figure in figures:
            counts.append(count(figure))
            if arguments.lines:
                print(msgspec.json.encode(counts[-1]).decode(), flush=True)
    if not arguments.lines:
        head, *rows = message_table(counts)
        table = Table(*head, title="Messages sent: by the busiest rank / by all, by ranks")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
