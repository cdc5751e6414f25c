"""Hosts: where the ranks of a group over several hosts are, and who works with whom.

The ranks of a host meet in a segment of their own; one of each host, the *leader*, sends messages
to those of the others. That is its lowest rank, or the root of an operation. All ranks see the same
hosts in the same order: that of their lowest ranks.
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
        place: That of this rank among those of its host; 0 is the leader.
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
        self.slots: SharedSlots | None = None
        self.slot_nbytes = 0

    def inside(self, x: Exchange) -> Members:
        """Return the ranks of this host."""
        return Members(x, self.groups[self.here], self.place, self.slots)

    def across(self, x: Exchange, root: int | None = None) -> Members:
        """Return one rank of each host: the leader, or the root. This one must be among them."""
        return Members(x, self.leaders(root), self.here)

    def leaders(self, root: int | None = None) -> list[int]:
        """Return who leads each host; the root, if there is one, leads its own."""
        return [root if root in group else group[0] for group in self.groups]
