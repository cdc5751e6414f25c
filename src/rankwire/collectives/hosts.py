"""Hosts: where the ranks of a group over several hosts are, and who works with whom.

Each host has *places*, in the order of its ranks. The ranks of a host meet in a segment of their
own; those of one place, one on each host, send each other messages. The rank at place 0 *leads* its
host. All ranks see the same hosts in the same order: that of their leaders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rankwire.collectives.exchange import Exchange
from rankwire.collectives.members import Members

if TYPE_CHECKING:
    from rankwire.collectives.sharing import SharedSlots


class Hosts:
    """The hosts of a group, as one of its ranks sees them.

    Args:
        hosts: That of each rank; those of ranks on one host are equal.
        rank: This rank.

    Attributes:
        groups: The ranks of each host.
        here: Which of them is this rank's.
        place: That of this rank on its host.
        width: How many places all hosts have.
        slots: What the ranks of this host share, once all hosts have agreed that theirs do.
        slot_nbytes: What fits into a slot on every host.
    """

    def __init__(self, hosts: Sequence[object], rank: int) -> None:
        groups: dict[object, list[int]] = {}
        for at, host in enumerate(hosts):
            groups.setdefault(host, []).append(at)
        self.groups = list(groups.values())
        local = groups[hosts[rank]]
        self.here = self.groups.index(local)
        self.place = local.index(rank)
        self.width = min(len(group) for group in self.groups)
        self.slots: SharedSlots | None = None
        self.slot_nbytes = 0

    def inside(self, x: Exchange) -> Members:
        """Return the ranks of this host."""
        return Members(x, self.groups[self.here], self.place, self.slots)

    def across(self, x: Exchange, place: int = 0) -> Members:
        """Return the ranks of a place, one on each host; this one is among them."""
        return Members(x, [group[place] for group in self.groups], self.here)
