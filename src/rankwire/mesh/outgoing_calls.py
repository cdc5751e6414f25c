"""The calling side of a call port: sends requests and receives replies.

The first call to a peer dials its connection; the threads that wait for replies read it
(``Inbox``). A rank's calls to itself use no connection: the port returns the request from ``poll``,
and the reply is put into an inbox without a connection.

Lock: ``lock``, the port's, guards the poller and the table of connections; nothing else is taken
under it. A rank's dial lock is held while its connection is opened, and ``lock`` is taken under it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from rankwire import runtime
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import ChannelClosedError, DeadlineExceededError, RankwireError
from rankwire.links.connection import Connection
from rankwire.links.inbox import Inbox, Reply
from rankwire.mesh.calls import (
    OWN,
    CallCancelled,
    CreditGiven,
    IncomingCall,
    PortEvent,
    RepliesDue,
)
from rankwire.mesh.peers import dial_alone
from rankwire.transports.poller import Poller
from rankwire.wire.credit import CREDIT_NBYTES, Credit
from rankwire.wire.frames import Channel, Message
from rankwire.wire.handshake import Purpose
from rankwire.wire.mailbox import Mailbox
from rankwire.wire.receive import Receive

if TYPE_CHECKING:
    from rankwire.mesh.mesh import Mesh

_FAREWELL_PATIENCE = 0.2
_CALL, _REPLY, _CANCEL = int(Channel.CALL), int(Channel.REPLY), int(Channel.CANCEL)
_STREAM, _ITEM, _CREDIT = int(Channel.STREAM), int(Channel.ITEM), int(Channel.CREDIT)
EXPIRED = b"\1"  # the payload of a cancel if the caller's timeout passed; otherwise it is empty
# With more calls in flight than this, a call that no thread waits for yet is sent together with the
# next ones: about a sixth more calls a second with 64 in flight (docs/decisions.md).
_HOLD_FROM = 8


class OutgoingCalls:
    """The connections on which one agent calls. Every method is safe from any thread.

    ``tell`` gives the port an event: a call of this rank to itself, or replies.

    Attributes:
        lock: The port's lock.
        own: Receives the replies of this rank's calls to itself.
        unread: The replies that no thread waits for.
        closed: Why no more calls are possible, if so.
        unsent_cancels: Cancels to be retried.
    """

    def __init__(
        self,
        mesh: Mesh,
        service: int,
        *,
        own_rank: int,
        tell: Callable[[PortEvent], None],
        poller: Poller,
        lock: runtime.Lock,
    ) -> None:
        self._mesh = mesh
        self._service = service
        self._own_rank = own_rank
        self._tell = tell
        self.lock = lock
        self._dial_locks: dict[int, runtime.Lock] = {}
        self._inboxes: dict[int, Inbox] = {}
        self.unsent_cancels: deque[tuple[Connection, int, bool]] = deque()
        self.own = Inbox(mesh.rank, Mailbox(keep_unmatched=False), mesh.clock, lookout=mesh.lookout)
        self.closed: RankwireError | None = None
        self.unread = UnreadReplies(self, poller, tell)

    # -- calls -------------------------------------------------------------------------------------

    def call(
        self,
        dst: int,
        request_id: int,
        message: Message,
        deadline: Deadline,
        on_reply: Callable[[Receive], None] | None,
        hold: bool,
        limit: float,
        window: Credit | None,
    ) -> Reply | None:
        """Send a request; see ``CallPort.call``."""
        inbox = self._inboxes.get(dst)
        if inbox is None or inbox.connection.failure is not None:  # type: ignore[union-attr]
            if dst == self._mesh.rank:
                return self._call_own(request_id, message, on_reply, limit, window)
            inbox = self._dial(dst, deadline)
        in_flight = len(inbox.wanted_by)
        if in_flight >= limit:
            return None
        service = self._service
        reply = Reply((service, _REPLY, request_id), on_reply, inbox)
        connection: Connection = inbox.connection  # type: ignore[assignment]
        is_small = message[1] < connection.lend_from
        send = connection.send_small if is_small else connection.send
        channel = _CALL
        try:
            try:
                if window is not None:
                    channel = _STREAM
                    inbox.keep((service, _ITEM, request_id), *window)
                inbox.expect(reply)
                hold = hold and in_flight >= _HOLD_FROM
                send((service, channel, request_id), message, deadline, hold, inbox)
            finally:
                if inbox.due:
                    inbox.call_back_due()
        except ChannelClosedError:
            if inbox.withdraw(reply):
                raise
        except DeadlineExceededError as error:
            inbox.withdraw(reply)
            error.may_have_run = error.may_have_arrived
            raise
        except BaseException:
            try:
                inbox.withdraw(reply)
            finally:
                inbox.withdraw(reply)  # a second interrupt may have stopped the first
            raise
        finally:
            if window is not None and not (reply.posted or reply.done):
                inbox.keep_no_more((service, _ITEM, request_id))
        return reply

    def _call_own(
        self,
        request_id: int,
        message: Message,
        on_reply: Callable[[Receive], None] | None,
        limit: float,
        window: Credit | None,
    ) -> Reply | None:
        if self.closed is not None:
            raise self.closed.copy()
        if len(self.own.wanted_by) >= limit:
            return None
        reply = Reply((self._service, _REPLY, request_id), on_reply, self.own)
        if window is not None:
            self.own.keep((self._service, _ITEM, request_id), *window)
        try:
            self.own.post(reply)
            if not reply.done:
                payload = bytearray().join(message[0])
                incoming = IncomingCall(self._own_rank, request_id, payload, OWN)
                incoming.is_stream = window is not None
                self._tell(incoming)
        except BaseException:
            try:
                self.own.withdraw(reply)
            finally:
                self.own.withdraw(reply)  # a second interrupt may have stopped the first
            raise
        return reply

    def answer_own(self, request_id: int, message: Message, channel: int) -> None:
        """Put the reply to a call of this rank to itself, or an item."""
        self.own.put((self._service, channel, request_id), bytearray().join(message[0]))

    def grant(self, reply: Reply, credit: Credit, deadline: Deadline) -> None:
        """Send a grant of credit; see ``CallPort.grant``."""
        connection = reply.inbox.connection
        if connection is None:
            self._tell(CreditGiven(self._own_rank, reply.request_id, credit))
        else:
            message = ((credit.pack(),), CREDIT_NBYTES)
            connection.send_small((self._service, _CREDIT, reply.request_id), message, deadline)

    def inbox_of(self, dst: int) -> Inbox | None:
        """Return the inbox of a rank's replies, if it has been called."""
        return self.own if dst == self._mesh.rank else self._inboxes.get(dst)

    def inboxes(self) -> list[Inbox]:
        """Return the inboxes of other ranks."""
        return list(self._inboxes.values())

    def wait_for_room(self, dst: int, limit: int, deadline: Deadline) -> bool:
        """Wait until fewer than ``limit`` calls are in flight; return False at the deadline."""
        inbox = self.inbox_of(dst)
        if inbox is None or len(inbox.wanted_by) < limit:
            return True
        inbox.send_held(deadline)
        return inbox.wait_until(lambda: len(inbox.wanted_by) < limit, deadline)

    # -- cancels -----------------------------------------------------------------------------------

    def cancel(self, dst: int, request_id: int, *, expired: bool) -> bool:
        """Drop a call's items and send a cancel; return False if that must be retried."""
        items = (self._service, _ITEM, request_id)
        if dst == self._mesh.rank:
            self.own.keep_no_more(items)
            self._tell(CallCancelled(self._own_rank, request_id, expired))
            return True
        inbox = self._inboxes.get(dst)
        if inbox is None or inbox.connection is None:
            return True
        inbox.keep_no_more(items)
        return self._cancel(inbox.connection, request_id, expired)

    def cancel_again(self) -> None:
        """Retry the cancels that were not sent."""
        for _ in range(len(self.unsent_cancels)):
            try:
                connection, request_id, expired = self.unsent_cancels.popleft()
            except IndexError:
                break  # another thread took it first
            self._cancel(connection, request_id, expired)

    def _cancel(self, connection: Connection, request_id: int, expired: bool) -> bool:
        reason: Message = ((EXPIRED,), len(EXPIRED)) if expired else ((), 0)
        try:
            connection.send((self._service, _CANCEL, request_id), reason, AT_ONCE)
        except DeadlineExceededError:  # another thread is sending
            self.unsent_cancels.append((connection, request_id, expired))
            return False
        except RankwireError:
            return True  # the connection has failed, which ends the work too
        return True

    # -- connections -------------------------------------------------------------------------------

    def _dial(self, dst: int, deadline: Deadline) -> Inbox:
        with self.lock:
            dial_lock = self._dial_locks.setdefault(dst, runtime.Lock())
        return dial_alone(dial_lock, dst, deadline, partial(self._dial_alone, dst, deadline))

    def _dial_alone(self, dst: int, deadline: Deadline) -> Inbox:
        inbox = self._inboxes.get(dst)
        if inbox is not None:
            assert inbox.connection is not None
            if inbox.connection.failure is None:
                return inbox
            self._discard(dst, inbox)
        if self.closed is not None:
            raise self.closed.copy()
        peer = self._mesh.peers[dst]
        keep = partial(self._keep, dst)
        connection = self._mesh.connections.dial(peer, Purpose.CALLS, self._service, deadline, keep)
        inbox = self._inboxes.get(dst)
        if inbox is not None:
            return inbox
        self.dismiss(connection, Deadline(_FAREWELL_PATIENCE, self._mesh.clock))
        assert self.closed is not None
        raise self.closed.copy()

    def _keep(self, dst: int, connection: Connection) -> None:
        """Use this connection for calls, unless this port is closed. Idempotent."""
        with self.lock:
            inbox = self._inboxes.get(dst)
            if self.closed is None and (inbox is None or inbox.connection is not connection):
                mesh, mailbox = self._mesh, Mailbox(keep_unmatched=False)
                inbox = Inbox(
                    dst, mailbox, mesh.clock, connection, fetch=True, lookout=mesh.lookout
                )
                inbox.on_unread = self.unread.arm
                self._inboxes[dst] = inbox

    def _discard(self, dst: int, inbox: Inbox) -> None:
        """Forget a failed connection: the peer's agent has closed, or its process has ended."""
        assert inbox.connection is not None
        assert inbox.connection.failure is not None
        inbox.read_available()  # the replies before its end
        with self.lock:
            if self._inboxes.get(dst) is inbox:
                del self._inboxes[dst]
        self.unread.forget(inbox)
        inbox.close(inbox.connection.failure)
        self._mesh.connections.release(inbox.connection)

    def dismiss(self, connection: Connection, patience: Deadline) -> None:
        """Say farewell to the agent at the other end, and close the connection."""
        connection.farewell(patience)
        self._mesh.connections.release(connection)

    # -- ending ------------------------------------------------------------------------------------

    def fail(self, cause: RankwireError) -> None:
        """End every wait, because the backend closes."""
        for inbox in (*self.inboxes(), self.own):
            inbox.fail(cause)

    def close(self, cause: RankwireError) -> list[Inbox]:
        """Refuse new calls; return the inboxes whose connections ``say_farewell`` must close."""
        with self.lock:
            self.closed = cause
            inboxes, self._inboxes = list(self._inboxes.values()), {}
        self.own.fail(cause)
        return inboxes

    def say_farewell(self, inboxes: list[Inbox], cause: RankwireError, patience: Deadline) -> None:
        """Say farewell to the callees of a closing agent, and close the connections."""
        for inbox in inboxes:
            assert inbox.connection is not None
            inbox.connection.farewell(patience)
            inbox.close(cause)
            self._mesh.connections.release(inbox.connection)

    def close_in_child(self, cause: RankwireError) -> None:
        """Refuse new calls; replace the lock, which a thread of the parent may hold."""
        self.closed = cause
        self.lock = runtime.Lock()


class UnreadReplies:
    """The replies that no thread waits for: the port's poller finds them.

    A connection is armed in the poller for one event, so that the poller does not disturb a thread
    that reads it meanwhile. If a reply is attended to, a thread that stops reading the connection
    arms it again (``Inbox.on_unread``).
    """

    def __init__(
        self, calls: OutgoingCalls, poller: Poller, tell: Callable[[PortEvent], None]
    ) -> None:
        self._calls = calls
        self._poller = poller
        self._tell = tell
        self._turns: dict[int, int] = {}

    def attend(self, *, patiently: bool) -> bool:
        """Have the poller read them; see ``CallPort.attend``."""
        outstanding = False
        for inbox in self._calls.inboxes():
            if inbox.was_interrupted or inbox.due:
                self._read_what_is_left(inbox)
            if not inbox.in_flight:
                continue
            outstanding = True
            seen, self._turns[inbox.peer] = self._turns.get(inbox.peer), inbox.turns
            if patiently and seen != inbox.turns:
                continue
            inbox.send_held(AT_ONCE)
            self._watch(inbox)
        return outstanding

    def attend_to(self, dst: int, reply: Reply) -> None:
        """Have one reply read as soon as it arrives."""
        inbox = self._calls.inbox_of(dst)
        if inbox is None or inbox.connection is None:
            return  # a call to oneself needs no reader
        inbox.attend_to(reply)
        inbox.send_held(AT_ONCE)
        self._watch(inbox)

    def read(self, inbox: Inbox) -> list[PortEvent]:
        """Read a connection in which the poller has found input."""
        with self._calls.lock:  # before the read: a thread that attends to a reply later rearms it
            inbox.is_armed = False
        inbox.read_quietly()
        if inbox.in_flight and not inbox.is_read:
            self.arm(inbox)
        return [RepliesDue(inbox.call_back_due)] if inbox.due else []

    def _watch(self, inbox: Inbox) -> None:
        if inbox.is_read:
            return  # the reading thread sees that, and arms the poller when it stops
        if inbox.connection is not None and inbox.connection.stream.before_sleep():
            self._read_what_is_left(inbox)
        self.arm(inbox)

    def _read_what_is_left(self, inbox: Inbox) -> None:
        """Read what the poller cannot see: input in a ring, or taken by an interrupted thread."""
        inbox.read_quietly()
        if inbox.due:
            self._tell(RepliesDue(inbox.call_back_due))

    def arm(self, inbox: Inbox) -> None:
        """Have the poller watch for input, once."""
        if inbox.is_armed:
            return
        with self._calls.lock:
            if self._calls.closed is None and self._calls.inbox_of(inbox.peer) is inbox:
                assert inbox.connection is not None
                self._poller.arm(inbox.connection.stream, inbox)
                inbox.is_armed = True  # last: an interrupt must not leave it marked and unarmed

    def forget(self, inbox: Inbox) -> None:
        """Stop polling a connection, before it is closed."""
        assert inbox.connection is not None
        with self._calls.lock:
            if self._calls.closed is None:
                self._poller.unregister(inbox.connection.stream)
