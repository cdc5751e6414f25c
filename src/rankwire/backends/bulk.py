"""Large messages: how they travel, and what their sender does meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from rankwire.backends.peers import Peer
from rankwire.backends.transport import Expected, Offer
from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.links.connection import Connection
from rankwire.links.inbox import Inbox
from rankwire.links.lender import Lent
from rankwire.links.stream import Stream
from rankwire.wire.frames import Payload
from rankwire.wire.loans import LoanRefusedError
from rankwire.wire.receive import Receive

_CHECK_EVERY = 0.05


class Link(NamedTuple):
    """How messages to one rank travel."""

    transport: str  # "unix", "tcp" or "memory"
    single_copy: bool  # whether it reads large ones straight out of this process's memory
    reason: str  # why not, if it does not
    shared_memory: bool = False  # whether collectives with it meet in memory that both share


class ReadingAll:
    """What a thread does that cannot send now: it reads whatever other ranks have sent.

    So ranks that all send first, in pairs or in a circle, do not wait for each other.

    Args:
        peers: The other ranks.
        clock: By which it is called now and then.
        check: Raises if it makes no sense any more to wait; called now and then.
    """

    def __init__(
        self, peers: dict[int, Peer], clock: Clock, check: Callable[[], None] | None = None
    ) -> None:
        self._peers = peers
        self._check = check
        self._next = Deadline(_CHECK_EVERY, clock)

    def watch(self) -> list[Stream]:
        """Return the streams on which something to read may come."""
        return [stream for peer in list(self._peers.values()) for stream in peer.inbox.watch()]

    def read(self) -> bool:
        """Read what is there, without waiting; return whether somebody's was read."""
        is_read = False
        for peer in list(self._peers.values()):
            is_read = peer.inbox.read() or is_read
        if self._check is not None and self._next.expired:
            self._next = Deadline(_CHECK_EVERY, self._next.clock)
            self._check()
        return is_read


@dataclass(eq=False)
class LentOffer(Offer):
    """A message that a peer may be reading out of this process's memory."""

    connection: Connection
    lent: Lent
    meanwhile: ReadingAll
    send_by_stream: Callable[[], None]

    def wait(self, deadline: Deadline) -> bool:
        """Wait until it was read. What the peer cannot read is sent to it now."""
        try:
            return self.connection.wait_for_receipt(self.lent, deadline, meanwhile=self.meanwhile)
        except LoanRefusedError:
            self.lent.revoke()
            self.send_by_stream()
            return True

    def revoke(self) -> None:
        """Be done with it: if it was not read, it is as if it had not been sent."""
        self.lent.revoke()


class ExpectedMessage(Expected):
    """A message that an inbox may receive straight into its place."""

    def __init__(self, inbox: Inbox, receive: Receive) -> None:
        self._inbox = inbox
        self._receive = receive
        self._is_posted = False

    def post(self) -> None:
        """Ask for it."""
        if not self._is_posted:
            self._is_posted = True
            self._inbox.post(self._receive)

    def take(self, deadline: Deadline) -> Payload:
        """Return it, reading for others on the way."""
        self.post()
        inbox, receive = self._inbox, self._receive
        if not inbox.drive(receive, deadline):
            raise inbox.too_late(deadline)
        if receive.payload is None:
            inbox.vacate(receive)
        return receive.take()

    def give_up(self) -> None:
        """Expect it no more."""
        if self._is_posted:
            self._inbox.give_up(self._receive)
