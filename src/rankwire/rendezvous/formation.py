"""Form the world of a TCP backend: rank 0 coordinates unless a launcher does, the others join."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import ConfigurationError
from rankwire.finalizers import close_at_exit
from rankwire.fork import guard
from rankwire.links.acceptor import Acceptor, room_for
from rankwire.rendezvous.coordinator import Coordinator
from rankwire.rendezvous.join import Joiner
from rankwire.rendezvous.membership import Audience, Membership
from rankwire.rendezvous.reports import Told
from rankwire.rendezvous.runtime_dir import host_id, new_socket_path, sweep_socket_files
from rankwire.rendezvous.secret import OwnKeys
from rankwire.transports import listen
from rankwire.transports.byte_stream import ByteStream, Listener
from rankwire.transports.security import Policy
from rankwire.transports.sockets import Socket
from rankwire.transports.tcp_stream import (
    ListeningPlace,
    TcpAddress,
    listen_somewhere,
    listen_tcp,
    start_listening,
)
from rankwire.wire.control_messages import Fallen, Member, Patience, Report, World
from rankwire.wire.handshake import BETWEEN_RANKS, LAUNCHER, Hello, Purpose, Status
from rankwire.wire.keys import KEY_NBYTES
from rankwire.wire.seals import Seals

_LOOK_EVERY = 0.5  # seconds between two checks for broken connections


class OwnListeners:
    """Listens for a rank until an acceptor does, and owns the files that it creates.

    ``advertise`` is the host at which others reach this rank, if not that of ``place``.
    ``share_files`` adds a Unix socket. ``listener`` is a bound TCP socket for rank 0 to use.
    """

    def __init__(
        self,
        rank: int,
        place: ListeningPlace,
        *,
        advertise: str | None,
        share_files: bool,
        listener: Socket | None,
    ) -> None:
        self._rank = rank
        self._place = place
        self._advertise = advertise
        self._share_files = share_files
        self._files: list[Callable[[], None]] = []  # each call removes one file
        self._tcp_listener = listener
        self._unix_listener: Listener | None = None
        self._member: Member | None = None
        guard(self)
        close_at_exit(self, OwnListeners._remove_files)

    def listen_at(self, address: TcpAddress) -> Socket:
        """Return the TCP listener of rank 0: at the place if that is set, else at the address."""
        if self._tcp_listener is None:
            place = self._place
            if place.low != place.high:
                raise ConfigurationError("rank 0 listens at the one port of its address")
            where = TcpAddress(place.host or address.host, place.low or address.port)
            self._tcp_listener = listen_tcp(where)
        return self._tcp_listener

    def describe(self, host: str) -> Member:
        """Listen at the host that reached the coordinator, once, and return this rank's entry."""
        if self._member is not None:
            return self._member
        if self._tcp_listener is None:
            self._tcp_listener = listen_somewhere(self._place, host)
        unix_path = ""
        if self._share_files:
            sweep_socket_files()
            unix_path = new_socket_path()
            self._unix_listener = listen(f"unix://{unix_path}")
            self.own_file(partial(Path(unix_path).unlink, missing_ok=True))
        self._member = Member(
            self._rank,
            runtime.getpid(),
            self._advertise or self._place.specific_host or host,
            self._tcp_listener.getsockname()[1],
            unix_path,
            host_id(),
        )
        return self._member

    def own_file(self, remove: Callable[[], None]) -> None:
        """Call ``remove`` on close."""
        self._files.append(remove)

    def leave_files(self) -> None:
        """Leave the files for the next world to remove."""
        self._files.clear()

    def pass_to(self, acceptor: Acceptor) -> None:
        """Transfer the listeners to an acceptor."""
        for listener in self._all():
            acceptor.listen(listener)
        self._tcp_listener = self._unix_listener = None

    def _all(self) -> list[Socket | Listener]:
        return [each for each in (self._tcp_listener, self._unix_listener) if each is not None]

    def close(self) -> None:
        """Stop listening and remove the files. Idempotent."""
        for listener in self._all():
            listener.close()
        self._remove_files()

    def close_in_child(self) -> None:
        """Close the listeners in a forked child, and leave the files to the parent."""
        self.leave_files()
        self.close()

    def _remove_files(self, error: BaseException | None = None) -> None:
        for remove in self._files:
            remove()


class Owner(Audience, Protocol):
    """The backend of a forming world. The acceptor's thread calls its methods."""

    rank: int
    world_size: int
    clock: Clock

    @property
    def closed(self) -> bool:
        """Whether the backend is closed."""
        ...

    def on_formed(self, world: World) -> None:
        """Store the world, before any rank can dial this one."""

    def look_for_silence(self) -> None:
        """Check for silent connections; called twice a second."""

    def admit(self, hello: Hello) -> tuple[Status, int]:
        """Return whether an authenticated rank may connect, or why not."""
        ...

    def enter(self, hello: Hello, sock: ByteStream, seals: Seals | None) -> None:
        """Own the connection of an admitted rank."""


@dataclass(eq=False, repr=False, kw_only=True)
class Formation:
    """Forms the world, and owns the control connections of a rank.

    With ``has_coordinator``, a launcher coordinates. A world of one rank has no ``acceptor``.
    """

    owner: Owner
    address: TcpAddress
    keys: OwnKeys
    listeners: OwnListeners
    job: bytes
    policy: Policy
    patience: Patience
    has_coordinator: bool
    acceptor: Acceptor | None = field(default=None, init=False)
    _epoch: int = field(default=0, init=False)
    _coordinator: Coordinator | None = field(default=None, init=False)
    _membership: Membership | None = field(default=None, init=False)

    def form(self, deadline: Deadline) -> None:
        """Wait until all ranks are up and can dial each other; raise as ``TcpBackend`` does."""
        if self.owner.world_size == 1:
            alone = Member(0, runtime.getpid(), self.address.host, 0, "", host_id())
            self._formed(World(1, [alone]))
        elif self.owner.rank == 0 and not self.has_coordinator:
            self._coordinate(deadline)
        else:
            self._join(deadline)

    def _join(self, deadline: Deadline) -> None:
        world, control, rest = Joiner(
            self.address,
            self.hello(Purpose.JOIN, LAUNCHER if self.has_coordinator else 0),
            find_key=lambda: self.keys.find(self.address.port),
            describe=self.listeners.describe,
            deadline=deadline,
            patience=self.patience,
            policy=self.policy,
            has_coordinator=self.has_coordinator,
        ).join()
        if world.coordinator == 0:
            # Rank 0 may listen on all interfaces: use the address that reached it.
            world.members[0] = msgspec.structs.replace(world.members[0], host=self.address.host)
        self._formed(world)
        # Peers that dialled earlier are waiting in the listeners' backlog.
        acceptor = self._make_acceptor()
        self._membership = Membership(control, world, acceptor, self.owner)
        self._membership.begin(rest)
        acceptor.start()

    def _formed(self, world: World) -> None:
        self._epoch = world.epoch
        self.keys.take_all(world, self.owner.world_size)
        self.owner.on_formed(world)

    def _coordinate(self, deadline: Deadline) -> None:
        listener = self.listeners.listen_at(self.address)
        self.address = TcpAddress(self.address.host, listener.getsockname()[1])
        self.keys.coordinate(self.address.port, self.listeners.own_file)
        me = self.listeners.describe(self.address.host)
        acceptor = self._make_acceptor()
        self._coordinator = Coordinator(
            me,
            self.owner.world_size,
            acceptor,
            key_of=self.keys.of_rank,
            patience=self.patience,
            told=Told(
                on_formed=self._formed,
                on_gone=self.owner.on_gone,
                on_suspected=self.owner.on_suspected,
                on_notice=self.owner.on_notice,
                on_agent_answer=self.owner.on_agent_answer,
                on_question=self.owner.on_question,
                on_answer=self.owner.on_answer,
            ),
        )
        start_listening(listener)
        acceptor.start()
        self._coordinator.wait_formed(deadline)

    def _find_key_of(self, hello: Hello) -> bytes:
        """Return the key of the claimed rank, or a random key. On the acceptor's thread."""
        if hello.purpose is Purpose.JOIN and self._coordinator is not None:
            return self.keys.of_rank(hello.rank)
        is_of_a_rank = hello.purpose in BETWEEN_RANKS
        key = self.keys.shared.get(hello.rank) if is_of_a_rank else None
        return key or runtime.token_bytes(KEY_NBYTES)

    def _make_acceptor(self) -> Acceptor:
        self.acceptor = Acceptor(
            self,
            self.owner.clock,
            key=self._find_key_of,
            policy=self.policy,
            room=room_for(self.owner.world_size),
        )
        self.acceptor.call_every(_LOOK_EVERY, self.owner.look_for_silence)
        self.listeners.pass_to(self.acceptor)
        return self.acceptor

    def hello(self, purpose: Purpose, peer: int, service: int = 0) -> Hello:
        """Return the greeting for a connection to a peer."""
        owner = self.owner
        return Hello(purpose, self.job, self._epoch, owner.world_size, owner.rank, peer, service)

    def admit(self, hello: Hello) -> tuple[Status, int]:
        """Return whether an authenticated peer may connect, or why not."""
        if hello.job != self.job:
            return Status.OTHER_JOB, 0
        if hello.purpose is Purpose.JOIN:
            if self._coordinator is None:
                return Status.INVALID_RANK, self.owner.world_size
            return self._coordinator.admit(hello)
        if hello.epoch != self._epoch or not self._epoch:
            return Status.OTHER_EPOCH, 0
        return self.owner.admit(hello)

    def enter(self, hello: Hello, sock: ByteStream, seals: Seals | None) -> None:
        """Pass an authenticated connection to the coordinator or the backend."""
        if hello.purpose is not Purpose.JOIN:
            self.owner.enter(hello, sock, seals)
            return
        assert self._coordinator is not None
        self._coordinator.enter(hello.rank, sock, seals)

    def report(self, message: Report, patience: float = 0.0) -> bool:
        """Send the coordinator a report or question; wait ``patience`` seconds until it is sent.

        Return False in a world of one rank, which has no coordinator. Safe from any thread.
        """
        if self.acceptor is None:
            return False
        is_sent = runtime.Event()

        def send() -> None:
            if self._coordinator is not None:
                self._coordinator.watch.take_report(self.owner.rank, message)
            elif self._membership is not None:
                self._membership.report(message)
            is_sent.set()

        self.acceptor.call_soon(send)
        if patience and not self.owner.closed:
            self.owner.clock.wait(is_sent, patience)
        return True

    def silences(self) -> dict[int, float]:
        """Return the seconds of silence of the watched ranks that missed a beat."""
        coordinator = self._coordinator
        counting = self._membership if coordinator is None else coordinator.watch
        return {} if counting is None else counting.silences()

    def close(self, fallen: Fallen | None = None) -> None:
        """Leave the world, reporting this rank's failure if any; remove the files. Idempotent."""
        if self.acceptor is not None:
            self.acceptor.close()
        if self._coordinator is not None:
            self._coordinator.close(fallen)
        if self._membership is not None:
            if fallen is not None and self._membership.has_ended:
                # No rank can be notified. A removed file would mean that this rank left without an
                # error, so keep it; the next world removes it.
                self.listeners.leave_files()
            self._membership.leave(fallen)
        self.listeners.close()
