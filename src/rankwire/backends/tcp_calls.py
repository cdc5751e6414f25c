"""The call port of a TCP backend: requests and replies of one agent, on connections of its own.

Outgoing, each peer that is called gets one connection, dialled by the first call; its replies are
read by the threads that wait for them (``Inbox``). Incoming connections are those that other ranks'
agents dialled; they are read only in ``poll``, by one thread at a time, through one poller. Replies
of calls that no thread waits for (``rpc_async``) are read there too, on request (``attend``): an
outgoing connection is then armed in the same poller for one shot, so that a thread that reads it
meanwhile is not disturbed again and again.

Lock: ``_lock`` guards the two tables of connections; nothing else is taken under it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter, sleep
from typing import TYPE_CHECKING

from rankwire.backends.calls import (
    CallCancelled,
    CallerGone,
    CallPort,
    IncomingCall,
    PortEvent,
    RepliesDue,
)
from rankwire.deadline import Deadline
from rankwire.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    ForkedProcessError,
    RankwireError,
)
from rankwire.fork import guard
from rankwire.links.connection import Connection
from rankwire.links.inbox import Inbox
from rankwire.links.lender import Lent
from rankwire.links.spin import Spin
from rankwire.wire.frames import Buffer, Channel
from rankwire.wire.handshake import Purpose
from rankwire.wire.loans import LoanRefusedError, whole_of
from rankwire.wire.mailbox import Mailbox, Receive

if TYPE_CHECKING:
    from rankwire.backends.tcp import TcpBackend

__all__ = ["TcpCallPort"]

_log = logging.getLogger("rankwire")

_FAREWELL_PATIENCE = 0.2
_POLLER_PATIENCE = 1.0
_CANCEL_AGAIN = 0.005
_NOW = Deadline(0.0)
_LOOKS_AT_ALL = 4  # one look in so many is at all connections
# With more calls in flight than this, one more that nobody waits for yet is sent together with the
# next ones: about a sixth more calls a second with 64 in flight (docs/decisions.md).
_HOLD_FROM = 8


class TcpCallPort(CallPort):
    """See ``CallPort``.

    Args:
        backend: Dials, and knows the peers.
        service: Which agent this is for.
    """

    def __init__(self, backend: TcpBackend, service: int) -> None:
        self.service = service
        self._backend = backend
        self._lock = threading.Lock()
        self._closed: ChannelClosedError | None = None
        self._ended: RankwireError | None = None
        self._outgoing: dict[int, Inbox] = {}
        self._incoming: set[Connection] = set()
        self._dial_locks: dict[int, threading.Lock] = {}
        self._last_caller: Connection | None = None
        self._holding: set[Connection] = set()  # these have something to be flushed
        self._unsent_cancels: deque[tuple[Connection, int]] = deque()
        self._lent: dict[tuple[Connection, int], Lent] = {}  # replies that are being read
        self._turns: dict[int, int] = {}
        self._is_polled = False
        self._spin = Spin(backend.spin)
        self._poller = backend.new_poller()
        guard(self)

    # -- outgoing ----------------------------------------------------------------------------------

    def call(
        self,
        dst: int,
        request_id: int,
        buffers: Sequence[Buffer],
        nbytes: int,
        deadline: Deadline,
        on_reply: Callable[[Receive], None] | None = None,
        *,
        hold: bool = False,
    ) -> Receive:
        """See ``CallPort.call``."""
        try:
            return self._call(dst, request_id, buffers, nbytes, deadline, on_reply, hold)
        except ChannelClosedError:
            # The peer's agent closed since the last call, and nothing of this one was sent. There
            # may be a new one; if not, the door says so.
            if self._closed is not None or self._ended is not None:
                raise
            return self._call(dst, request_id, buffers, nbytes, deadline, on_reply, hold)

    def _call(
        self,
        dst: int,
        request_id: int,
        buffers: Sequence[Buffer],
        nbytes: int,
        deadline: Deadline,
        on_reply: Callable[[Receive], None] | None,
        hold: bool,
    ) -> Receive:
        inbox = self._outgoing.get(dst)
        if inbox is None or inbox.connection.failure is not None:  # type: ignore[union-attr]
            inbox = self._dial(dst, deadline)
        receive = Receive((self.service, Channel.REPLY, request_id), on_reply)
        try:
            inbox.post(receive)
            inbox.connection.send(  # type: ignore[union-attr]
                (self.service, Channel.CALL, request_id),
                (buffers, nbytes),
                deadline,
                hold=hold and inbox.in_flight > _HOLD_FROM,
                meanwhile=inbox,
            )
        except ChannelClosedError:
            if inbox.withdraw(receive):
                raise
        except DeadlineExceededError as error:
            inbox.withdraw(receive)
            error.may_have_run = error.may_have_arrived
            raise
        except BaseException:
            try:
                inbox.withdraw(receive)
            finally:
                inbox.withdraw(receive)  # an interrupt may have fallen into the first
            raise
        finally:
            if inbox.due:
                inbox.call_back_due()
        return receive

    def wait(self, dst: int, receive: Receive, deadline: Deadline) -> bytearray:
        """See ``CallPort.wait``."""
        inbox: Inbox = receive.home
        # A call that is waited for was not held back.
        return whole_of(inbox.wait(receive, deadline))

    def drive(self, dst: int, receive: Receive, deadline: Deadline) -> bool:
        """See ``CallPort.drive``."""
        if receive.done:
            return True
        inbox: Inbox = receive.home
        self._send_held(inbox, deadline)
        return inbox.drive(receive, deadline)

    def _send_held(self, inbox: Inbox, deadline: Deadline) -> None:
        """Send requests that were held back; if that fails, so do the connection and the calls."""
        try:
            inbox.connection.flush(  # type: ignore[union-attr]
                deadline, meanwhile=inbox
            )
        except RankwireError as error:
            _log.debug("requests to rank %d were not sent: %s", inbox.peer, error)
        finally:
            if inbox.due:
                inbox.call_back_due()

    def forget(self, dst: int, receive: Receive) -> bool:
        """See ``CallPort.forget``."""
        inbox: Inbox = receive.home
        return inbox.withdraw(receive)

    def abort(self, dst: int, receive: Receive, error: RankwireError) -> bool:
        """See ``CallPort.abort``."""
        inbox: Inbox = receive.home
        return inbox.abort(receive, error)

    def cancel(self, dst: int, request_id: int) -> None:
        """See ``CallPort.cancel``."""
        inbox = self._outgoing.get(dst)
        if inbox is None or inbox.connection is None:
            return
        if not self._send_cancel(inbox.connection, request_id):
            self._unsent_cancels.append((inbox.connection, request_id))
            self._holding.add(inbox.connection)
            self.wake()  # whoever polls tries again

    def _send_cancel(self, connection: Connection, request_id: int) -> bool:
        """Return whether it was sent, or need not be; else another thread is just sending."""
        try:
            connection.send((self.service, Channel.CANCEL, request_id), ((), 0), _NOW)
        except DeadlineExceededError:
            return False
        except RankwireError:
            return True  # the connection has ended, and that ends the work too
        return True

    def _send_cancels(self) -> None:
        for _ in range(len(self._unsent_cancels)):
            try:
                connection, request_id = self._unsent_cancels.popleft()
            except IndexError:
                return  # another thread was faster
            if not self._send_cancel(connection, request_id):
                self._unsent_cancels.append((connection, request_id))
                self._holding.add(connection)

    def wait_for_room(self, dst: int, limit: int, deadline: Deadline) -> bool:
        """See ``CallPort.wait_for_room``."""
        inbox = self._outgoing.get(dst)
        if inbox is None or inbox.in_flight < limit:
            return True
        self._send_held(inbox, deadline)
        return inbox.wait_until(lambda: inbox.in_flight < limit, deadline)

    def calls_to(self, dst: int) -> list[int]:
        """See ``CallPort.calls_to``."""
        inbox = self._outgoing.get(dst)
        return [] if inbox is None else inbox.tags_wanted()

    def in_flight(self) -> int:
        """See ``CallPort.in_flight``."""
        return sum(inbox.in_flight for inbox in list(self._outgoing.values()))

    def in_flight_to(self, dst: int) -> int:
        """Return how many calls wait for a reply of one rank."""
        inbox = self._outgoing.get(dst)
        return 0 if inbox is None else inbox.in_flight

    def _dial(self, dst: int, deadline: Deadline) -> Inbox:
        with self._lock:
            dial_lock = self._dial_locks.setdefault(dst, threading.Lock())
        grip: list[bool] = []
        try:
            if not deadline.take(dial_lock, grip):
                raise DeadlineExceededError(
                    deadline.limit,
                    waiting_for=[dst],
                    detail="another thread is still connecting to it",
                )
            inbox = self._outgoing.get(dst)
            if inbox is not None:
                assert inbox.connection is not None
                if inbox.connection.failure is None:
                    return inbox
                self._discard(dst, inbox)
            if self._closed is not None:
                raise self._closed.copy()
            connection = self._backend.dial(
                dst, Purpose.CALLS, self.service, deadline, partial(self._keep, dst)
            )
            inbox = self._outgoing.get(dst)
            if inbox is not None:
                return inbox
            self._dismiss(connection, Deadline(_FAREWELL_PATIENCE))
            assert self._closed is not None
            raise self._closed.copy()
        finally:
            if grip[-1:] == [True]:
                dial_lock.release()

    def _keep(self, dst: int, connection: Connection) -> None:
        """Call on this connection from now on, unless this port is closed. Idempotent."""
        with self._lock:
            inbox = self._outgoing.get(dst)
            if self._closed is None and (inbox is None or inbox.connection is not connection):
                mailbox = Mailbox(keep_unmatched=False)
                self._outgoing[dst] = Inbox(dst, mailbox, connection, fetch=True)

    def _discard(self, dst: int, inbox: Inbox) -> None:
        """Forget a connection that has ended.

        The peer's agent has closed, and a new one may be there.
        """
        assert inbox.connection is not None
        assert inbox.connection.failure is not None
        inbox.read_available()  # what it replied before it ended
        with self._lock:
            if self._outgoing.get(dst) is inbox:
                del self._outgoing[dst]
            self._poller.unregister(inbox.connection.stream)
        inbox.close(inbox.connection.failure)
        self._backend.release(inbox.connection)

    # -- incoming ----------------------------------------------------------------------------------

    def adopt(self, connection: Connection) -> None:
        """Take a connection that another rank's agent dialled."""
        with self._lock:
            if self._closed is None:
                self._incoming.add(connection)
                self._poller.register(connection.stream, connection)
                return
        self._dismiss(connection, Deadline(_FAREWELL_PATIENCE))

    def _dismiss(self, connection: Connection, patience: Deadline) -> None:
        """Let the agent at the other end know that this one has closed."""
        connection.farewell(patience)
        connection.close()
        self._backend.release(connection)

    def poll(self, deadline: Deadline) -> list[PortEvent]:
        """See ``CallPort.poll``."""
        if self._holding:
            self.flush()
        # In this order, and in ``close`` the other way round: one of the two sees the other.
        self._is_polled = True
        try:
            if self._ended is not None:
                raise self._ended.copy()
            events = self._spin_for_events()
            if events is None:
                patience = _CANCEL_AGAIN if self._unsent_cancels else deadline.sleep_limit()
                ready = self._poller.poll(patience)
                events = [] if ready is None else self._handle(ready)
        except ValueError as error:
            if self._closed is None:
                raise
            raise self._closed.copy() from error  # so slow that the poller was closed meanwhile
        finally:
            self._is_polled = False
        return events

    def _spin_for_events(self) -> list[PortEvent] | None:
        """Look for events without sleeping, as long as that pays; None if there were none.

        Whoever called last calls next, most of the time: its connection is read without being asked
        whether there is anything, which is 1 us sooner.
        """
        spin = self._spin
        if spin.budget <= 0.0:
            spin.skipped()
            return None
        limit = perf_counter() + spin.budget
        look = 0
        while True:
            caller = self._last_caller
            if caller is not None and look % _LOOKS_AT_ALL:
                events = self._read(caller)
                if events:
                    spin.paid()
                    return events
            elif (ready := self._poller.poll(0)) is not None:
                spin.paid()
                return self._handle(ready)
            look += 1
            if perf_counter() >= limit:
                spin.wasted()
                return None

    def _handle(self, ready: object) -> list[PortEvent]:
        """Read a caller's connection, or replies that no thread waits for."""
        if isinstance(ready, Connection):
            self._last_caller = ready
            return self._read(ready)
        assert isinstance(ready, Inbox)
        ready.read_quietly()
        if ready.in_flight and not ready.is_read:
            self._arm(ready)
        return [RepliesDue(ready.call_back_due)] if ready.due else []

    def _read(self, connection: Connection) -> list[PortEvent]:
        try:
            frames = connection.receive_ready()
        except RankwireError:
            self._last_caller = None
            self._drop(connection)
            return [CallerGone(connection.peer, connection)]
        events: list[PortEvent] = []
        while frames:
            (group, channel, tag), payload = frames.popleft()
            if group != self.service:
                continue  # a frame for another agent cannot come on this agent's connection
            if channel == Channel.CALL:
                try:
                    request = whole_of(payload)
                except RankwireError:
                    continue  # the caller gave up, or is gone: the next read says so
                events.append(IncomingCall(connection.peer, tag, request, connection, connection))
            elif channel == Channel.CANCEL:
                events.append(CallCancelled(connection.peer, tag))
        return events

    def _drop(self, connection: Connection) -> None:
        with self._lock:
            if connection in self._incoming:
                self._incoming.remove(connection)
                self._poller.unregister(connection.stream)
        connection.close()
        self._backend.release(connection)

    def reply(
        self,
        call: IncomingCall,
        buffers: Sequence[Buffer],
        nbytes: int,
        deadline: Deadline,
        *,
        hold: bool = False,
    ) -> None:
        """See ``CallPort.reply``."""
        if self._ended is not None:  # the backend tells the callers, and perhaps of an error
            raise self._ended.copy()
        connection: Connection = call.origin
        if nbytes >= connection.lend_from and deadline.limit > 0.0:
            self._reply_at_length(connection, call, buffers, nbytes, deadline)
            return
        envelope = (self.service, Channel.REPLY, call.request_id)
        connection.send(envelope, (buffers, nbytes), deadline, hold=hold)
        if connection.is_holding:  # after the send: whoever flushes must find it
            self._holding.add(connection)

    def _reply_at_length(
        self,
        connection: Connection,
        call: IncomingCall,
        buffers: Sequence[Buffer],
        nbytes: int,
        deadline: Deadline,
    ) -> None:
        """Send a reply that the caller may read out of our memory, unless it cancels meanwhile."""
        envelope = (self.service, Channel.REPLY, call.request_id)
        lent = connection.offer(envelope, (buffers, nbytes), deadline)
        if lent is None:
            return
        self._lent[connection, call.request_id] = lent
        try:
            if not call.is_wanted:  # whoever cancels sets this first, and then looks for a loan
                lent.revoke()
            connection.settle(lent, deadline)
        except LoanRefusedError:
            connection.send(envelope, (buffers, nbytes), deadline, lend=False)
        finally:
            del self._lent[connection, call.request_id]

    def drop_reply(self, call: IncomingCall) -> None:
        """See ``CallPort.drop_reply``."""
        super().drop_reply(call)
        lent = self._lent.get((call.origin, call.request_id))
        if lent is not None:
            lent.revoke()

    def flush(self) -> None:
        """See ``CallPort.flush``."""
        for connection in list(self._holding):
            self._holding.discard(connection)
            try:
                connection.flush(_NOW)
            except RankwireError as error:
                _log.debug("replies to rank %d were not sent: %s", connection.peer, error)
            if connection.is_holding and connection.failure is None:
                self._holding.add(connection)  # it takes nothing now; the next look tries again
        if self._unsent_cancels:
            self._send_cancels()

    # -- replies that no thread waits for ----------------------------------------------------------

    def attend(self, *, patiently: bool = False) -> bool:
        """See ``CallPort.attend``."""
        outstanding = bool(self._holding)
        if outstanding:
            self.flush()
        for dst, inbox in list(self._outgoing.items()):
            if not inbox.in_flight:
                continue
            outstanding = True
            seen, self._turns[dst] = self._turns.get(dst), inbox.turns
            if patiently and seen != inbox.turns:
                continue
            self._send_held(inbox, _NOW)
            if not inbox.is_read:
                self._arm(inbox)
        return outstanding

    def _arm(self, inbox: Inbox) -> None:
        with self._lock:
            if self._outgoing.get(inbox.peer) is not inbox or inbox.connection is None:
                return
            self._poller.arm(inbox.connection.stream, inbox)

    # -- ending ------------------------------------------------------------------------------------

    def wake(self) -> None:
        """See ``CallPort.wake``."""
        with self._lock:  # or the poller might be closed
            if self._closed is None:
                self._poller.wake()

    def shut_down(self, cause: ChannelClosedError) -> None:
        """End every wait and ``poll`` with ``cause``, because the backend closes.

        Nobody is told: that is the backend's business. It calls ``close`` afterwards.
        """
        self._ended = cause
        self.wake()
        for inbox in list(self._outgoing.values()):
            inbox.fail(cause)

    def forsake(self) -> None:
        """See ``Forkable``. The poller is shared with the parent: nothing is unregistered."""
        self._ended = ForkedProcessError("this agent")
        self._lock = threading.Lock()
        if self._closed is None:
            self._closed = ChannelClosedError(self._ended.message)
            self._poller.close()

    def close(self) -> None:
        """See ``CallPort.close``. When the backend closes, farewells are left to that."""
        cause = ChannelClosedError("this agent is closed")
        with self._lock:
            if self._closed is not None:
                return
            self._closed = cause
            is_alone = self._ended is None
            self._ended = self._ended or cause
            outgoing, self._outgoing = dict(self._outgoing), {}
            incoming, self._incoming = self._incoming, set()
        # First of all: who dials from now on is told at the door.
        self._backend.forget_port(self)
        self._poller.wake()
        patience = Deadline(_POLLER_PATIENCE)
        while self._is_polled and not patience.expired:
            sleep(0.0005)  # it was woken up, and leaves
        self._poller.close()
        if not is_alone:
            return
        patience = Deadline(_FAREWELL_PATIENCE)
        for connection in incoming:
            self._dismiss(connection, patience)
        for inbox in outgoing.values():
            assert inbox.connection is not None
            inbox.connection.farewell(patience)
            inbox.close(cause)
            self._backend.release(inbox.connection)
