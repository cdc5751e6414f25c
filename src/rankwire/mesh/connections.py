"""Connections between a rank and its peers: those it dials, and those it accepts.

Any two ranks connect directly. The rank that sends or calls first dials, in the calling thread: one
connection for messages (one way) and one for each agent's calls (requests out, replies back).
Subclasses open the streams.

A peer's agent may dial before this rank's agent opens its port: the connection waits in ``Ports``,
and its data in the stream. A closed service accepts no connection until it is opened again.

Locks: a peer's ``dial_lock`` is held while this rank dials. ``Ports._lock`` guards the tables of
ports; nothing else is taken under it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from rankwire import runtime
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import ChannelClosedError, ConfigurationError, RankwireError
from rankwire.links.connection import Connection
from rankwire.mesh.peers import Peer, dial_alone
from rankwire.transports.poller import Poller, PollWaiter, Waiter
from rankwire.transports.spin import Spin
from rankwire.wire.handshake import Hello, Purpose
from rankwire.wire.seals import Seals

if TYPE_CHECKING:
    from rankwire.mesh.call_port import CallPort
    from rankwire.mesh.mesh import Mesh
    from rankwire.transports.byte_stream import ByteStream


class Link(NamedTuple):
    """How messages to one rank are sent."""

    transport: str  # "unix", "tcp" or "memory"
    single_copy: bool  # whether it reads large messages directly from this process's memory
    reason: str  # why not, if it does not
    shared_memory: bool = False  # whether collectives with it use shared memory
    incarnation: int = 0  # how many times a launcher restarted its process alone


class Connections(ABC):
    """Connects one rank to the others. Every method is safe from any thread.

    Attributes:
        spin: Seconds that a waiting thread polls before it sleeps.
        shares_cores: Whether this host has more ranks than cores.
    """

    spin = 0.0
    shares_cores = False

    def __init__(self, mesh: Mesh, *, single_copy: bool) -> None:
        self._mesh = mesh
        self._single_copy = single_copy
        self._looking: Spin | None = None  # for receives from any rank

    @abstractmethod
    def open_stream(
        self, peer: Peer, purpose: Purpose, service: int, deadline: Deadline
    ) -> tuple[ByteStream, Seals | None]:
        """Return an authenticated stream to a peer, and the keys that seal its frames.

        Raises ``PeerLostError``; ``ChannelClosedError`` if the peer has left, or this backend is
        closed; ``DeadlineExceededError``.
        """

    @abstractmethod
    def new_poller(self) -> Poller:
        """Return a poller for a call port."""

    @abstractmethod
    def flush_when_possible(self, connection: Connection) -> None:
        """Have held frames sent once the peer takes more. From any thread; send lock held."""

    def new_waiter(self) -> Waiter:
        """Return a waiter for a thread that sleeps on several streams."""
        if self._looking is None:
            self._looking = self.new_spin()
        return PollWaiter(self._looking)

    def new_spin(self) -> Spin:
        """Return how a thread polls before it sleeps."""
        return Spin(self.spin, self._mesh.clock, yields=self.shares_cores)

    # -- dialled by this rank ----------------------------------------------------------------------

    def for_messages(self, peer: Peer, deadline: Deadline) -> Connection:
        """Return the connection that sends messages to a peer; dial if there is none."""

        def dial() -> Connection:
            if peer.messages is not None:
                return peer.messages
            return self.dial(peer, Purpose.MESSAGES, 0, deadline, peer.send_on)

        return dial_alone(peer.dial_lock, peer.member.rank, deadline, dial)

    def dial(
        self,
        peer: Peer,
        purpose: Purpose,
        service: int,
        deadline: Deadline,
        keep: Callable[[Connection], None],
    ) -> Connection:
        """Open a connection to a peer; raise as ``open_stream`` does.

        ``keep`` is called with the connection once the peer would take its end for a crash, also if
        the caller is interrupted at that moment; perhaps twice.
        """
        stream, seals = self.open_stream(peer, purpose, service, deadline)
        try:
            connection = self._wrap(peer, stream, seals)
        except BaseException:
            stream.close()
            raise
        is_kept = False
        try:
            peer.add(connection)
            connection.await_introduction(deadline, peer.check)
            if connection.failure is not None:  # the peer or this backend has just closed
                peer.check()
                raise connection.failure.copy()
            # From now on the peer takes an end for a crash. On a connection for messages only a
            # farewell comes back.
            connection.introduce(is_read=purpose is Purpose.CALLS)
            is_kept = True
            keep(connection)
            return connection
        except BaseException:
            if (connection.outbox.frames_sent or is_kept) and connection.failure is None:
                keep(connection)
            else:
                self.release(connection)
            raise

    def link_to(self, rank: int, deadline: Deadline) -> Link:
        """Return how messages to a rank are sent; connect first if necessary."""
        peer = self._mesh.peers[rank]
        connection = peer.messages or self.for_messages(peer, deadline)
        can_lend, is_local = bool(connection.can_lend), connection.transport == "unix"
        shares = is_local and not self._mesh.segments.why_not()
        incarnation = peer.member.incarnation
        return Link(connection.transport, can_lend, connection.why_not_lend, shares, incarnation)

    def release(self, connection: Connection) -> None:
        """Close a connection if it is open, and forget it."""
        connection.close()
        self._mesh.peers[connection.peer].remove(connection)

    def _wrap(
        self, peer: Peer, stream: ByteStream, seals: Seals | None, *, incoming: bool = False
    ) -> Connection:
        return Connection(
            stream,
            peer=peer.member.rank,
            max_nbytes=self._mesh.max_message_nbytes,
            clock=self._mesh.clock,
            spin=self.new_spin(),
            on_lost=peer.fail,
            on_left=peer.explain_farewell,
            on_rest=self.flush_when_possible,
            incoming=incoming,
            single_copy=self._single_copy,
            seals=seals,
        )

    # -- dialled by a peer -------------------------------------------------------------------------

    def accept(self, hello: Hello, stream: ByteStream, seals: Seals | None) -> None:
        """Take a connection that a peer opened, for messages or calls."""
        mesh = self._mesh
        peer = mesh.peers[hello.rank]
        connection = self._wrap(peer, stream, seals, incoming=True)
        peer.add(connection, incoming=True)
        with suppress(RankwireError):  # the connection has failed, which is checked next
            connection.introduce()
        if connection.failure is not None:
            self.release(connection)
            return
        if hello.purpose is Purpose.MESSAGES:
            if peer.inbox.attach(connection):
                mesh.lookout.add(peer.inbox)
            else:
                self.release(connection)
            return
        port, surplus = mesh.ports.find(hello.service, connection)
        if port is not None:
            port.adopt(connection)
        elif surplus is not None:
            if surplus is connection:  # the service has closed since ``admit``
                connection.farewell(AT_ONCE)
            self.release(surplus)


class Ports:
    """A rank's call ports, by service, and connections that wait for one. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = runtime.Lock()
        self._open: dict[int, CallPort] = {}
        self._closed_services: set[int] = set()
        self._waiting: dict[int, dict[int, Connection]] = {}  # by service and rank
        self._has_ended = False

    def open(self, port: CallPort) -> list[Connection]:
        """Register a new port; return the connections that have waited for it.

        Raises ``ConfigurationError`` if its service has an open port already,
        ``ChannelClosedError`` if this rank has left.
        """
        with self._lock:
            if self._has_ended:
                raise ChannelClosedError("this backend is closed")
            if port.service in self._open:
                raise ConfigurationError(
                    "an agent of this name exists already; close it, or give this one another name"
                )
            self._open[port.service] = port
            self._closed_services.discard(port.service)
            return list(self._waiting.pop(port.service, {}).values())

    def forget(self, port: CallPort) -> None:
        """Unregister a closed port."""
        with self._lock:
            if self._open.get(port.service) is port:
                del self._open[port.service]
                self._closed_services.add(port.service)

    def is_closed(self, service: int) -> bool:
        """Whether a service was closed and not opened again."""
        return service in self._closed_services

    def find(
        self, service: int, connection: Connection
    ) -> tuple[CallPort | None, Connection | None]:
        """Return the port that a connection is for; if there is none, keep the connection for it.

        Also returns a connection to close: this one if its service has closed, or an older one of
        the same rank, whose agent has closed since.
        """
        with self._lock:
            port = self._open.get(service)
            if port is not None:
                return port, None
            if self._has_ended or service in self._closed_services:
                return None, connection
            waiting = self._waiting.setdefault(service, {})
            older = waiting.get(connection.peer)
            waiting[connection.peer] = connection
            return None, older

    def all(self) -> list[CallPort]:
        """Return the open ports."""
        with self._lock:
            return list(self._open.values())

    def end(self) -> tuple[list[CallPort], list[Connection]]:
        """Refuse new ports; return the open ports and the connections that wait for others."""
        with self._lock:
            self._has_ended = True
            waiting = [each for parked in self._waiting.values() for each in parked.values()]
            self._waiting.clear()
            return list(self._open.values()), waiting
