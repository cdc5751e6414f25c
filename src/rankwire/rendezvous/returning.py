"""Returning: the way of ranks that were started anew back into their world. Pure: who is where.

The states of one rank, told apart by what it has done::

    EXPECTED   its old process is gone, and a new one was started             -> ENTERED
    ENTERED    it has proved who it is, and has not said where it listens     -> QUEUED, EXPECTED
    QUEUED     another rank returns before it                                 -> ANNOUNCED, EXPECTED
    ANNOUNCED  all members were told of it; some have not said that they know -> a member, EXPECTED

One rank at a time is announced, so that each that comes back finds the others settled. Members
answer before the rank itself is told the world: when it dials them, they know its new keys. A
member that is lost meanwhile is not waited for. A rank whose connection ends on the way may begin
again.
"""

from __future__ import annotations

from collections.abc import Iterable

from rankwire.wire.control_messages import Member


class Returning:
    """Who may come back, and how far they are. One thread."""

    def __init__(self) -> None:
        self._expected: set[int] = set()
        self._entered: set[int] = set()
        self._queue: list[Member] = []
        self._announced: Member | None = None
        self._witnesses: set[int] = set()  # members that have not said that they know it

    def expect(self, rank: int) -> None:
        """A new process of a rank was started: it may come."""
        self._expected.add(rank)

    def is_expected(self, rank: int) -> bool:
        """Whether a rank may come in."""
        return rank in self._expected

    def is_under_way(self, rank: int) -> bool:
        """Whether a rank has come in, and does not know the world yet."""
        return rank in self._entered

    def enter(self, rank: int) -> None:
        """Its control connection stands."""
        self._entered.add(rank)

    def queue(self, member: Member) -> None:
        """It has said where it listens, and can be reached there."""
        self._queue.append(member)

    def announce(self, members: Iterable[int]) -> Member | None:
        """Return the next one to tell these members of; None if there is none, or it is early."""
        if self._announced is not None or not self._queue:
            return None
        self._announced = self._queue.pop(0)
        self._witnesses = set(members)
        return self._announced

    def know(self, witness: int, rank: int, incarnation: int) -> None:
        """A member says that it knows a rank that was announced."""
        announced = self._announced
        if announced is not None and (announced.rank, announced.incarnation) == (rank, incarnation):
            self._witnesses.discard(witness)

    def complete(self) -> Member | None:
        """Return the one that all members know, once: from now on it is one of them."""
        member = self._announced
        if member is None or self._witnesses:
            return None
        self._announced = None
        self._entered.discard(member.rank)
        self._expected.discard(member.rank)
        return member

    def excuse(self, rank: int) -> None:
        """A member is lost: nobody waits for its word."""
        self._witnesses.discard(rank)

    def fall_back(self, rank: int) -> bool:
        """A rank has gone on its way back; return whether members were told of it."""
        self._entered.discard(rank)
        self._queue = [member for member in self._queue if member.rank != rank]
        if self._announced is None or self._announced.rank != rank:
            return False
        self._announced = None
        return True
