"""The parts of a job: the ranks of each host, this one's own and others' by way of launchers."""

from __future__ import annotations

from collections.abc import Iterator

from rankwire.launch.local_ranks import LocalRanks
from rankwire.launch.nodes import RemoteRanks


class Parts:
    """All parts of a job, in the order of their hosts, as far as their launchers have come.

    Attributes:
        local: The ranks of this host, node 0.
        remote: Those of others, by node.
        nodes: How many hosts there are.
    """

    def __init__(self, local: LocalRanks, nodes: int) -> None:
        self.local = local
        self.remote: dict[int, RemoteRanks] = {}
        self.nodes = nodes

    def __iter__(self) -> Iterator[LocalRanks | RemoteRanks]:
        yield self.local
        yield from (self.remote[node] for node in sorted(self.remote))

    @property
    def have_started(self) -> bool:
        """Whether ranks were started, now or before."""
        return bool(self.local.ranks)

    @property
    def alive(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for part in self for rank in part.alive]

    def missing_nodes(self) -> list[int]:
        """Return the hosts whose launchers have not come."""
        here = {node for node, part in self.remote.items() if part.count}
        return [node for node in range(1, self.nodes) if node not in here]

    def part_of(self, rank: int) -> LocalRanks | RemoteRanks:
        """Return the part that a rank belongs to."""
        return next(part for part in self if rank in part.ranks)

    def errors_of(self, rank: int) -> list[str]:
        """Return the last lines that a rank wrote to stderr."""
        return self.part_of(rank).errors_of(rank)

    def where(self, rank: int) -> str:
        """Return on which host a rank is, for the end of a sentence; nothing if there is one."""
        for part in self.remote.values():
            if rank in part.ranks:
                return f", on node {part.node} ({part.host})"
        return ", on node 0" if self.nodes > 1 else ""
