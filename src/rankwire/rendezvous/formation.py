"""Form the world of a TCP backend.

Rank 0 coordinates unless a launcher does; the other ranks join. Afterwards the formation passes on
what the acceptor and the control connections report. A world of one rank opens nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from rankwire import runtime
from rankwire.deadline import Deadline
from rankwire.errors import ConfigurationError
from rankwire.fork import guard
from rankwire.links.acceptor import Acceptor, room_for
from rankwire.rendezvous.coordinator import Coordinator
from rankwire.rendezvous.join import Joiner
from rankwire.rendezvous.membership import Membership
from rankwire.rendezvous.reports import Told
from rankwire.rendezvous.runtime_dir import host_id, new_socket_path, sweep_socket_files
from rankwire.rendezvous.secret import AgreedSecret
from rankwire.shutdown import close_at_exit
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
from rankwire.wire.control_messages import (
    AgentSays,
    Fallen,
    Joined,
    Member,
    Patience,
    World,
)
from rankwire.wire.handshake import BETWEEN_RANKS, LAUNCHER, Hello, Purpose, Status, job_id
from rankwire.wire.keys import KEY_NBYTES, HiddenKey, RankKey, rank_key, unwrap, unwrap_one
from rankwire.wire.notices import Notice
from rankwire.wire.seals import Seals

if TYPE_CHECKING:
    from rankwire.backends.tcp import TcpBackend

_LOOK_EVERY = 0.5  # seconds between two checks for connections that may be cut


@dataclass(eq=False, repr=False)
class Formation:
    """Forms the world, and owns the listeners, keys and control connections of a rank.

    Attributes:
        owner: The backend.
        address: Where the world forms, with the port that was chosen.
        secret: The secret that the user gave; None if rank 0 writes one to a file.
        job: The name of the job; ranks of another job are refused.
        policy: How connections are protected.
        share_files: Whether this rank listens at a Unix socket too.
        patience: How long ranks may be silent.
        has_coordinator: Whether a launcher coordinates, and not rank 0.
        place: Where this rank listens.
        advertise: The host by which others reach this rank, if not the host of ``place``.
        key: The key with which this rank joins.
        acceptor: Accepts and reads connections; None in a world of one rank.

    Size: listeners, keys, files and both ends of the control plane live and end together.
    """

    owner: TcpBackend
    address: TcpAddress
    _: KW_ONLY
    secret: bytes | None
    job: str
    policy: Policy
    share_files: bool
    listener: InitVar[Socket | None]
    patience: Patience
    has_coordinator: bool
    place: ListeningPlace
    advertise: str | None

    def __post_init__(self, listener: Socket | None) -> None:
        if listener is not None and (self.owner.rank != 0 or self.has_coordinator):
            raise ConfigurationError("only a rank 0 that coordinates takes a listener")
        self.key = b""
        self.acceptor: Acceptor | None = None
        self._keys: dict[int, HiddenKey] = {}  # shared with each other rank
        self._job = job_id(self.job)
        self._agreed_secret = b""
        self._files: list[Callable[[], None]] = []  # each call removes one file
        # Until the acceptor has them; the TCP listener comes first.
        self._listeners: list[Socket] = [] if listener is None else [listener]
        self._local_listeners: list[Listener] = []
        self._member: Member | None = None
        self._epoch = 0
        self._coordinator: Coordinator | None = None
        self._membership: Membership | None = None
        guard(self)
        close_at_exit(self, Formation._remove_files)

    # -- forming -----------------------------------------------------------------------------------

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
            find_key=self._find_key,
            describe=self._describe,
            deadline=deadline,
            patience=self.patience,
            policy=self.policy,
            has_coordinator=self.has_coordinator,
        ).join()
        if world.coordinator == 0:
            # Rank 0 may listen on all interfaces: use the address that reached it.
            world.members[0] = msgspec.structs.replace(world.members[0], host=self.address.host)
        self._formed(world)
        # Peers are accepted only now; those that have dialled wait in the listeners' backlog.
        acceptor = self._make_acceptor()
        self._membership = Membership(control, world, acceptor, self.owner)
        self._membership.begin(rest)
        acceptor.start()

    def _formed(self, world: World) -> None:
        """Tell the owner its peers before any of them can dial."""
        self._epoch = world.epoch
        if self.key:
            owner = self.owner
            self._keys = dict(unwrap(self.key, world.keys, owner.rank, owner.world_size))
        self.owner.on_formed(world)

    def _coordinate(self, deadline: Deadline) -> None:
        if not self._listeners:
            self._listeners.append(listen_tcp(self._place_of_rank_0()))
        (listener,) = self._listeners
        self.address = TcpAddress(self.address.host, listener.getsockname()[1])
        if self.secret is None:
            agreed = AgreedSecret(self.address.port)
            self._agreed_secret = agreed.publish()
            self._files.append(lambda: agreed.remove(self._agreed_secret))
        secret = self.secret or self._agreed_secret
        if isinstance(secret, RankKey):
            raise ConfigurationError("rank 0 coordinates only with the secret that all ranks have")
        self.key = rank_key(secret, self.owner.rank)
        me = self._describe(self.address.host)
        acceptor = self._make_acceptor()
        self._coordinator = Coordinator(
            me,
            self.owner.world_size,
            acceptor,
            key_of=partial(rank_key, secret),
            patience=self.patience,
            told=Told(
                on_formed=self._formed,
                on_gone=self.owner.on_gone,
                on_suspected=self.owner.on_suspected,
                on_notice=self.owner.on_notice,
                on_agent_answer=self.owner.on_agent_answer,
            ),
        )
        start_listening(listener)
        acceptor.start()
        self._coordinator.wait_formed(deadline)

    def _place_of_rank_0(self) -> TcpAddress:
        """Return where rank 0 listens: at ``place`` if that is set, else at the address."""
        place = self.place
        if place.low != place.high:
            raise ConfigurationError("rank 0 listens at the one port of its address")
        return TcpAddress(place.host or self.address.host, place.low or self.address.port)

    def _find_key(self) -> bytes | None:
        secret = self.secret or AgreedSecret(self.address.port).read()
        if secret is None:
            return None
        is_own = isinstance(secret, RankKey)
        self.key = secret if is_own else rank_key(secret, self.owner.rank)
        return self.key

    def take_key(self, joined: Joined) -> None:
        """Replace the key that is shared with a restarted rank."""
        self._keys[joined.member.rank] = unwrap_one(self.key, joined.key)

    def key_with(self, rank: int) -> bytes:
        """Return the key for connections between this rank and another."""
        return self._keys[rank]

    def _find_key_of(self, hello: Hello) -> bytes:
        """Return the key of the rank that a peer claims to be; a random key if there is none.

        Runs on the acceptor's thread.
        """
        if hello.purpose is Purpose.JOIN and self._coordinator is not None:
            return rank_key(self.secret or self._agreed_secret, hello.rank)
        is_of_a_rank = hello.purpose in BETWEEN_RANKS
        key = self._keys.get(hello.rank) if is_of_a_rank else None
        return key or runtime.token_bytes(KEY_NBYTES)

    def _describe(self, host: str) -> Member:
        """Listen at the host that reached the coordinator, once, and return this rank's entry."""
        if self._member is not None:
            return self._member
        if not self._listeners:
            self._listeners.append(listen_somewhere(self.place, host))
        unix_path = ""
        if self.share_files:
            sweep_socket_files()
            unix_path = new_socket_path()
            self._local_listeners.append(listen(f"unix://{unix_path}"))
            self._files.append(partial(_remove_file, unix_path))
        self._member = Member(
            self.owner.rank,
            runtime.getpid(),
            self.advertise or self.place.specific_host or host,
            self._listeners[0].getsockname()[1],
            unix_path,
            host_id(),
        )
        return self._member

    def _all_listeners(self) -> list[Socket | Listener]:
        return [*self._listeners, *self._local_listeners]

    def _make_acceptor(self) -> Acceptor:
        self.acceptor = Acceptor(
            self,
            self.owner.clock,
            key=self._find_key_of,
            policy=self.policy,
            room=room_for(self.owner.world_size),
        )
        self.acceptor.call_every(_LOOK_EVERY, self.owner.look_for_silence)
        for listener in self._all_listeners():
            self.acceptor.listen(listener)
        self._listeners, self._local_listeners = [], []
        return self.acceptor

    # -- once formed -------------------------------------------------------------------------------

    def hello(self, purpose: Purpose, peer: int, service: int = 0) -> Hello:
        """Return the greeting for a connection to a peer."""
        owner = self.owner
        return Hello(purpose, self._job, self._epoch, owner.world_size, owner.rank, peer, service)

    def admit(self, hello: Hello) -> tuple[Status, int]:
        """Return whether an authenticated peer may connect, or why not."""
        if hello.job != self._job:
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

    def report(self, message: Notice | AgentSays, patience: float = 0.0) -> bool:
        """Send the coordinator a report about a collective or an agent. Safe from any thread.

        Args:
            message: The report.
            patience: Seconds to wait until the acceptor's thread has sent it.

        Returns:
            False if there is no coordinator, because this rank is the whole world.
        """
        if self.acceptor is None:
            return False
        is_sent = runtime.Event()

        def send() -> None:
            if self._coordinator is not None:
                self._coordinator.take_report(self.owner.rank, message)
            elif self._membership is not None:
                self._membership.report(message)
            is_sent.set()

        self.acceptor.call_soon(send)
        if patience and not self.owner.closed:
            self.owner.clock.wait(is_sent, patience)
        return True

    def silences(self) -> dict[int, float]:
        """Return the seconds of silence of ranks that missed a beat.

        A rank that coordinates watches all others; any other rank watches the coordinator.
        """
        counting = self._coordinator or self._membership
        return {} if counting is None else counting.silences()

    def close_in_child(self) -> None:
        """Close the listeners in a forked child, and leave the files to the parent."""
        self._files.clear()
        for listener in self._all_listeners():
            listener.close()

    # -- ending ------------------------------------------------------------------------------------

    def close(self, fallen: Fallen | None = None) -> None:
        """Leave the world, stop listening and remove the files. Idempotent.

        Args:
            fallen: The failure of this rank, if it does not leave in an orderly way.
        """
        if self.acceptor is not None:
            self.acceptor.close()
        if self._coordinator is not None:
            self._coordinator.close(fallen)
        if self._membership is not None:
            if fallen is not None and self._membership.has_ended:
                # No rank can be told. A removed file would mean that this rank left in an orderly
                # way, so it stays; the next world removes it.
                self._files.clear()
            self._membership.leave(fallen)
        for listener in self._all_listeners():
            listener.close()
        self._remove_files()

    def _remove_files(self, error: BaseException | None = None) -> None:
        for remove in self._files:
            remove()


def _remove_file(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
