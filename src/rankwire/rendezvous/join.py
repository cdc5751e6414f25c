"""Join a world: dial the coordinator, which may start later or restart, until it replies."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from rankwire import runtime
from rankwire.deadline import Deadline
from rankwire.errors import (
    AuthenticationError,
    ChannelClosedError,
    DeadlineExceededError,
    NoConnectionError,
    PeerLostError,
    ProtocolError,
    RankwireError,
    RendezvousError,
)
from rankwire.links.connection import Connection
from rankwire.links.dialer import HANDSHAKE_LIMIT, authenticate
from rankwire.rendezvous.roster import is_last_moment
from rankwire.texts import name_ranks
from rankwire.transports.byte_stream import ByteStream
from rankwire.transports.security import UNPROTECTED, Policy
from rankwire.transports.sockets import Socket
from rankwire.transports.tcp_stream import TcpAddress, connect_tcp, expect_prompt_reading
from rankwire.wire.control_messages import (
    CONTROL,
    DEFAULT_PATIENCE,
    Failed,
    Join,
    Member,
    Patience,
    Waiting,
    World,
    max_coordinator_nbytes,
    pack,
    unpack,
)
from rankwire.wire.frames import Frame, whole_of
from rankwire.wire.handshake import Hello
from rankwire.wire.seals import Seals

# The secret file may belong to an earlier job until rank 0 replaces it, so retry when refused.
_AUTHENTICATION_TRIES = 3


@dataclass
class Attempts:
    """Records one rank's attempts to join, and creates the error if all fail.

    ``missing`` and ``is_connected`` are of the last attempt; ``deadline`` limits all together.
    """

    rank: int
    address: TcpAddress
    deadline: Deadline
    has_coordinator: bool
    missing: list[int] = field(default_factory=list, init=False)
    _count: int = field(default=0, init=False)
    _refusals: int = field(default=0, init=False)
    is_connected: bool = field(default=False, init=False)
    _is_admitted: bool = field(default=False, init=False)
    # The last error before (False) and after (True) the connection was established.
    _troubles: dict[bool, RankwireError] = field(default_factory=dict, init=False)

    @property
    def coordinator(self) -> str:
        """The coordinator's name in errors."""
        return "the coordinator" if self.has_coordinator else "rank 0"

    @property
    def trouble(self) -> RankwireError | None:
        """The most informative error: a failed handshake, or else a refused connection."""
        return self._troubles.get(True) or self._troubles.get(False)

    def begin(self) -> None:
        """Begin an attempt."""
        self.missing = [] if self.has_coordinator else [0]
        self.is_connected = self._is_admitted = False
        self._count += 1

    def admitted(self) -> None:
        """Record that the coordinator admitted this rank."""
        self.missing = []
        self._is_admitted = True

    def failed(self, trouble: RankwireError) -> None:
        """Record the error of the attempt."""
        self._troubles[self.is_connected] = trouble

    def refused(self, error: AuthenticationError) -> None:
        """Record that authentication failed; raise the error after too many failures."""
        self._refusals += 1
        if self._refusals >= _AUTHENTICATION_TRIES:
            peer = None if self.has_coordinator else 0
            raise error.during(op="join", rank=self.rank, peer=peer, waited=self.deadline.waited)
        self.failed(error)

    def note_missing(self, missing: list[int]) -> None:
        """Record the missing ranks; shortly before the deadline add none, as others give up too."""
        if is_last_moment(self.deadline) and self.missing:
            missing = [rank for rank in missing if rank in self.missing]
        self.missing = missing

    def too_late(self) -> RendezvousError:
        """Return the error for a rank that did not join in time."""
        limit = f"within {self.deadline.limit:g} s"
        reason = f"the world did not form {limit}"
        if not self._is_admitted:
            tries = f"{self._count} {'tries' if self._count > 1 else 'try'}"
            reason = f"{self.coordinator} was not reached at {self.address} {limit}, in {tries}"
        if self.trouble is not None:
            reason += f" ({self.trouble.message})"
        return RendezvousError(reason, missing=self.missing).during(
            op="join", rank=self.rank, waited=self.deadline.waited
        )


_log = logging.getLogger("rankwire")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.5
_REPORT_EVERY = 10.0


@dataclass
class Joiner:
    """Joins one rank to the world.

    Args:
        find_key: Returns the handshake key after each connect, or None if there is none yet.
        describe: Listens at the local address that reached the coordinator; returns the entry.
        deadline: The limit for all attempts together.
    """

    address: TcpAddress
    hello: Hello
    _: KW_ONLY
    find_key: Callable[[], bytes | None]
    describe: Callable[[str], Member]
    deadline: Deadline
    patience: Patience = DEFAULT_PATIENCE
    policy: Policy = UNPROTECTED
    has_coordinator: bool = False
    _attempts: Attempts = field(init=False)
    _without_secret: Deadline | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._attempts = Attempts(
            self.hello.rank, self.address, self.deadline, self.has_coordinator
        )

    def join(self) -> tuple[World, Connection, list[Frame]]:
        """Dial the coordinator and wait until the whole world has joined.

        Returns the world, the control connection, and the frames received after the world. Raises
        RendezvousError if the coordinator refused or was not reached, or ranks are missing, and
        AuthenticationError if the secrets differ.
        """
        attempts = self._attempts
        pause = _FIRST_PAUSE
        while True:
            try:
                return self._try()
            except (NoConnectionError, PeerLostError, ChannelClosedError) as error:
                attempts.failed(error)
            except AuthenticationError as error:
                attempts.refused(error)
            except DeadlineExceededError as error:
                if attempts.trouble is None:
                    attempts.failed(error)
            if self.deadline.expired:
                raise attempts.too_late() from attempts.trouble
            longest = self.deadline.sleep_limit()
            self.deadline.clock.sleep(min(longest, pause * runtime.uniform(0.5, 1.0)))
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _try(self) -> tuple[World, Connection, list[Frame]]:
        self._attempts.begin()
        sock = connect_tcp(self.address, self.deadline)
        self._attempts.is_connected = True
        try:
            stream, seals = self._authenticate(sock)
            member = self.describe(sock.getsockname()[0])
            expect_prompt_reading(stream)
            longest = max_coordinator_nbytes(self.hello.world_size)
            control = Connection(
                stream, peer=0, max_nbytes=longest, clock=self.deadline.clock, seals=seals
            )
            payload = pack(Join(member, self.patience))
            control.send(CONTROL, ([payload], len(payload)), self.deadline)
            world, rest = self._await_world(control)
            return world, control, rest
        except BaseException:
            sock.close()
            raise

    def _authenticate(self, sock: Socket) -> tuple[ByteStream, Seals | None]:
        key = self.find_key()
        if key is None:
            raise self._no_secret()
        self._without_secret = None
        # The listener may not be a coordinator, and may never answer.
        limit = self.deadline.sooner(HANDSHAKE_LIMIT)
        return authenticate(sock, self.hello, key=key, deadline=limit, policy=self.policy)

    def _no_secret(self) -> RankwireError:
        self._without_secret = self._without_secret or Deadline(
            HANDSHAKE_LIMIT, self.deadline.clock
        )
        reason = f"something listens on {self.address}, but there is no secret of its rank 0"
        if not self._without_secret.expired:
            return NoConnectionError(f"{reason} yet")
        return AuthenticationError(f"{reason} that this user can read")

    def _await_world(self, control: Connection) -> tuple[World, list[Frame]]:
        attempts = self._attempts
        attempts.admitted()
        report = Deadline(_REPORT_EVERY, self.deadline.clock)
        while True:
            frames = control.read(self.deadline.sooner(report.remaining()))
            for index, frame in enumerate(frames):
                message = unpack(whole_of(frame.payload))
                if isinstance(message, World):
                    return message, frames[index + 1 :]
                if isinstance(message, Failed):
                    error = RendezvousError(message.reason, missing=message.missing)
                    error.root = message.cause
                    raise error
                if not isinstance(message, Waiting):
                    raise ProtocolError(
                        f"unexpected {type(message).__name__} from {attempts.coordinator}"
                    )
                attempts.note_missing(message.missing)
            if self.deadline.expired:
                raise attempts.too_late()
            if report.expired:
                report = Deadline(_REPORT_EVERY, self.deadline.clock)
                _log.warning(
                    "rank %d waits for %s (%.0f s)",
                    self.hello.rank,
                    name_ranks(attempts.missing),
                    self.deadline.waited,
                )
