"""The call port: sends one agent's requests and replies over connections of its own.

An agent has the same *service* number on all ranks, and a connection serves one service only.
Outgoing: ``call`` sends a request and returns its ``Reply``; the thread that waits for the reply
reads the connection (see ``outgoing_calls``). Incoming: one thread at a time calls ``poll``, which
reads the connections that other ranks' agents dialled, through one poller. The port knows nothing
of payloads, functions or futures.

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
from rankwire.mesh.calls import (
    OWN,
    CallCancelled,
    CallerGone,
    CreditGiven,
    Describe,
    IncomingCall,
    PortEvent,
)
from rankwire.mesh.outgoing_calls import EXPIRED, OutgoingCalls
from rankwire.wire.credit import CREDIT_NBYTES, Credit, unpack_credit
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
_STREAM, _CREDIT = int(Channel.STREAM), int(Channel.CREDIT)


class CallPort:
    """Sends requests, returns replies; receives requests, sends replies.

    Every method but ``poll`` is safe from any thread. ``own_rank`` is this rank's number in the
    port's group; None for the world.

    Attributes:
        presence: Reports the agent's state to the coordinator, and waits for its answers.
        describe: Describes the calls in service; set by the agent. Called in any thread; must not
            wait.
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
        self._incoming: dict[Connection, int] = {}  # by connection: the rank that dialled it
        self._holding: dict[Connection, None] = {}  # they have held replies to flush
        # Replies that their callers have not read yet.
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
        window: Credit | None = None,
    ) -> Reply | None:
        """Send a request; return its pending reply, or None if ``limit`` is reached.

        Args:
            dst: The rank to call.
            request_id: Unique for this port.
            message: The payload; the caller may reuse its buffers on return.
            deadline: For connecting and sending.
            on_reply: Called once the reply, or the peer's failure, is known; in any thread, without
                locks held.
            hold: Whether the request may wait to be sent together with others; a wait for its
                reply, ``attend`` or the next call to that rank sends it.
            limit: Maximum number of calls to that rank in flight.
            window: Request the items of a stream, and keep so many that are not read.
        """
        try:
            try:
                return self._calls.call(
                    dst, request_id, message, deadline, on_reply, hold, limit, window
                )
            except ChannelClosedError:
                # The peer's agent has closed since the last call, and nothing of this request was
                # sent. Dial again: the peer refuses if no new agent is open.
                if self._closed is not None or self._ended is not None:
                    raise
                return self._calls.call(
                    dst, request_id, message, deadline, on_reply, hold, limit, window
                )
        except RankwireError:
            raise
        except BaseException:  # an interrupt: the request may be sent, and its reply is not wanted
            try:
                self.cancel(dst, request_id)
            finally:
                self.cancel(dst, request_id)  # a second interrupt may have stopped the first
            raise

    def cancel(self, dst: int, request_id: int, *, expired: bool = False) -> None:
        """Cancel a call, now or by a retry; ``expired`` says that the caller's timeout passed."""
        if not self._calls.cancel(dst, request_id, expired=expired):
            self.wake()  # the thread in ``poll`` retries

    def grant(self, reply: Reply, credit: Credit, deadline: Deadline) -> None:
        """Grant the producer of a stream credit; ``reply`` is that of its request."""
        self._calls.grant(reply, credit, deadline)

    def wait_for_room(self, dst: int, limit: int, deadline: Deadline) -> bool:
        """Wait until fewer than ``limit`` calls to a rank are in flight; False at the deadline."""
        return self._calls.wait_for_room(dst, limit, deadline)

    def calls_to(self, dst: int) -> list[int]:
        """Return the request ids of the calls to ``dst`` that are in flight."""
        return self.calls_to_world_rank(dst)

    def calls_to_world_rank(self, dst: int) -> list[int]:
        """Return the request ids of the calls to a rank of the world that are in flight."""
        inbox = self._calls.inbox_of(dst)
        return [] if inbox is None else inbox.tags_wanted()

    def in_own_ranks(self, dst: int, error: RankwireError) -> RankwireError:
        """Put the ranks of the port's group into an error of a call to ``dst``, and return it."""
        return error

    def in_flight(self) -> int:
        """Return the number of calls that wait for another rank's reply."""
        return sum(inbox.in_flight for inbox in self._calls.inboxes())

    def _tell(self, event: PortEvent) -> None:
        self._own_events.append(event)
        self.wake()

    # -- incoming ----------------------------------------------------------------------------------

    def adopt(self, connection: Connection) -> None:
        """Read a connection that another rank's agent dialled."""
        with self._lock:
            if self._closed is None:
                self._incoming[connection] = self._rank_of(connection)
                self._poller.register(connection.stream, connection)
                return
        self._calls.dismiss(connection, Deadline(_FAREWELL_PATIENCE, self._mesh.clock))

    def poll(self, deadline: Deadline | None = None) -> list[PortEvent]:
        """Return the next events from other ranks, or nothing at the deadline or after ``wake``.

        Called by one thread at a time. Without a deadline there is no time limit.

        Raises:
            ChannelClosedError: The agent or the backend is closed.
        """
        if self._holding or self._calls.unsent_cancels:
            self.flush()
        # ``close`` sets and reads these two in the opposite order: one thread sees the other.
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
            raise self._closed.copy() from error  # ``close`` gave up waiting and closed the poller
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
                continue  # a frame for another agent is invalid here
            if channel == _CALL or channel == _STREAM:
                if type(payload) is not bytearray:
                    try:
                        payload = whole_of(payload)
                    except RankwireError:
                        continue  # the caller cancelled or failed: the next read reports it
                incoming = IncomingCall(src, tag, payload, connection)
                if channel == _STREAM:
                    incoming.is_stream = True
                events.append(incoming)
            elif channel == _CREDIT:
                if type(payload) is bytearray and len(payload) == CREDIT_NBYTES:
                    events.append(CreditGiven(src, tag, unpack_credit(payload)))
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
        self,
        call: IncomingCall,
        message: Message,
        deadline: Deadline,
        hold: bool = False,
        channel: int = _REPLY,
    ) -> None:
        """Send the reply to a request, or an item; the caller may reuse the buffers on return.

        With ``hold``, it may wait to be sent together with others; ``flush`` or the next ``poll``
        sends it.
        """
        connection = call.origin
        if connection is OWN:
            self._calls.answer_own(call.request_id, message, channel)
            return
        if self._ended is not None:  # the backend informs the callers, perhaps of an error
            raise self._ended.copy()
        envelope = (self.service, channel, call.request_id)
        if message[1] >= connection.lend_from:
            if deadline.limit > 0.0:
                self._reply_at_length(connection, call, envelope, message, deadline)
            else:
                connection.send(envelope, message, deadline)
            return
        connection.send_small(envelope, message, deadline, hold)
        if hold and connection.outbox.is_holding:  # after the send: a flushing thread must find it
            self._holding[connection] = None

    def _reply_at_length(
        self,
        connection: Connection,
        call: IncomingCall,
        envelope: Envelope,
        message: Message,
        deadline: Deadline,
    ) -> None:
        handle = offer(connection, envelope, message, deadline)
        if handle is None:
            return
        self._sending[connection, call.request_id] = handle
        try:
            if not call.is_wanted:  # ``drop_reply`` sets this before it looks for a handle
                handle.revoke()
            handle.settle(deadline)
        finally:
            del self._sending[connection, call.request_id]

    def drop_reply(self, call: IncomingCall) -> None:
        """Drop a reply, or revoke it while the caller reads it; safe during its ``reply``."""
        call.is_wanted = False
        handle = self._sending.get((call.origin, call.request_id))
        if handle is not None:
            handle.revoke()

    def flush_held(self) -> bool:
        """Send the held replies and items, if there are any; return whether there were."""
        is_holding = bool(self._holding)
        if is_holding:
            self.flush()
        return is_holding

    def flush(self) -> None:
        """Send the held replies, and retry the cancels."""
        for connection in list(self._holding):
            self._holding.pop(connection, None)
            try:
                connection.outbox.flush(AT_ONCE)
            except RankwireError as error:
                _log.debug("replies to rank %d were not sent: %s", connection.peer, error)
            if connection.outbox.is_holding and connection.failure is None:
                self._holding[connection] = None  # its buffer is full; the next flush retries
        if self._calls.unsent_cancels:
            self._calls.cancel_again()

    # -- replies that no thread waits for ----------------------------------------------------------

    def attend(self, *, patiently: bool = False) -> bool:
        """Have the thread in ``poll`` read the replies that no thread waits for.

        ``patiently`` skips ranks whose connection a thread has read since the last call. Returns
        whether any call is in flight, or a reply was held.
        """
        is_holding = self.flush_held()
        return self._calls.unread.attend(patiently=patiently) or is_holding

    def attend_to(self, dst: int, reply: Reply) -> None:
        """Have the thread that reads or polls next read a reply of ``dst`` when it arrives."""
        self._calls.unread.attend_to(dst, reply)

    # -- ending ------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Make ``poll`` return."""
        with self._lock:  # without it, the poller's descriptor may be closed and reused
            if self._closed is None:
                self._poller.wake()

    def shut_down(self, cause: RankwireError) -> None:
        """End every wait with ``cause``; the backend informs the peers, then calls ``close``."""
        self._ended = cause
        self.wake()
        self._calls.fail(cause)

    def close_in_child(self) -> None:
        """Close what a forked child shares with its parent, without unregistering any stream."""
        self._ended = ForkedProcessError("this agent")
        if self._closed is None:
            self._closed = ChannelClosedError(self._ended.message)
            self._poller.close()
        self._calls.close_in_child(self._closed)
        self._lock = self._calls.lock

    def close(self) -> None:
        """Close all, with farewells unless the backend closes; end every wait. Idempotent."""
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
        # First, so that the acceptor refuses callers that dial from now on.
        self._mesh.ports.forget(self)
        patience = Deadline(_POLLER_PATIENCE, self._mesh.clock)
        while self._is_polled and not patience.expired:
            self._mesh.clock.sleep(0.0005)  # the woken thread is leaving ``poll``
        self._poller.close()
        if not is_alone:
            return
        patience = Deadline(_FAREWELL_PATIENCE, self._mesh.clock)
        for connection in incoming:
            self._calls.dismiss(connection, patience)
        self._calls.say_farewell(outgoing, cause, patience)
