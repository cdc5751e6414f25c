"""What a rank keeps about one peer: where it is, its connections, and whether it has gone.

The failure of a peer is sticky and spreads: the first cause ends every connection to it, so that
every operation that needs it fails at once and names the same cause. Readers drain what had arrived
before they see the failure. If its process is started anew, that is another peer, with connections,
messages and a failure of its own.

Whoever sees a connection end sees only that. The control plane knows more, and tells all ranks the
same, mostly within a millisecond: its *verdict* is waited for, for a moment, before the loss is
declared.
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
# An agent that an error closes says farewell before its backend can say why: on a busy machine that
# takes 30 ms and more. Only those wait so long for whom a call is under way.
_FAREWELL_PATIENCE = 0.25

_log = logging.getLogger("rankwire")

# One for messages and one for each agent that calls this rank; a rank that was taken over might
# open them without end.
MAX_CONNECTIONS_OF_A_RANK = 128


T = TypeVar("T")


def dial_alone(lock: runtime.Lock, rank: int, deadline: Deadline, dial: Callable[[], T]) -> T:
    """Call ``dial`` while holding a dial lock, and return its result.

    Raises:
        DeadlineExceededError: Another thread holds the lock until the deadline.
    """
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
    """One other rank, seen from here. Every method is safe from any thread.

    Attributes:
        member: Where it is.
        clock: By which a verdict is waited for.
        await_verdict: Waits until the control plane has said what has become of it, or has nothing
            to say for so many seconds; called before it is given up because of a connection.
        on_lost: Called once if the peer is lost.
        explain: Returns the error to raise for its end, with what else is known; see ``blame``.
        lookout: What a thread reads that has waited for its messages for a while.
        inbox: The messages it sends; its connection comes when it first does.
        failure: Why it has gone, if it has.
        dial_lock: Held while the outgoing message connection is opened. Nothing else is taken under
            it but ``_lock``.
        messages: The outgoing message connection, once opened.
        silent_for: Seconds of silence that the last beat told of.
        is_suspected: Whether the control plane suspects it.
    """

    member: Member
    clock: Clock
    _: KW_ONLY
    await_verdict: Callable[[Peer, float], None] = lambda peer, patience: None
    on_lost: Callable[[PeerLostError], None] = lambda error: None
    explain: Callable[[RankwireError], RankwireError] = lambda error: error
    lookout: Lookout | None = None

    def __post_init__(self) -> None:
        self._has_verdict: runtime.Event | None = None  # made by the first who waits
        self.silent_for = 0.0
        self.is_suspected = False
        self._was_refused = False  # a connection, because it has too many
        self._is_left = False  # by this rank, in good order
        self.inbox = Inbox(self.member.rank, Mailbox(), self.clock, lookout=self.lookout)
        self.failure: RankwireError | None = None
        self.dial_lock = runtime.Lock()
        self.messages: Connection | None = None
        self._lock = runtime.Lock()
        self._connections: dict[Connection, bool] = {}  # and whether the peer has dialled

    def add(self, connection: Connection, *, incoming: bool = False) -> None:
        """Have a connection end with the peer."""
        with self._lock:
            self._connections[connection] = incoming
            failure = self.failure
        if failure is not None:
            if self._is_left:  # it was let in meanwhile; without a word it would take us for dead
                connection.farewell(AT_ONCE)
            connection.fail(failure)

    def remove(self, connection: Connection) -> None:
        """Forget a connection that its owner has closed."""
        with self._lock:
            self._connections.pop(connection, None)

    def has_too_many_connections(self) -> bool:
        """Whether so many stand that the peer has opened that it gets no more. Said once."""
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
        """Send messages on this connection from now on."""
        self.messages = connection

    def check(self) -> None:
        """Raise if the peer has gone."""
        if self.failure is not None:
            raise self.failure.copy()

    def fail(self, cause: RankwireError) -> RankwireError:
        """Give the peer up: every connection to it ends now. Returns the cause that stays."""
        if type(cause) is PeerLostError:
            self._await_verdict(_VERDICT_PATIENCE)
        return self.judge(cause)

    def explain_farewell(self, cause: RankwireError) -> RankwireError:
        """Return why it says farewell: its agent closes first if an error passes its blocks."""
        self._await_verdict(_FAREWELL_PATIENCE)
        return self.failure if isinstance(self.failure, PeerLostError) else self.explain(cause)

    def _await_verdict(self, patience: float) -> None:
        if self.failure is None:
            self.await_verdict(self, patience)

    def is_judged_within(self, seconds: float) -> bool:
        """Wait for a verdict; return whether it has come."""
        with self._lock:
            has_verdict = self._has_verdict = self._has_verdict or runtime.Event()
            if self.failure is not None:
                return True
        return self.clock.wait(has_verdict, seconds)

    def judge(self, cause: RankwireError) -> RankwireError:
        """Give the peer up at once, because the control plane has said so."""
        if (marked := self.mark(cause)) is not None:
            for connection in self.connections():
                connection.fail(marked)
            if self.inbox.connection is None:
                self.inbox.fail(marked)
            if isinstance(marked, PeerLostError):
                self.on_lost(marked)
            elif not isinstance(marked, ChannelClosedError):  # it broke the protocol, say
                rank = self.member.rank
                self.on_lost(PeerLostError(rank, marked.message, root=rank))
        assert self.failure is not None
        return self.failure

    def leave(self, cause: RankwireError) -> None:
        """The peer has left in good order: nothing more can be sent to it.

        What it sent before may still be on the way, and is followed by its farewell: connections
        that are read end by themselves.
        """
        if (marked := self.mark(cause)) is not None:
            if self.messages is not None:
                self.messages.fail(marked)
            if self.inbox.connection is None:
                self.inbox.fail(marked)

    def mark(self, cause: RankwireError) -> RankwireError | None:
        """Have what ends here from now on end for this cause; return it if it is the first."""
        with self._lock:
            if self.failure is not None:
                return None
            self.failure = self.explain(cause).kept()
            if self._has_verdict is not None:
                self._has_verdict.set()
            return self.failure

    def connections(self) -> list[Connection]:
        """Return those that stand, and those that have failed and are still in use."""
        with self._lock:
            return list(self._connections)

    def status(self) -> PeerStatus:
        """Return what is known of it, its calls apart."""
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
        """Give it up if its host has not answered on a busy connection for so long."""
        if self.failure is None and any(c.is_unanswered(seconds) for c in self.connections()):
            reason = f"its host has not answered for {seconds:g} s"
            self.judge(PeerLostError(self.member.rank, reason))

    def look_for_end(self) -> None:
        """Look whether it has ended, because there is no control plane any more that would tell.

        On the outgoing connection, which says nothing else and which nobody reads.
        """
        if self.failure is not None or self.messages is None:
            return
        try:
            self.messages.look_for_end()
        except ChannelClosedError as error:
            self.leave(error)
        except RankwireError as error:
            self.judge(error)

    def retire(self) -> None:
        """Let go of what is left of it, because a new process is in its place.

        Who waited has been woken when it was given up. Connections for calls are closed by the
        ports that read them, which have seen their end too.
        """
        cause = self.judge(PeerLostError(self.member.rank, "it was started anew"))
        self.inbox.close(cause)
        if self.messages is not None:
            self.messages.fail(cause)
            self.messages.close()

    def close(self, cause: RankwireError, patience: Deadline, *, orderly: bool = True) -> None:
        """End every wait and close; say farewell on every connection if this is a good end."""
        self._is_left = orderly
        self.mark(cause)
        for connection in self.connections():
            if connection.failure is None and orderly:
                connection.farewell(patience)
        self.inbox.close(cause)
        for connection in self.connections():
            connection.fail(cause)
            connection.close()
