"""Pass on what ranks report to the coordinator about collectives and agents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from rankwire.links.connection import Connection
from rankwire.rendezvous.control_protocol import tell
from rankwire.rendezvous.roll import Answers, Attendance, Roll
from rankwire.wire.control_messages import (
    AgentAnswer,
    AgentSays,
    Ask,
    Doing,
    Gone,
    Member,
    Notice,
    Suspected,
    World,
)


class Told(NamedTuple):
    """The callbacks of a coordinator. They run on the acceptor's thread and must not block.

    Attributes:
        on_formed: The world is complete; called before any other rank is notified.
        on_gone: A rank has died or left after the world formed, also by ``close``; with the
            coordinator's own rank, or -1: the ranks have given up the coordinator.
        on_suspected: A rank has become silent, or is heard again.
        on_hopeless: Another rank will never join; called once, after waiting ranks were notified.
        on_joined: A restarted rank is back; called when the others are notified.
        on_doing: A rank has reported what it does and which ranks it waits for.
        on_notice: A notice about a collective, for the coordinator's own rank.
        ending_of: Returns how the process of a rank ended whose connection closed without a
            message; empty if that is not known yet.
        on_agent_answer: The message of an agent of the coordinator's own rank is answered.
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


class Reports:
    """Keeps the reports of ranks, and notifies the ranks that need them. For one thread.

    The coordinator changes ``controls``, the control connections by rank. ``roll`` has the
    collectives in which ranks wait; ``asked`` has the ranks that were asked what they do, and
    whether they have answered.
    """

    def __init__(
        self,
        world_size: int,
        coordinator: int,
        controls: Mapping[int, Connection],
        *,
        is_member: Callable[[int], bool],
        told: Told,
    ) -> None:
        self._coordinator = coordinator
        self._controls = controls
        self._is_member = is_member
        self._told = told
        self._attendance = Attendance()
        self.roll = Roll(world_size)
        self.asked: dict[int, bool] = {}

    def take_notice(self, rank: int, notice: Notice) -> None:
        """Take a rank's report about a collective."""
        for other, told in self.roll.hear(rank, notice):
            if other == self._coordinator:
                self._told.on_notice(told)
            elif other in self._controls and self._is_member(other):
                tell(self._controls[other], told)

    def take_agent(self, rank: int, says: AgentSays) -> None:
        """Take a rank's report about an agent."""
        self._answer(self._attendance.hear(rank, says))

    def forget_agents(self, rank: int) -> None:
        """Drop the agents of a rank that is gone, and answer the agents that waited for them."""
        self._answer(self._attendance.forget(rank))

    def _answer(self, answers: Answers) -> None:
        for rank, number in answers:
            if rank in self._controls:
                tell(self._controls[rank], AgentAnswer(number))
        for rank, number in answers:  # this rank last: its answer may end this process
            if rank == self._coordinator:
                self._told.on_agent_answer(number)

    def ask(self, ranks: Iterable[int]) -> None:
        """Ask ranks what they do, each once. To be called before they learn of a failure."""
        for rank in ranks:
            if rank in self._controls and rank not in self.asked and self._is_member(rank):
                self.asked[rank] = False
                tell(self._controls[rank], Ask())

    def is_asked(self, rank: int) -> bool:
        """Return whether a rank was asked what it does, and has not answered."""
        return self.asked.get(rank) is False

    def take_doing(self, rank: int, doing: Doing) -> None:
        """Take a rank's answer, and ask the ranks that it waits for."""
        self.asked[rank] = True
        self._told.on_doing(rank, doing)
        self.ask(doing.waits_for)
