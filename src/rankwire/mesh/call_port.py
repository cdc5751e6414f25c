"""The call port: how requests and replies of one agent travel, on connections of its own.

A port's *service* number is the same at all ranks, and ports of different services never meet.
Outgoing: ``call`` sends a request and returns its ``Reply``, and the thread that wants it waits in
that (and reads the connection itself); see ``outgoing_calls``. Incoming: connections that other
ranks' agents dialled are read only in ``poll``, by one thread at a time, through one poller.

The port does not know what is in a payload, functions or futures.

Lock: ``_lock`` guards the poller and the tables of connections, also those of ``outgoing_calls``;
nothing else is taken under it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from rankwire import runtime
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import ChannelClosedError, ForkedProcessError, RankwireError
from rankwire.fork import guard
from rankwire.links.connection import Connection
from rankwire.links.inbox import Inbox, Reply
from rankwire.links.send_handle import SendHandle, offer
from rankwire.mesh.calls import OWN, CallCancelled, CallerGone, Describe, IncomingCall, PortEvent
from rankwire.mesh.outgoing_calls import EXPIRED, OutgoingCalls
from rankwire.wire.frames import Channel, Envelope, Message, whole_of
from rankwire.wire.receive import Receive

if TYPE_CHECKING:
    from rankwire.mesh.mesh import Mesh

_log = logging.getLogger("rankwire")

_FAREWELL_PATIENCE = 0.2
_POLLER_PATIENCE = 1.0
_CANCEL_AGAIN = 0.005
_LONGEST_SLEEP = 86_400.0
_CALL, _REPLY, _CANCEL = int(Channel.CALL), int(Channel.REPLY), int(Channel.CANCEL)


class CallPort:
    """Requests out and replies back; requests in and replies out.

    Safe from any thread but for ``poll``.

    Args:
        mesh: Dials, and knows the peers.
        service: Which agent this is for.
        own_rank: The number of this rank in the port's group; None if that is the world.

    Attributes:
        presence: How the agent tells the others of its name what it does, and waits for them.
        describe: How calls in service are described, set by the agent. Called in any thread; must
            not wait.
    """

    def __init__(self, mesh: Mesh, service: int, own_rank: int | None = None) -> None:
        self.service = service
        self.describe: Describe = lambda keys: []
        self.presence = mesh.presences.of(service)
        self._mesh = mesh
        self._lock = runtime.Lock()
        self._closed: ChannelClosedError | None = None
        self._ended: RankwireError | None = None
        self._poller = mesh.connections.new_poller()
        self._calls = OutgoingCalls(
            mesh,
            service,
            own_rank=mesh.rank if own_rank is None else own_rank,
            tell=self._tell,
            poller=self._poller,
            lock=self._lock,
        )
        self._own_events: deque[PortEvent] = deque()
        self._incoming: dict[Connection, int] = {}  # with the ranks that dialled them
        self._holding: dict[Connection, None] = {}  # these have something to be flushed
        # Replies that callers have not taken yet.
        self._sending: dict[tuple[Connection, int], SendHandle] = {}
        self._is_polled = False
        self._spin = mesh.connections.new_spin()
        guard(self)

    # -- outgoing ----------------------------------------------------------------------------------

    def call(
        self,
        dst: int,
        request_id: int,
        message: Message,
        deadline: Deadline,
        on_reply: Callable[[Receive], None] | None = None,
        hold: bool = False,
        limit: float = float("inf"),
    ) -> Reply | None:
        """Send a request; return its pending reply, or None if there is no room for it.

        Args:
            dst: The rank to call.
            request_id: Unique for this port.
            message: The payload; its buffers are free again on return.
            deadline: For connecting and sending.
            on_reply: Called once the reply, or the peer's failure, is known; in any thread, without
                locks held.
            hold: Whether it may be sent a moment later, together with others; waiting for it,
                ``attend``, or the next call to that rank sends it.
            limit: Calls to that rank that may be in flight.
        """
        try:
            try:
                return self._calls.call(dst, request_id, message, deadline, on_reply, hold, limit)
            except ChannelClosedError:
                # The peer's agent closed since the last call, and nothing of this one was sent.
                # There may be a new one; if not, the door says so.
                if self._closed is not None or self._ended is not None:
                    raise
                return self._calls.call(dst, request_id, message, deadline, on_reply, hold, limit)
        except RankwireError:
            raise
        except BaseException:  # an interrupt: the request may have left, and its reply is nobody's
            try:
                self.cancel(dst, request_id)
            finally:
                self.cancel(dst, request_id)  # another one may have fallen into the first
            raise

    def cancel(self, dst: int, request_id: int, *, expired: bool = False) -> None:
        """Tell the callee that the reply is not wanted: now, or as soon as that can be sent.

        ``expired`` says that this is because the caller's time is up.
        """
        if not self._calls.cancel(dst, request_id, expired=expired):
            self.wake()  # whoever polls tries again

    def wait_for_room(self, dst: int, limit: int, deadline: Deadline) -> bool:
        """Wait until fewer than ``limit`` calls to a rank are in flight; False at the deadline."""
        return self._calls.wait_for_room(dst, limit, deadline)

    def calls_to(self, dst: int) -> list[int]:
        """Return the request ids of the calls to ``dst`` that are in flight."""
        return self.calls_to_world_rank(dst)

    def calls_to_world_rank(self, dst: int) -> list[int]:
        """Do what ``calls_to`` does, for a rank of the world."""
        inbox = self._calls.inbox_of(dst)
        return [] if inbox is None else inbox.tags_wanted()

    def in_flight(self) -> int:
        """Return how many calls wait for a reply of another rank."""
        return sum(inbox.in_flight for inbox in self._calls.inboxes())

    def _tell(self, event: PortEvent) -> None:
        """Have ``poll`` return an event that does not come over a connection."""
        self._own_events.append(event)
        self.wake()

    # -- incoming ----------------------------------------------------------------------------------

    def adopt(self, connection: Connection) -> None:
        """Take a connection that another rank's agent dialled."""
        with self._lock:
            if self._closed is None:
                self._incoming[connection] = self._rank_of(connection)
                self._poller.register(connection.stream, connection)
                return
        self._calls.dismiss(connection, Deadline(_FAREWELL_PATIENCE, self._mesh.clock))

    def poll(self, deadline: Deadline | None = None) -> list[PortEvent]:
        """Return what other ranks ask, or nothing at the deadline or after ``wake``.

        One thread at a time. Without a deadline it waits for as long as that takes.

        Raises:
            ChannelClosedError: The backend is closed; there is nothing more to wait for.
        """
        if self._holding or self._calls.unsent_cancels:
            self.flush()
        # In this order, and in ``close`` the other way round: one of the two sees the other.
        self._is_polled = True
        try:
            if self._ended is not None:
                raise self._ended.copy()
            if self._own_events:
                return [self._own_events.popleft() for _ in range(len(self._own_events))]
            patience = _LONGEST_SLEEP if deadline is None else deadline.sleep_limit()
            if self._calls.unsent_cancels:
                patience = min(patience, _CANCEL_AGAIN)
            ready = self._poller.poll(patience, self._spin)
            if isinstance(ready, Connection):
                return self._read(ready)
            if ready is None:
                return []
            assert isinstance(ready, Inbox)
            return self._calls.unread.read(ready)
        except ValueError as error:
            if self._closed is None:
                raise
            raise self._closed.copy() from error  # so slow that the poller was closed meanwhile
        finally:
            self._is_polled = False

    def _read(self, connection: Connection) -> list[PortEvent]:
        src = self._incoming[connection]
        try:
            frames = connection.receive_ready()
        except RankwireError:
            self._drop(connection)
            return [CallerGone(src, connection)]
        events: list[PortEvent] = []
        while frames:
            (group, channel, tag), payload = frames.popleft()
            if group != self.service:
                continue  # a frame for another agent cannot come on this agent's connection
            if channel == _CALL:
                if type(payload) is not bytearray:
                    try:
                        payload = whole_of(payload)
                    except RankwireError:
                        continue  # the caller gave up, or is gone: the next read says so
                events.append(IncomingCall(src, tag, payload, connection))
            elif channel == _CANCEL:
                expired = type(payload) is bytearray and payload == EXPIRED
                events.append(CallCancelled(src, tag, expired))
        return events

    def _rank_of(self, connection: Connection) -> int:
        return connection.peer

    def _drop(self, connection: Connection) -> None:
        with self._lock:
            if connection in self._incoming:
                del self._incoming[connection]
                self._poller.unregister(connection.stream)
        self._mesh.connections.release(connection)

    # -- replies -----------------------------------------------------------------------------------

    def reply(
        self, call: IncomingCall, message: Message, deadline: Deadline, hold: bool = False
    ) -> None:
        """Answer a request.

        Args:
            call: The request.
            message: The payload; its buffers are free again on return.
            deadline: For sending.
            hold: Whether it may be sent a moment later, together with others; ``flush`` or the next
                ``poll`` sends it.
        """
        connection = call.origin
        if connection is OWN:
            self._calls.answer_own(call.request_id, message)
            return
        if self._ended is not None:  # the backend tells the callers, and perhaps of an error
            raise self._ended.copy()
        envelope = (self.service, _REPLY, call.request_id)
        if message[1] >= connection.lend_from:
            if deadline.limit > 0.0:
                self._reply_at_length(connection, call, envelope, message, deadline)
            else:
                connection.send(envelope, message, deadline)
            return
        connection.send_small(envelope, message, deadline, hold)
        if hold and connection.outbox.is_holding:  # after the send: whoever flushes must find it
            self._holding[connection] = None

    def _reply_at_length(
        self,
        connection: Connection,
        call: IncomingCall,
        envelope: Envelope,
        message: Message,
        deadline: Deadline,
    ) -> None:
        """Send a large reply, unless the caller cancels meanwhile."""
        handle = offer(connection, envelope, message, deadline)
        if handle is None:
            return
        self._sending[connection, call.request_id] = handle
        try:
            if not call.is_wanted:  # ``drop_reply`` sets this first, and then looks for a handle
                handle.revoke()
            handle.settle(deadline)
        finally:
            del self._sending[connection, call.request_id]

    def drop_reply(self, call: IncomingCall) -> None:
        """Note that the caller does not want the reply; one that it is just reading is revoked.

        Safe also while another thread is in ``reply`` for the same call.
        """
        call.is_wanted = False
        handle = self._sending.get((call.origin, call.request_id))
        if handle is not None:
            handle.revoke()

    def flush(self) -> None:
        """Send the replies that were held back, and the cancels."""
        for connection in list(self._holding):
            self._holding.pop(connection, None)
            try:
                connection.outbox.flush(AT_ONCE)
            except RankwireError as error:
                _log.debug("replies to rank %d were not sent: %s", connection.peer, error)
            if connection.outbox.is_holding and connection.failure is None:
                self._holding[connection] = None  # it takes nothing now; the next look tries again
        if self._calls.unsent_cancels:
            self._calls.cancel_again()

    # -- replies that no thread waits for ----------------------------------------------------------

    def attend(self, *, patiently: bool = False) -> bool:
        """Have replies that no thread waits for looked after by whoever is in ``poll``.

        Args:
            patiently: Leave those of a rank alone whose replies were read by somebody since the
                last look.

        Returns:
            Whether any call is in flight, or something is held back.
        """
        is_holding = bool(self._holding)
        if is_holding:
            self.flush()
        return self._calls.unread.attend(patiently=patiently) or is_holding

    def attend_to(self, dst: int, reply: Reply) -> None:
        """Have a reply of ``dst`` that no thread waits for read as soon as it comes.

        That is done by whoever reads its connection then, or is in ``poll``.
        """
        self._calls.unread.attend_to(dst, reply)

    # -- ending ------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Make ``poll`` return."""
        with self._lock:  # or the poller might be closed, and its descriptor somebody else's by now
            if self._closed is None:
                self._poller.wake()

    def shut_down(self, cause: RankwireError) -> None:
        """End every wait and ``poll`` with ``cause``, because the backend closes.

        Nobody is told: that is the backend's business. It calls ``close`` afterwards.
        """
        self._ended = cause
        self.wake()
        self._calls.fail(cause)

    def close_in_child(self) -> None:
        """Close what a forked child shares with its parent; nothing is unregistered there."""
        self._ended = ForkedProcessError("this agent")
        if self._closed is None:
            self._closed = ChannelClosedError(self._ended.message)
            self._poller.close()
        self._calls.close_in_child(self._closed)
        self._lock = self._calls.lock

    def close(self) -> None:
        """Say farewell to all and end every wait, also in ``poll``. Idempotent.

        When the backend closes, that tells the others.
        """
        cause = ChannelClosedError("this agent is closed")
        with self._lock:
            if self._closed is not None:
                return
            self._closed = cause
            is_alone = self._ended is None
            self._ended = self._ended or cause
            incoming, self._incoming = self._incoming, {}
            self._poller.wake()
        self.presence.close()
        outgoing = self._calls.close(cause)
        # First of all: who dials from now on is told at the door.
        self._mesh.ports.forget(self)
        patience = Deadline(_POLLER_PATIENCE, self._mesh.clock)
        while self._is_polled and not patience.expired:
            self._mesh.clock.sleep(0.0005)  # it was woken up, and leaves
        self._poller.close()
        if not is_alone:
            return
        patience = Deadline(_FAREWELL_PATIENCE, self._mesh.clock)
        for connection in incoming:
            self._calls.dismiss(connection, patience)
        self._calls.say_farewell(outgoing, cause, patience)
