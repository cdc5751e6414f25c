"""Hosts: where the ranks of a group over several hosts are, and who works with whom.

The ranks of a host meet in a segment of their own; one of each host, the *leader*, sends messages
to those of the others. That is its lowest rank, or the root of an operation. All ranks see the same
hosts in the same order: that of their lowest ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rankwire.collectives.exchange import Array, Arriving, Exchange, Piece
from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError
from rankwire.wire.frames import Buffer, Payload

if TYPE_CHECKING:
    from rankwire.collectives.slots import SharedSlots


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

    def inside(self, x: Exchange) -> SubExchange:
        """Return the ranks of this host."""
        return SubExchange(x, self.groups[self.here], self.place, self.slots)

    def across(self, x: Exchange, root: int | None = None) -> SubExchange:
        """Return one rank of each host: the leader, or the root. This one must be among them."""
        return SubExchange(x, self.leaders(root), self.here)

    def leaders(self, root: int | None = None) -> list[int]:
        """Return who leads each host; the root, if there is one, leads its own."""
        return [root if root in group else group[0] for group in self.groups]


class SubExchange(Exchange):
    """Send and receive among some ranks.

    Args:
        whole: The operation.
        ranks: Who they are, in the order of their new numbers.
        rank: The new number of this one.
        shared: The memory that they share, which only ranks of one host do.
    """

    __slots__ = ("_ranks", "_whole")

    def __init__(
        self, whole: Exchange, ranks: Sequence[int], rank: int, shared: SharedSlots | None = None
    ) -> None:
        # Not the base's: nothing must reach the backend under these numbers.
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
    def is_one_host(self) -> bool:
        """Whether they are the ranks of one host."""
        return self.shared is not None

    def in_group(self, rank: int) -> int:
        """Return the number that a rank has in the group."""
        return self._ranks[rank]

    def look(self, src: int) -> None:
        """See whether there is still a reason to wait for a rank."""
        self._whole.look(self._ranks[src])

    def too_late(self, src: int) -> DeadlineExceededError:
        """Return the error of an operation whose time is up while it waits for a rank."""
        return self._whole.too_late(self._ranks[src])

    def tag_of_part(self, part: int) -> int:
        """Return the tag of step 0 of a part."""
        return self._whole.tag_of_part(part)

    def next_look(self) -> Deadline:
        """Return until when to wait for a rank before looking up."""
        return self._whole.next_look()

    def sleeps(self, sleeps_until: Callable[[Deadline], bool]) -> bool:
        """Sleep where no message wakes this rank, and read now and then what others have sent."""
        return self._whole.sleeps(sleeps_until)

    def look_up(self, src: int) -> None:
        """Look up from waiting for a rank outside of messages; that one may have left."""
        self._whole.look_up(self._ranks[src])

    def send_buffers(self, dst: int, step: int, buffers: Sequence[Buffer], nbytes: int) -> None:
        """Send bytes in pieces, as one message. They must not change before ``settle``."""
        self._whole.send_buffers(self._ranks[dst], step, buffers, nbytes)

    def receive(self, src: int, step: int, nbytes: int | None = None) -> Payload:
        """Return what a rank sent in a step."""
        return self._whole.receive(self._ranks[src], step, nbytes)

    def receive_array(self, src: int, step: int, like: Array) -> Array:
        """Return an array that has the size and dtype of ``like``, in memory of its own."""
        return self._whole.receive_array(self._ranks[src], step, like)

    def receive_into(self, src: int, step: int, out: Array) -> None:
        """Receive an array of the size and dtype of ``out`` into it."""
        self._whole.receive_into(self._ranks[src], step, out)

    def expect_into(self, src: int, step: int, out: Array) -> Arriving:
        """Ask for an array of the size and dtype of ``out``: from now on it may come there."""
        return self._whole.expect_into(self._ranks[src], step, out)

    def take_in(self, arriving: Arriving) -> None:
        """Wait until what was asked for is there."""
        self._whole.take_in(arriving)

    def receive_piece(self, src: int, step: int, like: Array) -> Piece:
        """Return a part of an array that has the size and dtype of ``like``."""
        return self._whole.receive_piece(self._ranks[src], step, like)

    def settle(self) -> None:
        """Wait until all that was sent may be changed again."""
        self._whole.settle()
