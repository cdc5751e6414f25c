"""Attendance: which ranks use an agent of each name, and who of them waits for the others to leave.

The coordinator of a world keeps it, or the network of a simulated one. An agent that leaves goes on
serving until no other agent of its name is in use: each has left too, does nothing but serve, or
its rank is gone. Pure: what an agent says goes in, and whom to answer comes out.

An agent does not wait for those that its own thread uses: ``with RpcAgent(a), RpcAgent(b):`` leaves
one after the other.
"""

from __future__ import annotations

from collections import defaultdict

from rankwire.errors import ProtocolError
from rankwire.wire.control_messages import AgentSays, AgentState

MAX_AGENTS = 4096  # of one rank; each has threads and a descriptor, so no program has so many

Answers = list[tuple[int, int]]  # ranks, and the numbers of the messages that are answered


class Attendance:
    """The agents of all ranks. Not safe from several threads."""

    def __init__(self) -> None:
        self._services: defaultdict[int, _Service] = defaultdict(_Service)
        self._services_of: defaultdict[int, set[int]] = defaultdict(set)

    def hear(self, rank: int, says: AgentSays) -> Answers:
        """Take in what an agent says; return whom to answer.

        Raises:
            ProtocolError: The rank says that it has too many agents.
        """
        services = self._services_of[rank]
        if len(services) >= MAX_AGENTS and says.service not in services:
            raise ProtocolError(f"it said to the coordinator that it has over {MAX_AGENTS} agents")
        service = self._services[says.service]
        services.add(says.service)
        answers = service.hear(rank, says)
        return answers + self._settle(says.service, rank)

    def forget(self, rank: int) -> Answers:
        """Drop the agents of a rank that is gone; return whom to answer."""
        answers: Answers = []
        for service in [*self._services_of.get(rank, ())]:
            self._services[service].drop(rank)
            answers += self._settle(service, rank)
        return answers

    def _settle(self, service: int, rank: int) -> Answers:
        """Let those leave who wait for no other; return them. Keep nothing of those who are out."""
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
    """The agents of one name: for each rank that has one, the thread that uses it."""

    def __init__(self) -> None:
        self._in_use: dict[int, int] = {}
        self._serving: dict[int, int] = {}
        self._leaving: dict[int, tuple[int, int]] = {}  # the owner, and the number to answer
        # Told to stop serving, by an agent that leaves. They are in use, whatever they said before.
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
        elif rank in self._in_use:  # what it said last may still be on the way
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
        """Let those go who wait for no other agent, and return them."""
        owners: set[int] = set()
        for owner in self._in_use.values():
            owners.add(owner)
            if len(owners) > 1:
                return []  # at the second one, not the last: this runs whenever an agent leaves
        due = [
            (rank, number) for rank, (owner, number) in self._leaving.items() if owners <= {owner}
        ]
        for rank, _ in due:
            del self._leaving[rank]
        return due
