"""Large messages: how they travel, and what a thread does that waits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.links.connection import Connection
from rankwire.links.first_receive import FirstReceive
from rankwire.links.inbox import Inbox
from rankwire.links.lender import Lent
from rankwire.links.outbox import Queued
from rankwire.mesh.peers import Peer
from rankwire.mesh.transport import Expected, ExpectedFromAny, Offer
from rankwire.transports.stream import Stream
from rankwire.wire.frames import Envelope, Message, Payload
from rankwire.wire.loans import LoanRefusedError
from rankwire.wire.receive import PostedReceive

_CHECK_EVERY = 0.05


class Link(NamedTuple):
    """How messages to one rank travel."""

    transport: str  # "unix", "tcp" or "memory"
    single_copy: bool  # whether it reads large ones straight out of this process's memory
    reason: str  # why not, if it does not
    shared_memory: bool = False  # whether collectives with it meet in memory that both share
    incarnation: int = 0  # how many times its process was started anew alone


class ReadingAll:
    """What a thread does that waits: it reads whatever other ranks have sent.

    So what this rank has posted moves on, whatever it waits for, and ranks that all send first, in
    pairs or in a circle, do not wait for each other.

    Args:
        clock: By which ``check`` is called now and then.
        inboxes: Those of the ranks that have connected to this one.
        check: Raises if it makes no sense any more to wait; called now and then.
    """

    def __init__(
        self,
        clock: Clock,
        inboxes: list[Inbox] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._inboxes: list[Inbox] = [] if inboxes is None else inboxes
        self._check = check
        self.clock = clock
        self._next = Deadline(_CHECK_EVERY, clock)

    def checking(self, check: Callable[[], None]) -> ReadingAll:
        """Return one that also calls ``check`` now and then."""
        return ReadingAll(self.clock, self._inboxes, check)

    def add(self, inbox: Inbox) -> None:
        """Read an inbox whose rank has connected to this one. Safe from any thread."""
        if inbox not in self._inboxes:
            self._inboxes.append(inbox)

    def watch(self) -> list[Stream]:
        """Return the streams on which something to read may come."""
        return [stream for inbox in list(self._inboxes) for stream in inbox.watch()]

    def read(self) -> bool:
        """Read what is there, without waiting; return whether anything could be."""
        is_read = False
        for inbox in list(self._inboxes):
            is_read = inbox.read() or is_read
            if inbox.due:  # a receive from any rank, which takes back those from the others
                inbox.call_back_due()
            if inbox.is_over:
                with suppress(ValueError):  # another thread was faster
                    self._inboxes.remove(inbox)
                if not inbox.is_over:  # its rank has connected again before it was removed
                    self.add(inbox)
        if self._check is not None and self._next.expired:
            self._next = Deadline(_CHECK_EVERY, self.clock)
            self._check()
        return is_read

    def has_posted(self) -> bool:
        """Whether this rank waits for a message of a rank that has connected to it."""
        return any(inbox.wanted_by for inbox in list(self._inboxes))


@dataclass(eq=False)
class LentOffer(Offer):
    """A message that a peer may be reading out of this process's memory."""

    connection: Connection
    lent: Lent
    meanwhile: ReadingAll
    envelope: Envelope
    message: Message
    again: float  # seconds for sending it by stream: once begun, that must be finished

    def wait(self, deadline: Deadline) -> bool:
        """Wait until it was read. What the peer cannot read is sent to it now."""
        if self.lent.was_read:  # and whoever was told so was interrupted
            return True
        try:
            is_read = self.connection.wait_for_receipt(
                self.lent, deadline, meanwhile=self.meanwhile
            )
            if not is_read:
                self.connection.look_for_end()  # that may be why: it takes all loans back
            return is_read
        except LoanRefusedError:
            self.lent.revoke()
            limit = Deadline(self.again, self.meanwhile.clock)
            self.connection.send(
                self.envelope, self.message, limit, lend=False, meanwhile=self.meanwhile
            )
            return True

    def is_over(self) -> bool:
        """Whether it was read, or taken back."""
        return self.lent.is_over

    def revoke(self) -> bool:
        """Be done with it: if it was not read, it is as if it had not been sent."""
        return self.lent.revoke()


@dataclass(eq=False)
class QueuedOffer(Offer):
    """A message that waits to leave."""

    connection: Connection
    queued: Queued
    meanwhile: ReadingAll

    def wait(self, deadline: Deadline) -> bool:
        """Send until it has left, and what is before it."""
        return self.connection.finish(self.queued, deadline, self.meanwhile)

    def is_over(self) -> bool:
        """Whether it has left."""
        return self.connection.has_left(self.queued)

    def revoke(self) -> bool:
        """Be done with it: if nothing of it has left, it is as if it had not been sent."""
        return self.connection.take_back(self.queued)


def offer_of(
    peer: Peer,
    connection: Connection,
    posted: Lent | Queued,
    meanwhile: ReadingAll,
    envelope: Envelope,
    message: Message,
    again: float,
) -> Offer:
    """Return what to settle of a message that was posted and has not left, or is lent.

    What is lent to the peer is kept until it was read.

    Args:
        peer: The rank it goes to.
        connection: To it.
        posted: What the connection has returned.
        meanwhile: What to read while it is waited for.
        envelope: Under which it is received.
        message: What is sent.
        again: Seconds for sending it by stream, if the peer cannot read it.
    """
    if not isinstance(posted, Lent):
        return QueuedOffer(connection, posted, meanwhile)
    peer.keep(posted)
    return LentOffer(connection, posted, meanwhile, envelope, message, again)


class ExpectedMessage(Expected):
    """A message that an inbox may receive straight into its place."""

    def __init__(self, inbox: Inbox, receive: PostedReceive) -> None:
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
        if not inbox.drive_posted(receive, deadline):
            raise inbox.too_late(deadline)
        if receive.payload is None:
            inbox.vacate(receive)
        return receive.take()

    def give_up(self) -> None:
        """Expect it no more."""
        if self._is_posted:
            self._inbox.give_up(self._receive)


class FirstOfAny(ExpectedFromAny):
    """A message that one of several inboxes receives."""

    def __init__(self, first: FirstReceive) -> None:
        self._first = first

    def post(self) -> None:
        """Ask for it."""
        self._first.post()

    def take(self, deadline: Deadline) -> Payload:
        """Return it, reading all that others send on the way."""
        payload = self._first.take(deadline)
        self.source = self._first.source
        return payload

    def give_up(self) -> None:
        """Expect it no more."""
        self._first.give_up()
