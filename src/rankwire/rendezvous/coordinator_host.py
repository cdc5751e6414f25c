"""Host a coordinator in a launcher: one world after another, and links to other launchers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from rankwire.clock import Clock
from rankwire.errors import ConfigurationError, NoConnectionError
from rankwire.links.acceptor import Acceptor, room_for
from rankwire.rendezvous.coordinator import Coordinator
from rankwire.rendezvous.launchers import LAUNCH_JOB, LauncherLink
from rankwire.rendezvous.reports import Told
from rankwire.transports.byte_stream import ByteStream
from rankwire.transports.security import Policy
from rankwire.transports.sockets import Socket
from rankwire.transports.tcp_stream import TcpAddress, listen_tcp, start_listening
from rankwire.wire.control_messages import Gone, Member, World
from rankwire.wire.handshake import Hello, Purpose, Status, handshake_key, job_id
from rankwire.wire.keys import rank_key
from rankwire.wire.seals import Seals


def bind(address: str) -> Socket:
    """Return a socket bound to ``host:port``, or raise ConfigurationError."""
    try:
        return listen_tcp(TcpAddress.parse(address))
    except NoConnectionError as error:
        raise ConfigurationError(f"cannot listen on {address}: {error.message}") from error


@dataclass(eq=False, repr=False)
class CoordinatorHost:
    """Coordinates worlds without being a rank. It owns ``listener``.

    Attributes:
        told: The callbacks; they run on the acceptor's thread.
        are_restarted: Whether lost ranks are restarted; then a world without ranks is kept.
        nodes: The number of launchers in the job.
        on_launcher: Called on that thread with another node's number and link, which it then owns.
    """

    listener: Socket
    world_size: int
    _: KW_ONLY
    secret: bytes
    job: str
    clock: Clock
    policy: Policy
    told: Told = field(default_factory=Told)
    are_restarted: bool = False
    nodes: int = 1
    on_launcher: Callable[[int, LauncherLink], None] = lambda node, link: link.close()

    def __post_init__(self) -> None:
        self._present: set[int] = set()
        self._lost: set[int] = set()  # ranks of the current world
        self._incarnations: dict[int, int] = {}
        self._absent: dict[int, str] = {}
        self._job = job_id(self.job)
        self._acceptor = Acceptor(self, self.clock, key=self._find_key, policy=self.policy)
        self._acceptor.listen(self.listener)
        self._coordinator = self._new_coordinator()
        start_listening(self.listener)
        self._acceptor.start()

    def _new_coordinator(self) -> Coordinator:
        self._acceptor.room = room_for(self.world_size)
        coordinator = Coordinator(
            None,
            self.world_size,
            self._acceptor,
            key_of=self._key_of,
            incarnation_of=self._incarnation_of,
            are_restarted=self.are_restarted,
            told=self.told._replace(
                on_formed=self._formed, on_gone=self._gone, on_joined=self._joined
            ),
        )
        for rank, reason in self._absent.items():
            coordinator.expect_never(rank, reason)
        return coordinator

    def _formed(self, world: World) -> None:
        self._present = {member.rank for member in world.members}
        self._lost = set()
        self.told.on_formed(world)

    def _joined(self, member: Member) -> None:
        self._present.add(member.rank)
        self._lost.discard(member.rank)
        self.told.on_joined(member)

    def _gone(self, gone: Gone) -> None:
        if gone.rank < 0:  # the ranks gave up this process
            self.expect()
            return
        self._present.discard(gone.rank)
        if not gone.orderly:
            self._lost.add(gone.rank)
        self.told.on_gone(gone)
        if not self._present and not (self.are_restarted and self._lost):
            self.expect()

    def _find_key(self, hello: Hello) -> bytes:
        if hello.purpose is Purpose.LAUNCH:
            return handshake_key(self.secret)
        return self._key_of(hello.rank)

    def _key_of(self, rank: int) -> bytes:
        return rank_key(self.secret, rank, self._incarnation_of(rank))

    def _incarnation_of(self, rank: int) -> int:
        return self._incarnations.get(rank, 0)

    def admit(self, hello: Hello) -> tuple[Status, int]:
        """Return whether a rank or a launcher may connect, or why not."""
        if hello.purpose is Purpose.LAUNCH:
            return self._admit_launcher(hello)
        if hello.job != self._job:
            return Status.OTHER_JOB, 0
        if hello.purpose is not Purpose.JOIN:
            return Status.INVALID_RANK, self.world_size
        return self._coordinator.admit(hello)

    def _admit_launcher(self, hello: Hello) -> tuple[Status, int]:
        if hello.job != job_id(LAUNCH_JOB):
            return Status.OTHER_JOB, 0
        if hello.world_size != self.nodes:
            return Status.WRONG_WORLD_SIZE, self.nodes
        if not 0 < hello.rank < self.nodes:
            return Status.INVALID_RANK, self.nodes
        return Status.WELCOME, 0

    def enter(self, hello: Hello, sock: ByteStream, seals: Seals | None) -> None:
        """Pass an admitted connection to the coordinator, or to ``on_launcher``."""
        if hello.purpose is Purpose.LAUNCH:
            link = LauncherLink(sock, hello.rank, self.clock, seals)
            self.on_launcher(hello.rank, link)
        else:
            self._coordinator.enter(hello.rank, sock, seals)

    def expect(self, *, world_size: int | None = None, job: str | None = None) -> None:
        """Let the ranks of the next world join, maybe with a new size. Safe from any thread."""

        def begin() -> None:
            self.world_size = self.world_size if world_size is None else world_size
            if job is not None:
                self._job = job_id(job)
                self._absent, self._incarnations = {}, {}
            self._coordinator.dissolve()
            self._coordinator = self._new_coordinator()

        self._acceptor.call_soon(begin)

    def expect_again(self, rank: int, incarnation: int) -> None:
        """Let a restarted rank rejoin with the key of this incarnation. Safe from any thread."""

        def note() -> None:
            self._incarnations[rank] = incarnation
            self._coordinator.expect_again(rank)

        self._acceptor.call_soon(note)

    def expect_never(self, rank: int, reason: str) -> None:
        """Record that a rank of this job will never join. Safe from any thread."""

        def note() -> None:
            self._absent[rank] = reason
            self._coordinator.expect_never(rank, reason)

        self._acceptor.call_soon(note)

    def close(self) -> None:
        """Stop the acceptor and disconnect from all ranks. Idempotent."""
        self._acceptor.close()
        self._coordinator.close()
