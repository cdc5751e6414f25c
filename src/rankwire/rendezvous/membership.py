"""Keep a member's control connection in a formed world, on the acceptor's thread."""

from __future__ import annotations

from typing import Protocol

from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import PeerUnresponsiveError, RankwireError
from rankwire.links.acceptor import Acceptor
from rankwire.links.connection import Connection
from rankwire.rendezvous.control_protocol import tell
from rankwire.rendezvous.heartbeat import Silence
from rankwire.wire.control_messages import (
    AgentAnswer,
    Answer,
    Beat,
    Fallen,
    Gone,
    Joined,
    Known,
    Notice,
    Question,
    Report,
    Suspected,
    World,
    unpack,
)
from rankwire.wire.frames import Frame, whole_of

_LAST_WORDS_PATIENCE = 0.2


class Audience(Protocol):
    """Handles the coordinator's messages. Called on the acceptor's thread; must not block."""

    def on_gone(self, gone: Gone) -> None:
        """Handle the loss or departure of a rank."""

    def on_joined(self, joined: Joined) -> None:
        """Handle a restarted rank, which may now dial or be dialled."""

    def on_question(self, question: Question) -> Answer:
        """Return what this process is doing."""
        ...

    def on_answer(self, answer: Answer) -> None:
        """Handle the answer to a question of this rank."""

    def on_suspected(self, suspected: Suspected) -> None:
        """Handle a rank that became silent, or was heard again."""

    def on_notice(self, notice: Notice) -> None:
        """Handle a notice about a collective."""

    def on_agent_answer(self, number: int) -> None:
        """Handle the answer to a numbered message of this rank's agent."""

    def on_silences(self, silent: dict[int, float]) -> None:
        """Handle a heartbeat, with the ranks that missed theirs."""

    def on_coordinator_gone(self, error: RankwireError) -> None:
        """Handle the end of the control connection."""


class Membership:
    """Sends heartbeats and receives. Call ``leave`` after the acceptor has stopped."""

    def __init__(
        self, control: Connection, world: World, acceptor: Acceptor, audience: Audience
    ) -> None:
        self._control = control
        self._coordinator = world.coordinator
        self._patience = world.patience
        self._acceptor = acceptor
        self._now = acceptor.clock.now
        self._audience = audience
        self._silence = Silence(self._patience, [self._coordinator], self._now())
        self.has_ended = False

    def begin(self, heard_already: list[Frame]) -> None:
        """Begin, before the acceptor starts, with the frames received after the world."""
        self._acceptor.watch(self._control, self._heard, self._ended)
        self._acceptor.call_every(self._patience.beat, self._beat)
        self._heard(heard_already)

    def _heard(self, frames: list[Frame]) -> None:
        self._silence.heard(self._coordinator, self._now())
        for frame in frames:
            match unpack(whole_of(frame.payload)):
                case Beat(silent):
                    self._audience.on_silences(dict(silent))
                case Suspected() as suspected:
                    self._audience.on_suspected(suspected)
                case Gone() as gone:
                    self._audience.on_gone(gone)
                case Joined() as joined:
                    self._audience.on_joined(joined)
                    member = joined.member
                    tell(self._control, Known(member.rank, member.incarnation))
                case Question() as question:
                    tell(self._control, self._audience.on_question(question))
                case Answer() as answer:
                    self._audience.on_answer(answer)
                case Notice() as notice:
                    self._audience.on_notice(notice)
                case AgentAnswer(number):
                    self._audience.on_agent_answer(number)

    def report(self, message: Report) -> None:
        """Send the coordinator a report about a collective or an agent, or a question."""
        if not self.has_ended:
            tell(self._control, message)

    def _beat(self) -> None:
        if self.has_ended:
            return
        tell(self._control, Beat())
        for change in self._silence.judge(self._now()):
            if isinstance(change, Suspected):
                self._audience.on_suspected(change)
                continue
            # If the coordinator resumes, it must not treat the end of this connection as a loss.
            tell(self._control, change)
            self._acceptor.unwatch(self._control)
            error = PeerUnresponsiveError(change.rank, change.reason)
            self._control.fail(error)
            self._ended(error)

    def _ended(self, error: RankwireError) -> None:
        self.has_ended = True
        self._audience.on_coordinator_gone(error)

    def silences(self) -> dict[int, float]:
        """Return how long the coordinator is silent, if it missed a beat. Safe from any thread."""
        return {} if self.has_ended else self._silence.lengths(self._now())

    def leave(self, fallen: Fallen | None) -> None:
        """Leave the world; notify the coordinator of this rank's failure, if any."""
        if fallen is None:
            self._control.farewell(AT_ONCE)
        else:
            tell(self._control, fallen, Deadline(_LAST_WORDS_PATIENCE, self._acceptor.clock))
        self._control.close()
