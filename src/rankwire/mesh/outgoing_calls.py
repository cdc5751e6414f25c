"""The calling side of a call port: requests out, replies back, on connections of its own.

Each peer that is called gets one connection, dialled by the first call; its replies are read by the
threads that wait for them (``Inbox``). Calls of a rank to itself go over none: the request is given
to whoever serves, and the reply is put into an inbox without a connection.

Lock: ``_lock`` guards the table of connections; nothing else is taken under it. A rank's dial lock
is held while its connection is opened, and ``_lock`` is taken under that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from rankwire import runtime
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    RankwireError,
)
from rankwire.links.connection import Connection
from rankwire.links.inbox import Inbox, Reply
from rankwire.mesh.peers import dial_alone
from rankwire.wire.frames import Channel, Message
from rankwire.wire.handshake import Purpose
from rankwire.wire.mailbox import Mailbox
from rankwire.wire.receive import Receive

if TYPE_CHECKING:
    from rankwire.mesh.mesh import Mesh

_FAREWELL_PATIENCE = 0.2
_CALL, _REPLY, _CANCEL = int(Channel.CALL), int(Channel.REPLY), int(Channel.CANCEL)
EXPIRED = b"\1"  # what a cancel says if the caller's time is up; else it says nothing
# With more calls in flight than this, one more that nobody waits for yet is sent together with the
# next ones: about a sixth more calls a second with 64 in flight (docs/decisions.md).
_HOLD_FROM = 8


class OutgoingCalls:
    """The connections on which one agent calls. Every method is safe from any thread.

    Args:
        mesh: Dials, and knows the peers.
        service: Which agent this is for.
        serve_own: Takes a request of this rank to itself: its id and payload.
        forget: Called with a connection that is not used any more, before it is closed.
        on_unread: Called when nobody reads a connection any more that is attended to.

    Attributes:
        own: Where the replies of calls to oneself arrive.
        closed: Why nothing can be called any more, if that is so.
        unsent_cancels: What could not be told, and is to be tried again.
    """

    def __init__(
        self,
        mesh: Mesh,
        service: int,
        *,
        serve_own: Callable[[int, bytearray], None],
        forget: Callable[[Inbox], None],
        on_unread: Callable[[Inbox], None],
    ) -> None:
        self._mesh = mesh
        self._service = service
        self._serve_own = serve_own
        self._forget = forget
        self._on_unread = on_unread
        self._lock = runtime.Lock()
        self._dial_locks: dict[int, runtime.Lock] = {}
        self._inboxes: dict[int, Inbox] = {}
        self.unsent_cancels: deque[tuple[Connection, int, bool]] = deque()
        self.own = Inbox(mesh.rank, Mailbox(keep_unmatched=False), mesh.clock, lookout=mesh.lookout)
        self.closed: RankwireError | None = None

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
    ) -> Reply | None:
        """Send a request; see ``CallPort.call``."""
        inbox = self._inboxes.get(dst)
        if inbox is None or inbox.connection.failure is not None:  # type: ignore[union-attr]
            if dst == self._mesh.rank:
                return self._call_own(request_id, message, on_reply, limit)
            inbox = self._dial(dst, deadline)
        in_flight = len(inbox.wanted_by)
        if in_flight >= limit:
            return None
        service = self._service
        reply = Reply((service, _REPLY, request_id), on_reply, inbox)
        connection: Connection = inbox.connection  # type: ignore[assignment]
        is_small = message[1] < connection.lend_from
        send = connection.send_small if is_small else connection.send
        try:
            try:
                inbox.expect(reply)
                hold = hold and in_flight >= _HOLD_FROM
                send((service, _CALL, request_id), message, deadline, hold, inbox)
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
                inbox.withdraw(reply)  # an interrupt may have fallen into the first
            raise
        return reply

    def _call_own(
        self,
        request_id: int,
        message: Message,
        on_reply: Callable[[Receive], None] | None,
        limit: float,
    ) -> Reply | None:
        if self.closed is not None:
            raise self.closed.copy()
        if len(self.own.wanted_by) >= limit:
            return None
        reply = Reply((self._service, _REPLY, request_id), on_reply, self.own)
        try:
            self.own.post(reply)
            if not reply.done:
                self._serve_own(request_id, bytearray().join(message[0]))
        except BaseException:
            try:
                self.own.withdraw(reply)
            finally:
                self.own.withdraw(reply)  # an interrupt may have fallen into the first
            raise
        return reply

    def answer_own(self, request_id: int, message: Message) -> None:
        """End a call of this rank to itself."""
        self.own.put((self._service, _REPLY, request_id), bytearray().join(message[0]))

    def inbox_of(self, dst: int) -> Inbox | None:
        """Return where a rank's replies arrive, if it has been called."""
        return self.own if dst == self._mesh.rank else self._inboxes.get(dst)

    def inboxes(self) -> list[Inbox]:
        """Return those of other ranks."""
        return list(self._inboxes.values())

    def wait_for_room(self, dst: int, limit: int, deadline: Deadline) -> bool:
        """Wait until fewer than ``limit`` calls are in flight; False if the time passes first."""
        inbox = self.inbox_of(dst)
        if inbox is None or len(inbox.wanted_by) < limit:
            return True
        inbox.send_held(deadline)
        return inbox.wait_until(lambda: len(inbox.wanted_by) < limit, deadline)

    # -- cancels -----------------------------------------------------------------------------------

    def cancel(self, dst: int, request_id: int, *, expired: bool) -> bool:
        """Tell a callee that a reply is not wanted; False if that has to be tried again."""
        inbox = self._inboxes.get(dst)
        if inbox is None or inbox.connection is None:
            return True
        return self._cancel(inbox.connection, request_id, expired)

    def cancel_again(self) -> None:
        """Try again what could not be told."""
        for _ in range(len(self.unsent_cancels)):
            try:
                connection, request_id, expired = self.unsent_cancels.popleft()
            except IndexError:
                break  # another thread was faster
            self._cancel(connection, request_id, expired)

    def _cancel(self, connection: Connection, request_id: int, expired: bool) -> bool:
        reason: Message = ((EXPIRED,), len(EXPIRED)) if expired else ((), 0)
        try:
            connection.send((self._service, _CANCEL, request_id), reason, AT_ONCE)
        except DeadlineExceededError:  # another thread is just sending
            self.unsent_cancels.append((connection, request_id, expired))
            return False
        except RankwireError:
            return True  # the connection has ended, and that ends the work too
        return True

    # -- connections -------------------------------------------------------------------------------

    def _dial(self, dst: int, deadline: Deadline) -> Inbox:
        with self._lock:
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
        connection = self._mesh.dial(peer, Purpose.CALLS, self._service, deadline, keep)
        inbox = self._inboxes.get(dst)
        if inbox is not None:
            return inbox
        self.dismiss(connection, Deadline(_FAREWELL_PATIENCE, self._mesh.clock))
        assert self.closed is not None
        raise self.closed.copy()

    def _keep(self, dst: int, connection: Connection) -> None:
        """Call on this connection from now on, unless this port is closed. Idempotent."""
        with self._lock:
            inbox = self._inboxes.get(dst)
            if self.closed is None and (inbox is None or inbox.connection is not connection):
                mailbox = Mailbox(keep_unmatched=False)
                lookout = self._mesh.lookout
                inbox = Inbox(
                    dst, mailbox, self._mesh.clock, connection, fetch=True, lookout=lookout
                )
                inbox.on_unread = self._on_unread
                self._inboxes[dst] = inbox

    def _discard(self, dst: int, inbox: Inbox) -> None:
        """Forget a connection that has ended.

        The peer's agent has closed, or its process has ended, and a new one may be there.
        """
        assert inbox.connection is not None
        assert inbox.connection.failure is not None
        inbox.read_available()  # what it replied before it ended
        with self._lock:
            if self._inboxes.get(dst) is inbox:
                del self._inboxes[dst]
        self._forget(inbox)
        inbox.close(inbox.connection.failure)
        self._mesh.release(inbox.connection)

    def dismiss(self, connection: Connection, patience: Deadline) -> None:
        """Let the agent at the other end know that this one has closed."""
        connection.farewell(patience)
        self._mesh.release(connection)

    # -- ending ------------------------------------------------------------------------------------

    def fail(self, cause: RankwireError) -> None:
        """End every wait, because the backend closes."""
        for inbox in (*self.inboxes(), self.own):
            inbox.fail(cause)

    def close(self, cause: RankwireError) -> list[Inbox]:
        """Call no more; return the inboxes that are still to be told and closed."""
        with self._lock:
            self.closed = cause
            inboxes, self._inboxes = list(self._inboxes.values()), {}
        self.own.fail(cause)
        return inboxes

    def say_farewell(self, inboxes: list[Inbox], cause: RankwireError, patience: Deadline) -> None:
        """Tell the callees of an agent that closes, and close the connections."""
        for inbox in inboxes:
            assert inbox.connection is not None
            inbox.connection.farewell(patience)
            inbox.close(cause)
            self._mesh.release(inbox.connection)

    def close_in_child(self) -> None:
        """Let go of the lock in a child of a fork: the thread that has it is not there."""
        self._lock = runtime.Lock()
