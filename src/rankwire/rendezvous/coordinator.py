"""Coordinate a world: gather its ranks, then watch them over their control connections.

The coordinator runs in rank 0 or in the launcher. Its states, in order::

    FORMING   ranks join in any order (``Roster``)                               -> FORMED, FAILED
    FORMED    a control connection that ends is a loss, and a restarted rank
              may rejoin (``WorldWatch``)                                        -> CLOSED
    FAILED    the timeout expired; the ranks present know which are missing      -> CLOSED
    CLOSED

All methods but ``wait_formed`` and ``close`` run on the acceptor's thread. A lock guards the state
for ``wait_formed``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum, auto
from functools import partial

import msgspec

from rankwire import runtime
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import (
    PeerLostError,
    ProtocolError,
    RankwireError,
    RendezvousError,
)
from rankwire.links.acceptor import Acceptor
from rankwire.links.connection import Connection
from rankwire.rendezvous.control_protocol import Standing, objection, tell
from rankwire.rendezvous.reachability import Reachability, allow_files
from rankwire.rendezvous.reports import Told
from rankwire.rendezvous.roster import FormedWorld, Roster
from rankwire.rendezvous.world_watch import WorldWatch
from rankwire.texts import name_ranks
from rankwire.transports.byte_stream import ByteStream
from rankwire.transports.tcp_stream import TcpAddress, expect_prompt_reading
from rankwire.wire.control_messages import (
    DEFAULT_PATIENCE,
    MAX_MEMBER_NBYTES,
    AgentSays,
    Answer,
    Failed,
    Fallen,
    Gone,
    Join,
    Known,
    Member,
    Notice,
    Patience,
    Question,
    Waiting,
    gone_by,
    unpack,
)
from rankwire.wire.frames import Frame, whole_of
from rankwire.wire.handshake import Hello, Status
from rankwire.wire.seals import Seals

_log = logging.getLogger("rankwire")

_REPORT_EVERY = 10.0  # seconds between log lines about missing ranks
# Seconds between two messages about them to all ranks. One message at each join would cost 520,000
# messages, 500 MB and 7 s of CPU time for 1,000 ranks.
_WAITING_EVERY = 1.0
# The control connection, and two during their handshakes (``room_for``).
_FILES_OF_RANK = 3


class _State(Enum):
    FORMING = auto()
    FORMED = auto()
    FAILED = auto()
    CLOSED = auto()


class Coordinator:
    """Gathers the ranks of a world, and watches them.

    ``me`` is the entry of rank 0, or None in a launcher, which may restart lost ranks
    (``are_restarted``). Ranks may ask for less ``patience``.
    """

    def __init__(
        self,
        me: Member | None,
        world_size: int,
        acceptor: Acceptor,
        *,
        key_of: Callable[[int], bytes],
        incarnation_of: Callable[[int], int] = lambda rank: 0,
        patience: Patience = DEFAULT_PATIENCE,
        told: Told,
        are_restarted: bool = False,
    ) -> None:
        self._me = me
        self._are_restarted = are_restarted
        self._acceptor = acceptor
        self._key_of = key_of
        self._incarnation_of = incarnation_of
        self._patience = patience
        self._told = told
        self._roster = Roster(world_size, me)
        self._reachability = Reachability(acceptor, self._answered)
        self._joining: set[int] = set()  # ranks that have sent their address
        self.watch = WorldWatch(world_size, self._roster.coordinator, acceptor, patience, told)
        self._state = _State.FORMING
        self._changed = runtime.Condition()
        acceptor.call_every(_WAITING_EVERY, self._tell_missing)
        if lacking := allow_files(_FILES_OF_RANK * world_size):
            text = "a world of %d ranks may need %d more open files than this process may have"
            _log.warning(text, world_size, lacking)

    def admit(self, hello: Hello) -> tuple[Status, int]:
        """Return whether a rank may join, or why not."""
        world_size = self._roster.world_size
        if hello.world_size != world_size:
            return Status.WRONG_WORLD_SIZE, world_size
        if not 0 <= hello.rank < world_size:
            return Status.INVALID_RANK, world_size
        if hello.rank in self.watch.controls or hello.rank == self._roster.coordinator:
            holder = self._roster.members.get(hello.rank)
            if self._state is _State.FORMING:
                first = holder.pid if holder else "unknown"
                text = "a second process says that it is rank %d; process %s was first"
                _log.warning(text, hello.rank, first)
            return Status.DUPLICATE_RANK, holder.pid if holder else 0
        is_back = self._state is _State.FORMED and self.watch.rejoins.is_expected(hello.rank)
        if self._state is not _State.FORMING and not is_back:
            return Status.NOT_EXPECTED, 0
        return Status.WELCOME, 0

    def enter(self, rank: int, sock: ByteStream, seals: Seals | None) -> None:
        """Own the control connection of an admitted rank."""
        expect_prompt_reading(sock)
        clock = self._acceptor.clock
        connection = Connection(
            sock, peer=rank, max_nbytes=MAX_MEMBER_NBYTES, clock=clock, seals=seals
        )
        self.watch.controls[rank] = connection
        if self._state is _State.FORMED:
            self.watch.rejoins.enter(rank)
        self._acceptor.watch(connection, partial(self._heard, rank), partial(self._ended, rank))

    def wait_formed(self, deadline: Deadline) -> None:
        """Wait until every rank has joined; on timeout, notify them and raise RendezvousError."""
        self._roster.deadline = deadline
        while True:
            with self._changed:
                patience = min(_REPORT_EVERY, deadline.sleep_limit())
                if self._acceptor.clock.wait_for(
                    self._changed, lambda: self._state is _State.FORMED, patience
                ):
                    return
                missing = self._roster.missing()
                if deadline.expired:
                    self._state = _State.FAILED
            if self._state is _State.FAILED:
                reason = f"the world did not form within {deadline.limit:g} s"
                if self._roster.unreached:
                    reason += f" ({'; '.join(self._roster.unreached.values())})"
                self._tell_failed(reason, missing)
                raise RendezvousError(reason, missing=missing)
            _log.warning("waiting for %s (%.0f s)", name_ranks(missing), deadline.waited)

    def expect_never(self, rank: int, reason: str) -> None:
        """Record that a rank will never join, and notify the waiting ranks, now and later."""
        self._roster.absent[rank] = reason
        self._tell_hopeless()

    def _tell_hopeless(self) -> None:
        absent = self._roster.never_to_come()
        if self._state is not _State.FORMING or not absent or not self.watch.controls:
            return
        reason = f"the world cannot form: {self._roster.absent[absent[0]]}"
        self.watch.tell_all(Failed(reason, absent, absent[0]))
        if not self._roster.is_hopeless:
            self._roster.is_hopeless = True
            self._told.on_hopeless(reason)

    def _heard(self, rank: int, frames: list[Frame]) -> None:
        self.watch.heard(rank)
        for frame in frames:
            message = unpack(whole_of(frame.payload))
            if words := objection(message, self._standing_of(rank)):
                _log.warning("rank %d is given up: it said to the coordinator %s", rank, words)
                raise ProtocolError(f"it said to the coordinator {words}")
            match message:
                case Join():
                    self._joining.add(rank)
                    self._reachability.check(self.watch.controls[rank], message)
                case Known():
                    self.watch.take_known(rank, message)
                case Notice() | AgentSays() | Question():
                    self.watch.take_report(rank, message)
                case Answer():
                    self.watch.reports.take_answer(rank, message)
                case Fallen():
                    self.watch.take_fallen(rank, message, self._roster.members)
                    return
                case Gone():
                    self._give_in(message)
                    return

    def _standing_of(self, rank: int) -> Standing:
        watch = self.watch
        return Standing(
            rank,
            has_joined=rank in self._joining,
            is_formed=watch.is_member(rank),
            coordinator=self._roster.coordinator,
            was_absent=watch.was_absent(),
            has_fallen=rank in watch.fallen,
        )

    def _answered(self, connection: Connection, join: Join, trouble: str) -> None:
        rank = join.member.rank
        if not trouble:
            self._join(join.member, join.patience)
            return
        where = TcpAddress(join.member.host, join.member.port)
        reason = f"rank {rank} cannot be reached at {where}, where it listens: {trouble}"
        self._roster.unreached[rank] = reason
        advice = "choose the address by listen= or advertise= (RANKWIRE_LISTEN, _ADVERTISE)"
        tell(connection, Failed(f"{reason}; {advice}", []))

    def _join(self, member: Member, patience: Patience) -> None:
        incarnation = self._incarnation_of(member.rank)
        member = msgspec.structs.replace(member, incarnation=incarnation)
        if self.watch.rejoins.is_under_way(member.rank):
            self.watch.rejoins.queue(member)
            self.watch.welcome_back()
            return
        with self._changed:
            if self._state is not _State.FORMING:
                return
            self._roster.enter(member)
            self._patience = self._patience.shorter(patience)
            if self._roster.is_complete:
                self._form()
                return
            self._roster.has_changed = True
        tell(self.watch.controls[member.rank], Waiting(self._roster.missing()))
        self._tell_hopeless()

    def _tell_missing(self) -> None:
        if self._state is not _State.FORMING:
            self._acceptor.call_no_more(self._tell_missing)
        elif self._roster.has_changed:
            self._roster.has_changed = False
            self.watch.tell_all(Waiting(self._roster.missing()))

    def _form(self) -> None:
        members = [member for _, member in sorted(self._roster.members.items())]
        coordinator = self._roster.coordinator
        world = FormedWorld(
            members, self._patience, coordinator, self._key_of, are_restarted=self._are_restarted
        )
        is_launcher = self._me is None
        self._told.on_formed(world.without_keys if is_launcher else world.as_told_to(coordinator))
        self.watch.begin(world, self._patience)  # send it to all ranks before this one continues
        self._state = _State.FORMED
        self._changed.notify_all()

    def _give_in(self, gone: Gone) -> None:
        """Notify all ranks that this process is lost, or they treat the reporter as lost."""
        self._state = _State.CLOSED
        self.watch.report(gone)
        self.dissolve()

    def _ended(self, rank: int, error: RankwireError) -> None:
        self.watch.controls.pop(rank).close()
        self._joining.discard(rank)
        self._reachability.forget(rank)
        if self._state is _State.FORMED:  # set on this thread only
            self.watch.ended(rank, error)
            return
        with self._changed:
            self._roster.strike(rank)
        self._roster.has_changed = True
        self._tell_hopeless()

    def expect_again(self, rank: int) -> None:
        """Allow a rank whose old process has ended to rejoin the formed world."""
        if (connection := self.watch.controls.get(rank)) is not None:  # its child may keep it open
            self._acceptor.unwatch(connection)
            self._ended(rank, PeerLostError(rank, "its process has ended"))
        self.watch.expect_again(rank)

    def _tell_failed(self, reason: str, missing: list[int]) -> None:
        told = runtime.Event()

        def tell() -> None:
            self.watch.tell_all(Failed(reason, missing))
            told.set()

        self._acceptor.call_soon(tell)
        self._acceptor.clock.wait(told, 1.0)

    def dissolve(self) -> None:
        """Disconnect from all ranks, on the acceptor's thread, which continues."""
        self._acceptor.call_no_more(self.watch.beat)
        for connection in self.watch.controls.values():
            self._acceptor.unwatch(connection)
        self.close()

    def close(self, fallen: Fallen | None = None) -> None:
        """Disconnect from all ranks after the acceptor stopped. ``fallen`` is rank 0's failure."""
        if self._state is _State.FORMED:
            self._pass_on_last_words()
        self._state = _State.CLOSED
        for connection in self.watch.controls.values():
            if fallen is None or self._me is None:
                connection.farewell(AT_ONCE)
            else:
                tell(connection, gone_by(self._me.rank, fallen))
            connection.close()
        self.watch.controls.clear()

    def _pass_on_last_words(self) -> None:
        """Notify the others of ranks that left or failed at the same moment."""
        for rank, connection in list(self.watch.controls.items()):
            try:
                while self.watch.controls.get(rank) is connection:
                    frames = connection.read_ready()
                    if frames is None:
                        break
                    self._heard(rank, frames)
            except RankwireError as error:
                connection.fail(error)
                self._ended(rank, error)
