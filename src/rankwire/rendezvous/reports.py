"""Forward the reports, questions and answers of ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from rankwire.links.connection import Connection
from rankwire.rendezvous.control_protocol import tell
from rankwire.rendezvous.roll import Answers, Attendance, Roll
from rankwire.wire.control_messages import (
    AgentAnswer,
    AgentSays,
    Answer,
    Gone,
    Member,
    Notice,
    Question,
    Suspected,
    World,
)

_log = logging.getLogger("rankwire")

_MOST_OPEN = 64  # unanswered questions of one rank
_OPEN_FOR = 1.0  # seconds; no rank waits this long for an answer
_SUMMARY = -1  # the asker of questions for the summary of a failure


class Told(NamedTuple):
    """The callbacks of a coordinator. They run on the acceptor's thread and must not block.

    Attributes:
        on_formed: The world is complete; called before any other rank is notified.
        on_gone: A rank died or left after the world formed, also during ``close``. The rank is the
            coordinator's own, or -1, if the ranks gave up the coordinator.
        on_suspected: A rank became silent, or was heard again.
        on_hopeless: Another rank will never join; called once, after waiting ranks were notified.
        on_joined: A restarted rank rejoined; called when the others are notified.
        on_doing: A rank for which a failed one had waited reported what it is doing.
        on_question: Returns what the coordinator's own rank is doing. ``on_answer``, ``on_notice``
            and ``on_agent_answer`` are messages to that rank.
        ending_of: Returns how a rank's process ended whose connection closed without a message, or
            "".
    """

    on_formed: Callable[[World], None] = lambda world: None
    on_gone: Callable[[Gone], None] = lambda gone: None
    on_suspected: Callable[[Suspected], None] = lambda suspected: None
    on_hopeless: Callable[[str], None] = lambda reason: None
    on_joined: Callable[[Member], None] = lambda member: None
    on_doing: Callable[[int, Answer], None] = lambda rank, doing: None
    on_question: Callable[[Question], Answer] = lambda question: Answer()
    on_answer: Callable[[Answer], None] = lambda answer: None
    on_notice: Callable[[Notice], None] = lambda notice: None
    ending_of: Callable[[int], str] = lambda rank: ""
    on_agent_answer: Callable[[int], None] = lambda number: None


class _Asked(NamedTuple):
    rank: int
    at: float


class Reports:
    """Keeps the reports of ranks, and notifies the ranks that need them. For one thread."""

    def __init__(
        self,
        world_size: int,
        coordinator: int,
        controls: Mapping[int, Connection],
        *,
        is_member: Callable[[int], bool],
        now: Callable[[], float],
        told: Told,
    ) -> None:
        self._coordinator = coordinator
        self._controls = controls
        self._is_member = is_member
        self._now = now
        self._told = told
        self._attendance = Attendance()
        self.roll = Roll(world_size)
        self._open: dict[int, dict[int, _Asked]] = {}  # questions, by asker and number
        self._summarized: set[int] = set()  # ranks that were asked for the summary

    def take_notice(self, rank: int, notice: Notice) -> None:
        """Handle a rank's report about a collective."""
        for other, told in self.roll.hear(rank, notice):
            if other == self._coordinator:
                self._told.on_notice(told)
            elif self._has(other):
                tell(self._controls[other], told)

    def take_agent(self, rank: int, says: AgentSays) -> None:
        """Handle a rank's report about an agent."""
        self._answer(self._attendance.hear(rank, says))

    def forget_agents(self, rank: int) -> None:
        """Drop the agents of a lost rank, and answer the agents that waited for them."""
        self._answer(self._attendance.forget(rank))

    def _answer(self, answers: Answers) -> None:
        for rank, number in answers:
            if rank in self._controls:
                tell(self._controls[rank], AgentAnswer(number))
        for rank, number in answers:  # this rank last: its answer may end this process
            if rank == self._coordinator:
                self._told.on_agent_answer(number)

    def ask(self, ranks: Iterable[int]) -> None:
        """Ask each rank once what it is doing. Call it before notifying them of a failure."""
        for rank in ranks:
            if rank not in self._summarized and self._has(rank):
                self._summarized.add(rank)
                self.take_question(_SUMMARY, Question(rank, rank, wants_stacks=True))

    def take_question(self, asker: int, question: Question) -> None:
        """Forward a question, unless the asker has too many open or the rank is gone."""
        question = replace(question, asker=asker)
        if question.rank == self._coordinator:
            self._deliver(question.rank, self._told.on_question(question))
            return
        asked, now = self._open.setdefault(asker, {}), self._now()
        if len(asked) >= _MOST_OPEN and asker != _SUMMARY:
            self._open[asker] = asked = {
                number: each for number, each in asked.items() if now - each.at < _OPEN_FOR
            }
        if self._has(question.rank) and (len(asked) < _MOST_OPEN or asker == _SUMMARY):
            asked[question.number] = _Asked(question.rank, now)
            tell(self._controls[question.rank], question)

    def take_answer(self, rank: int, answer: Answer) -> None:
        """Forward an answer to the asking rank, if that rank asked and still waits."""
        asked = self._open.get(answer.asker, {})
        if answer.number in asked and asked[answer.number].rank == rank:
            del asked[answer.number]
            self._deliver(rank, answer)
        else:
            _log.debug("rank %d answers a question that no rank has asked", rank)

    def _deliver(self, rank: int, answer: Answer) -> None:
        if answer.asker == _SUMMARY:
            self._told.on_doing(rank, answer)
            self.ask(answer.waits_for)  # also in a circle: each rank is asked once
        elif answer.asker == self._coordinator:
            self._told.on_answer(answer)
        elif self._has(answer.asker):
            tell(self._controls[answer.asker], answer)

    def _has(self, rank: int) -> bool:
        return rank in self._controls and self._is_member(rank)

    def forget_questions(self, rank: int) -> None:
        """Drop the questions of a rank that disconnected; it may rejoin."""
        self._open.pop(rank, None)
        self._summarized.discard(rank)
