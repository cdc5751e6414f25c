"""A coordinator on its own: for a launcher, so that rank 0 is a rank like any other.

It listens, admits the ranks of one job and nothing else, and coordinates one world after the other:
when all ranks of one have gone, or are to be started again (``expect``), the next may form. The
launchers of other hosts are let in too, as ``launchers`` describes. Owns an acceptor's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rankwire.clock import Clock
from rankwire.errors import ConfigurationError, NoConnectionError
from rankwire.links.acceptor import Acceptor
from rankwire.links.security import Policy
from rankwire.links.sockets import AnySocket, Socket, TcpAddress, listen_tcp, start_listening
from rankwire.rendezvous.control_messages import Gone, World
from rankwire.rendezvous.coordinator import Coordinator, Told
from rankwire.rendezvous.launchers import LAUNCH_JOB, LauncherLink
from rankwire.wire.handshake import Hello, Purpose, Status, handshake_key, job_id
from rankwire.wire.keys import rank_key
from rankwire.wire.seals import Seals


def bind(address: str) -> Socket:
    """Return a socket bound to ``host:port``, so that no other process can take it.

    Raises:
        ConfigurationError: It cannot be had.
    """
    try:
        return listen_tcp(TcpAddress.parse(address))
    except NoConnectionError as error:
        raise ConfigurationError(f"cannot listen on {address}: {error.message}") from error


class CoordinatorHost:
    """Coordinates worlds without being a rank.

    Args:
        listener: A bound TCP socket. Owned from now on.
        world_size: How many ranks a world has.
        secret: What the key of every rank is made of.
        job: The name of the job.
        clock: By which it waits.
        policy: How connections are protected.
        told: Who is told of what happens, on the host's own thread.
        nodes: How many launchers the job has, this one included.
        on_launcher: Called there with another node's number and the connection to its launcher,
            which is the callee's from then on.
    """

    def __init__(
        self,
        listener: Socket,
        world_size: int,
        *,
        secret: bytes,
        job: str,
        clock: Clock,
        policy: Policy,
        told: Told | None = None,
        nodes: int = 1,
        on_launcher: Callable[[int, LauncherLink], None] = lambda node, link: link.close(),
    ) -> None:
        self._nodes = nodes
        self._on_launcher = on_launcher
        self._world_size = world_size
        self._job = job_id(job)
        self._told = told or Told()
        self._present: set[int] = set()
        self._secret = secret
        self._absent: dict[int, str] = {}
        self._acceptor = Acceptor(self, clock, key=self._find_key, policy=policy)
        self._acceptor.listen(listener)
        self._coordinator = self._new_coordinator()
        start_listening(listener)
        self._acceptor.start()

    def _new_coordinator(self) -> Coordinator:
        coordinator = Coordinator(
            None,
            self._world_size,
            self._acceptor,
            key_of=partial(rank_key, self._secret),
            told=self._told._replace(on_formed=self._formed, on_gone=self._gone),
        )
        for rank, reason in self._absent.items():
            coordinator.expect_never(rank, reason)
        return coordinator

    def _formed(self, world: World) -> None:
        self._present = {member.rank for member in world.members}
        self._told.on_formed(world)

    def _gone(self, gone: Gone) -> None:
        if gone.rank < 0:  # the ranks have given up this process: they go on without it
            self.expect()
            return
        self._present.discard(gone.rank)
        self._told.on_gone(gone)
        if not self._present:
            self.expect()

    def _find_key(self, hello: Hello) -> bytes:
        if hello.purpose is Purpose.LAUNCH:
            return handshake_key(self._secret)
        return rank_key(self._secret, hello.rank)

    def admit(self, hello: Hello) -> tuple[Status, int]:
        """Judge who dials: a rank by the coordinator, a launcher by what is known of its node."""
        if hello.purpose is Purpose.LAUNCH:
            return self._admit_launcher(hello)
        if hello.job != self._job:
            return Status.OTHER_JOB, 0
        if hello.purpose is not Purpose.JOIN:
            return Status.INVALID_RANK, self._world_size
        return self._coordinator.admit(hello)

    def _admit_launcher(self, hello: Hello) -> tuple[Status, int]:
        if hello.job != job_id(LAUNCH_JOB):
            return Status.OTHER_JOB, 0
        if hello.world_size != self._nodes:
            return Status.WRONG_WORLD_SIZE, self._nodes
        if not 0 < hello.rank < self._nodes:
            return Status.INVALID_RANK, self._nodes
        return Status.WELCOME, 0

    def enter(self, hello: Hello, sock: AnySocket, seals: Seals | None) -> None:
        """Give a connection that was welcomed to the coordinator, or to the owner of launchers."""
        if hello.purpose is Purpose.LAUNCH:
            link = LauncherLink(sock, hello.rank, self._acceptor.clock, seals)
            self._on_launcher(hello.rank, link)
        else:
            self._coordinator.enter(hello.rank, sock, seals)

    def expect(self, *, world_size: int | None = None, job: str | None = None) -> None:
        """Begin anew: the next world's ranks may join. Safe from any thread.

        Args:
            world_size: How many there are, if that has changed.
            job: The name of the job, if that has changed.
        """

        def begin() -> None:
            self._world_size = self._world_size if world_size is None else world_size
            if job is not None:
                self._job = job_id(job)
                self._absent = {}
            self._coordinator.dissolve()
            self._coordinator = self._new_coordinator()

        self._acceptor.call_soon(begin)

    def expect_never(self, rank: int, reason: str) -> None:
        """Hear that a rank of this job joins no world any more. Safe from any thread."""

        def note() -> None:
            self._absent[rank] = reason
            self._coordinator.expect_never(rank, reason)

        self._acceptor.call_soon(note)

    def close(self) -> None:
        """Leave the world to itself. Idempotent."""
        self._acceptor.close()
        self._coordinator.close()
