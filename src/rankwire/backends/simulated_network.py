"""The simulated network: how traffic gets from rank to rank in one process, and how it fails to.

Traffic goes over lanes and lands in inboxes (``simulated_lanes``). What is sent is a *landing*, a
function that hands the message over; without delays it runs in the sender's own thread, else in the
timetable's.

The network knows who has left, who was killed and which links are broken, and applies the fault
plan. It does not know what travels, nor backends and ports: its members tell it who they are
(``Member``) and hear from it whom they have lost.

Locks: one for the whole world, ``Network.lock``; every condition variable here and in
``simulated_calls`` stands on it. It is never held while a callback runs: ``Network.changing`` runs
those of the receives that ended once the lock is free, and never in the timetable's thread, so a
callback may wait for the network. *Lock held* in a docstring means that the caller is inside
``changing()``.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Protocol

from rankwire.backends.base import check_rank
from rankwire.backends.blame import Losses
from rankwire.backends.exit_report import Fall
from rankwire.backends.faults import FaultPlan, Link, Timetable, link_between
from rankwire.backends.simulated_lanes import Landing, Lane
from rankwire.deadline import Deadline
from rankwire.errors import (
    ChannelClosedError,
    PeerLostError,
    RankwireError,
)
from rankwire.wire.mailbox import Receive

__all__ = ["Member", "Network"]

_KILLED = Fall("it was killed", "")


class Member(Protocol):
    """One rank as the network sees it. Both methods are called with the lock held."""

    def end(self, error: RankwireError) -> None:
        """This rank is dead: end everything it waits for with ``error``."""

    def lose(self, peer: int, error: RankwireError) -> None:
        """``peer`` is out of reach: end everything that is wanted of it with ``error``."""


class Network:
    """The lanes of one world and the state of its ranks. Safe from any thread.

    Args:
        world_size: How many ranks.
        queue_nbytes: Load of one lane above which senders wait. One larger message may be sent when
            there is no other.
        faults: What goes wrong, and when.
    """

    def __init__(self, world_size: int, *, queue_nbytes: int, faults: FaultPlan) -> None:
        self.lock = threading.Lock()
        self.world_size = world_size
        self.queue_nbytes = queue_nbytes
        self._faults = copy.deepcopy(faults)
        self._members: Sequence[Member] = ()
        self._left: set[int] = set()
        self._killed: set[int] = set()
        self._falls: dict[int, Fall] = {}
        self._ends: dict[int, RankwireError] = {}
        self.losses = Losses()
        self._broken: set[Link] = set()
        self._lanes: dict[tuple[int, int, str], Lane] = {}
        self._sent: Counter[int] = Counter()
        self._carried: Counter[Link] = Counter()
        self._reader_free_at: dict[int, float] = {}
        self._ended: list[Receive] = []
        self._timetable = Timetable(self.lock, self.changing) if faults.takes_time else None

    def start(self, members: Sequence[Member]) -> None:
        """Take the ranks; time begins for the fault plan."""
        with self.changing():
            self._members = members
            for rank, count in self._faults.kill_after_messages.items():
                if count == 0:
                    self._kill(rank)
            for link, count in self._faults.break_after_messages.items():
                if count == 0:
                    self._break(link)
            if self._timetable is not None:
                for rank, seconds in self._faults.kill_after_seconds.items():
                    self._timetable.plan(monotonic() + seconds, partial(self._kill, rank))
                for link, seconds in self._faults.break_after_seconds.items():
                    self._timetable.plan(monotonic() + seconds, partial(self._break, link))
                self._timetable.start()

    # -- faults on demand --------------------------------------------------------------------------

    def kill(self, rank: int) -> None:
        """Let a rank die now: it and all its peers see that at once.

        What it sent and has arrived stays receivable, what is under way is lost. A rank that has
        left cannot die.
        """
        rank = check_rank(rank, self.world_size)
        with self.changing():
            self._kill(rank)

    def break_link(self, a: int, b: int) -> None:
        """Break the link between two ranks now: each sees the other as lost.

        What is under way is lost, what has arrived stays receivable.
        """
        a, b = (check_rank(rank, self.world_size) for rank in (a, b))
        with self.changing():
            self._break(link_between(a, b))

    # -- for members -------------------------------------------------------------------------------

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock; once it is free, call back for the receives that ended meanwhile."""
        ended: list[Receive] = []
        try:
            with self.lock:
                try:
                    yield
                finally:
                    ended, self._ended = self._ended, ended
        finally:
            if ended and self._timetable is not None:
                self._timetable.keep_free(partial(_call_back, ended))
            else:
                _call_back(ended)

    def call_back(self, receive: Receive) -> None:
        """Have ``on_done`` of an ended receive called when the lock is free. Lock held."""
        if receive.on_done is not None:
            self._ended.append(receive)

    def lane(self, src: int, dst: int, kind: str) -> Lane:
        """Return the lane for a kind of traffic, new if need be. Lock held."""
        lane = self._lanes.get((src, dst, kind))
        if lane is None:
            lane = Lane(src, dst, self._faults.delays(src, dst, kind))
            lane.failure = self.why_lost(src, dst)
            self._lanes[src, dst, kind] = lane
        return lane

    def close_lane(self, src: int, dst: int, kind: str, error: RankwireError) -> None:
        """The end at ``dst`` is gone: senders get ``error``; a new lane may follow. Lock held."""
        lane = self._lanes.pop((src, dst, kind), None)
        if lane is not None:
            lane.abort(error)

    def wait_for_room(
        self, lane: Lane, nbytes: int, deadline: Deadline, *, check: Callable[[], object] = int
    ) -> None:
        """Return when the lane takes ``nbytes``. Lock held on return, free while waiting.

        Args:
            lane: The lane.
            nbytes: The size of what is to be sent.
            deadline: For the wait.
            check: Called after each wait; raises if the sender may not send any more.

        Raises:
            DeadlineExceededError: There was no room in time.
            RankwireError: One of the two ends is gone, or the link is broken.
        """
        lane.wait_for_room(nbytes, self.queue_nbytes, self.lock, deadline, check)

    def dispatch(self, lane: Lane, nbytes: int, landing: Landing) -> None:
        """Send something for which there is room. Lock held, and again when ``landing`` runs."""
        arrival = lane.next_arrival()
        if arrival is None:
            landing()
        else:
            self._carry(lane, arrival, nbytes, landing)
        if self._faults.counts_messages:
            self._count(lane)

    def farewell(self, lane: Lane, landing: Landing) -> None:
        """Send the last thing of an orderly end. Lock held.

        It lands after all that is under way, at once if nothing is. Senders that wait for room look
        again whether they still may.
        """
        lane.wake_senders()
        if lane.under_way:
            self._carry(lane, monotonic(), 0, landing)
        else:
            landing()

    def why_lost(self, rank: int, peer: int) -> RankwireError | None:
        """Return why ``rank`` cannot reach ``peer`` (which may be itself), or None. Lock held."""
        if rank in self._left:
            return ChannelClosedError("this backend is closed")
        if rank in self._killed:
            return PeerLostError(rank, "this rank itself was killed")
        if peer in self._killed:
            return self._ends[peer].copy()
        if rank != peer and link_between(rank, peer) in self._broken:
            return PeerLostError(peer, "the link to it is broken")
        if peer in self._left:
            left = ChannelClosedError(f"rank {peer} has left").during(peer=peer)
            return self.losses.explain(left)
        return None

    def gone_for(self, rank: int) -> set[int]:
        """Return the ranks that a rank cannot reach. Lock held."""
        cut = {other for link in self._broken if rank in link for other in link}
        return (self._killed | self._left | cut) - {rank}

    def leave(self, rank: int) -> None:
        """Let nothing more go to a rank or from it; what it sent still arrives. Lock held."""
        self._left.add(rank)
        for lane in self._lanes.values():
            if lane.dst == rank:
                self._abort(lane)
            elif lane.src == rank:
                lane.refuse(ChannelClosedError("this backend is closed"))
        self._end_if_empty()

    def fall(self, rank: int, fall: Fall) -> None:
        """Let a rank leave because of an error: its peers lose it and learn why. Lock held."""
        self._falls.setdefault(rank, fall)
        self._kill(rank)
        self._left.add(rank)

    def settle(self) -> None:
        """Wait for the end of the timetable's thread if all ranks are gone. Without the lock."""
        if self._timetable is not None and self._timetable.ending:
            self._timetable.join()

    # -- how messages travel, lock held ------------------------------------------------------------

    def _carry(self, lane: Lane, arrival: float, nbytes: int, landing: Landing) -> None:
        lane.under_way.append((arrival, nbytes, landing))
        lane.under_way_nbytes += nbytes
        if len(lane.under_way) == 1:  # the others are planned in their turn: the lane stays FIFO
            self._plan_hand_over(lane, arrival)

    def _plan_hand_over(self, lane: Lane, when: float) -> None:
        assert self._timetable is not None
        self._timetable.plan(when, partial(self._hand_over, lane))

    def _hand_over(self, lane: Lane) -> None:
        if not lane.under_way:
            return  # it was lost
        now = monotonic()
        free_at = self._reader_free_at.get(lane.dst, now)
        if free_at > now:
            self._plan_hand_over(lane, free_at)
            return
        if lane.dst in self._faults.reader_seconds:
            self._reader_free_at[lane.dst] = now + self._faults.reader_seconds[lane.dst]
        _, nbytes, landing = lane.under_way.popleft()
        lane.under_way_nbytes -= nbytes
        if lane.under_way:
            self._plan_hand_over(lane, lane.under_way[0][0])
        landing()
        lane.room_made()

    def _count(self, lane: Lane) -> None:
        link = link_between(lane.src, lane.dst)
        self._sent[lane.src] += 1
        self._carried[link] += 1
        if self._carried[link] == self._faults.break_after_messages.get(link):
            self._break(link)
        if self._sent[lane.src] == self._faults.kill_after_messages.get(lane.src):
            self._kill(lane.src)

    # -- what happens to ranks and links, lock held ------------------------------------------------

    def _kill(self, rank: int) -> None:
        if rank in self._killed or rank in self._left:
            return
        self._killed.add(rank)
        fall = self._falls.get(rank, _KILLED)
        loss = PeerLostError(rank, fall.reason, remote_traceback=fall.traceback)
        self._ends[rank] = self.losses.explain(loss, cause=fall.cause)
        for lane in self._lanes.values():
            if rank in (lane.src, lane.dst):
                self._abort(lane)
        self._members[rank].end(self._loss(rank, rank))
        for other in range(self.world_size):
            self._tell_loss(other, rank)
        self._end_if_empty()

    def _break(self, link: Link) -> None:
        self._broken.add(link)
        for lane in self._lanes.values():
            if link_between(lane.src, lane.dst) == link:
                self._abort(lane)
        a, b = link
        self._tell_loss(a, b)
        self._tell_loss(b, a)

    def _tell_loss(self, rank: int, peer: int) -> None:
        if rank not in self._left and rank not in self._killed:
            self._members[rank].lose(peer, self._loss(rank, peer))

    def _abort(self, lane: Lane) -> None:
        lane.abort(self._loss(lane.src, lane.dst))

    def _loss(self, rank: int, peer: int) -> RankwireError:
        error = self.why_lost(rank, peer)
        assert error is not None
        return error

    def _end_if_empty(self) -> None:
        if self._timetable is not None and len(self._left | self._killed) == self.world_size:
            self._timetable.end()


def _call_back(receives: list[Receive]) -> None:
    for receive in receives:
        assert receive.on_done is not None
        receive.on_done(receive)
