"""Presence: reports the state of an agent to the agents of its name on other ranks.

An agent reports that it is open, only serves, leaves, or is closed, to the coordinator, which keeps
the attendance of the world (``rendezvous.roll``); no rank dials another for it. Two answers come
back: its opening is known, so that no agent that knows of it leaves without it; and all others have
left. If no answer can come, because the coordinator is lost or the backend is closed, every wait
ends.

Lock: ``Presences._lock`` guards the messages that wait for an answer; nothing is taken under it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rankwire import runtime
from rankwire.wire.control_messages import AgentSays, AgentState

_PROCESS = runtime.randbits(62)  # with a thread's number, unique among processes


class Presences:
    """The reports of one rank's agents. Safe from any thread.

    ``say`` sends a report, and returns False if no answer will come. ``wait_for`` waits until an
    event is set, by the clock of the world.
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
        """Report an agent's state; return the number for ``await_answer``."""
        number = next(self._numbers)
        with self._lock:
            if not self._has_ended and state in (AgentState.OPEN, AgentState.LEAVING):
                self._unanswered[number] = runtime.Event()
        says = AgentSays(service, number, state, _PROCESS ^ runtime.get_ident(), stopped)
        if self._has_ended or not self._say(says):
            self.answered(number)
        return number

    def await_answer(self, number: int) -> None:
        """Wait until a report is answered, or no answer will come any more."""
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
        """End all waits: no answer will come any more."""
        with self._lock:
            self._has_ended = True
            unanswered, self._unanswered = self._unanswered, {}
        for answer in unanswered.values():
            answer.set()


class Presence:
    """Reports the state of one agent. Safe from any thread."""

    def __init__(self, presences: Presences, service: int) -> None:
        self._presences = presences
        self._service = service
        self._number = 0  # of its last report
        self._owner = 0
        self._is_over = False  # the agent has left, with all others, or is closed

    def open(self) -> None:
        """Report that the calling thread uses the agent; return when the coordinator knows it.

        There is no timeout, but a coordinator that is silent for too long is given up.
        """
        if self._owner != runtime.get_ident():
            self._say_open()

    def _say_open(self) -> None:
        self._owner = runtime.get_ident()
        self._say(AgentState.OPEN)
        self._wait()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Report for the time of a block that the agent does nothing but serve."""
        self._say(AgentState.SERVING)
        try:
            yield
        except BaseException:
            self._say(AgentState.OPEN)
            raise
        self._say_open()

    def leave(self, stopped: Iterable[int]) -> None:
        """Report that the agent leaves; return when all others have left, or no answer can come.

        ``stopped`` are the world ranks that it has told to stop serving.
        """
        self._say(AgentState.LEAVING, stopped)
        self._wait()
        self._is_over = True

    def close(self) -> None:
        """Report that the agent is closed, and end its wait."""
        if not self._is_over:
            self._is_over = True
            self._presences.say(self._service, AgentState.CLOSED, [])
        self._presences.answered(self._number)

    def _say(self, state: AgentState, stopped: Iterable[int] = ()) -> None:
        if self._is_over:
            return
        self._number = number = self._presences.say(self._service, state, sorted(stopped))
        if self._is_over:  # closed meanwhile by another thread, which did not see this number
            self._presences.answered(number)

    def _wait(self) -> None:
        self._presences.await_answer(self._number)
