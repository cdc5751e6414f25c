"""The coordinator: rank 0's side of the rendezvous, and of the control connections afterwards.

States, each left only downwards::

    FORMING   ranks join in any order; one that hangs up frees its place        -> FORMED, FAILED
    FORMED    every rank has the list; an end of a control connection is a death -> CLOSED
    FAILED    the deadline passed; everyone present was told who is missing      -> CLOSED
    CLOSED

All methods but ``wait_formed`` and ``close`` run on the doorkeeper's thread. One lock guards the
state because ``wait_formed`` looks at it.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from enum import Enum, auto

from rankwire.deadline import Deadline
from rankwire.errors import ChannelClosedError, ProtocolError, RankwireError, RendezvousError
from rankwire.links.connection import Connection
from rankwire.links.doorkeeper import Doorkeeper
from rankwire.rendezvous.messages import (
    Failed,
    Gone,
    Join,
    Member,
    Message,
    Waiting,
    World,
    pack,
    unpack,
)
from rankwire.wire.frames import Channel, Frame
from rankwire.wire.handshake import Hello, Status
from rankwire.wire.loans import whole_of

__all__ = ["Coordinator", "is_last_moment"]

_log = logging.getLogger("rankwire")

_REPORT_EVERY = 10.0  # seconds between log lines about missing ranks


def is_last_moment(deadline: Deadline) -> bool:
    """Whether a rank that gives up now does so because time is over for it too."""
    return deadline.remaining() < min(0.25, deadline.limit / 4)


class _State(Enum):
    FORMING = auto()
    FORMED = auto()
    FAILED = auto()
    CLOSED = auto()


class Coordinator:
    """Gathers the ranks of a world.

    Args:
        me: Rank 0 itself.
        world_size: How many ranks to wait for.
        doorkeeper: Reads the control connections.
        on_formed: Called on the doorkeeper's thread when the world is complete, before any other
            rank is told.
        on_gone: Called on the doorkeeper's thread when a rank has died or left after the world
            formed.
    """

    def __init__(
        self,
        me: Member,
        world_size: int,
        doorkeeper: Doorkeeper,
        *,
        on_formed: Callable[[World], None],
        on_gone: Callable[[Gone], None],
    ) -> None:
        self._world_size = world_size
        self._doorkeeper = doorkeeper
        self._on_formed = on_formed
        self._on_gone = on_gone
        self._members: dict[int, Member] = {0: me}
        self._controls: dict[int, Connection] = {}
        self._state = _State.FORMING
        self._deadline: Deadline | None = None
        self._gave_up: set[int] = set()
        self._changed = threading.Condition()

    # -- joining -----------------------------------------------------------------------------------

    def admit(self, hello: Hello) -> tuple[Status, int]:
        """Judge a rank that wants to join."""
        if hello.world_size != self._world_size:
            return Status.WRONG_WORLD_SIZE, self._world_size
        if not 0 < hello.rank < self._world_size:
            return (
                (Status.DUPLICATE_RANK, self._members[0].pid)
                if hello.rank == 0
                else (Status.INVALID_RANK, self._world_size)
            )
        if hello.rank in self._controls:
            holder = self._members.get(hello.rank)
            return Status.DUPLICATE_RANK, holder.pid if holder else 0
        if self._state is not _State.FORMING:
            return Status.NOT_EXPECTED, 0
        return Status.WELCOME, 0

    def enter(self, rank: int, connection: Connection) -> None:
        """Take the control connection of a rank that was welcomed."""
        self._controls[rank] = connection
        self._doorkeeper.watch(
            connection,
            lambda frames: self._heard(rank, frames),
            lambda error: self._ended(rank, error),
        )

    def wait_formed(self, deadline: Deadline) -> None:
        """Return once every rank has joined.

        Raises:
            RendezvousError: Some did not; all others were told.
        """
        self._deadline = deadline
        while True:
            with self._changed:
                patience = min(_REPORT_EVERY, deadline.sleep_limit())
                if self._changed.wait_for(lambda: self._state is _State.FORMED, patience):
                    return
                missing = self._missing()
                if deadline.expired:
                    self._state = _State.FAILED
            if self._state is _State.FAILED:
                reason = f"the world did not form within {deadline.limit:g} s"
                self._tell_failed(reason, missing)
                raise RendezvousError(reason, missing=missing)
            _log.warning("waiting for ranks %s (%.0f s)", missing, deadline.waited)

    def _missing(self) -> list[int]:
        present = self._members.keys() | self._gave_up
        return [rank for rank in range(self._world_size) if rank not in present]

    def _heard(self, rank: int, frames: list[Frame]) -> None:
        for frame in frames:
            message = unpack(whole_of(frame.payload))
            if not isinstance(message, Join) or message.member.rank != rank:
                self._controls[rank].fail(ProtocolError(f"unexpected {type(message).__name__}"))
                return
            self._join(message.member)

    def _join(self, member: Member) -> None:
        with self._changed:
            if self._state is not _State.FORMING:
                return
            self._members[member.rank] = member
            if len(self._members) == self._world_size:
                members = [self._members[rank] for rank in range(self._world_size)]
                world = World(secrets.randbits(32) or 1, members)
                self._on_formed(world)
                # Told before this rank goes on, so that all are ready together.
                self._tell_all(world)
                self._state = _State.FORMED
                self._changed.notify_all()
                return
        self._tell_all(Waiting(self._missing()))

    # -- afterwards --------------------------------------------------------------------------------

    def _ended(self, rank: int, error: RankwireError) -> None:
        connection = self._controls.pop(rank)
        connection.close()
        with self._changed:
            formed = self._state is _State.FORMED
            if not formed:
                self._members.pop(rank, None)
                if self._deadline is not None and is_last_moment(self._deadline):
                    self._gave_up.add(rank)
        if not formed:
            self._tell_all(Waiting(self._missing()))
            return
        self.report(
            Gone(
                rank, getattr(error, "reason", error.message), isinstance(error, ChannelClosedError)
            )
        )

    def report(self, gone: Gone) -> None:
        """Tell everyone that a rank is gone."""
        self._on_gone(gone)
        self._tell_all(gone)

    def _tell_all(self, message: Message) -> None:
        for connection in list(self._controls.values()):
            _tell(connection, message)

    def _tell_failed(self, reason: str, missing: list[int]) -> None:
        told = threading.Event()

        def tell() -> None:
            self._tell_all(Failed(reason, missing))
            told.set()

        self._doorkeeper.call_soon(tell)
        told.wait(1.0)

    def close(self) -> None:
        """Say farewell to all. After the doorkeeper has stopped."""
        self._state = _State.CLOSED
        for connection in self._controls.values():
            connection.farewell(Deadline(0.0))
            connection.close()
        self._controls.clear()


def _tell(connection: Connection, message: Message) -> None:
    """Send a control message, which is small, without waiting.

    A member that does not take it is as good as gone.
    """
    payload = pack(message)
    try:
        connection.send(Channel.CONTROL, 0, 0, [payload], len(payload), Deadline(0.0))
    except RankwireError as error:
        connection.fail(error)
