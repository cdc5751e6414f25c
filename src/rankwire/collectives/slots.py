"""Slots: the shared memory in which the ranks of a host exchange small messages; and the hosts.

One rank per host, the *leader*, exchanges messages with the leaders of other hosts: the lowest rank
of the host, or the root of an operation. Hosts are in the order of their lowest ranks.

The first operation of a group, and the first after a failure, agree on a new segment
(``Segment``), because an interrupted rank may leave the old one in any state. Then every rank
writes its slot and waits until all others have published theirs under the same tag. In a group over
several hosts either all hosts use their segments or none does.

Used by the thread whose operation has its turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rankwire.collectives.exchange import Array, Exchange
from rankwire.errors import ChannelClosedError, DeadlineExceededError, PeerLostError
from rankwire.override import override
from rankwire.wire.frames import Buffer, whole_of

if TYPE_CHECKING:
    from rankwire.backends.base import Backend
    from rankwire.transports.shared_segment import SharedSegment

_OFFER, _OPENED, _FITS, _VERDICT = 0x10, 0x11, 0x12, 0x13  # steps of the agreement
_YES, _NO = b"\1", b"\0"
_NUMBER_NBYTES = 8
_MOST_VIEWS = 64
_HURRY = 0.001  # seconds between two checks of a rank that is in another operation


class Hosts:
    """The hosts of a group, as one of its ranks sees them."""

    def __init__(self, hosts: Sequence[object], rank: int) -> None:
        groups: dict[object, list[int]] = {}
        for at, host in enumerate(hosts):
            groups.setdefault(host, []).append(at)
        self.groups = list(groups.values())  # the ranks of each host
        local = groups[hosts[rank]]
        self.here = self.groups.index(local)  # the index of this rank's host in ``groups``
        self.place = local.index(rank)  # the index of this rank in its host's group; 0 leads
        self.slots: SharedSlots | None = None
        self.slot_nbytes = 0  # the largest message that fits into a slot on every host

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

    Errors, and the messages that are not settled, have the group ranks of the whole operation.
    """

    __slots__ = ("_ranks", "_whole")

    def __init__(
        self, whole: Exchange, ranks: Sequence[int], rank: int, shared: SharedSlots | None = None
    ) -> None:
        super().__init__(whole._backend, rank, [whole._world[member] for member in ranks])
        self._whole = whole
        self._ranks = ranks
        self.tag = whole.tag
        self.shared = shared
        self.deadline = whole.deadline
        self.offers, self.expected = whole.offers, whole.expected

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
    def settle(self) -> None:
        self._whole.settle()


class SlotAgreement:
    """The memory that a group's ranks share: slots on one host, or hosts with slots, or none."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.drop()

    def drop(self) -> None:
        """Release the memory: the group is closed, or agrees on a new segment."""
        self.slots: SharedSlots | None = None
        self.hosts: Hosts | None = None
        self.epoch = -1  # that of the agreement

    def agree(self, x: Exchange, epoch: int) -> None:
        """Agree with all ranks on the slots to use, in messages of the operation ``x``."""
        self.drop()
        hosts = Hosts(self._backend.hosts, x.rank)
        is_one = len(hosts.groups) == 1
        # On several hosts each leader asks the ranks of its host whether they can.
        may_share = self._backend.mesh.shares_memory or not is_one
        if may_share and len(hosts.groups) < x.size:
            self._agree(x, hosts)
            if is_one:
                self.slots = hosts.slots
            elif hosts.slots is not None:
                self.hosts = hosts
        self.epoch = epoch

    def _agree(self, x: Exchange, hosts: Hosts) -> None:
        for rank in x.others:  # a rank sends to some of them only, so it checks all first
            failure = self._backend.failure_of(rank)
            if failure is not None:
                raise failure.copy()
        inside = hosts.inside(x)
        if inside.rank == 0:
            segment, nbytes = _offer_segment(inside, hosts.across(x), self._backend)
        else:
            segment, nbytes = _open_segment(inside, self._backend)
        if segment is not None and nbytes:
            hosts.slots, hosts.slot_nbytes = SharedSlots(segment), nbytes


def _offer_segment(
    inside: Exchange, leaders: Exchange, backend: Backend
) -> tuple[SharedSegment | None, int]:
    """Create this host's segment; return it and the slot size of all hosts, 0 if one has none."""
    segments = backend.mesh.segments if backend.mesh.shares_memory else None
    segment = None if segments is None else segments.make(0, inside.size)
    try:
        offer = b"" if segment is None else segment.offer
        for dst in inside.others:
            inside.send_buffers(dst, _OFFER, (offer,), len(offer))
        if segment is None:
            _find_least(leaders, 0)
            return None, 0
        votes = [whole_of(inside.receive(src, _OPENED, len(_YES))) for src in inside.others]
        can_all = all(vote == _YES for vote in votes)
        nbytes = _find_least(leaders, segment.slot_nbytes if can_all else 0)
        verdict = nbytes.to_bytes(_NUMBER_NBYTES, "little")
        for dst in inside.others:
            inside.send_buffers(dst, _VERDICT, (verdict,), len(verdict))
        return segment, nbytes
    finally:
        if segment is not None:
            segment.keep_private()


def _find_least(leaders: Exchange, number: int) -> int:
    ours = number.to_bytes(_NUMBER_NBYTES, "little")
    for dst in leaders.others:
        leaders.send_buffers(dst, _FITS, (ours,), len(ours))
    theirs = [whole_of(leaders.receive(src, _FITS, len(ours))) for src in leaders.others]
    return min([number, *(int.from_bytes(told, "little") for told in theirs)])


def _open_segment(inside: Exchange, backend: Backend) -> tuple[SharedSegment | None, int]:
    offer = bytes(whole_of(inside.receive(0, _OFFER)))
    if not offer:
        return None, 0
    maker = inside.in_group(0)
    segment = backend.mesh.open_segment(backend.world[maker], offer, inside.rank, inside.size)
    vote = _NO if segment is None else _YES
    inside.send_buffers(0, _OPENED, (vote,), len(vote))
    verdict = whole_of(inside.receive(0, _VERDICT, _NUMBER_NBYTES))
    return segment, int.from_bytes(verdict, "little")


class SharedSlots:
    """The slots of a group's ranks, as arrays."""

    def __init__(self, segment: SharedSegment) -> None:
        self._segment = segment
        self.slot_nbytes = segment.slot_nbytes
        self._views: dict[tuple[Any, int], tuple[list[Array], list[Array]]] = {}

    def put(self, x: Exchange, array: Array) -> list[Array]:
        """Write an array to this rank's slot and meet; return all slots as arrays of its dtype."""
        rows = self.begin(x, array.dtype, array.size)
        rows[x.rank][...] = array
        self.publish(x, array.nbytes)
        self.meet(x)
        return rows

    def put_buffers(self, x: Exchange, buffers: Sequence[Buffer], nbytes: int) -> list[Array]:
        """Write bytes to this rank's slot and meet; publish only their size if they do not fit."""
        rows = self.begin(x, np.dtype(np.uint8), self.slot_nbytes)
        if nbytes <= self.slot_nbytes:
            rows[x.rank][:nbytes] = np.frombuffer(b"".join(buffers), np.uint8)
        self.publish_and_meet(x, nbytes)
        return rows

    def begin(self, x: Exchange, dtype: np.dtype[Any], count: int) -> list[Array]:
        """Begin a step; return the slots of all ranks, of which this rank may write its own."""
        segment = self._segment
        if not segment.begin():
            self._await(x, segment.step - 1)
        views = self._views.get((dtype, count))
        if views is None:
            views = self._view_as(dtype, count)
        return views[segment.step & 1]

    def publish(self, x: Exchange, nbytes: int) -> None:
        """Notify the other ranks that this rank's slot is complete."""
        self._segment.publish(x.tag, nbytes)
        self._segment.wake_others()

    def publish_and_meet(self, x: Exchange, nbytes: int = 0) -> None:
        """Publish this rank's slot, and wait until the slots of all ranks may be read."""
        self.publish(x, nbytes)
        self.meet(x)

    def meet(self, x: Exchange) -> None:
        """Wait until all other ranks have published this step. Their slots may then be read."""
        segment = self._segment
        while not segment.all_came(x.tag):
            self._await(x, segment.step)
            for rank in x.others:
                if not segment.came(rank, x.tag):  # it is in another operation: ask why
                    x.look_up(rank)
                    x.deadline.clock.sleep(_HURRY)

    def retract(self, x: Exchange) -> None:
        """Withdraw this rank's last published slot, because its operation has failed."""
        self._segment.retract(x.tag)

    def sizes(self, x: Exchange) -> list[int]:
        """Return how many bytes each rank has published, after ``meet``."""
        return [self._segment.nbytes_of(rank) for rank in range(x.size)]

    def _view_as(self, dtype: np.dtype[Any], count: int) -> tuple[list[Array], list[Array]]:
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        nbytes = count * dtype.itemsize
        even, odd = (
            [np.frombuffer(slot, np.uint8)[:nbytes].view(dtype) for slot in slots]
            for slots in self._segment.slots
        )
        views = self._views[dtype, count] = (even, odd)
        return views

    def _await(self, x: Exchange, step: int) -> None:
        segment = self._segment
        for rank in x.others:
            if segment.looks_until(step, rank):
                continue
            while not x.sleeps(partial(segment.sleeps_until, step, rank)):
                try:
                    x.look_up(rank)
                except (ChannelClosedError, PeerLostError) as error:
                    # It may have published since the last check, before it left or was lost.
                    is_it = error.peer == x.in_group(rank) and not error.is_reported
                    if not is_it or not segment.has_come(rank, step):
                        raise
