"""The coordinator's side of the rendezvous, and of the control connections afterwards.

It runs in rank 0, or in the launcher: then rank 0 is a rank like any other. States, each left only
downwards::

    FORMING   ranks join in any order; one that hangs up frees its place        -> FORMED, FAILED
    FORMED    every rank has the list; an end of a control connection is a death;
              a rank that was started anew may come back (``returning``)         -> CLOSED
    FAILED    the deadline passed; everyone present was told who is missing      -> CLOSED
    CLOSED

Once formed, everyone says every beat that it lives. Who is silent for too long is suspected, then
given up; who falls by an error says so first. All this is told to all others at once, so that they
name the same rank and the same cause. A coordinator that was silent itself, for so long that a
member has given it up, gives in: it tells all that it is the one who is gone. What a rank may say
is in ``rights``; who says anything else is given up.

All methods but ``wait_formed`` and ``close`` run on the acceptor's thread. One lock guards the
state because ``wait_formed`` looks at it.

Size: as for its class.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import NamedTuple

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
from rankwire.rendezvous.attendance import Answers, Attendance
from rankwire.rendezvous.control_protocol import Standing, objection, tell
from rankwire.rendezvous.heartbeat import Silence
from rankwire.rendezvous.reachability import Reachability
from rankwire.rendezvous.roll import Roll
from rankwire.rendezvous.roster import FormedWorld, Rejoins, Roster
from rankwire.texts import name_ranks
from rankwire.transports.sockets import AnySocket, TcpAddress, expect_prompt_reading
from rankwire.wire.control_messages import (
    DEFAULT_PATIENCE,
    MAX_MEMBER_NBYTES,
    AgentAnswer,
    AgentSays,
    Ask,
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
    Suspected,
    Waiting,
    World,
    gone_by,
    unpack,
)
from rankwire.wire.frames import Frame
from rankwire.wire.handshake import Hello, Status
from rankwire.wire.loans import whole_of
from rankwire.wire.notices import Notice
from rankwire.wire.seals import Seals

_log = logging.getLogger("rankwire")

_REPORT_EVERY = 10.0  # seconds between log lines about missing ranks
# Seconds between two messages about them to all. Telling all at each join, 1,000 ranks that join
# cost 520,000 messages, 500 MB and 7 s of CPU time here.
_WAITING_EVERY = 1.0
# A rank has a control connection, and may have two more in their handshake (``room_for``).
_FILES_OF_RANK = 3
# Seconds for all ranks, which wait for nothing else, to take the list of all. Between hosts a new
# connection takes 80 kB at once, the list of 400 ranks. To make and send the lists of 1,000 ranks
# takes 1.1 s of CPU time here, so more ranks have more time.
_WORLD_PATIENCE, _WORLD_PATIENCE_OF_RANK = 5.0, 0.02


class _State(Enum):
    FORMING = auto()
    FORMED = auto()
    FAILED = auto()
    CLOSED = auto()


class Told(NamedTuple):
    """Whom the coordinator tells what, on the acceptor's thread. None of them may block.

    Attributes:
        on_formed: That the world is complete, before any other rank is told.
        on_gone: That a rank has died or left after the world formed, also by ``close``; and with
            the coordinator's own rank, or -1, that it was itself given up.
        on_suspected: That a rank has become silent, or is heard again.
        on_hopeless: Once, with the reason, that ranks which wait were told that another will never
            come.
        on_joined: That a rank which was started anew is back, as soon as others are told.
        on_doing: What a rank does for which others have waited in vain, and for whom it waits.
        on_notice: Something about a collective, for the rank in whose process the coordinator is.
        ending_of: Asked, when the connection of a rank has ended without a word, how its process
            has: that is told to all. Empty if it is not known at that moment.
        on_agent_answer: What an agent of the coordinator's own rank has said under a number is
            answered.
    """

    on_formed: Callable[[World], None] = lambda world: None
    on_gone: Callable[[Gone], None] = lambda gone: None
    on_suspected: Callable[[Suspected], None] = lambda suspected: None
    on_hopeless: Callable[[str], None] = lambda reason: None
    on_joined: Callable[[Member], None] = lambda member: None
    on_doing: Callable[[int, Doing], None] = lambda rank, doing: None
    on_notice: Callable[[Notice], None] = lambda notice: None
    ending_of: Callable[[int], str] = lambda rank: ""
    on_agent_answer: Callable[[int], None] = lambda number: None


class Coordinator:
    """Gathers the ranks of a world.

    Args:
        me: Rank 0, if this is it; None in a launcher.
        world_size: How many ranks to wait for.
        acceptor: Reads the control connections.
        key_of: Returns the key of a rank, by which it has joined.
        incarnation_of: Returns how many times a rank was started anew alone.
        patience: How long a rank may be silent; ranks that join may ask for less.
        told: Who is told of what happens.

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
        self._joining: set[int] = set()  # these have said where they listen
        self._silence = Silence(patience, (), self._acceptor.clock.now())
        self._given_up: set[int] = set()
        self._fallen: set[int] = set()  # these have said so
        self._asked: dict[int, bool] = {}  # what they do, each once; whether they have said it
        self._attendance = Attendance()
        self._world: FormedWorld | None = None
        self._rejoins = Rejoins()
        self._roll = Roll(world_size)
        self._state = _State.FORMING
        self._changed = runtime.Condition()
        self._has_roster_changed = False  # since all were told who is missing
        acceptor.call_every(_WAITING_EVERY, self._tell_missing)
        if lacking := open_files.allow(_FILES_OF_RANK * world_size):
            text = "a world of %d ranks may need %d more open files than this process may have"
            _log.warning(text, world_size, lacking)

    # -- joining -----------------------------------------------------------------------------------

    def admit(self, hello: Hello) -> tuple[Status, int]:
        """Judge a rank that wants to join."""
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
        """Take the control connection of a rank that was welcomed."""
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
        """Return once every rank has joined.

        Raises:
            RendezvousError: Some did not; all others were told.
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
        """Hear that a rank will not join any more; who waits for it, or will, is told at once."""
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
                    self._asked[rank] = True
                    self._told.on_doing(rank, message)
                    self._ask_what_they_do(message.waits_for)
                case Fallen():
                    self._fallen.add(rank)
                    self._ask_what_they_do(message.waited_for)
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
            was_asked=self._asked.get(rank) is False,
        )

    def _is_member(self, rank: int) -> bool:
        """Whether a rank that is connected is in the world: it has formed, and it knows it."""
        return self._state is _State.FORMED and not self._rejoins.is_under_way(rank)

    def _answered(self, connection: Connection, join: Join, trouble: str) -> None:
        """Let a rank in if others can connect to it."""
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
        """Tell all ranks that wait who is missing, if that has changed."""
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
        # Told before this rank goes on, so that all are ready together.
        limit = _WORLD_PATIENCE + _WORLD_PATIENCE_OF_RANK * len(members)
        patience = Deadline(limit, self._acceptor.clock)
        for rank, connection in list(self._controls.items()):
            tell(connection, world.as_told_to(rank), patience)
        self._silence = Silence(self._patience, self._controls, self._acceptor.clock.now())
        self._acceptor.call_every(self._patience.beat, self._beat)
        self._state = _State.FORMED
        self._changed.notify_all()

    # -- coming back -------------------------------------------------------------------------------

    def expect_again(self, rank: int) -> None:
        """Hear that a rank's process is gone and another one was started in its place.

        Only after this is a rank let into a world that has formed: while its process lives, no
        other takes its place.
        """
        if (connection := self._controls.get(rank)) is not None:  # a child of its may hold it open
            self._acceptor.unwatch(connection)
            self._ended(rank, PeerLostError(rank, "its process has ended"))
        self._given_up.discard(rank)
        self._fallen.discard(rank)
        if self._state is _State.FORMED:
            self._rejoins.expect(rank)

    def _welcome_back(self) -> None:
        """Take those who have come back some steps further, as far as they can go now."""
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
        """Tell a rank the world as it is now, and who of it is gone: it is a member again."""
        connection = self._controls[rank]
        patience = Deadline(_WORLD_PATIENCE, self._acceptor.clock)
        tell(connection, world.as_told_to(rank), patience)
        for gone in world.gone.values():
            tell(connection, gone, patience)
        self._silence.watch(rank, self._acceptor.clock.now())

    def _members(self) -> dict[int, Connection]:
        """Return the control connections of those who know the world."""
        return {
            rank: connection
            for rank, connection in self._controls.items()
            if not self._rejoins.is_under_way(rank)
        }

    # -- afterwards --------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Say that this process lives, and judge who has not said so."""
        beat = Beat(list(self._silence.lengths(self._acceptor.clock.now()).items()))
        self._tell_all(beat)
        for change in self._silence.judge(self._acceptor.clock.now()):
            if isinstance(change, Gone):
                self._lose(change)
            else:
                self._told.on_suspected(change)
                self._tell_all(change)

    def _lose(self, gone: Gone) -> None:
        """Give up a rank whose connection stands; it is told too, in case it wakes up."""
        self._silence.forget(gone.rank)
        self._given_up.add(gone.rank)
        self.report(gone)
        self._rejoins.excuse(gone.rank)
        self._welcome_back()

    def take_report(self, rank: int, message: Notice | AgentSays) -> None:
        """Take what a rank, perhaps this one, reports; tell the ranks that need to know."""
        if isinstance(message, AgentSays):
            if rank not in self._given_up:
                self._answer(self._attendance.hear(rank, message))
            return
        for other, told in self._roll.hear(rank, message):
            if other == self._roster.coordinator:
                self._told.on_notice(told)
            elif other in self._controls and self._is_member(other):
                tell(self._controls[other], told)

    def _answer(self, answers: Answers) -> None:
        own = self._roster.coordinator
        for rank, number in answers:
            if rank in self._controls:
                tell(self._controls[rank], AgentAnswer(number))
        for rank, number in answers:  # this rank last: it may end at once, and with it this object
            if rank == own:
                self._told.on_agent_answer(number)

    def _ask_what_they_do(self, ranks: list[int]) -> None:
        """Ask ranks that others wait for. Before anyone hears of a fall, which would move them."""
        for rank in ranks:
            if rank in self._controls and rank not in self._asked and self._is_member(rank):
                self._asked[rank] = False
                tell(self._controls[rank], Ask())

    def _give_in(self, gone: Gone) -> None:
        """Members have given up this process; they live, though their connections end.

        Those that have not are told the same, so that no rank is left that takes the others for
        dead.
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
        self._asked.pop(rank, None)
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
        """Tell everyone that a rank is gone."""
        if self._world is not None:
            self._world.gone[gone.rank] = gone
        self._roll.forget(gone.rank)
        self._told.on_gone(gone)
        self._tell_all(gone)
        self._answer(self._attendance.forget(gone.rank))

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
        """Leave a world to itself. On the acceptor's thread, which goes on."""
        self._acceptor.call_no_more(self._beat)
        for connection in self._controls.values():
            self._acceptor.unwatch(connection)
        self.close()

    def close(self, fallen: Fallen | None = None) -> None:
        """Leave. After the acceptor has stopped.

        Args:
            fallen: The error because of which rank 0 leaves, if it does not leave in good order.
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
        """Tell the others who left or fell at the same moment: after this none can."""
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
