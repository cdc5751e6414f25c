"""The state of one peer: its address, its connections, and its failure.

A peer's first failure is final: it ends every connection to the peer, so every operation that needs
the peer fails at once and names the same cause. Readers drain what had arrived before they raise
it. A restarted process is a new peer, with its own connections, messages and failure.

A connection's end alone does not show its cause. The control plane knows it, and sends all ranks
the same *verdict*, mostly within a millisecond: a peer waits a moment for it before it declares the
loss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TypeVar

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import ChannelClosedError, DeadlineExceededError, PeerLostError, RankwireError
from rankwire.links.connection import Connection
from rankwire.links.inbox import Inbox
from rankwire.mesh.message_port import Lookout
from rankwire.observe.status import PeerStatus, describe_unreceived, describe_wanted, state_of
from rankwire.wire.control_messages import Member
from rankwire.wire.mailbox import Mailbox

_VERDICT_PATIENCE = 0.03  # seconds
# An agent that an error closes says farewell before its backend can send the reason: on a busy
# machine that takes 30 ms and more. Only threads with a call under way wait so long.
_FAREWELL_PATIENCE = 0.25

_log = logging.getLogger("rankwire")

# One for messages and one for each agent that calls this rank; without a limit, a compromised rank
# could open any number.
MAX_CONNECTIONS_OF_A_RANK = 128


T = TypeVar("T")


def dial_alone(lock: runtime.Lock, rank: int, deadline: Deadline, dial: Callable[[], T]) -> T:
    """Call ``dial`` under a lock; ``DeadlineExceededError`` if another thread holds it."""
    grip: list[bool] = []
    try:
        if not deadline.take(lock, grip):
            detail = "another thread is still connecting to it"
            raise DeadlineExceededError(deadline.limit, waiting_for=[rank], detail=detail)
        return dial()
    finally:
        if grip[-1:] == [True]:
            lock.release()


@dataclass(eq=False, repr=False)
class Peer:
    """One other rank, as this rank sees it. Every method is safe from any thread.

    Attributes:
        await_verdict: Waits until the control plane has sent its verdict, or for that many seconds;
            called before the peer is given up because of a connection.
        on_lost: Called once if the peer is lost.
        explain: Returns the error to raise for its end, with what else is known; see ``blame``.
        lookout: Read by a thread that has waited for its messages for a while.
        inbox: The messages it sends; its connection is set when it first does.
        failure: Why it is gone, or None.
        dial_lock: Held while the outgoing message connection is opened. Nothing else is taken under
            it but ``_lock``.
        messages: The outgoing message connection, once opened.
        silent_for: Seconds of silence in the last beat's report.
    """

    member: Member
    clock: Clock
    _: KW_ONLY
    await_verdict: Callable[[Peer, float], None] = lambda peer, patience: None
    on_lost: Callable[[PeerLostError], None] = lambda error: None
    explain: Callable[[RankwireError], RankwireError] = lambda error: error
    lookout: Lookout | None = None

    def __post_init__(self) -> None:
        self._has_verdict: runtime.Event | None = None  # made by the first waiting thread
        self.silent_for = 0.0
        self.is_suspected = False
        self._was_refused = False  # a connection, because it has too many
        self._is_left = False  # by this rank, in good order
        self.inbox = Inbox(self.member.rank, Mailbox(), self.clock, lookout=self.lookout)
        self.failure: RankwireError | None = None
        self.dial_lock = runtime.Lock()
        self.messages: Connection | None = None
        self._lock = runtime.Lock()
        self._connections: dict[Connection, bool] = {}  # and whether the peer dialled it

    def add(self, connection: Connection, *, incoming: bool = False) -> None:
        """Register a connection, which fails when the peer does."""
        with self._lock:
            self._connections[connection] = incoming
            failure = self.failure
        if failure is not None:
            if self._is_left:  # accepted meanwhile; without a farewell the peer sees a crash
                connection.farewell(AT_ONCE)
            connection.fail(failure)

    def remove(self, connection: Connection) -> None:
        """Forget a connection that its owner has closed."""
        with self._lock:
            self._connections.pop(connection, None)

    def has_too_many_connections(self) -> bool:
        """Whether the peer has opened the maximum of connections. Warns once."""
        with self._lock:
            count = sum(
                incoming and connection.failure is None
                for connection, incoming in self._connections.items()
            )
        if count < MAX_CONNECTIONS_OF_A_RANK:
            return False
        if not self._was_refused:
            self._was_refused = True
            rank = self.member.rank
            _log.warning("rank %d has %d connections to this rank: no more", rank, count)
        return True

    def send_on(self, connection: Connection) -> None:
        """Use this connection for messages to the peer."""
        self.messages = connection

    def check(self) -> None:
        """Raise the peer's failure, if it has one."""
        if self.failure is not None:
            raise self.failure.copy()

    def fail(self, cause: RankwireError) -> RankwireError:
        """Give the peer up after a moment for the verdict; return the failure that stays."""
        if type(cause) is PeerLostError:
            self._await_verdict(_VERDICT_PATIENCE)
        return self.judge(cause)

    def explain_farewell(self, cause: RankwireError) -> RankwireError:
        """Return why a peer says farewell: an error may have closed the agent first."""
        self._await_verdict(_FAREWELL_PATIENCE)
        return self.failure if isinstance(self.failure, PeerLostError) else self.explain(cause)

    def _await_verdict(self, patience: float) -> None:
        if self.failure is None:
            self.await_verdict(self, patience)

    def is_judged_within(self, seconds: float) -> bool:
        """Wait for a verdict; return whether it arrived."""
        with self._lock:
            has_verdict = self._has_verdict = self._has_verdict or runtime.Event()
            if self.failure is not None:
                return True
        return self.clock.wait(has_verdict, seconds)

    def judge(self, cause: RankwireError) -> RankwireError:
        """Give the peer up at once, on the control plane's verdict; return its failure."""
        if (marked := self.mark(cause)) is not None:
            for connection in self.connections():
                connection.fail(marked)
            if self.inbox.connection is None:
                self.inbox.fail(marked)
            if isinstance(marked, PeerLostError):
                self.on_lost(marked)
            elif not isinstance(marked, ChannelClosedError):  # such as a broken protocol
                rank = self.member.rank
                self.on_lost(PeerLostError(rank, marked.message, root=rank))
        assert self.failure is not None
        return self.failure

    def leave(self, cause: RankwireError) -> None:
        """Note that the peer has left in good order: sends to it fail.

        What it sent before may still be on the way, followed by its farewell: connections that are
        read end by themselves.
        """
        if (marked := self.mark(cause)) is not None:
            if self.messages is not None:
                self.messages.fail(marked)
            if self.inbox.connection is None:
                self.inbox.fail(marked)

    def mark(self, cause: RankwireError) -> RankwireError | None:
        """Set the failure if there is none yet, and return it; otherwise return None."""
        with self._lock:
            if self.failure is not None:
                return None
            self.failure = self.explain(cause).kept()
            if self._has_verdict is not None:
                self._has_verdict.set()
            return self.failure

    def connections(self) -> list[Connection]:
        """Return the open connections, and failed ones that are still in use."""
        with self._lock:
            return list(self._connections)

    def status(self) -> PeerStatus:
        """Return the peer's status, without its calls."""
        failure, messages = self.failure, self.messages
        return PeerStatus(
            self.member.rank,
            state_of(failure, is_suspected=self.is_suspected),
            reason=getattr(failure, "reason", ""),
            silent_for=self.silent_for,
            link=messages.transport if messages is not None else "",
            queued_nbytes=sum(c.queued_nbytes for c in self.connections() if c.failure is None),
            waiting_for=describe_wanted(self.inbox.wanted()),
            incarnation=self.member.incarnation,
            unreceived=describe_unreceived(self.inbox.unreceived()),
        )

    def look_for_silence(self, seconds: float) -> None:
        """Give the peer up if its host has not answered on a busy connection for so long."""
        if self.failure is None and any(c.is_unanswered(seconds) for c in self.connections()):
            reason = f"its host has not answered for {seconds:g} s"
            self.judge(PeerLostError(self.member.rank, reason))

    def look_for_end(self) -> None:
        """Check the message connection for an end, when no control plane reports ends."""
        if self.failure is not None or self.messages is None:
            return
        try:
            self.messages.look_for_end()
        except ChannelClosedError as error:
            self.leave(error)
        except RankwireError as error:
            self.judge(error)

    def retire(self) -> None:
        """Close the inbox and message connection; the ports close the connections for calls."""
        cause = self.judge(PeerLostError(self.member.rank, "it was started anew"))
        self.inbox.close(cause)
        if self.messages is not None:
            self.messages.fail(cause)
            self.messages.close()

    def close(self, cause: RankwireError, patience: Deadline, *, orderly: bool = True) -> None:
        """End every wait and close; say farewell on every connection if the end is orderly."""
        self._is_left = orderly
        self.mark(cause)
        for connection in self.connections():
            if connection.failure is None and orderly:
                connection.farewell(patience)
        self.inbox.close(cause)
        for connection in self.connections():
            connection.fail(cause)
            connection.close()
