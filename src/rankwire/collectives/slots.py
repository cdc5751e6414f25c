"""Sharing memory: how the ranks of a group on one host come to a segment, and meet in it.

The first operation of a group agrees on a segment (``wire.segment``), and the first one after a
failure on a new one: then all ranks begin at step 1, whatever an interrupted rank has left. From
there on a small operation needs no message: every rank puts its bytes into its slot and waits until
all others have done so under the same tag. So whoever reads a slot knows that all ranks are in the
same operation, and that what it reads is whole; a rank that is in another one is found at once.

In a group over several hosts each host has a segment of its own, also one with a single rank: it is
then not an exception. All hosts have one, or none uses it: what is sent by whom depends on that.

It knows nothing of operations but their ``Exchange``. Used by the thread whose operation has its
turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rankwire.collectives.exchange import Array, Exchange
from rankwire.collectives.hosts import Hosts
from rankwire.errors import ChannelClosedError, PeerLostError
from rankwire.wire.frames import Buffer
from rankwire.wire.loans import whole_of

if TYPE_CHECKING:
    from rankwire.backends.base import Backend
    from rankwire.transports.shared_segment import SharedSegment

_OFFER, _OPENED, _FITS, _VERDICT = 0x10, 0x11, 0x12, 0x13  # steps of the agreement
_YES, _NO = b"\1", b"\0"
_NUMBER_NBYTES = 8
_MOST_VIEWS = 64
_HURRY = 0.001  # seconds between two looks at a rank that is in another operation


class SlotAgreement:
    """What the ranks of a group share.

    Args:
        backend: The group.

    Attributes:
        slots: The memory of a group on one host; None if not all ranks can, or they have not come
            to it.
        hosts: The same of a group over several hosts.
        epoch: That in which they agreed on it; -1 before.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.drop()

    def drop(self) -> None:
        """Let go of the memory: the group is closed, or agrees on another one."""
        self.slots: SharedSlots | None = None
        self.hosts: Hosts | None = None
        self.epoch = -1

    def agree(self, x: Exchange, epoch: int) -> None:
        """Find out what ranks share from now on, in messages of an operation of an epoch."""
        self.drop()
        hosts = Hosts(self._backend.hosts, x.rank)
        is_one = len(hosts.groups) == 1
        # On several hosts not all may be of the kind that can: they are asked.
        may_share = self._backend.shares_memory or not is_one
        if may_share and len(hosts.groups) < x.size:
            self._agree(x, hosts)
            if is_one:
                self.slots = hosts.slots
            elif hosts.slots is not None:
                self.hosts = hosts
        self.epoch = epoch

    def _agree(self, x: Exchange, hosts: Hosts) -> None:
        for rank in x.others:  # not each of them is asked here, and who is gone already cannot come
            failure = self._backend.failure_of(rank)
            if failure is not None:
                raise failure.copy()
        inside = hosts.inside(x)
        if inside.rank == 0:
            segment, nbytes = _offered(inside, hosts.across(x), self._backend)
        else:
            segment, nbytes = _opened(inside, self._backend)
        if segment is not None and nbytes:
            hosts.slots, hosts.slot_nbytes = SharedSlots(segment), nbytes


def _offered(
    inside: Exchange, leaders: Exchange, backend: Backend
) -> tuple[SharedSegment | None, int]:
    """Make a segment, and have the others of this host open it.

    Returns:
        The segment, and what fits into a slot on every host; 0 if a host has no segment.
    """
    segment = backend.new_segment(0, inside.size) if backend.shares_memory else None
    try:
        offer = b"" if segment is None else segment.offer
        for dst in inside.others:
            inside.send_buffers(dst, _OFFER, (offer,), len(offer))
        if segment is None:
            _least_of_all(leaders, 0)
            return None, 0
        votes = [whole_of(inside.receive(src, _OPENED, len(_YES))) for src in inside.others]
        can_all = all(vote == _YES for vote in votes)
        nbytes = _least_of_all(leaders, segment.slot_nbytes if can_all else 0)
        verdict = nbytes.to_bytes(_NUMBER_NBYTES, "little")
        for dst in inside.others:
            inside.send_buffers(dst, _VERDICT, (verdict,), len(verdict))
        return segment, nbytes
    finally:
        if segment is not None:
            segment.keep_private()


def _least_of_all(leaders: Exchange, number: int) -> int:
    """Return the least of the numbers of all leaders."""
    ours = number.to_bytes(_NUMBER_NBYTES, "little")
    for dst in leaders.others:
        leaders.send_buffers(dst, _FITS, (ours,), len(ours))
    theirs = [whole_of(leaders.receive(src, _FITS, len(ours))) for src in leaders.others]
    return min([number, *(int.from_bytes(told, "little") for told in theirs)])


def _opened(inside: Exchange, backend: Backend) -> tuple[SharedSegment | None, int]:
    """Open the segment that the first rank of this host has made; return what that one does."""
    offer = bytes(whole_of(inside.receive(0, _OFFER)))
    if not offer:
        return None, 0
    maker = inside.in_group(0)
    segment = (
        backend.open_segment(maker, offer, inside.rank, inside.size)
        if backend.shares_memory
        else None
    )
    vote = _NO if segment is None else _YES
    inside.send_buffers(0, _OPENED, (vote,), len(vote))
    verdict = whole_of(inside.receive(0, _VERDICT, _NUMBER_NBYTES))
    return segment, int.from_bytes(verdict, "little")


class SharedSlots:
    """The slots of a group's ranks, as arrays.

    Attributes:
        slot_nbytes: The most that a rank can put into its slot.
    """

    def __init__(self, segment: SharedSegment) -> None:
        self._segment = segment
        self.slot_nbytes = segment.slot_nbytes
        self._views: dict[tuple[Any, int], tuple[list[Array], list[Array]]] = {}

    def put(self, x: Exchange, array: Array) -> list[Array]:
        """Put an array into this rank's slot; return the slots of all as arrays of its kind."""
        rows = self.begin(x, array.dtype, array.size)
        rows[x.rank][...] = array
        self.publish(x, array.nbytes)
        return rows

    def put_buffers(self, x: Exchange, buffers: Sequence[Buffer], nbytes: int) -> list[Array]:
        """Put bytes into this rank's slot; if they do not fit, only their number is told."""
        rows = self.begin(x, np.dtype(np.uint8), self.slot_nbytes)
        if nbytes <= self.slot_nbytes:
            rows[x.rank][:nbytes] = np.frombuffer(b"".join(buffers), np.uint8)
        self.publish(x, nbytes)
        return rows

    def begin(self, x: Exchange, dtype: np.dtype[Any], count: int) -> list[Array]:
        """Begin a step; return the slots, of which this rank's own can be written."""
        segment = self._segment
        if not segment.begin():
            self._await(x, segment.step - 1)
        views = self._views.get((dtype, count))
        if views is None:
            views = self._view_as(dtype, count)
        return views[segment.step & 1]

    def publish(self, x: Exchange, nbytes: int) -> None:
        """Tell the others that this rank's slot is written."""
        self._segment.publish(x.tag, nbytes)
        self._segment.wake_others()

    def meet(self, x: Exchange) -> None:
        """Wait until all others have published this step; from then on their slots are theirs.

        Raises:
            RankwireError: One of them cannot come any more, or is in another operation.
        """
        segment = self._segment
        while not segment.all_came(x.tag):
            self._await(x, segment.step)
            for rank in x.others:
                if not segment.came(rank, x.tag):
                    self._find_out_why(x, rank)

    def retract(self, x: Exchange) -> None:
        """Take back what this rank has published last: its operation has failed."""
        self._segment.retract(x.tag)

    def sizes(self, x: Exchange) -> list[int]:
        """Return how many bytes each rank has, or had, for its slot. After ``meet``."""
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
                    # It may have published, and left or died, since it was last looked at.
                    is_it = error.peer == x.in_group(rank) and not error.is_reported
                    if not is_it or not segment.has_come(rank, step):
                        raise

    def _find_out_why(self, x: Exchange, rank: int) -> None:
        """A rank has come under another tag: it is in another operation. It sees that as well."""
        x.look_up(rank)
        x.deadline.clock.sleep(_HURRY)
