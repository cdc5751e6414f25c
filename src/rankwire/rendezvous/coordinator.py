"""Coordinate a world: gather its ranks, then watch them over their control connections.

The coordinator runs in rank 0 or in the launcher. Its states, each left only downwards::

    FORMING   ranks join in any order; one that disconnects frees its place      -> FORMED, FAILED
    FORMED    every rank has the list; a control connection that ends is a loss;
              a restarted rank may rejoin                                        -> CLOSED
    FAILED    the deadline passed; the ranks present were told who is missing    -> CLOSED
    CLOSED

Once formed, all send heartbeats. Losses are told to all ranks at once, so that they name the same
rank and cause. If members have given up the coordinator, which was stopped, it gives in: it tells
all ranks that it is the one that is lost.

All methods but ``wait_formed`` and ``close`` run on the acceptor's thread. A lock guards the state
for ``wait_formed``.

Size: as for its class.
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
    ChannelClosedError,
    PeerLostError,
    ProtocolError,
    RankwireError,
    RendezvousError,
)
from rankwire.links.acceptor import Acceptor
from rankwire.links.connection import Connection
from rankwire.rendezvous import open_files
from rankwire.rendezvous.control_protocol import Standing, objection, tell
from rankwire.rendezvous.heartbeat import Silence
from rankwire.rendezvous.reachability import Reachability
from rankwire.rendezvous.reports import Reports, Told
from rankwire.rendezvous.roster import FormedWorld, Rejoins, Roster
from rankwire.texts import name_ranks
from rankwire.transports.sockets import AnySocket, TcpAddress, expect_prompt_reading
from rankwire.wire.control_messages import (
    DEFAULT_PATIENCE,
    MAX_MEMBER_NBYTES,
    AgentSays,
    Beat,
    Doing,
    Failed,
    Fallen,
    Gone,
    Join,
    Known,
    Member,
    Message,
    Patience,
    Waiting,
    gone_by,
    unpack,
)
from rankwire.wire.frames import Frame, whole_of
from rankwire.wire.handshake import Hello, Status
from rankwire.wire.notices import Notice
from rankwire.wire.seals import Seals

_log = logging.getLogger("rankwire")

_REPORT_EVERY = 10.0  # seconds between log lines about missing ranks
# Seconds between two messages about them to all ranks. With a message at each join, 1,000 ranks
# cost 520,000 messages, 500 MB and 7 s of CPU time.
_WAITING_EVERY = 1.0
# The control connection, and two in their handshake (``room_for``).
_FILES_OF_RANK = 3
# Seconds to send all ranks the list. A new connection between hosts takes 80 kB at once, the list
# of 400 ranks. The lists of 1,000 ranks take 1.1 s of CPU time, so more ranks have more time.
_WORLD_PATIENCE, _WORLD_PATIENCE_OF_RANK = 5.0, 0.02


class _State(Enum):
    FORMING = auto()
    FORMED = auto()
    FAILED = auto()
    CLOSED = auto()


class Coordinator:
    """Gathers the ranks of a world, and watches them.

    Args:
        me: The entry of rank 0; None in a launcher.
        world_size: How many ranks to wait for.
        acceptor: Reads the control connections.
        key_of: Returns the key with which a rank joins.
        incarnation_of: Returns how many times a rank was restarted alone.
        patience: How long a rank may be silent; ranks that join may ask for less.
        told: The callbacks.

    Size: all of it is one protocol on one set of connections, and their state.
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
    ) -> None:
        self._me = me
        self._acceptor = acceptor
        self._key_of = key_of
        self._incarnation_of = incarnation_of
        self._patience = patience
        self._told = told
        self._is_hopeless = False
        self._roster = Roster(world_size, me)
        self._reachability = Reachability(acceptor, self._answered)
        self._controls: dict[int, Connection] = {}
        self._joining: set[int] = set()  # ranks that have said where they listen
        self._silence = Silence(patience, (), self._acceptor.clock.now())
        self._given_up: set[int] = set()
        self._fallen: set[int] = set()  # ranks that have reported their own failure
        self._world: FormedWorld | None = None
        self._rejoins = Rejoins()
        self._reports = Reports(
            world_size,
            self._roster.coordinator,
            self._controls,
            is_member=self._is_member,
            told=told,
        )
        self._state = _State.FORMING
        self._changed = runtime.Condition()
        self._has_roster_changed = False  # since ranks were told who is missing
        acceptor.call_every(_WAITING_EVERY, self._tell_missing)
        if lacking := open_files.allow(_FILES_OF_RANK * world_size):
            text = "a world of %d ranks may need %d more open files than this process may have"
            _log.warning(text, world_size, lacking)

    # -- joining -----------------------------------------------------------------------------------

    def admit(self, hello: Hello) -> tuple[Status, int]:
        """Return whether a rank may join, or why not."""
        world_size = self._roster.world_size
        if hello.world_size != world_size:
            return Status.WRONG_WORLD_SIZE, world_size
        if not 0 <= hello.rank < world_size:
            return Status.INVALID_RANK, world_size
        if hello.rank in self._controls or hello.rank == self._roster.coordinator:
            holder = self._roster.members.get(hello.rank)
            if self._state is _State.FORMING:
                first = holder.pid if holder else "unknown"
                text = "a second process says that it is rank %d; process %s was first"
                _log.warning(text, hello.rank, first)
            return Status.DUPLICATE_RANK, holder.pid if holder else 0
        is_back = self._state is _State.FORMED and self._rejoins.is_expected(hello.rank)
        if self._state is not _State.FORMING and not is_back:
            return Status.NOT_EXPECTED, 0
        return Status.WELCOME, 0

    def enter(self, rank: int, sock: AnySocket, seals: Seals | None) -> None:
        """Take the control connection of an admitted rank."""
        expect_prompt_reading(sock)
        clock = self._acceptor.clock
        connection = Connection(
            sock, peer=rank, max_nbytes=MAX_MEMBER_NBYTES, clock=clock, seals=seals
        )
        self._controls[rank] = connection
        if self._state is _State.FORMED:
            self._rejoins.enter(rank)
        self._acceptor.watch(connection, partial(self._heard, rank), partial(self._ended, rank))

    def wait_formed(self, deadline: Deadline) -> None:
        """Wait until every rank has joined.

        Raises:
            RendezvousError: Ranks are missing; the others were told.
        """
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
        """Record that a rank will never join, and tell the ranks that wait, now and later."""
        self._roster.absent[rank] = reason
        self._tell_hopeless()

    def _tell_hopeless(self) -> None:
        absent = self._roster.never_to_come()
        if self._state is not _State.FORMING or not absent or not self._controls:
            return
        reason = f"the world cannot form: {self._roster.absent[absent[0]]}"
        self._tell_all(Failed(reason, absent, absent[0]))
        if not self._is_hopeless:
            self._is_hopeless = True
            self._told.on_hopeless(reason)

    def _heard(self, rank: int, frames: list[Frame]) -> None:
        self._silence.heard(rank, self._acceptor.clock.now())
        for frame in frames:
            message = unpack(whole_of(frame.payload))
            if words := objection(message, self._standing_of(rank)):
                _log.warning("rank %d is given up: it said to the coordinator %s", rank, words)
                raise ProtocolError(f"it said to the coordinator {words}")
            match message:
                case Join():
                    self._joining.add(rank)
                    self._reachability.check(self._controls[rank], message)
                case Known():
                    self._rejoins.know(rank, message.rank, message.incarnation)
                    self._welcome_back()
                case Notice() | AgentSays():
                    self.take_report(rank, message)
                case Doing():
                    self._reports.take_doing(rank, message)
                case Fallen():
                    self._fallen.add(rank)
                    self._reports.ask(message.waited_for)
                    gone = gone_by(rank, message)
                    if gone.cause not in range(self._roster.world_size):
                        gone = msgspec.structs.replace(gone, cause=None)
                    ranks = [other for other in gone.waited_for if other in self._roster.members]
                    gone = msgspec.structs.replace(gone, waited_for=ranks)
                    self._lose(gone)
                    return
                case Gone():
                    self._give_in(message)
                    return

    def _standing_of(self, rank: int) -> Standing:
        return Standing(
            rank,
            has_joined=rank in self._joining,
            is_formed=self._is_member(rank),
            coordinator=self._roster.coordinator,
            was_absent=self._silence.was_absent(self._acceptor.clock.now()),
            has_fallen=rank in self._fallen,
            was_asked=self._reports.is_asked(rank),
        )

    def _is_member(self, rank: int) -> bool:
        """Return whether a connected rank was told the formed world."""
        return self._state is _State.FORMED and not self._rejoins.is_under_way(rank)

    def _answered(self, connection: Connection, join: Join, trouble: str) -> None:
        """Join a rank that others can connect to; refuse any other."""
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
        if self._rejoins.is_under_way(member.rank):
            self._rejoins.queue(member)
            self._welcome_back()
            return
        with self._changed:
            if self._state is not _State.FORMING:
                return
            self._roster.enter(member)
            self._patience = self._patience.shorter(patience)
            if self._roster.is_complete:
                self._form()
                return
            self._has_roster_changed = True
        tell(self._controls[member.rank], Waiting(self._roster.missing()))
        self._tell_hopeless()

    def _tell_missing(self) -> None:
        if self._state is not _State.FORMING:
            self._acceptor.call_no_more(self._tell_missing)
        elif self._has_roster_changed:
            self._has_roster_changed = False
            self._tell_all(Waiting(self._roster.missing()))

    def _form(self) -> None:
        members = [member for _, member in sorted(self._roster.members.items())]
        coordinator = self._roster.coordinator
        self._world = world = FormedWorld(members, self._patience, coordinator, self._key_of)
        is_launcher = self._me is None
        self._told.on_formed(world.without_keys if is_launcher else world.as_told_to(coordinator))
        # Before this rank goes on, so that all are ready together.
        limit = _WORLD_PATIENCE + _WORLD_PATIENCE_OF_RANK * len(members)
        patience = Deadline(limit, self._acceptor.clock)
        for rank, connection in list(self._controls.items()):
            tell(connection, world.as_told_to(rank), patience)
        self._silence = Silence(self._patience, self._controls, self._acceptor.clock.now())
        self._acceptor.call_every(self._patience.beat, self._beat)
        self._state = _State.FORMED
        self._changed.notify_all()

    # -- rejoining ---------------------------------------------------------------------------------

    def expect_again(self, rank: int) -> None:
        """Allow a rank to rejoin the formed world, whose old process has ended."""
        if (connection := self._controls.get(rank)) is not None:  # its child may hold it open
            self._acceptor.unwatch(connection)
            self._ended(rank, PeerLostError(rank, "its process has ended"))
        self._given_up.discard(rank)
        self._fallen.discard(rank)
        if self._state is _State.FORMED:
            self._rejoins.expect(rank)

    def _welcome_back(self) -> None:
        """Advance the ranks that rejoin as far as possible now."""
        world = self._world
        assert world is not None
        while True:
            knowing = [rank for rank in self._members() if rank not in self._given_up]
            if (member := self._rejoins.announce(knowing)) is not None:
                world.take_back(member)
                self._told.on_joined(member)
                for rank, connection in self._members().items():
                    tell(connection, world.joined_as_told_to(rank, member))
            if (member := self._rejoins.complete()) is None:
                return
            self._let_in_again(member.rank, world)

    def _let_in_again(self, rank: int, world: FormedWorld) -> None:
        """Tell a rank the world and its losses: it is a member again."""
        connection = self._controls[rank]
        patience = Deadline(_WORLD_PATIENCE, self._acceptor.clock)
        tell(connection, world.as_told_to(rank), patience)
        for gone in world.gone.values():
            tell(connection, gone, patience)
        self._silence.watch(rank, self._acceptor.clock.now())

    def _members(self) -> dict[int, Connection]:
        """Return the control connections of all ranks but those that rejoin."""
        return {
            rank: connection
            for rank, connection in self._controls.items()
            if not self._rejoins.is_under_way(rank)
        }

    # -- once formed -------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Send a heartbeat, and judge the ranks that sent none."""
        beat = Beat(list(self._silence.lengths(self._acceptor.clock.now()).items()))
        self._tell_all(beat)
        for change in self._silence.judge(self._acceptor.clock.now()):
            if isinstance(change, Gone):
                self._lose(change)
            else:
                self._told.on_suspected(change)
                self._tell_all(change)

    def _lose(self, gone: Gone) -> None:
        """Give up a connected rank; it is told too, in case its process wakes up."""
        self._silence.forget(gone.rank)
        self._given_up.add(gone.rank)
        self.report(gone)
        self._rejoins.excuse(gone.rank)
        self._welcome_back()

    def take_report(self, rank: int, message: Notice | AgentSays) -> None:
        """Take the report of a rank, perhaps this one, and tell the ranks that need to know."""
        if isinstance(message, Notice):
            self._reports.take_notice(rank, message)
        elif rank not in self._given_up:
            self._reports.take_agent(rank, message)

    def _give_in(self, gone: Gone) -> None:
        """Tell all ranks that this process is lost, as a member has reported.

        Without this, the others would take the members that gave it up for lost.
        """
        self._state = _State.CLOSED
        self.report(gone)
        self.dissolve()

    def _ended(self, rank: int, error: RankwireError) -> None:
        connection = self._controls.pop(rank)
        connection.close()
        self._joining.discard(rank)
        self._reachability.forget(rank)
        if self._state is not _State.FORMED:  # which it becomes on this thread only
            with self._changed:
                self._roster.strike(rank)
            self._has_roster_changed = True
            self._tell_hopeless()
            return
        self._silence.forget(rank)
        self._reports.forget_question(rank)
        is_on_its_way = self._rejoins.is_under_way(rank)
        is_unknown = is_on_its_way and not self._rejoins.fall_back(rank)
        if rank not in self._given_up and not is_unknown:
            orderly = isinstance(error, ChannelClosedError) and not is_on_its_way
            reason = "" if orderly else self._told.ending_of(rank)
            self.report(Gone(rank, reason or getattr(error, "reason", error.message), orderly))
        self._rejoins.excuse(rank)
        self._welcome_back()

    def silences(self) -> dict[int, float]:
        """Return the seconds of silence of the ranks that missed a beat. Safe from any thread."""
        return self._silence.lengths(self._acceptor.clock.now())

    def report(self, gone: Gone) -> None:
        """Tell all ranks that a rank is gone."""
        if self._world is not None:
            self._world.gone[gone.rank] = gone
        self._reports.forget_notices(gone.rank)
        self._told.on_gone(gone)
        self._tell_all(gone)
        self._reports.forget_agents(gone.rank)

    def _tell_all(self, message: Message) -> None:
        for connection in self._members().values():
            tell(connection, message)

    def _tell_failed(self, reason: str, missing: list[int]) -> None:
        told = runtime.Event()

        def tell() -> None:
            self._tell_all(Failed(reason, missing))
            told.set()

        self._acceptor.call_soon(tell)
        self._acceptor.clock.wait(told, 1.0)

    def dissolve(self) -> None:
        """Disconnect from all ranks. On the acceptor's thread, which continues."""
        self._acceptor.call_no_more(self._beat)
        for connection in self._controls.values():
            self._acceptor.unwatch(connection)
        self.close()

    def close(self, fallen: Fallen | None = None) -> None:
        """Disconnect from all ranks, after the acceptor has stopped.

        Args:
            fallen: The failure of rank 0, if it does not leave in an orderly way.
        """
        if self._state is _State.FORMED:
            self._pass_on_last_words()
        self._state = _State.CLOSED
        for connection in self._controls.values():
            if fallen is None or self._me is None:
                connection.farewell(AT_ONCE)
            else:
                tell(connection, gone_by(self._me.rank, fallen))
            connection.close()
        self._controls.clear()

    def _pass_on_last_words(self) -> None:
        """Tell the others which ranks left or failed at the same moment."""
        for rank, connection in list(self._controls.items()):
            try:
                while self._controls.get(rank) is connection:
                    frames = connection.read_ready()
                    if frames is None:
                        break
                    self._heard(rank, frames)
            except RankwireError as error:
                connection.fail(error)
                self._ended(rank, error)
