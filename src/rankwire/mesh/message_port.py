"""The message port: sends messages to ranks, and receives theirs, under an envelope.

An envelope is a group, a channel and a tag; ranks are world ranks. Connections for messages go one
way; the first message to a rank opens one. A waiting thread reads what others send, so that ranks
that all send first do not deadlock.
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
    """Sends and receives the messages of one rank. Every method is safe from any thread."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._peers = mesh.peers
        self._lookout = mesh.lookout

    def transmit(self, dst: int, envelope: Envelope, message: Message, deadline: Deadline) -> None:
        """Send one message. The caller may reuse its buffers on return."""
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
        """Send one message without waiting for a peer that reads it from this rank's memory.

        ``check`` is called now and then while the peer does not take it; its exception ends the
        wait. Returns a handle to settle before the buffers may change; None if they may change
        already.
        """
        peer, lookout = self._peers[dst], self._lookout
        connection = peer.messages or self._mesh.connections.for_messages(peer, deadline)
        checking = None if check is None else lookout.checking(check)
        return offer(connection, envelope, message, deadline, lookout, while_sending=checking)

    def begin(
        self, dst: int, envelope: Envelope, message: Message, deadline: Deadline
    ) -> SendHandle | None:
        """Send one message without waiting for the peer to take it.

        It is sent before later messages to the same rank. The deadline is for connecting. Returns
        the same as ``offer``.
        """
        peer = self._peers[dst]
        connection = peer.messages or self._mesh.connections.for_messages(peer, deadline)
        return post(connection, envelope, message, self._lookout)

    def receive(
        self, src: int, envelope: Envelope, deadline: Deadline, *, nbytes: int | None = None
    ) -> Payload:
        """Return the next message under an envelope; the caller owns it.

        A large one may still be in the sender's memory; then the caller must read and release it.
        Raises ``SizeMismatchError`` if it does not have ``nbytes`` bytes; it stays receivable.
        """
        return self._peers[src].inbox.take(Receive(envelope, nbytes=nbytes), deadline)

    def expect(
        self, src: int, envelope: Envelope, *, nbytes: int | None = None, into: Destination | None
    ) -> ReceiveHandle:
        """Post a receive of the next message under an envelope.

        ``nbytes`` is its size if that is fixed; otherwise as for ``receive``. It arrives in
        ``into``, unless it is small, is still in the sender's memory, or arrived before this call.
        """
        return PeerReceive(self._peers[src].inbox, envelope, nbytes, into)

    def expect_any(
        self, sources: Sequence[int], envelope: Envelope, *, nbytes: int | None = None
    ) -> ReceiveHandle:
        """Post a receive of the next message under an envelope from one of several ranks.

        It fails when all of them are gone. If several messages have arrived, the first rank of
        ``sources`` wins.
        """
        inboxes = [self._peers[src].inbox for src in sources]
        new_waiter = self._mesh.connections.new_waiter
        return FirstReceive(
            inboxes, envelope, nbytes, new_waiter, self._successor_of, self._lookout
        )

    def _successor_of(self, inbox: Inbox) -> Inbox:
        """Return the current inbox of an inbox's rank: another one if the rank was restarted."""
        return self._peers[inbox.peer].inbox

    def has_arrived(self, src: int, envelope: Envelope) -> bool:
        """Return whether a message was read and not received. Neither reads nor waits."""
        return self._peers[src].inbox.has_arrived(envelope)

    def abandon(self, group: int, cause: RankwireError) -> None:
        """End all receives of one group on this rank, because it has left the group."""
        for peer in list(self._peers.values()):
            peer.inbox.abandon(group, cause)

    def refuse(self, envelope: Envelope) -> None:
        """Drop arrived and later messages whose tag differs in the lower 16 bits only."""
        for peer in list(self._peers.values()):
            peer.inbox.refuse(envelope)


class Lookout:
    """Reads what other ranks have sent, for a thread that waits.

    So posted messages progress whatever the thread waits for, and ranks that all send first, in
    pairs or in a circle, do not deadlock. ``check`` is called now and then; it raises to end the
    wait.
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
        """Return a lookout that also calls ``check`` now and then."""
        return Lookout(self.clock, self._inboxes, check)

    def add(self, inbox: Inbox) -> None:
        """Read an inbox whose rank has connected to this one. Safe from any thread."""
        if inbox not in self._inboxes:
            self._inboxes.append(inbox)

    def watch(self) -> list[ByteStream]:
        """Return the streams to read."""
        return [stream for inbox in list(self._inboxes) for stream in inbox.watch()]

    def read(self) -> bool:
        """Read what has arrived, without waiting; return whether this thread could read."""
        is_read = False
        for inbox in list(self._inboxes):
            is_read = inbox.read() or is_read
            if inbox.due:  # a receive from any rank, which withdraws its receives from the others
                inbox.call_back_due()
            if inbox.is_over:
                with suppress(ValueError):  # another thread removed it first
                    self._inboxes.remove(inbox)
                if not inbox.is_over:  # its rank connected again before it was removed
                    self.add(inbox)
        if self._check is not None and self._next.expired:
            self._next = Deadline(_CHECK_EVERY, self.clock)
            self._check()
        return is_read

    def await_event(self, event: runtime.Event) -> None:
        """Wait for an event that another thread sets; read meanwhile."""
        while not self.clock.wait(event, _CHECK_EVERY):
            self.read()

    def has_posted(self) -> bool:
        """Whether a receive is posted for a rank that has connected to this one."""
        return any(inbox.wanted_by for inbox in list(self._inboxes))
