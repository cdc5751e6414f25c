"""Form the world of a TCP backend.

Rank 0 coordinates unless a launcher does; the other ranks join. Afterwards the formation passes on
what the acceptor and the control connections report. A world of one rank opens nothing.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.links.acceptor import Acceptor, room_for
from rankwire.rendezvous.coordinator import Coordinator
from rankwire.rendezvous.join import Joiner
from rankwire.rendezvous.membership import Audience, Membership
from rankwire.rendezvous.own_listeners import OwnKeys, OwnListeners
from rankwire.rendezvous.reports import Told
from rankwire.rendezvous.runtime_dir import host_id
from rankwire.transports.byte_stream import ByteStream
from rankwire.transports.security import Policy
from rankwire.transports.tcp_stream import TcpAddress, start_listening
from rankwire.wire.control_messages import AgentSays, Fallen, Member, Notice, Patience, World
from rankwire.wire.handshake import BETWEEN_RANKS, LAUNCHER, Hello, Purpose, Status, job_id
from rankwire.wire.keys import KEY_NBYTES
from rankwire.wire.seals import Seals

_LOOK_EVERY = 0.5  # seconds between two checks for connections that may be cut


class Owner(Audience, Protocol):
    """The backend of a forming world. The acceptor's thread calls its methods."""

    rank: int
    world_size: int
    clock: Clock

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        ...

    def on_formed(self, world: World) -> None:
        """Take the list of the ranks, before any of them can dial."""

    def look_for_silence(self) -> None:
        """Check for silent connections; called twice a second."""

    def admit(self, hello: Hello) -> tuple[Status, int]:
        """Return whether an authenticated rank may connect, or why not."""
        ...

    def enter(self, hello: Hello, sock: ByteStream, seals: Seals | None) -> None:
        """Take the connection of an admitted rank."""


class Formation:
    """Forms the world, and owns the control connections of a rank.

    Ranks of another ``job`` are refused. ``has_coordinator`` says that a launcher coordinates, and
    not rank 0.

    Attributes:
        address: Where the world forms, with the port that was chosen.
        acceptor: Accepts and reads connections; None in a world of one rank.
    """

    def __init__(
        self,
        owner: Owner,
        address: TcpAddress,
        *,
        keys: OwnKeys,
        listeners: OwnListeners,
        job: str,
        policy: Policy,
        patience: Patience,
        has_coordinator: bool,
    ) -> None:
        self._owner = owner
        self.address = address
        self.keys = keys
        self._listeners = listeners
        self._job = job_id(job)
        self.policy = policy
        self._patience = patience
        self._has_coordinator = has_coordinator
        self.acceptor: Acceptor | None = None
        self._epoch = 0
        self._coordinator: Coordinator | None = None
        self._membership: Membership | None = None

    # -- forming -----------------------------------------------------------------------------------

    def form(self, deadline: Deadline) -> None:
        """Wait until all ranks are up and can dial each other; raise as ``TcpBackend`` does."""
        if self._owner.world_size == 1:
            alone = Member(0, runtime.getpid(), self.address.host, 0, "", host_id())
            self._formed(World(1, [alone]))
        elif self._owner.rank == 0 and not self._has_coordinator:
            self._coordinate(deadline)
        else:
            self._join(deadline)

    def _join(self, deadline: Deadline) -> None:
        world, control, rest = Joiner(
            self.address,
            self.hello(Purpose.JOIN, LAUNCHER if self._has_coordinator else 0),
            find_key=lambda: self.keys.find(self.address.port),
            describe=self._listeners.describe,
            deadline=deadline,
            patience=self._patience,
            policy=self.policy,
            has_coordinator=self._has_coordinator,
        ).join()
        if world.coordinator == 0:
            # Rank 0 may listen on all interfaces: use the address that reached it.
            world.members[0] = msgspec.structs.replace(world.members[0], host=self.address.host)
        self._formed(world)
        # Peers are accepted only now; those that have dialled wait in the listeners' backlog.
        acceptor = self._make_acceptor()
        self._membership = Membership(control, world, acceptor, self._owner)
        self._membership.begin(rest)
        acceptor.start()

    def _formed(self, world: World) -> None:
        self._epoch = world.epoch
        self.keys.take_all(world, self._owner.world_size)
        self._owner.on_formed(world)

    def _coordinate(self, deadline: Deadline) -> None:
        listener = self._listeners.listen_at(self.address)
        self.address = TcpAddress(self.address.host, listener.getsockname()[1])
        self.keys.coordinate(self.address.port, self._listeners.own_file)
        me = self._listeners.describe(self.address.host)
        acceptor = self._make_acceptor()
        self._coordinator = Coordinator(
            me,
            self._owner.world_size,
            acceptor,
            key_of=self.keys.of_rank,
            patience=self._patience,
            told=Told(
                on_formed=self._formed,
                on_gone=self._owner.on_gone,
                on_suspected=self._owner.on_suspected,
                on_notice=self._owner.on_notice,
                on_agent_answer=self._owner.on_agent_answer,
            ),
        )
        start_listening(listener)
        acceptor.start()
        self._coordinator.wait_formed(deadline)

    def _find_key_of(self, hello: Hello) -> bytes:
        """Return the key of the rank that a peer claims to be; a random key if there is none.

        Runs on the acceptor's thread.
        """
        if hello.purpose is Purpose.JOIN and self._coordinator is not None:
            return self.keys.of_rank(hello.rank)
        is_of_a_rank = hello.purpose in BETWEEN_RANKS
        key = self.keys.shared.get(hello.rank) if is_of_a_rank else None
        return key or runtime.token_bytes(KEY_NBYTES)

    def _make_acceptor(self) -> Acceptor:
        self.acceptor = Acceptor(
            self,
            self._owner.clock,
            key=self._find_key_of,
            policy=self.policy,
            room=room_for(self._owner.world_size),
        )
        self.acceptor.call_every(_LOOK_EVERY, self._owner.look_for_silence)
        self._listeners.pass_to(self.acceptor)
        return self.acceptor

    # -- once formed -------------------------------------------------------------------------------

    def hello(self, purpose: Purpose, peer: int, service: int = 0) -> Hello:
        """Return the greeting for a connection to a peer."""
        owner = self._owner
        return Hello(purpose, self._job, self._epoch, owner.world_size, owner.rank, peer, service)

    def admit(self, hello: Hello) -> tuple[Status, int]:
        """Return whether an authenticated peer may connect, or why not."""
        if hello.job != self._job:
            return Status.OTHER_JOB, 0
        if hello.purpose is Purpose.JOIN:
            if self._coordinator is None:
                return Status.INVALID_RANK, self._owner.world_size
            return self._coordinator.admit(hello)
        if hello.epoch != self._epoch or not self._epoch:
            return Status.OTHER_EPOCH, 0
        return self._owner.admit(hello)

    def enter(self, hello: Hello, sock: ByteStream, seals: Seals | None) -> None:
        """Pass an authenticated connection to the coordinator or the backend."""
        if hello.purpose is not Purpose.JOIN:
            self._owner.enter(hello, sock, seals)
            return
        assert self._coordinator is not None
        self._coordinator.enter(hello.rank, sock, seals)

    def report(self, message: Notice | AgentSays, patience: float = 0.0) -> bool:
        """Send the coordinator a report, and wait ``patience`` seconds until it is sent.

        Safe from any thread. Returns False in a world of one rank, which has no coordinator.
        """
        if self.acceptor is None:
            return False
        is_sent = runtime.Event()

        def send() -> None:
            if self._coordinator is not None:
                self._coordinator.watch.take_report(self._owner.rank, message)
            elif self._membership is not None:
                self._membership.report(message)
            is_sent.set()

        self.acceptor.call_soon(send)
        if patience and not self._owner.closed:
            self._owner.clock.wait(is_sent, patience)
        return True

    def silences(self) -> dict[int, float]:
        """Return the seconds of silence of the watched ranks that missed a beat."""
        coordinator = self._coordinator
        counting = self._membership if coordinator is None else coordinator.watch
        return {} if counting is None else counting.silences()

    # -- ending ------------------------------------------------------------------------------------

    def close(self, fallen: Fallen | None = None) -> None:
        """Leave the world, stop listening and remove the files. Idempotent.

        ``fallen`` is the failure of this rank, if it does not leave in an orderly way.
        """
        if self.acceptor is not None:
            self.acceptor.close()
        if self._coordinator is not None:
            self._coordinator.close(fallen)
        if self._membership is not None:
            if fallen is not None and self._membership.has_ended:
                # No rank can be notified. A removed file would mean an orderly exit, so it stays;
                # the next world removes it.
                self._listeners.leave_files()
            self._membership.leave(fallen)
        self._listeners.close()
