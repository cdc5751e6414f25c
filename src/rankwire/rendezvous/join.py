"""Joining: a rank's side of the rendezvous, until it has the list of all ranks.

Blocking, in the thread that constructs the backend. The coordinator (rank 0, or a launcher) may
start later, restart, or be slow: dialling is repeated with growing, jittered pauses until the
deadline.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field

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
from rankwire.links.security import UNPROTECTED, Policy
from rankwire.links.sockets import AnySocket, Socket, TcpAddress, connect_tcp, expect_prompt_reading
from rankwire.rendezvous.control_messages import (
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
from rankwire.rendezvous.roster import is_last_moment
from rankwire.wire.frames import Frame
from rankwire.wire.handshake import Hello
from rankwire.wire.loans import whole_of
from rankwire.wire.seals import Seals

_log = logging.getLogger("rankwire")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.5
_AUTHENTICATION_TRIES = 3  # a full acceptor drops strangers too, so one refusal proves nothing
_REPORT_EVERY = 10.0


def join(
    address: TcpAddress,
    hello: Hello,
    *,
    find_key: Callable[[], bytes | None],
    describe: Callable[[str], Member],
    deadline: Deadline,
    patience: Patience = DEFAULT_PATIENCE,
    policy: Policy = UNPROTECTED,
    has_coordinator: bool = False,
) -> tuple[World, Connection, list[Frame]]:
    """Dial the coordinator and wait until the whole world has joined.

    Args:
        address: Where the coordinator listens.
        hello: Who joins.
        find_key: Returns the handshake key, asked after each connect; None if there is none yet.
        describe: Given the local address that reached the coordinator, starts to listen there and
            says where.
        deadline: For all of it.
        patience: How long this rank would let others be silent.
        policy: How the control connection is protected.
        has_coordinator: Whether a launcher coordinates, and not rank 0.

    Returns:
        The world, the control connection, and frames that came on it right behind the world.

    Raises:
        RendezvousError: The coordinator refused, was not reached, or ranks are missing.
        AuthenticationError: The secrets differ.
    """
    attempt = _Attempt(
        address, hello, find_key, describe, deadline, patience, policy, has_coordinator
    )
    pause = _FIRST_PAUSE
    while True:
        try:
            return attempt.run()
        except (NoConnectionError, PeerLostError, ChannelClosedError) as error:
            attempt.note(error)
        except AuthenticationError as error:
            attempt.refusals += 1
            if attempt.refusals >= _AUTHENTICATION_TRIES:
                peer = None if has_coordinator else 0
                error.during(op="join", rank=hello.rank, peer=peer, waited=deadline.waited)
                raise
            attempt.note(error)
        except DeadlineExceededError as error:
            if attempt.trouble is None:
                attempt.note(error)
        if deadline.expired:
            raise attempt.too_late() from attempt.trouble
        deadline.clock.sleep(min(deadline.sleep_limit(), pause * random.uniform(0.5, 1.0)))
        pause = min(pause * 2, _LONGEST_PAUSE)


@dataclass
class _Attempt:
    """What is remembered from one try to the next."""

    address: TcpAddress
    hello: Hello
    find_key: Callable[[], bytes | None]
    describe: Callable[[str], Member]
    deadline: Deadline
    patience: Patience
    policy: Policy
    has_coordinator: bool
    refusals: int = 0
    missing: list[int] = field(default_factory=list)
    is_connected: bool = False
    is_let_in: bool = False
    without_secret: Deadline | None = None
    troubles: dict[bool, RankwireError] = field(default_factory=dict)  # last, by is_connected

    @property
    def coordinator(self) -> str:
        """Who it is, in words."""
        return "the coordinator" if self.has_coordinator else "rank 0"

    @property
    def trouble(self) -> RankwireError | None:
        """What to blame if there is no time left.

        A handshake that failed says more than a connection that was refused later: the coordinator
        has given up by then, perhaps for the same reason.
        """
        return self.troubles.get(True) or self.troubles.get(False)

    def note(self, trouble: RankwireError) -> None:
        """Remember why the last try failed."""
        self.troubles[self.is_connected] = trouble

    def run(self) -> tuple[World, Connection, list[Frame]]:
        self.missing = [] if self.has_coordinator else [0]
        self.is_connected = self.is_let_in = False
        sock = connect_tcp(self.address, self.deadline)
        self.is_connected = True
        try:
            stream, seals = self._authenticate(sock)
            member = self.describe(sock.getsockname()[0])
            expect_prompt_reading(sock)
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

    def _authenticate(self, sock: Socket) -> tuple[AnySocket, Seals | None]:
        key = self.find_key()
        if key is None:
            raise self._no_secret()
        self.without_secret = None
        # Whatever listens there may be no coordinator at all, and never answer.
        limit = self.deadline.sooner(HANDSHAKE_LIMIT)
        return authenticate(sock, self.hello, key=key, deadline=limit, policy=self.policy)

    def _within(self, seconds: float) -> Deadline:
        return Deadline(seconds, self.deadline.clock)

    def _no_secret(self) -> RankwireError:
        """No secret is laid out: a launcher's socket may listen before rank 0 is there."""
        self.without_secret = self.without_secret or self._within(HANDSHAKE_LIMIT)
        reason = f"something listens on {self.address}, but there is no secret of its rank 0"
        if not self.without_secret.expired:
            return NoConnectionError(f"{reason} yet")
        self.refusals = _AUTHENTICATION_TRIES
        return AuthenticationError(f"{reason} that this user can read")

    def _await_world(self, control: Connection) -> tuple[World, list[Frame]]:
        self.missing = []
        self.is_let_in = True
        report = self._within(_REPORT_EVERY)
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
                        f"unexpected {type(message).__name__} from {self.coordinator}"
                    )
                self._note_missing(message.missing)
            if self.deadline.expired:
                raise self.too_late()
            if report.expired:
                report = self._within(_REPORT_EVERY)
                _log.warning(
                    "rank %d waits for ranks %s (%.0f s)",
                    self.hello.rank,
                    self.missing,
                    self.deadline.waited,
                )

    def _note_missing(self, missing: list[int]) -> None:
        """Remember who is missing; at the last moment only who is so no more.

        By then others give up too, for the same reason as this one; they are not the cause.
        """
        if is_last_moment(self.deadline) and self.missing:
            missing = [rank for rank in missing if rank in self.missing]
        self.missing = missing

    def too_late(self) -> RendezvousError:
        limit = f"within {self.deadline.limit:g} s"
        reason = f"the world did not form {limit}"
        if not self.is_let_in:
            reason = f"{self.coordinator} was not reached at {self.address} {limit}"
        if self.trouble is not None:
            reason += f" ({self.trouble.message})"
        return RendezvousError(reason, missing=self.missing).during(
            op="join", rank=self.hello.rank, waited=self.deadline.waited
        )
