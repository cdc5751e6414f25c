"""What a TCP backend keeps about one peer: where it is, its connections, and whether it has gone.

The failure of a peer is sticky and spreads: the first cause ends every connection to it, so that
every operation that needs it fails at once and names the same cause. Readers drain what had arrived
before they see the failure.
"""

from __future__ import annotations

import threading

from rankwire.deadline import Deadline
from rankwire.errors import RankwireError
from rankwire.links.connection import Connection
from rankwire.links.inbox import Inbox
from rankwire.rendezvous.messages import Member
from rankwire.wire.mailbox import Mailbox

__all__ = ["Peer"]


class Peer:
    """One other rank, seen from here. Every method is safe from any thread.

    Attributes:
        member: Where it is.
        inbox: The messages it sends; its connection comes when it first does.
        failure: Why it has gone, if it has.
        dial_lock: Held while the outgoing message connection is opened. Nothing else is taken under
            it but ``_lock``.
        messages: The outgoing message connection, once opened.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        self.inbox = Inbox(member.rank, Mailbox())
        self.failure: RankwireError | None = None
        self.dial_lock = threading.Lock()
        self.messages: Connection | None = None
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()

    def add(self, connection: Connection) -> None:
        """Have a connection share the peer's fate."""
        with self._lock:
            self._connections.add(connection)
            failure = self.failure
        if failure is not None:
            connection.fail(failure)

    def remove(self, connection: Connection) -> None:
        """Forget a connection that its owner has closed."""
        with self._lock:
            self._connections.discard(connection)

    def check(self) -> None:
        """Raise if the peer has gone."""
        if self.failure is not None:
            raise self.failure.copy()

    def fail(self, cause: RankwireError) -> None:
        """Give the peer up: every connection to it ends now. The first cause stays."""
        if self._mark(cause):
            for connection in self._all():
                connection.fail(cause)
            if self.inbox.connection is None:
                self.inbox.fail(cause)

    def leave(self, cause: RankwireError) -> None:
        """The peer has left in good order: nothing more can be sent to it.

        What it sent before may still be on the way, and is followed by its farewell: connections
        that are read end by themselves.
        """
        if self._mark(cause):
            if self.messages is not None:
                self.messages.fail(cause)
            if self.inbox.connection is None:
                self.inbox.fail(cause)

    def _mark(self, cause: RankwireError) -> bool:
        with self._lock:
            if self.failure is not None:
                return False
            self.failure = cause
            return True

    def _all(self) -> list[Connection]:
        with self._lock:
            return list(self._connections)

    def close(self, cause: RankwireError, patience: Deadline) -> None:
        """Say farewell on every connection, end every wait, and close."""
        self._mark(cause)
        for connection in self._all():
            if connection.failure is None:
                connection.farewell(patience)
        self.inbox.close(cause)
        for connection in self._all():
            connection.fail(cause)
            connection.close()
