"""Attempts: what a rank has learned from its tries to join, and the error if all of them fail.

No input or output; the thread that joins is the only one that uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rankwire.deadline import Deadline
from rankwire.errors import AuthenticationError, RankwireError, RendezvousError
from rankwire.rendezvous.roster import is_last_moment
from rankwire.transports.sockets import TcpAddress

# The secret file may be that of an earlier job until rank 0 replaces it, so one refusal proves
# nothing.
_AUTHENTICATION_TRIES = 3


@dataclass
class Attempts:
    """The tries of one rank to join.

    Args:
        rank: The rank that joins.
        address: Where the coordinator listens.
        deadline: The limit for all tries together.
        has_coordinator: Whether a launcher coordinates, and not rank 0.

    Attributes:
        missing: The ranks that have not joined, as far as the last try has shown.
    """

    rank: int
    address: TcpAddress
    deadline: Deadline
    has_coordinator: bool
    missing: list[int] = field(default_factory=list, init=False)
    _count: int = field(default=0, init=False)
    _refusals: int = field(default=0, init=False)
    _is_connected: bool = field(default=False, init=False)
    _is_admitted: bool = field(default=False, init=False)
    # The last error before and after the connection stood.
    _troubles: dict[bool, RankwireError] = field(default_factory=dict, init=False)

    @property
    def coordinator(self) -> str:
        """The coordinator, as errors call it."""
        return "the coordinator" if self.has_coordinator else "rank 0"

    @property
    def trouble(self) -> RankwireError | None:
        """The error to blame when the time is over.

        A handshake that failed explains more than a connection that was refused later: the
        coordinator has given up by then, perhaps for the same reason.
        """
        return self._troubles.get(True) or self._troubles.get(False)

    def begin(self) -> None:
        """Note that a try begins."""
        self.missing = [] if self.has_coordinator else [0]
        self._is_connected = self._is_admitted = False
        self._count += 1

    def connected(self) -> None:
        """Note that something accepted the connection."""
        self._is_connected = True

    def admitted(self) -> None:
        """Note that the coordinator let this rank in, so that it is not missing itself."""
        self.missing = []
        self._is_admitted = True

    def failed(self, trouble: RankwireError) -> None:
        """Note why the try failed."""
        self._troubles[self._is_connected] = trouble

    def refused(self, error: AuthenticationError) -> None:
        """Note that authentication failed; raise the error if that has happened too often."""
        self._refusals += 1
        if self._refusals >= _AUTHENTICATION_TRIES:
            peer = None if self.has_coordinator else 0
            raise error.during(op="join", rank=self.rank, peer=peer, waited=self.deadline.waited)
        self.failed(error)

    def note_missing(self, missing: list[int]) -> None:
        """Note the ranks that the coordinator waits for; shortly before the deadline, add none.

        By then other ranks give up too, for the same reason as this one; they are not the cause.
        """
        if is_last_moment(self.deadline) and self.missing:
            missing = [rank for rank in missing if rank in self.missing]
        self.missing = missing

    def too_late(self) -> RendezvousError:
        """Return the error that says why this rank did not join within its limit."""
        limit = f"within {self.deadline.limit:g} s"
        reason = f"the world did not form {limit}"
        if not self._is_admitted:
            tries = f"{self._count} {'tries' if self._count > 1 else 'try'}"
            reason = f"{self.coordinator} was not reached at {self.address} {limit}, in {tries}"
        if self.trouble is not None:
            reason += f" ({self.trouble.message})"
        return RendezvousError(reason, missing=self.missing).during(
            op="join", rank=self.rank, waited=self.deadline.waited
        )
