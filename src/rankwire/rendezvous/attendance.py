"""Track the agents of each name, and which of them wait for the others to leave. Pure.

An agent that leaves keeps serving until each other agent of its name has left, only serves, or is
on a lost rank. It does not wait for agents of its own thread, so ``with RpcAgent(a), RpcAgent(b):``
can leave them one after the other.
"""

from __future__ import annotations

from collections import defaultdict

from rankwire.errors import ProtocolError
from rankwire.wire.control_messages import AgentSays, AgentState

MAX_AGENTS = 4096  # of one rank; each has threads and a descriptor

Answers = list[tuple[int, int]]  # ranks, and the numbers of the messages to answer


class Attendance:
    """Keeps the agents of all ranks. For one thread."""

    def __init__(self) -> None:
        self._services: defaultdict[int, _Service] = defaultdict(_Service)
        self._services_of: defaultdict[int, set[int]] = defaultdict(set)

    def hear(self, rank: int, says: AgentSays) -> Answers:
        """Take an agent's message; return the messages to answer.

        Raises ProtocolError if the rank has too many agents.
        """
        services = self._services_of[rank]
        if len(services) >= MAX_AGENTS and says.service not in services:
            raise ProtocolError(f"it said to the coordinator that it has over {MAX_AGENTS} agents")
        service = self._services[says.service]
        services.add(says.service)
        answers = service.hear(rank, says)
        return answers + self._settle(says.service, rank)

    def forget(self, rank: int) -> Answers:
        """Drop the agents of a rank that is gone; return the messages to answer."""
        answers: Answers = []
        for service in [*self._services_of.get(rank, ())]:
            self._services[service].drop(rank)
            answers += self._settle(service, rank)
        return answers

    def _settle(self, service: int, rank: int) -> Answers:
        due = self._services[service].due()
        for out in {rank, *(out for out, _ in due)}:
            if not self._services[service].has(out):
                self._services_of[out].discard(service)
                if not self._services_of[out]:
                    del self._services_of[out]
        if self._services[service].is_empty:
            del self._services[service]
        return due


class _Service:
    """The agents of one name: for each rank, the thread that uses its agent."""

    def __init__(self) -> None:
        self._in_use: dict[int, int] = {}
        self._serving: dict[int, int] = {}
        self._leaving: dict[int, tuple[int, int]] = {}  # the owner, and the number to answer
        # A leaving agent told these to stop serving; they count as in use.
        self._stopped: set[int] = set()

    def hear(self, rank: int, says: AgentSays) -> Answers:
        was_stopped = rank in self._stopped
        self.drop(rank)
        match says.state:
            case AgentState.OPEN:
                self._in_use[rank] = says.owner
                return [(rank, says.number)]
            case AgentState.SERVING if not was_stopped:
                self._serving[rank] = says.owner
            case AgentState.SERVING:
                self._in_use[rank] = says.owner
            case AgentState.LEAVING:
                for other in says.stopped:
                    self._stop(other)
                self._leaving[rank] = (says.owner, says.number)
        return []

    def _stop(self, rank: int) -> None:
        if rank in self._serving:
            self._in_use[rank] = self._serving.pop(rank)
        elif rank in self._in_use:  # its last message may not have arrived yet
            self._stopped.add(rank)

    def drop(self, rank: int) -> None:
        self._in_use.pop(rank, None)
        self._serving.pop(rank, None)
        self._leaving.pop(rank, None)
        self._stopped.discard(rank)

    def has(self, rank: int) -> bool:
        return rank in self._in_use or rank in self._serving or rank in self._leaving

    @property
    def is_empty(self) -> bool:
        return not (self._in_use or self._serving or self._leaving)

    def due(self) -> Answers:
        """Remove and return the agents that wait for no other."""
        owners: set[int] = set()
        for owner in self._in_use.values():
            owners.add(owner)
            if len(owners) > 1:
                return []  # stop early: this runs whenever an agent leaves
        due = [
            (rank, number) for rank, (owner, number) in self._leaving.items() if owners <= {owner}
        ]
        for rank, _ in due:
            del self._leaving[rank]
        return due
