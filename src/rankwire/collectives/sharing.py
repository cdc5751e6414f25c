"""Sharing memory: how the ranks of a group on one host come to a segment, and meet in it.

The first operation of a group agrees on a segment (``wire.segment``), and the first one after a
failure on a new one: then all ranks begin at step 1, whatever an interrupted rank has left. From
there on a small operation needs no message: every rank puts its bytes into its slot and waits until
all others have done so under the same tag. So whoever reads a slot knows that all ranks are in the
same operation, and that what it reads is whole; a rank that is in another one is found at once.

It knows nothing of operations but their ``Exchange``. Used by the thread whose operation has its
turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rankwire.collectives.exchange import Array, Exchange
from rankwire.errors import ChannelClosedError, PeerLostError
from rankwire.wire.frames import Buffer
from rankwire.wire.loans import whole_of

if TYPE_CHECKING:
    from rankwire.backends.base import Backend
    from rankwire.links.shared_segment import SharedSegment

_OFFER, _OPENED, _VERDICT = 0x10, 0x11, 0x12  # steps of the agreement
_YES, _NO = b"\1", b"\0"
_MOST_VIEWS = 64
_HURRY = 0.001  # seconds between two looks at a rank that is in another operation


class Sharing:
    """What the ranks of a group share.

    Args:
        backend: The group.

    Attributes:
        slots: The memory; None if not all ranks can, or they have not come to it.
        epoch: That in which they agreed on it; -1 before.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.drop()

    def drop(self) -> None:
        """Let go of the memory: the group is closed, or agrees on another one."""
        self.slots: SharedSlots | None = None
        self.epoch = -1

    def agree(self, x: Exchange, epoch: int) -> SharedSlots | None:
        """Return what all ranks share from now on, in messages of an operation of an epoch."""
        self.drop()
        backend = self._backend
        if x.size > 1 and backend.shares_memory and x.is_one_host:
            segment = _offered(x, backend) if x.rank == 0 else _opened(x, backend)
            self.slots = None if segment is None else SharedSlots(segment)
        self.epoch = epoch
        return self.slots


def _offered(x: Exchange, backend: Backend) -> SharedSegment | None:
    """Make a segment, and have the others open it."""
    segment = backend.new_segment(x.rank, x.size)
    try:
        offer = b"" if segment is None else segment.offer
        for dst in x.others:
            x.send_buffers(dst, _OFFER, (offer,), len(offer))
        if segment is None:
            return None
        votes = [whole_of(x.receive(src, _OPENED, len(_YES))) for src in x.others]
        verdict = _YES if all(vote == _YES for vote in votes) else _NO
        for dst in x.others:
            x.send_buffers(dst, _VERDICT, (verdict,), len(verdict))
        return segment if verdict == _YES else None
    finally:
        if segment is not None:
            segment.keep_private()


def _opened(x: Exchange, backend: Backend) -> SharedSegment | None:
    """Open the segment that rank 0 has made."""
    offer = bytes(whole_of(x.receive(0, _OFFER)))
    if not offer:
        return None
    segment = backend.open_segment(0, offer, x.rank, x.size)
    vote = _NO if segment is None else _YES
    x.send_buffers(0, _OPENED, (vote,), len(vote))
    return segment if whole_of(x.receive(0, _VERDICT, len(_YES))) == _YES else None


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
            while not segment.await_step(step, rank, x.next_look()):
                try:
                    x.look_up(rank)
                except (ChannelClosedError, PeerLostError) as error:
                    # It may have published, and left or died, since it was last looked at.
                    if error.peer != rank or error.is_reported or not segment.has_come(rank, step):
                        raise

    def _find_out_why(self, x: Exchange, rank: int) -> None:
        """A rank has come under another tag: it is in another operation. It sees that as well."""
        x.look_up(rank)
        x.deadline.clock.sleep(_HURRY)
