"""The simulated network: the state of a world's ranks and links, and faults of its streams.

``Network`` knows which ranks have left or were killed and which links are broken. ``Traffic`` makes
the streams between ranks and applies the fault plan to them. Neither knows messages and ports: when
the network requests it, ranks close their streams (``cut``, ``die``: at once, without waiting or
callbacks) and end their waits (``end``, ``hear_of``); they ask it for the state of a peer.

A fault happens in two steps. First it is recorded and the streams are cut, at once and in any
thread, a sender's included: a thread that uses such a stream finds it ended and asks here why. Then
all ranks are informed. That runs callbacks of the user's, so it has a thread of its own, unless the
user injects the fault.

Locks: ``Network._lock`` and ``Traffic._lock`` guard the state; nothing is called under them.
``_roll_lock`` guards the roll, which this network keeps instead of a coordinator; notices are
delivered under it.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rankwire import runtime
from rankwire.backends.arguments import check_rank
from rankwire.backends.faults import FaultPlan, Link, Operation, Timetable, link_between
from rankwire.clock import Clock
from rankwire.errors import ChannelClosedError, PeerLostError, RankwireError
from rankwire.rendezvous.roll import Answers, Attendance, Roll
from rankwire.transports.memory_stream import MemoryStream, memory_pair
from rankwire.transports.pipe import Gate, Route
from rankwire.wire.control_messages import AgentSays, Fallen, Notice, sanitize_notice
from rankwire.wire.handshake import Purpose
from rankwire.wire.protocol import left

if TYPE_CHECKING:
    from rankwire.backends.simulated_mesh import SimulatedMesh

_KILLED = Fallen("it was killed", "")
# A user's callback may still run in a thread; closing the world waits for it at most so long.
_JOIN_LIMIT = 5.0


class Traffic:
    """The streams of a world and its ranks' operations, under a fault plan. Thread-safe.

    ``on_break`` is called when a link has carried the messages after which it breaks, ``on_kill``
    when a rank has sent the messages after which it is killed. ``queue_nbytes`` is the size of a
    stream.

    Attributes:
        sent: How many messages each rank has sent, if the plan counts them.
    """

    def __init__(
        self,
        plan: FaultPlan,
        queue_nbytes: int,
        clock: Clock,
        *,
        on_break: Callable[[Link], None],
        on_kill: Callable[[int], None],
    ) -> None:
        self._plan = plan
        self._queue_nbytes = queue_nbytes
        self._clock = clock
        self._on_break = on_break
        self._on_kill = on_kill
        self._gates = {rank: Gate(each) for rank, each in plan.reader_seconds.items()}
        self._lock = runtime.Lock()
        self._delays: dict[tuple[int, int, str], Iterator[float] | None] = {}
        self.sent: Counter[int] = Counter()
        self._carried: Counter[Link] = Counter()
        self._begun: Counter[tuple[int, Operation]] = Counter()

    def fails(self, rank: int, operation: Operation) -> bool:
        """Whether the plan fails any operation of that kind."""
        return (rank, operation) in self._plan.failures

    def begin(self, rank: int, operation: Operation) -> None:
        """Count an operation that a rank begins; raise if the plan fails it."""
        if not self.fails(rank, operation):
            return
        with self._lock:
            self._begun[rank, operation] += 1
            number = self._begun[rank, operation]
        error = self._plan.failures[rank, operation].get(number)
        if error is not None:
            raise error

    def connect(
        self, src: int, dst: int, purpose: Purpose, service: int
    ) -> tuple[MemoryStream, MemoryStream]:
        """Return the two ends of a new stream, that of the dialling rank first."""
        if purpose is Purpose.MESSAGES:
            there, back = "messages", "courtesies"
        else:
            there, back = f"requests {service}", f"replies {service}"
        routes = self._route(src, dst, there), self._route(dst, src, back)
        return memory_pair(self._queue_nbytes, self._clock, *routes)

    def _route(self, src: int, dst: int, kind: str) -> Route | None:
        delays, gate = self._plan.delays(src, dst, kind), self._gates.get(dst)
        if delays is None and gate is None and not self._plan.counts_messages:
            return None
        with self._lock:  # a reopened stream continues its sequence of delays
            delays = self._delays.setdefault((src, dst, kind), delays)
        return Route(self._clock.now, delays, gate, partial(self._count, src, dst))

    def _count(self, src: int, dst: int) -> None:
        link = link_between(src, dst)
        with self._lock:
            self.sent[src] += 1
            self._carried[link] += 1
            breaks = self._carried[link] == self._plan.break_after_messages.get(link)
            kills = self.sent[src] == self._plan.kill_after_messages.get(src)
        if breaks:
            self._on_break(link)
        if kills:
            self._on_kill(src)


class Network:
    """The state of a world's ranks and links. Safe from any thread.

    Attributes:
        traffic: The streams between the ranks.
        members: The ranks, once it has started.
    """

    def __init__(
        self, world_size: int, *, queue_nbytes: int, faults: FaultPlan, clock: Clock
    ) -> None:
        self.world_size = world_size
        self.clock = clock
        self._faults = copy.deepcopy(faults)
        self.traffic = Traffic(
            self._faults,
            queue_nbytes,
            clock,
            on_break=self._break_in_passing,
            on_kill=self._kill_in_passing,
        )
        self.members: Sequence[SimulatedMesh] = ()
        self._lock = runtime.Lock()
        self._left: set[int] = set()
        self._killed: dict[int, Fallen] = {}
        self._broken: set[Link] = set()
        self._attendance = Attendance()
        self._on_kill: list[Callable[[int], None]] = []
        self._roll = Roll(world_size)
        self._roll_lock = runtime.Lock()
        self._timetable = Timetable(clock)
        self._telling: list[runtime.Thread] = []

    def start(self, members: Sequence[SimulatedMesh]) -> None:
        """Take the ranks, and start the clock of the fault plan."""
        self.members = members
        for rank, count in self._faults.kill_after_messages.items():
            if count == 0:
                self.kill(rank)
        for link, count in self._faults.break_after_messages.items():
            if count == 0:
                self.break_link(*link)
        now = self.clock.now()
        kills, breaks = self._faults.kill_after_seconds, self._faults.break_after_seconds
        self._timetable.begin(
            [
                *((now + kills[rank], partial(self._kill_in_passing, rank)) for rank in kills),
                *((now + breaks[link], partial(self._break_in_passing, link)) for link in breaks),
            ]
        )
        self._end_if_empty()

    # -- faults on demand --------------------------------------------------------------------------

    def kill(self, rank: int) -> None:
        """Kill a rank now: it and all its peers see that at once.

        What has arrived from it stays receivable, what is under way is lost. A rank that has left
        cannot be killed.
        """
        rank = check_rank(rank, self.world_size)
        if self._kill(rank, _KILLED):
            self._tell_death(rank)

    def break_link(self, a: int, b: int) -> None:
        """Break the link between two ranks now: each sees the other as lost.

        What is under way is lost, what has arrived stays receivable.
        """
        link = link_between(check_rank(a, self.world_size), check_rank(b, self.world_size))
        self._break(link)
        self._tell_break(link)

    def on_kill(self, callback: Callable[[int], None]) -> None:
        """Call ``callback(rank)`` for each rank that is killed, also for those killed before now.

        Not for a rank that leaves, by an error or without. It may be called in any thread.
        """
        with self._lock:
            self._on_kill.append(callback)
            killed = [rank for rank, fallen in self._killed.items() if fallen is _KILLED]
        for rank in killed:
            callback(rank)

    def was_killed(self, rank: int) -> bool:
        """Whether a rank was killed, even if no rank was informed yet."""
        with self._lock:
            return self._killed.get(rank) is _KILLED

    # -- for members -------------------------------------------------------------------------------

    def verdict(self, rank: int, peer: int) -> tuple[RankwireError, int | None] | None:
        """Return why ``rank`` cannot reach ``peer``, and which rank caused it; None if it can."""
        with self._lock:
            if rank in self._left:
                return ChannelClosedError("this backend is closed"), None
            if rank in self._killed:
                return PeerLostError(rank, "this rank itself was killed"), None
            if peer in self._killed:
                fallen = self._killed[peer]
                loss = PeerLostError(peer, fallen.reason, remote_traceback=fallen.traceback)
                return loss, fallen.cause
            if rank != peer and link_between(rank, peer) in self._broken:
                return PeerLostError(peer, "the link to it is broken"), None
            if peer in self._left:
                return left(peer), None
        return None

    def gone_for(self, rank: int) -> set[int]:
        """Return the ranks that a rank cannot reach."""
        with self._lock:
            cut = {other for link in self._broken if rank in link for other in link}
            return (self._killed.keys() | self._left | cut) - {rank}

    def report(self, rank: int, notice: Notice, patience: float) -> None:
        """Take a rank's report about a collective, and inform the ranks that need it."""
        if self._is_gone(rank):
            return
        with self._roll_lock:
            for other, told in self._roll.hear(rank, sanitize_notice(notice)):
                if not self._is_gone(other):
                    self.members[other].roll.deliver(told)

    def hear_agent(self, rank: int, says: AgentSays) -> bool:
        """Take the report of a rank's agent; return False if the rank is gone."""
        with self._lock:
            if rank in self._left or rank in self._killed:
                return False
            answers = self._attendance.hear(rank, says)
        self._answer(answers)
        return True

    def _answer(self, answers: Answers) -> None:
        for rank, number in answers:
            self.members[rank].on_agent_answer(number)

    def leave(self, rank: int) -> None:
        """Note that a rank leaves in good order: from now on its streams may end."""
        with self._lock:
            self._left.add(rank)
            answers = self._attendance.forget(rank)
        self._answer(answers)

    def fall(self, rank: int, fallen: Fallen) -> None:
        """Make a rank leave because of an error: its peers lose it and get the error."""
        is_new = self._kill(rank, fallen)
        self.leave(rank)
        if is_new:
            self._tell_others(rank)

    def depart(self) -> None:
        """Wait for the end of the threads of faults if all ranks are gone."""
        if self._end_if_empty():
            with self._lock:
                telling = self._telling
            for thread in telling:
                if thread is not runtime.current_thread():
                    self.clock.join(thread, _JOIN_LIMIT)

    # -- what befalls ranks and links --------------------------------------------------------------

    def _kill(self, rank: int, fallen: Fallen) -> bool:
        with self._lock:
            if rank in self._killed or rank in self._left:
                return False
            self._killed[rank] = fallen
            answers = self._attendance.forget(rank)
        self._answer(answers)
        self.members[rank].die()
        return True

    def _break(self, link: Link) -> None:
        with self._lock:
            self._broken.add(link)
        a, b = link
        self.members[a].cut(b)

    def _kill_in_passing(self, rank: int) -> None:
        if self._kill(rank, _KILLED):
            self._tell_in_background(partial(self._tell_death, rank))

    def _break_in_passing(self, link: Link) -> None:
        self._break(link)
        self._tell_in_background(partial(self._tell_break, link))

    def _tell_in_background(self, tell: Callable[[], None]) -> None:
        thread = runtime.Thread(target=tell, name="rankwire-tidings", daemon=True)
        with self._lock:  # the threads in ``depart`` find it started
            thread.start()
            self._telling = [*(each for each in self._telling if each.is_alive()), thread]

    def _tell_death(self, rank: int) -> None:
        with self._lock:
            callbacks = list(self._on_kill)
        for callback in callbacks:
            callback(rank)
        self.members[rank].end()
        self._tell_others(rank)
        self._end_if_empty()

    def _tell_others(self, rank: int) -> None:
        for other, member in enumerate(self.members):
            if other != rank and not self._is_gone(other):
                member.hear_of(rank)

    def _tell_break(self, link: Link) -> None:
        a, b = link
        for rank, peer in ((a, b), (b, a)):
            if not self._is_gone(rank):
                self.members[rank].hear_of(peer)

    def _is_gone(self, rank: int) -> bool:
        with self._lock:
            return rank in self._killed or rank in self._left

    def _end_if_empty(self) -> bool:
        with self._lock:
            is_empty = len(self._killed.keys() | self._left) == self.world_size
        if is_empty:
            self._timetable.end()
        return is_empty
