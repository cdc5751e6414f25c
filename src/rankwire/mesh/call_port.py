"""The call port of a mesh: requests and replies of one agent, on connections of its own.

Outgoing calls are in ``outgoing_calls``. Incoming connections are those that other ranks' agents
dialled; they are read only in ``poll``, by one thread at a time, through one poller. Replies of
calls that no thread waits for (``rpc_async``) are read there too, on request (``attend``,
``attend_to``): an outgoing connection is then armed in the same poller for one shot, so that a
thread that reads it meanwhile is not disturbed again and again. Of a reply that is attended to,
whoever leaves the connection arms it again (``Inbox.on_unread``).

Lock: ``_lock`` guards the poller and the incoming connections; nothing else is taken under it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
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
    CallPort,
    IncomingCall,
    PortEvent,
    RepliesDue,
    Serving,
)
from rankwire.mesh.group_ranks import GroupRanks
from rankwire.mesh.outgoing_calls import EXPIRED, OutgoingCalls
from rankwire.override import override
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


class MeshCallPort(CallPort):
    """Requests and replies on the connections of a mesh. Safe from any thread but for ``poll``.

    Args:
        mesh: Dials, and knows the peers.
        service: Which agent this is for.

    Attributes:
        serving: Returns the calls that are being served.
    """

    def __init__(self, mesh: Mesh, service: int) -> None:
        self.service = service
        self.serving: Callable[[], list[Serving]] = list
        self.presence = mesh.presences.of(service)
        self._mesh = mesh
        self._own_rank = mesh.rank
        self._lock = runtime.Lock()
        self._closed: ChannelClosedError | None = None
        self._ended: RankwireError | None = None
        self._calls = OutgoingCalls(
            mesh,
            service,
            serve_own=self._serve_own,
            forget=self._unattend,
            on_unread=self._arm,
        )
        self._own_events: deque[PortEvent] = deque()
        self._incoming: dict[Connection, int] = {}  # with the ranks that dialled them
        self._holding: dict[Connection, None] = {}  # these have something to be flushed
        # Replies that callers have not taken yet.
        self._sending: dict[tuple[Connection, int], SendHandle] = {}
        self._turns: dict[int, int] = {}
        self._is_polled = False
        self._spin = mesh.new_spin()
        self._poller = mesh.new_poller()
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
        """Send a request; return its pending reply, or None if there is no room for it."""
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
        """Tell the callee that the reply is not wanted: now, or as soon as that can be sent."""
        if dst == self._mesh.rank:
            self._own_events.append(CallCancelled(self._own_rank, request_id, expired))
            self.wake()
        elif not self._calls.cancel(dst, request_id, expired=expired):
            self.wake()  # whoever polls tries again

    def wait_for_room(self, dst: int, limit: int, deadline: Deadline) -> bool:
        """Wait until fewer than ``limit`` calls are in flight; False if the time passes first."""
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

    def tell_serving(self, serving: Callable[[], list[Serving]]) -> None:
        """Say how to learn which calls are being served."""
        self.serving = serving

    def _serve_own(self, request_id: int, payload: bytearray) -> None:
        self._own_events.append(IncomingCall(self._own_rank, request_id, payload, OWN))
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
        """Return what other ranks ask, or nothing at the deadline or after ``wake``."""
        if self._holding or self._calls.unsent_cancels:
            self.flush()
        # In this order, and in ``close`` the other way round: one of the two sees the other.
        self._is_polled = True
        try:
            if self._ended is not None:
                raise self._ended.copy()
            if self._own_events:
                return self._take_own()
            patience = _LONGEST_SLEEP if deadline is None else deadline.sleep_limit()
            if self._calls.unsent_cancels:
                patience = min(patience, _CANCEL_AGAIN)
            ready = self._poller.poll(patience, self._spin)
            if isinstance(ready, Connection):
                return self._read(ready)
            return [] if ready is None else self._read_replies(ready)
        except ValueError as error:
            if self._closed is None:
                raise
            raise self._closed.copy() from error  # so slow that the poller was closed meanwhile
        finally:
            self._is_polled = False

    def _take_own(self) -> list[PortEvent]:
        """Return what this rank asks of itself."""
        return [self._own_events.popleft() for _ in range(len(self._own_events))]

    def _read(self, connection: Connection) -> list[PortEvent]:
        """Read what a caller sends."""
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

    def _read_replies(self, ready: object) -> list[PortEvent]:
        """Read replies that no thread waits for."""
        assert isinstance(ready, Inbox)
        with self._lock:  # before it reads: who attends to a reply after that arms it again
            ready.is_armed = False
        ready.read_quietly()
        if ready.in_flight and not ready.is_read:
            self._arm(ready)
        return [RepliesDue(ready.call_back_due)] if ready.due else []

    def _rank_of(self, connection: Connection) -> int:
        return connection.peer

    def _drop(self, connection: Connection) -> None:
        with self._lock:
            if connection in self._incoming:
                del self._incoming[connection]
                self._poller.unregister(connection.stream)
        self._mesh.release(connection)

    # -- replies -----------------------------------------------------------------------------------

    def reply(
        self, call: IncomingCall, message: Message, deadline: Deadline, hold: bool = False
    ) -> None:
        """Answer a request."""
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
        """Note that the caller does not want the reply; one that it is just reading is revoked."""
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
        """Have replies that no thread waits for looked after by whoever is in ``poll``."""
        outstanding = bool(self._holding)
        if outstanding:
            self.flush()
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
            if not inbox.is_read:
                if inbox.connection is not None and inbox.connection.stream.before_sleep():
                    self._read_what_is_left(inbox)
                self._arm(inbox)
        return outstanding

    def attend_to(self, dst: int, reply: Reply) -> None:
        """Have a reply that no thread waits for read as soon as it comes."""
        inbox = self._calls.inbox_of(dst)
        if inbox is None or inbox.connection is None:
            return  # a call to oneself needs no reader
        inbox.attend_to(reply)
        inbox.send_held(AT_ONCE)
        if inbox.is_read:
            return  # whoever reads sees that it is attended to, and arms the poller in leaving
        if inbox.connection.stream.before_sleep():
            self._read_what_is_left(inbox)
        self._arm(inbox)

    def _read_what_is_left(self, inbox: Inbox) -> None:
        """Read what the poller cannot see: taken by an interrupted thread, or in a ring."""
        inbox.read_quietly()
        if inbox.due:
            self._own_events.append(RepliesDue(inbox.call_back_due))
            self.wake()

    def _arm(self, inbox: Inbox) -> None:
        if inbox.is_armed:
            return
        with self._lock:
            if self._closed is None and self._calls.inbox_of(inbox.peer) is inbox:
                assert inbox.connection is not None
                self._poller.arm(inbox.connection.stream, inbox)
                inbox.is_armed = True  # last: an interrupt must not leave it unarmed for ever

    def _unattend(self, inbox: Inbox) -> None:
        assert inbox.connection is not None
        with self._lock:
            if self._closed is None:
                self._poller.unregister(inbox.connection.stream)

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
        self._lock = runtime.Lock()
        self._calls.close_in_child()
        if self._closed is None:
            self._closed = ChannelClosedError(self._ended.message)
            self._poller.close()

    def close(self) -> None:
        """Say farewell to all and end every wait; when the backend closes, that tells them."""
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


class GroupCallPort(MeshCallPort):
    """A port that numbers ranks as a group does."""

    def __init__(self, mesh: Mesh, service: int, ranks: GroupRanks) -> None:
        super().__init__(mesh, service)
        self._ranks = ranks
        self._own_rank = ranks.own

    @override
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
        ranks = self._ranks
        ranks.check_member(dst)
        rank = ranks.world[dst]
        try:
            reply = super().call(rank, request_id, message, deadline, on_reply, hold, limit)
        except RankwireError as error:
            raise ranks.adopted(dst, error) from error.__cause__
        if reply is not None:
            reply.translate = partial(ranks.adopted, dst)
        return reply

    @override
    def cancel(self, dst: int, request_id: int, *, expired: bool = False) -> None:
        super().cancel(self._ranks.world[dst], request_id, expired=expired)

    @override
    def wait_for_room(self, dst: int, limit: int, deadline: Deadline) -> bool:
        try:
            self._ranks.check_member(dst)
            return super().wait_for_room(self._ranks.world[dst], limit, deadline)
        except RankwireError as error:
            raise self._ranks.adopted(dst, error) from error.__cause__

    @override
    def calls_to(self, dst: int) -> list[int]:
        return super().calls_to(self._ranks.world[dst])

    @override
    def attend_to(self, dst: int, reply: Reply) -> None:
        super().attend_to(self._ranks.world[dst], reply)

    @override
    def poll(self, deadline: Deadline | None = None) -> list[PortEvent]:
        try:
            self._ranks.check_member(None)
            return super().poll(deadline)
        except RankwireError as error:
            raise self._ranks.adopted(self._own_rank, error) from error.__cause__

    @override
    def reply(
        self, call: IncomingCall, message: Message, deadline: Deadline, hold: bool = False
    ) -> None:
        try:
            self._ranks.check_member(call.src)
            super().reply(call, message, deadline, hold)
        except RankwireError as error:
            raise self._ranks.adopted(call.src, error) from error.__cause__

    @override
    def tell_serving(self, serving: Callable[[], list[Serving]]) -> None:
        world = self._ranks.world
        super().tell_serving(lambda: [call._replace(src=world[call.src]) for call in serving()])

    @override
    def _rank_of(self, connection: Connection) -> int:
        rank = self._ranks.find(connection.peer)
        assert rank is not None  # only members know the service number
        return rank
