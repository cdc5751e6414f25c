"""Watch a formed world. All ranks are notified of a loss at once, to name the same cause."""

from __future__ import annotations

from collections.abc import Container

import msgspec

from rankwire.deadline import Deadline
from rankwire.errors import ChannelClosedError, RankwireError
from rankwire.links.acceptor import Acceptor
from rankwire.links.connection import Connection
from rankwire.rendezvous.control_protocol import tell
from rankwire.rendezvous.heartbeat import Silence
from rankwire.rendezvous.reports import Reports, Told
from rankwire.rendezvous.roster import FormedWorld, Rejoins
from rankwire.wire.control_messages import (
    Beat,
    Fallen,
    Gone,
    Known,
    Message,
    Notice,
    Patience,
    Question,
    Report,
    gone_by,
)

# Seconds to send all ranks the list. A new connection between hosts accepts 80 kB at once, the list
# of 400 ranks. Sending 1,000 ranks their lists takes 1.1 s of CPU time, so add time for each.
_WORLD_PATIENCE, _WORLD_PATIENCE_OF_RANK = 5.0, 0.02


class WorldWatch:
    """Watches the ranks of a world after ``begin``. On the acceptor's thread.

    It has ``controls`` also while the world forms. ``fallen`` are ranks that reported a failure.
    """

    def __init__(
        self,
        world_size: int,
        coordinator: int,
        acceptor: Acceptor,
        patience: Patience,
        told: Told,
    ) -> None:
        self._world_size = world_size
        self._acceptor = acceptor
        self._told = told
        self.controls: dict[int, Connection] = {}
        self._silence = Silence(patience, (), acceptor.clock.now())
        self._given_up: set[int] = set()
        self.fallen: set[int] = set()
        self._world: FormedWorld | None = None
        self.rejoins = Rejoins()
        self.reports = Reports(
            world_size,
            coordinator,
            self.controls,
            is_member=self.is_member,
            now=acceptor.clock.now,
            told=told,
        )

    def begin(self, world: FormedWorld, patience: Patience) -> None:
        """Send the world to all ranks, and start watching them."""
        self._world = world
        limit = _WORLD_PATIENCE + _WORLD_PATIENCE_OF_RANK * self._world_size
        deadline = Deadline(limit, self._acceptor.clock)
        for rank, connection in list(self.controls.items()):
            tell(connection, world.as_told_to(rank), deadline)
        self._silence = Silence(patience, self.controls, self._acceptor.clock.now())
        self._acceptor.call_every(patience.beat, self.beat)

    def is_member(self, rank: int) -> bool:
        """Return whether a connected rank has received the formed world."""
        return self._world is not None and not self.rejoins.is_under_way(rank)

    def _members(self) -> dict[int, Connection]:
        is_on_its_way = self.rejoins.is_under_way
        return {rank: control for rank, control in self.controls.items() if not is_on_its_way(rank)}

    def tell_all(self, message: Message) -> None:
        """Send a message to all ranks except those that rejoin."""
        for connection in self._members().values():
            tell(connection, message)

    def heard(self, rank: int) -> None:
        """Record a sign of life from a rank."""
        self._silence.heard(rank, self._acceptor.clock.now())

    def was_absent(self) -> bool:
        """Return whether this process was stopped so long that ranks may have given it up."""
        return self._silence.was_absent(self._acceptor.clock.now())

    def silences(self) -> dict[int, float]:
        """Return the seconds of silence of the ranks that missed a beat. Safe from any thread."""
        return self._silence.lengths(self._acceptor.clock.now())

    def beat(self) -> None:
        """Send a heartbeat, and judge the silent ranks."""
        self.tell_all(Beat(list(self.silences().items())))
        for change in self._silence.judge(self._acceptor.clock.now()):
            if isinstance(change, Gone):
                self._lose(change)
            else:
                self._told.on_suspected(change)
                self.tell_all(change)

    def _lose(self, gone: Gone) -> None:
        """Give up a connected rank and notify it too, in case its process resumes."""
        self._silence.forget(gone.rank)
        self._given_up.add(gone.rank)
        self.report(gone)
        self.rejoins.excuse(gone.rank)
        self.welcome_back()

    def report(self, gone: Gone) -> None:
        """Notify all ranks that a rank is gone."""
        if self._world is not None:
            self._world.gone[gone.rank] = gone
        self.reports.roll.forget(gone.rank)
        self._told.on_gone(gone)
        self.tell_all(gone)
        self.reports.forget_agents(gone.rank)

    def ended(self, rank: int, error: RankwireError) -> None:
        """Report a rank whose control connection ended."""
        self._silence.forget(rank)
        self.reports.forget_questions(rank)
        is_on_its_way = self.rejoins.is_under_way(rank)
        is_unknown = is_on_its_way and not self.rejoins.fall_back(rank)
        if rank not in self._given_up and not is_unknown:
            orderly = isinstance(error, ChannelClosedError) and not is_on_its_way
            reason = "" if orderly else self._told.ending_of(rank)
            self.report(Gone(rank, reason or getattr(error, "reason", error.message), orderly))
        self.rejoins.excuse(rank)
        self.welcome_back()

    def take_report(self, rank: int, message: Report) -> None:
        """Handle a rank's report or question."""
        if isinstance(message, Notice):
            self.reports.take_notice(rank, message)
        elif isinstance(message, Question):
            self.reports.take_question(rank, message)
        elif rank not in self._given_up:
            self.reports.take_agent(rank, message)

    def take_fallen(self, rank: int, fallen: Fallen, members: Container[int]) -> None:
        """Give up a rank that reports its own failure, and ask the ranks it waited for."""
        self.fallen.add(rank)
        self.reports.ask(fallen.waited_for)
        gone = gone_by(rank, fallen)
        cause = gone.cause if gone.cause in range(self._world_size) else None
        waited_for = [other for other in gone.waited_for if other in members]
        self._lose(msgspec.structs.replace(gone, cause=cause, waited_for=waited_for))

    def expect_again(self, rank: int) -> None:
        """Allow a rank whose old process has ended to rejoin."""
        self._given_up.discard(rank)
        self.fallen.discard(rank)
        if self._world is not None:
            self.rejoins.expect(rank)

    def take_known(self, rank: int, known: Known) -> None:
        """Record that a rank acknowledged the announced one."""
        self.rejoins.know(rank, known.rank, known.incarnation)
        self.welcome_back()

    def welcome_back(self) -> None:
        """Advance the ranks that rejoin as far as possible."""
        world = self._world
        assert world is not None
        while True:
            knowing = [rank for rank in self._members() if rank not in self._given_up]
            if (member := self.rejoins.announce(knowing)) is not None:
                world.take_back(member)
                self._told.on_joined(member)
                for rank, connection in self._members().items():
                    tell(connection, world.joined_as_told_to(rank, member))
            if (member := self.rejoins.complete()) is None:
                return
            self._let_in_again(member.rank, world)

    def _let_in_again(self, rank: int, world: FormedWorld) -> None:
        connection = self.controls[rank]
        patience = Deadline(_WORLD_PATIENCE, self._acceptor.clock)
        tell(connection, world.as_told_to(rank), patience)
        for gone in world.gone.values():
            tell(connection, gone, patience)
        self._silence.watch(rank, self._acceptor.clock.now())
