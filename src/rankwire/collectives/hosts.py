"""Hosts: which ranks of a group are on which host, and exchanges among some of its ranks.

One rank per host, the *leader*, exchanges messages with the leaders of other hosts: the lowest rank
of the host, or the root of an operation. Hosts are in the order of their lowest ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rankwire.collectives.exchange import Array, Arriving, Exchange
from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError
from rankwire.override import override
from rankwire.wire.frames import Buffer, Payload

if TYPE_CHECKING:
    from rankwire.collectives.slots import SharedSlots


class Hosts:
    """The hosts of a group, as one of its ranks sees them.

    Attributes:
        groups: The ranks of each host.
        here: The index of this rank's host in ``groups``.
        place: The index of this rank in the group of its host; 0 is the leader.
        slot_nbytes: The largest message that fits into a slot on every host.
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

    def inside(self, x: Exchange) -> SubExchange:
        """Return an exchange among the ranks of this host."""
        return SubExchange(x, self.groups[self.here], self.place, self.slots)

    def across(self, x: Exchange, root: int | None = None) -> SubExchange:
        """Return an exchange among the leaders of all hosts. This rank must be one of them."""
        return SubExchange(x, self.leaders(root), self.here)

    def leaders(self, root: int | None = None) -> list[int]:
        """Return the leader of each host; the root, if given, leads its own."""
        return [root if root in group else group[0] for group in self.groups]


class SubExchange(Exchange):
    """An exchange among some ranks of an operation, numbered from 0 as algorithms expect.

    Every call goes to the operation's own exchange with group ranks, so errors name group ranks.
    """

    __slots__ = ("_ranks", "_whole")

    def __init__(
        self, whole: Exchange, ranks: Sequence[int], rank: int, shared: SharedSlots | None = None
    ) -> None:
        # Without Exchange.__init__: nothing must reach the backend under these numbers.
        self._whole = whole
        self._ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self.tag = whole.tag
        self.shared = shared
        self.hosts = None
        self.deadline = whole.deadline
        self.offers = whole.offers

    @property
    @override
    def is_one_host(self) -> bool:
        return self.shared is not None

    @override
    def in_group(self, rank: int) -> int:
        return self._ranks[rank]

    @override
    def look(self, src: int) -> None:
        self._whole.look(self._ranks[src])

    @override
    def too_late(self, src: int) -> DeadlineExceededError:
        return self._whole.too_late(self._ranks[src])

    @override
    def begin_part(self, part: int) -> None:
        self._whole.begin_part(part)
        self.tag = self._whole.tag

    @override
    def next_look(self) -> Deadline:
        return self._whole.next_look()

    @override
    def sleeps(self, sleeps_until: Callable[[Deadline], bool]) -> bool:
        return self._whole.sleeps(sleeps_until)

    @override
    def look_up(self, src: int) -> None:
        self._whole.look_up(self._ranks[src])

    @override
    def send_buffers(self, dst: int, step: int, buffers: Sequence[Buffer], nbytes: int) -> None:
        self._whole.send_buffers(self._ranks[dst], step, buffers, nbytes)

    @override
    def receive(self, src: int, step: int, nbytes: int | None = None) -> Payload:
        return self._whole.receive(self._ranks[src], step, nbytes)

    @override
    def expect_into(self, src: int, step: int, out: Array) -> Arriving:
        return self._whole.expect_into(self._ranks[src], step, out)

    @override
    def take_in(self, arriving: Arriving) -> None:
        self._whole.take_in(arriving)

    @override
    def settle(self) -> None:
        self._whole.settle()
