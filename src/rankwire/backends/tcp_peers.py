"""What a TCP backend keeps about one peer: where it is, its connections, and whether it has gone.

The failure of a peer is sticky and spreads: the first cause ends every connection to it, so that
every operation that needs it fails at once and names the same cause. Readers drain what had arrived
before they see the failure.
"""

from __future__ import annotations

import threading
from contextlib import suppress

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

    def fail(self, cause: RankwireError) -> bool:
        """Give the peer up; False if that had happened before."""
        with self._lock:
            if self.failure is not None:
                return False
            self.failure = cause
            connections = list(self._connections)
        for connection in connections:
            connection.fail(cause)
        if self.inbox.connection is None:
            self.inbox.fail(cause)
        return True

    def close(self, cause: RankwireError, patience: Deadline) -> None:
        """Say farewell on every connection, end every wait, and close."""
        with self._lock:
            connections = list(self._connections)
            if self.failure is None:
                self.failure = cause
        for connection in connections:
            if connection.failure is None:
                connection.farewell(patience)
        self.inbox.close(cause)
        for connection in connections:
            with suppress(RankwireError):
                connection.fail(cause)
            connection.close()
