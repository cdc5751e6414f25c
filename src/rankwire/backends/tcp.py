"""TcpBackend: ranks in processes of one or several hosts.

Construction is the rendezvous: rank 0 listens and coordinates, the others join, and all return when
the whole world is up. Afterwards any two ranks talk directly. Whoever sends or calls first dials,
in its own thread: one connection for messages (one way) and one for each agent's calls (requests
out, replies back), over a Unix socket where both ranks are on one host and over TCP otherwise.

Threads: the doorkeeper accepts connections and hears who has gone; everything else happens in the
threads of the user. Locks, in order: a peer's ``dial_lock``, ``_lock`` (ports and parked
connections), then the locks inside peers, inboxes and connections. ``docs/thread-model.md`` has the
whole table.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from rankwire.backends.base import DEFAULT_TIMEOUT, Backend
from rankwire.backends.blame import Losses
from rankwire.backends.exit_report import fall_by
from rankwire.backends.status import PeerStatus
from rankwire.backends.tcp_bulk import Link, ReadingAll, ReadingAndChecking, TcpOffer
from rankwire.backends.tcp_calls import TcpCallPort
from rankwire.backends.tcp_formation import Formation
from rankwire.backends.tcp_peers import Peer
from rankwire.backends.transport import Offer
from rankwire.deadline import Deadline
from rankwire.errors import (
    AuthenticationError,
    ChannelClosedError,
    ConfigurationError,
    DeadlineExceededError,
    NoConnectionError,
    PeerLostError,
    PeerUnresponsiveError,
    ProtocolError,
    RankwireError,
)
from rankwire.links.connection import Connection
from rankwire.links.dialer import authenticate
from rankwire.links.poller import EpollPoller
from rankwire.links.security import Integrity, Security, Tls, choose_policy
from rankwire.links.sockets import TcpAddress, connect_tcp, connect_unix
from rankwire.links.spin import Spin, default_spin
from rankwire.rendezvous.control_messages import (
    DEFAULT_PATIENCE,
    SHORTEST_FAIL_AFTER,
    Fallen,
    Gone,
    Patience,
    Suspected,
    World,
)
from rankwire.rendezvous.runtime_dir import has_removed, remove_socket_file
from rankwire.shutdown import close_at_exit
from rankwire.wire.frames import DEFAULT_MAX_MESSAGE_NBYTES, Envelope, Message, Payload
from rankwire.wire.handshake import Hello, Purpose, Status
from rankwire.wire.mailbox import Receive
from rankwire.wire.seals import Seals

if TYPE_CHECKING:
    import socket

    from rankwire.links.tls import AnySocket

__all__ = ["MAX_CONNECTIONS_OF_A_RANK", "TcpBackend", "Transport"]

_log = logging.getLogger("rankwire")

Transport = Literal["auto", "tcp", "unix"]

DEFAULT_JOIN_TIMEOUT = 300.0
# One for messages and one for each agent that calls this rank; a rank that was taken over might
# open them without end.
MAX_CONNECTIONS_OF_A_RANK = 128
# A peer that refuses connections has died or is leaving; the control connection says which within
# this time.
_REFUSED_PATIENCE = 0.5
_FAREWELL_PATIENCE = 0.2
_INTRODUCTION_DELAY = 0.2
# For introductions under way to notice that this rank has closed. One that looks up a name does
# not; it is left to end by itself.
_INTRODUCTIONS_PATIENCE = 2.0
# A host that is there answers at once, whatever its processes do.
_CONNECT_LIMIT = 5.0
_UNANSWERED_LIMIT = 4.5


class TcpBackend(Backend):
    """A rank of a world of processes.

    Construction returns when all ranks are up, or fails on all of them, naming the ranks that are
    missing. Start the ranks in any order.

    Args:
        rank: This process's rank.
        world_size: The number of ranks; the same everywhere.
        address: ``host:port`` at which rank 0 listens. Rank 0 may use port 0 and read the chosen
            one from ``address``.
        secret: At least 16 bytes that all ranks know, or what a launcher gave this rank instead.
            Not needed on loopback, where ranks of one user find each other.
        job: A name; ranks of different jobs refuse each other.
        timeout: Seconds for every operation without a limit of its own.
        join_timeout: Seconds for the world to form.
        transport: ``"auto"`` uses Unix sockets within a host and TCP between hosts; the others
            force one.
        spin: Seconds a waiting thread polls before it sleeps; None chooses by the number of ranks
            and cores.
        max_message_nbytes: Largest message sent or accepted.
        single_copy: Read large messages of ranks on this host straight out of their memory, where
            the kernel allows it; ``link_to`` tells.
        listen: Where this rank listens: ``host``, ``host:port``, ``host:low-high`` or
            ``:low-high``; the host may be a network interface. Without it: the address that reached
            the rendezvous, and any free port. One port serves everything. For rank 0, where to
            listen if the host of ``address`` is not one of its own.
        advertise: The host by which others reach this rank, if that is not where it listens. The
            coordinator tries it before it lets the rank in.
        suspect_after: Seconds of silence after which a rank is suspected, which is told
            (``on_peer_suspected``) and changes nothing. The smallest of all ranks' counts.
        fail_after: Seconds of silence after which a rank is given up with
            ``PeerUnresponsiveError``, though its connection stands: it is stopped, swapping, or
            holds the interpreter lock. Dead processes and cut links are noticed sooner. At least
            0.1. The smallest of all ranks' counts.
        has_coordinator: Whether a launcher coordinates at ``address``, and not rank 0.
        security: ``"auto"`` protects by the address: ``"local"`` on loopback, ``"auth"`` elsewhere
            (frames are sealed), ``"tls"`` if ``tls`` is given. ``"insecure"`` runs without a
            secret. The same on all ranks; see ``SECURITY.md``.
        integrity: What protects payloads above 64 KiB of messages and collectives where frames are
            sealed: ``"crc"`` finds damage, ``"mac"`` also alteration.
        tls: Files for TLS between hosts.
        listener: For rank 0: a TCP socket that is bound and listening already. Owned by the backend
            from now on.

    Raises:
        RendezvousError: The world did not form; ``missing`` has the absent ranks.
        AuthenticationError: The secrets differ.
        ConfigurationError: The arguments cannot work.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        address: str,
        *,
        secret: bytes | str | None = None,
        job: str = "default",
        timeout: float = DEFAULT_TIMEOUT,
        join_timeout: float = DEFAULT_JOIN_TIMEOUT,
        transport: Transport = "auto",
        spin: float | None = None,
        max_message_nbytes: int = DEFAULT_MAX_MESSAGE_NBYTES,
        single_copy: bool = True,
        listen: str | None = None,
        advertise: str | None = None,
        suspect_after: float = DEFAULT_PATIENCE.suspect_after,
        fail_after: float = DEFAULT_PATIENCE.fail_after,
        has_coordinator: bool = False,
        security: Security = "auto",
        integrity: Integrity = "crc",
        tls: Tls | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        super().__init__(rank, world_size, timeout=timeout, max_message_nbytes=max_message_nbytes)
        if transport not in ("auto", "tcp", "unix"):
            raise ConfigurationError(f'transport is "auto", "tcp" or "unix", not {transport!r}')
        suspect_after, fail_after = Deadline(suspect_after).limit, Deadline(fail_after).limit
        if not 0 < suspect_after <= fail_after:
            raise ConfigurationError(
                "a rank is suspected before it is given up: 0 < suspect_after <= fail_after, not "
                f"{suspect_after!r} and {fail_after!r}"
            )
        if fail_after < SHORTEST_FAIL_AFTER:
            raise ConfigurationError(
                f"a rank is given up after {SHORTEST_FAIL_AFTER:g} s of silence or later, not "
                f"fail_after={fail_after!r}"
            )
        self._transport = transport
        self._single_copy = single_copy
        self._wanted_spin = spin
        self._closed = False
        self._close_lock = threading.RLock()  # a callback of closing may close
        self._lock = threading.Lock()
        self._ports: dict[int, TcpCallPort] = {}
        self._services_closed: set[int] = set()
        self._callers_waiting: dict[int, dict[int, Connection]] = {}  # by service and rank
        self._peers: dict[int, Peer] = {}
        self._losses = Losses()
        self._is_watched = True
        self._closing = threading.Event()
        self._introductions = threading.Thread(
            target=self._introduce, name="rankwire-introductions", daemon=True
        )
        where = TcpAddress.parse(address)
        policy = choose_policy(security, where, integrity=integrity, tls=tls)
        self.security = policy.mode
        self._formation = Formation(
            self,
            where,
            secret=secret,
            job=job,
            policy=policy,
            share_files=transport != "tcp",
            listener=listener,
            patience=Patience(suspect_after, fail_after),
            has_coordinator=has_coordinator,
            listen=listen,
            advertise=advertise,
        )
        try:
            self._formation.form(Deadline(join_timeout))
        except BaseException:
            self._formation.close()
            raise
        close_at_exit(self)

    def on_formed(self, world: World) -> None:
        """Get to know the peers. Called once by the formation, before any of them can dial."""
        self._me = world.members[self.rank]
        local = sum(member.host_id == self._me.host_id for member in world.members)
        self.spin = default_spin(local) if self._wanted_spin is None else self._wanted_spin
        self._hosts = [member.host_id for member in world.members]
        self._coordinator = world.coordinator
        self._peers = {
            member.rank: Peer(
                member,
                expects_verdict=self._expects_verdict,
                catch_up=self._formation.catch_up,
                on_lost=self._events.lost,
                explain=self._explain_end,
            )
            for member in world.members
            if member.rank != self.rank
        }
        self._meanwhile = ReadingAll(self._peers)

    @property
    def hosts(self) -> Sequence[object]:
        """See ``Backend.hosts``."""
        return self._hosts

    @property
    def address(self) -> str:
        """``host:port`` at which rank 0 listens, with the port that was chosen."""
        return str(self._formation.address)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    # -- messages ----------------------------------------------------------------------------------

    def transmit(
        self,
        dst: int,
        envelope: Envelope,
        message: Message,
        deadline: Deadline,
    ) -> None:
        """See ``Backend.transmit``."""
        peer = self._peers[dst]
        connection = peer.messages
        if connection is None:
            connection = self._dial_messages(peer, deadline)
        connection.send(envelope, message, deadline, meanwhile=self._meanwhile)

    def offer(
        self,
        dst: int,
        envelope: Envelope,
        message: Message,
        deadline: Deadline,
        *,
        check: Callable[[], None] | None = None,
    ) -> Offer | None:
        """See ``Backend.offer``."""
        peer = self._peers[dst]
        connection = peer.messages
        if connection is None:
            connection = self._dial_messages(peer, deadline)
        meanwhile = self._meanwhile if check is None else ReadingAndChecking(self._peers, check)
        lent = connection.offer(envelope, message, deadline, meanwhile=meanwhile)
        if lent is None:
            return None

        def send_by_stream() -> None:
            limit = Deadline(self.timeout)  # once begun, it must be finished
            connection.send(envelope, message, limit, lend=False, meanwhile=self._meanwhile)

        try:
            return TcpOffer(connection, lent, self._meanwhile, send_by_stream)
        except BaseException:
            lent.revoke()  # interrupted: nobody else knows of it
            raise

    def receive(
        self,
        src: int,
        envelope: Envelope,
        deadline: Deadline,
        *,
        nbytes: int | None = None,
    ) -> Payload:
        """See ``Backend.receive``."""
        inbox = self._peers[src].inbox
        return inbox.take(Receive(envelope, nbytes=nbytes), deadline)

    def has_arrived(self, src: int, envelope: Envelope) -> bool:
        """See ``Backend.has_arrived``."""
        return self._peers[src].inbox.has_arrived(envelope)

    def abandon(self, group: int, cause: RankwireError) -> None:
        """See ``Backend.abandon``."""
        for peer in self._peers.values():
            peer.inbox.abandon(group, cause)

    def refuse(self, envelope: Envelope) -> None:
        """See ``Backend.refuse``."""
        for peer in self._peers.values():
            peer.inbox.refuse(envelope)

    def _dial_messages(self, peer: Peer, deadline: Deadline) -> Connection:
        grip: list[bool] = []
        try:
            if not deadline.take(peer.dial_lock, grip):
                raise DeadlineExceededError(
                    deadline.limit,
                    waiting_for=[peer.member.rank],
                    detail="another thread is still connecting to it",
                )
            if peer.messages is not None:
                return peer.messages
            return self.dial(peer.member.rank, Purpose.MESSAGES, 0, deadline, peer.send_on)
        finally:
            if grip[-1:] == [True]:
                peer.dial_lock.release()

    # -- calls -------------------------------------------------------------------------------------

    def open_calls(self, service: int) -> TcpCallPort:
        """See ``Backend.open_calls``."""
        port = TcpCallPort(self, service)
        refusal: RankwireError | None = None
        waiting: list[Connection] = []
        with self._lock:
            if self._closed:
                refusal = ChannelClosedError("this backend is closed")
            elif service in self._ports:
                refusal = ConfigurationError(
                    "there is an agent of this name already; close it, or give this one a name"
                )
            else:
                waiting = list(self._callers_waiting.pop(service, {}).values())
                self._ports[service] = port
                self._services_closed.discard(service)
        if refusal is not None:
            port.close()
            raise refusal
        for connection in waiting:
            port.adopt(connection)
        return port

    def new_poller(self) -> EpollPoller:
        """Return what a port waits with for calls."""
        return EpollPoller()

    def forget_port(self, port: TcpCallPort) -> None:
        """Called by a port that is closed."""
        with self._lock:
            if self._ports.get(port.service) is port:
                del self._ports[port.service]
                self._services_closed.add(port.service)

    # -- connections -------------------------------------------------------------------------------

    def dial(
        self,
        rank: int,
        purpose: Purpose,
        service: int,
        deadline: Deadline,
        keep: Callable[[Connection], None],
    ) -> Connection:
        """Open a connection of our own to a peer.

        Args:
            rank: The peer.
            purpose: What the connection is for.
            service: Which agent it is for.
            deadline: For all of it.
            keep: Called with the connection once the peer takes an end of it for a death, also if
                the caller is interrupted at that moment; perhaps twice.

        Raises:
            PeerLostError: The peer has gone.
            ChannelClosedError: It has left, or this backend is closed.
            DeadlineExceededError: No answer in time.
        """
        peer = self._peers[rank]
        hello = self._formation.hello(purpose, rank, service)
        patience = Deadline(_REFUSED_PATIENCE)
        while True:
            peer.check()
            try:
                sock = self._connect(peer, deadline)
                try:
                    stream, seals = authenticate(
                        sock,
                        hello,
                        key=self._formation.key_with(rank),
                        deadline=deadline,
                        check=peer.check,
                        policy=self._formation.policy,
                    )
                except BaseException:
                    sock.close()
                    raise
                break
            except (NoConnectionError, AuthenticationError) as error:
                # All have proved the secret when the world formed: who hangs up now is going.
                if patience.expired or deadline.expired:
                    raise self._unreachable(peer, error) from error
                time.sleep(0.005)
        try:
            connection = self._wrap(peer, stream, seals)
        except BaseException:
            stream.close()
            raise
        try:
            peer.add(connection)
            connection.await_introduction(deadline, peer.check)
            if connection.failure is not None:  # the peer went, or this backend, at this moment
                peer.check()
                raise connection.failure.copy()
            connection.introduce()  # from now on the peer takes an end for a death
            keep(connection)
            return connection
        except BaseException:
            if connection.frames_sent and connection.failure is None:
                keep(connection)
            else:
                self._discard(peer, connection)
            raise

    def link_to(self, rank: int, timeout: float | None = None) -> Link:
        """Return how messages to a rank travel; connects if that has not happened yet."""
        deadline = Deadline.of(timeout, self.timeout)
        try:
            peer = self._peers[self._check_peer(rank)]
            connection = peer.messages or self._dial_messages(peer, deadline)
        except RankwireError as error:
            raise self._explained(error, "link_to", rank, None, deadline) from error.__cause__
        return Link(connection.transport, bool(connection.can_lend), connection.why_not_lend)

    def _unreachable(self, peer: Peer, error: RankwireError) -> RankwireError:
        """Return what has become of a peer that lets nobody in, if nobody has told.

        Who leaves removes its socket file; who is killed cannot.
        """
        rank, member = peer.member.rank, peer.member
        if member.host_id == self._me.host_id and has_removed(member.unix_path):
            return ChannelClosedError(f"rank {rank} has left").during(peer=rank)
        return PeerLostError(rank, error.message)

    def _discard(self, peer: Peer, connection: Connection) -> None:
        connection.close()
        peer.remove(connection)

    def _connect(self, peer: Peer, deadline: Deadline) -> socket.socket:
        member = peer.member
        here = member.host_id == self._me.host_id and member.unix_path
        if self._transport == "unix" and not here:
            raise ConfigurationError(
                f"rank {member.rank} is on another host: no Unix socket reaches it"
            )
        if here:
            try:
                return connect_unix(member.unix_path, deadline, check=peer.check)
            except NoConnectionError:
                # Another container of the same host does not see the file; or the peer is gone,
                # then TCP tells.
                if self._transport == "unix" or os.path.exists(member.unix_path):
                    raise
        limit = deadline.sooner(_CONNECT_LIMIT)
        try:
            return connect_tcp(TcpAddress(member.host, member.port), limit, check=peer.check)
        except DeadlineExceededError as error:
            if limit is deadline:
                raise
            raise NoConnectionError(f"{error.detail} for {limit.limit:g} s") from error

    def _wrap(
        self, peer: Peer, sock: AnySocket, seals: Seals | None, *, incoming: bool = False
    ) -> Connection:
        return Connection(
            sock,
            peer=peer.member.rank,
            max_nbytes=self.max_message_nbytes,
            spin=Spin(self.spin),
            on_lost=peer.fail,
            on_left=peer.explain_farewell,
            on_rest=self._formation.flush_when_possible,
            incoming=incoming,
            single_copy=self._single_copy,
            seals=seals,
        )

    def release(self, connection: Connection) -> None:
        """Called by a port for a connection that it has closed."""
        self._peers[connection.peer].remove(connection)

    # -- the house of the doorkeeper, on its thread ------------------------------------------------

    def admit(self, hello: Hello) -> tuple[Status, int]:
        """Judge an authenticated peer that opens a connection."""
        if self._closed:
            return Status.CLOSED, 0
        peer = self._peers.get(hello.rank)
        is_of_a_rank = hello.purpose in (Purpose.MESSAGES, Purpose.CALLS)
        if peer is None or hello.peer != self.rank or not is_of_a_rank:
            return Status.INVALID_RANK, self.world_size
        if hello.purpose is Purpose.MESSAGES:
            peer.inbox.drop_given_up()
            if peer.inbox.connection is not None:
                return Status.DUPLICATE_RANK, peer.member.pid
        if peer.incoming_count() >= MAX_CONNECTIONS_OF_A_RANK:
            if not peer.has_too_many:
                peer.has_too_many = True  # said once
                limit = MAX_CONNECTIONS_OF_A_RANK
                _log.warning("rank %d has %d connections to this rank: no more", hello.rank, limit)
            return Status.TOO_MANY_CONNECTIONS, MAX_CONNECTIONS_OF_A_RANK
        if hello.purpose is Purpose.CALLS and hello.service in self._services_closed:
            return Status.CLOSED, 0
        return Status.WELCOME, 0

    def enter(self, hello: Hello, sock: AnySocket, seals: Seals | None) -> None:
        """Take a connection that a peer opened."""
        peer = self._peers[hello.rank]
        connection = self._wrap(peer, sock, seals, incoming=True)
        peer.add(connection, incoming=True)
        with suppress(RankwireError):  # the connection has failed, then
            connection.introduce()
        if connection.failure is not None:
            self._discard(peer, connection)
            return
        if hello.purpose is Purpose.MESSAGES:
            if not peer.inbox.attach(connection):
                self._discard(peer, connection)
            return
        older: Connection | None = None
        with self._lock:
            port = self._ports.get(hello.service)
            has_closed = self._closed or hello.service in self._services_closed
            if port is None and not has_closed:
                waiting = self._callers_waiting.setdefault(hello.service, {})
                older = waiting.get(hello.rank)
                waiting[hello.rank] = connection
        if older is not None:  # of an agent that was closed since: each has one
            self._discard(peer, older)
        if port is not None:
            port.adopt(connection)
        elif has_closed:  # since it was let in
            connection.farewell(Deadline(0.0))
            self._discard(peer, connection)

    def on_gone(self, gone: Gone) -> None:
        """Hear from the control plane that a rank has died or left."""
        if gone.rank == self.rank:
            for rank, peer in self._peers.items():
                reason = f"the others have given up this rank: {gone.reason}"
                peer.judge(PeerLostError(rank, reason, root=self.rank))
            return
        if gone.rank not in self._peers:
            raise ProtocolError(f"the coordinator tells of rank {gone.rank}, which does not exist")
        peer = self._peers[gone.rank]
        if gone.orderly:
            peer.leave(ChannelClosedError(f"rank {gone.rank} has left").during(peer=gone.rank))
            return
        kind = PeerUnresponsiveError if gone.silent else PeerLostError
        loss = kind(gone.rank, gone.reason, remote_traceback=gone.traceback)
        peer.judge(self._losses.explain(loss, cause=gone.cause))
        if not gone.silent and peer.member.host_id == self._me.host_id and peer.member.unix_path:
            remove_socket_file(peer.member.unix_path)  # a killed process cannot remove its own

    def on_suspected(self, suspected: Suspected) -> None:
        """Hear from the control plane that a rank has become silent, or is heard again."""
        rank, seconds = suspected.rank, suspected.seconds
        peer = self._peers.get(rank)
        if peer is None:
            return  # this rank itself, or a launcher
        peer.is_suspected = seconds > 0.0
        peer.silent_for = seconds  # of the coordinator, no beat tells
        if peer.is_suspected:
            _log.warning("rank %d has been silent for %.1f s", rank, seconds)
        else:
            _log.warning("rank %d is heard again", rank)
        self._events.suspected(rank, seconds)

    def on_silences(self, silent: dict[int, float]) -> None:
        """Hear from the coordinator who missed a beat."""
        for rank, peer in self._peers.items():
            peer.silent_for = silent.get(rank, 0.0)

    def on_coordinator_gone(self, error: RankwireError) -> None:
        """Hear that nobody tells any more who is gone."""
        self._is_watched = False
        for other in self._peers.values():  # nobody would say any more that it is heard again
            other.is_suspected, other.silent_for = False, 0.0
        peer = self._peers.get(self._coordinator)
        if peer is not None:
            if isinstance(error, ChannelClosedError):
                peer.leave(
                    ChannelClosedError(f"rank {peer.member.rank} has left").during(
                        peer=peer.member.rank
                    )
                )
            else:
                peer.judge(error)
        self._introductions.start()

    def look_for_silence(self) -> None:
        """Look for what nobody tells, now and then.

        Hosts that do not answer on a busy connection; without a coordinator, also ends.
        """
        for peer in self._peers.values():
            peer.look_for_silence(_UNANSWERED_LIMIT)
            if not self._is_watched:
                peer.look_for_end()

    def _explain_end(self, error: RankwireError) -> RankwireError:
        return self._losses.explain(error, is_told=self._is_watched)

    def _expects_verdict(self) -> bool:
        return self._is_watched and not self._closed and not self._formation.is_doorkeeper

    def failure_of(self, rank: int) -> RankwireError | None:
        """See ``Backend.failure_of``."""
        return self._peers[self._check_peer(rank)].failure

    def status_of(self, rank: int) -> PeerStatus:
        """See ``Backend.status_of``."""
        rank = self._check_peer(rank)
        with self._lock:
            ports = list(self._ports.values())
        status = self._peers[rank].status()
        silences = self._formation.silences()
        return replace(
            status,
            silent_for=silences.get(rank, status.silent_for),
            in_flight=sum(port.in_flight_to(rank) for port in ports),
        )

    def _introduce(self) -> None:
        """Connect to everyone, because the coordinator is gone.

        It would have told who dies. Now each rank hears of the others' ends on its own connections,
        and for that every two must have one. Not at once: mostly everyone leaves by now.
        """
        if self._closing.wait(_INTRODUCTION_DELAY):
            return
        # All at once: one that is out of reach must not keep the others from being noticed.
        threads = [
            threading.Thread(
                target=self._greet, args=(peer,), name="rankwire-introduction", daemon=True
            )
            for peer in self._peers.values()
            if peer.failure is None
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _greet(self, peer: Peer) -> None:
        try:
            deadline = Deadline(self.timeout)
            self._dial_messages(peer, deadline).greet(deadline)
        except PeerLostError as error:
            peer.fail(error)
        except ChannelClosedError as error:
            peer.leave(error)
        except RankwireError as error:
            _log.debug("rank %d was not greeted: %s", peer.member.rank, error)

    # -- leaving -----------------------------------------------------------------------------------

    def close(self, *, error: BaseException | None = None) -> None:
        """See ``Backend.close``. Agents on this backend are ended too."""
        with self._close_lock:
            with self._lock:
                if self._closed:
                    return
                self._closed = True
                self._closing.set()
                ports = list(self._ports.values())
                waiting = [c for parked in self._callers_waiting.values() for c in parked.values()]
                self._callers_waiting.clear()
            cause = ChannelClosedError("this backend is closed")
            for port in ports:
                port.shut_down(cause)
            patience = Deadline(_FAREWELL_PATIENCE)
            fall = fall_by(error, first_lost=self._losses.first)
            if fall is not None:  # first of all, before anyone sees a connection end
                for peer in self._peers.values():
                    peer.turn_away(cause)
                root = None if fall.cause == self.rank else fall.cause
                self._formation.close(Fallen(fall.reason, fall.traceback, root, fall.exit_code))
            for peer in self._peers.values():
                peer.close(cause, patience, orderly=fall is None)
            for connection in waiting:
                connection.close()
            for port in ports:  # whether or not its agent is still there to do it
                port.close()
            self._formation.close()
            if self._introductions.ident is not None:
                self._introductions.join(_INTRODUCTIONS_PATIENCE)

    def leave_at_exit(self, error: BaseException | None) -> None:
        """See ``Leaving``."""
        self.close(error=error)

    def __repr__(self) -> str:
        gone = [rank for rank, peer in self._peers.items() if peer.failure is not None]
        state = "closed" if self._closed else f"gone: {gone}" if gone else "all up"
        return f"<TcpBackend rank {self.rank} of {self.world_size} at {self.address}, {state}>"
