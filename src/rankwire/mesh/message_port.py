"""The message port: how a rank sends to another one, and receives from it, under an envelope.

An envelope is a group, a channel and a tag; ranks are those of the world. Connections for messages
go one way; the first message to a rank opens one. A thread that waits reads what others send, so
that ranks which all send first do not deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import RankwireError
from rankwire.links.inbox import Inbox
from rankwire.links.receive_handle import FirstReceive, PeerReceive, ReceiveHandle
from rankwire.links.send_handle import SendHandle, offer, post
from rankwire.transports.byte_stream import ByteStream
from rankwire.wire.frames import Envelope, Message, Payload
from rankwire.wire.receive import Destination, Receive

if TYPE_CHECKING:
    from rankwire.mesh.mesh import Mesh

_CHECK_EVERY = 0.05


class MessagePort:
    """The messages of one rank. Every method is safe from any thread."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._peers = mesh.peers
        self._lookout = mesh.lookout

    def transmit(self, dst: int, envelope: Envelope, message: Message, deadline: Deadline) -> None:
        """Send one message under an envelope. The buffers may change again on return."""
        peer = self._peers[dst]
        connection = peer.messages or self._mesh.connections.for_messages(peer, deadline)
        connection.send(envelope, message, deadline, meanwhile=self._lookout)

    def offer(
        self,
        dst: int,
        envelope: Envelope,
        message: Message,
        deadline: Deadline,
        *,
        check: Callable[[], None] | None = None,
    ) -> SendHandle | None:
        """Send one message, but do not wait for a peer that reads it out of this rank's memory.

        Args:
            dst: The rank to send to.
            envelope: The envelope of the message.
            message: The buffers to send.
            deadline: For sending it.
            check: Called now and then if the peer does not take it; its exception ends the wait.

        Returns:
            What to settle before the buffers may change; None if they may change already.
        """
        peer, lookout = self._peers[dst], self._lookout
        connection = peer.messages or self._mesh.connections.for_messages(peer, deadline)
        checking = None if check is None else lookout.checking(check)
        return offer(connection, envelope, message, deadline, lookout, while_sending=checking)

    def begin(
        self, dst: int, envelope: Envelope, message: Message, deadline: Deadline
    ) -> SendHandle | None:
        """Send one message without waiting for the peer to take it.

        It leaves before later messages to the same rank. The deadline is for connecting. The result
        is that of ``offer``.
        """
        peer = self._peers[dst]
        connection = peer.messages or self._mesh.connections.for_messages(peer, deadline)
        return post(connection, envelope, message, self._lookout)

    def receive(
        self, src: int, envelope: Envelope, deadline: Deadline, *, nbytes: int | None = None
    ) -> Payload:
        """Return the next message under an envelope; the caller owns it.

        A large one may still be in the sender's memory; then it must be read and given back.

        Raises:
            SizeMismatchError: The message does not have ``nbytes`` bytes; it stays receivable.
        """
        return self._peers[src].inbox.take(Receive(envelope, nbytes=nbytes), deadline)

    def expect(
        self, src: int, envelope: Envelope, *, nbytes: int | None = None, into: Destination | None
    ) -> ReceiveHandle:
        """Return the next message under an envelope before it has arrived.

        Args:
            src: The rank that sends it.
            envelope: The envelope of the message.
            nbytes: Its size, if that is fixed; otherwise as for ``receive``.
            into: Where it should arrive. It may arrive elsewhere: if it is small, is still in the
                sender's memory, or arrived before it was asked for.
        """
        return PeerReceive(self._peers[src].inbox, envelope, nbytes, into)

    def expect_any(
        self, sources: Sequence[int], envelope: Envelope, *, nbytes: int | None = None
    ) -> ReceiveHandle:
        """Return the next message under an envelope from one of several ranks.

        It is expected while one of them is there. If several have sent one, the first rank of
        ``sources`` wins.
        """
        inboxes = [self._peers[src].inbox for src in sources]
        new_waiter = self._mesh.connections.new_waiter
        return FirstReceive(
            inboxes, envelope, nbytes, new_waiter, self._successor_of, self._lookout
        )

    def _successor_of(self, inbox: Inbox) -> Inbox:
        """Return the inbox of the rank that another one was of: the same unless it is back."""
        return self._peers[inbox.peer].inbox

    def has_arrived(self, src: int, envelope: Envelope) -> bool:
        """Return whether a message was read and not received. Neither reads nor waits."""
        return self._peers[src].inbox.has_arrived(envelope)

    def abandon(self, group: int, cause: RankwireError) -> None:
        """End all receives of one group on this rank, because it has left the group."""
        for peer in list(self._peers.values()):
            peer.inbox.abandon(group, cause)

    def refuse(self, envelope: Envelope) -> None:
        """Drop the messages of an envelope, and of those whose tag differs in the lower 16 bits.

        Now and when they arrive: this rank will not receive them any more.
        """
        for peer in list(self._peers.values()):
            peer.inbox.refuse(envelope)


class Lookout:
    """Reads what other ranks have sent, for a thread that waits.

    So posted messages progress whatever the thread waits for, and ranks that all send first, in
    pairs or in a circle, do not deadlock.

    Args:
        clock: The clock for the calls of ``check``.
        inboxes: The inboxes of the ranks that have connected to this one.
        check: Called now and then; raises if waiting is pointless.
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

    def checking(self, check: Callable[[], None]) -> Lookout:
        """Return one that also calls ``check`` now and then."""
        return Lookout(self.clock, self._inboxes, check)

    def add(self, inbox: Inbox) -> None:
        """Read an inbox whose rank has connected to this one. Safe from any thread."""
        if inbox not in self._inboxes:
            self._inboxes.append(inbox)

    def watch(self) -> list[ByteStream]:
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

    def await_event(self, event: runtime.Event) -> None:
        """Wait for an event that another thread sets; meanwhile, what was posted moves on."""
        while not self.clock.wait(event, _CHECK_EVERY):
            self.read()

    def has_posted(self) -> bool:
        """Whether this rank waits for a message of a rank that has connected to it."""
        return any(inbox.wanted_by for inbox in list(self._inboxes))
