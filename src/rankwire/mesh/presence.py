"""Presence: what an agent tells the agents of its name on other ranks about itself.

It says that it is open, that it does nothing but serve, that it leaves, or that it is closed, to
whoever keeps the attendance of the world (``rendezvous.roll``); no rank dials another for it.
Two answers come back: the opening is known, so that no agent that is told of it leaves without this
one; and all others have left. If there is none who would answer, because the coordinator is lost or
the backend is closed, all waiting ends.

Lock: ``Presences._lock`` guards the messages that wait for an answer; nothing is taken under it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rankwire import runtime
from rankwire.wire.control_messages import AgentSays, AgentState

_PROCESS = runtime.randbits(62)  # with a thread's number, tells it from those of other processes


class Presences:
    """What the agents of one rank have said. Safe from any thread.

    Args:
        say: Passes on what an agent says; returns False if there is none who would answer.
        wait_for: Waits until an event is set, by the clock of the world.
    """

    def __init__(
        self, say: Callable[[AgentSays], bool], wait_for: Callable[[runtime.Event], object]
    ) -> None:
        self._say = say
        self._wait_for = wait_for
        self._lock = runtime.Lock()
        self._numbers = itertools.count(1)
        self._unanswered: dict[int, runtime.Event] = {}
        self._has_ended = False

    def of(self, service: int) -> Presence:
        """Return the presence of an agent."""
        return Presence(self, service)

    def say(self, service: int, state: AgentState, stopped: list[int]) -> int:
        """Say what an agent does; return the number by which the answer is waited for."""
        number = next(self._numbers)
        with self._lock:
            if not self._has_ended and state in (AgentState.OPEN, AgentState.LEAVING):
                self._unanswered[number] = runtime.Event()
        says = AgentSays(service, number, state, _PROCESS ^ runtime.get_ident(), stopped)
        if self._has_ended or not self._say(says):
            self.answered(number)
        return number

    def await_answer(self, number: int) -> None:
        """Wait until something that was said is answered, or no answer will come any more."""
        answer = self._unanswered.get(number)
        if answer is not None:
            self._wait_for(answer)

    def answered(self, number: int) -> None:
        """Take an answer."""
        with self._lock:
            answer = self._unanswered.pop(number, None)
        if answer is not None:
            answer.set()

    def end(self) -> None:
        """End all waiting: no answer will come any more."""
        with self._lock:
            self._has_ended = True
            unanswered, self._unanswered = self._unanswered, {}
        for answer in unanswered.values():
            answer.set()


class Presence:
    """What one agent says of itself. Safe from any thread."""

    def __init__(self, presences: Presences, service: int) -> None:
        self._presences = presences
        self._service = service
        self._number = 0  # of what it said last
        self._owner = 0
        self._is_over = False  # the agent has left, with all others, or is closed

    def open(self) -> None:
        """Say that the calling thread uses the agent; return when that is known.

        It waits for the coordinator, which is given up if it is silent for too long.
        """
        if self._owner != runtime.get_ident():
            self._say_open()

    def _say_open(self) -> None:
        self._owner = runtime.get_ident()
        self._say(AgentState.OPEN)
        self._wait()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Say for the time of a block that the agent does nothing but serve."""
        self._say(AgentState.SERVING)
        try:
            yield
        except BaseException:
            self._say(AgentState.OPEN)
            raise
        self._say_open()

    def leave(self, stopped: Iterable[int]) -> None:
        """Say that the agent leaves; return when all others have left, or there is none to ask.

        Args:
            stopped: The ranks of the world that it has told to stop serving.
        """
        self._say(AgentState.LEAVING, stopped)
        self._wait()
        self._is_over = True

    def close(self) -> None:
        """Say that the agent is closed, and end its waiting."""
        if not self._is_over:
            self._is_over = True
            self._presences.say(self._service, AgentState.CLOSED, [])
        self._presences.answered(self._number)

    def _say(self, state: AgentState, stopped: Iterable[int] = ()) -> None:
        if self._is_over:
            return
        self._number = number = self._presences.say(self._service, state, sorted(stopped))
        if self._is_over:  # closed meanwhile, by another thread that does not know of this
            self._presences.answered(number)

    def _wait(self) -> None:
        self._presences.await_answer(self._number)
