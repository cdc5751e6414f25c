"""Handles: messages in progress while their thread does something else.

A handle makes no thread. A message is sent when the peer takes it; any waiting thread of this rank
reads what arrives. Each step may be interrupted and repeated: an interrupt leaves a handle
unchanged.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import DeadlineExceededError, ForkedProcessError, RankwireError
from rankwire.links.send_handle import SendHandle
from rankwire.public_dir import PublicDir
from rankwire.wire.frames import Channel, Payload
from rankwire.wire.receive import Destination, MessageWithdrawnError

if TYPE_CHECKING:
    from rankwire.backends.posting import MessagePosting


class MessageHandle(PublicDir):
    """A message that is being sent or received; made by ``isend``, ``irecv`` and their variants.

    For one thread at a time. Its timeout counts from the call that made it.

    If you drop the handle before it is done, a send continues, and its buffers must not change
    until the message has been sent. A receive is cancelled, and the next receive gets its message.
    Once ``done`` has returned True, the message belongs to the handle.

    Attributes:
        source: The rank that sent the message, once it has arrived; None for a send.
    """

    __slots__ = ("_deadline", "_error", "_op", "_peer", "_ranks", "_tag", "source")
    _SHOWN = ("done", "source", "wait")

    _ranks: MessagePosting
    _op: str
    _peer: int | None
    _tag: int
    _deadline: Deadline | None  # None once it is done
    _error: Exception | None
    source: int | None

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until it is done; may be called again, also after an interrupt.

        Args:
            timeout: Seconds for this wait, at most the handle's own timeout; None is that timeout.

        Returns:
            The message, its size, or the array, as described for the call that made the handle.
            None for a send, whose buffers may change from now on.

        Raises:
            DeadlineExceededError: It is not done. After ``timeout`` the handle continues. After its
                own timeout it has failed: an expected message can still be received; for a send,
                ``may_have_arrived`` says whether it will arrive.
            PeerLostError: The peer is lost; for ``ANY_RANK``, all other ranks are.
            ChannelClosedError: The peer has left, or the backend is closed.
        """
        if self._deadline is None:
            return self._value()
        return self._wait(self._deadline, timeout)

    def _wait(self, limit: Deadline, timeout: float | None) -> Any:
        ranks = self._ranks
        clock = ranks.clock  # in a forked child, this raises
        try:
            if self._error is not None:
                raise _again(self._error)
            self._finish(limit if timeout is None else limit.sooner(Deadline(timeout, clock).limit))
        except DeadlineExceededError as error:
            if self._error is None and limit.expired:
                self._end(error)
            raise ranks.failed(error, self._op, limit, self._peer, self._tag) from None
        except RankwireError as error:
            self._error = self._error or error.kept()
            raise ranks.failed(error, self._op, limit, self._peer, self._tag) from error.__cause__
        self._deadline = None
        return self._value()

    def done(self) -> bool:
        """Whether ``wait`` would return or raise at once. Reads what has arrived; does not wait.

        While the handle is not done, this also makes progress on all other handles.
        """
        if self._deadline is None or self._error is not None:
            return True
        try:
            if self._is_done():
                return True
        except RankwireError:
            return True  # ``wait`` raises it
        self._ranks.mesh.lookout.read()
        return False

    def fail(self, error: Exception) -> None:
        """Fail before anything was sent or posted; ``wait`` raises the error."""
        if isinstance(error, RankwireError):  # and not the program's own, from a fault plan
            assert self._deadline is not None
            context = self._op, self._deadline, self._peer, self._tag
            error = self._ranks.failed(error, *context).kept()
        self._error = error.with_traceback(None)

    def _end(self, error: DeadlineExceededError) -> None:
        try:
            error.may_have_arrived = self._give_up() or error.may_have_arrived
        finally:
            self._give_up()  # a second interrupt may have stopped the first
        self._error = error.kept()

    @abstractmethod
    def _value(self) -> Any:
        """Return the result."""

    @abstractmethod
    def _finish(self, deadline: Deadline) -> None:
        """Wait until it is done."""

    @abstractmethod
    def _is_done(self) -> bool:
        """Whether it is done, or can be without waiting."""

    @abstractmethod
    def _give_up(self) -> bool:
        """Give the message up; return whether it may arrive all the same. Idempotent."""

    def __repr__(self) -> str:
        state = "under way" if self._deadline is not None and self._error is None else "done"
        return f"<{self._op} of rank {self._ranks.rank}, tag {self._tag}, {state}>"


def _again(error: Exception) -> Exception:
    return error.copy() if isinstance(error, RankwireError) else error.with_traceback(None)


class Sending(MessageHandle):
    """A message to send. ``deadline`` and ``sent`` are None if it is sent."""

    __slots__ = ("_sent",)

    def __init__(
        self,
        ranks: MessagePosting,
        op: str,
        dst: int,
        tag: int,
        deadline: Deadline | None = None,
        sent: SendHandle | None = None,
    ) -> None:
        # Not by the base class: a round trip of 8 bytes takes 13 us.
        self._ranks = ranks
        self._op = op
        self._peer = dst
        self._tag = tag
        self._deadline = deadline
        self._error = self.source = None
        self._sent = sent

    def _value(self) -> None:
        return None

    def _finish(self, deadline: Deadline) -> None:
        sent = self._sent
        assert sent is not None
        try:
            self._ranks.check_member(self._peer)  # a group may close while its connection is open
            is_taken = sent.wait(deadline)
        except RankwireError:
            sent.revoke()
            raise
        if not is_taken:
            peers = [] if self._peer is None else [self._ranks.world[self._peer]]
            detail = "it does not take the message"
            raise DeadlineExceededError(deadline.limit, waiting_for=peers, detail=detail)
        sent.revoke()

    def _is_done(self) -> bool:
        sent, dst = self._sent, self._peer
        if sent is None or sent.is_over():
            return True
        return dst is not None and self._ranks.mesh.failure_of(self._ranks.world[dst]) is not None

    def _give_up(self) -> bool:
        return self._sent is not None and self._sent.revoke()


class Receiving(MessageHandle):
    """A message to receive: of ``nbytes``, if that is fixed, and into ``into``, if it can.

    ``src`` is None for any rank. ``read`` converts the payload for the user; it may be called again
    until the payload is released.
    """

    __slots__ = ("_expected", "_into", "_nbytes", "_read", "_result", "_sources")

    def __init__(
        self,
        ranks: MessagePosting,
        op: str,
        src: int | None,
        tag: int,
        deadline: Deadline,
        nbytes: int | None,
        into: Destination | None,
        read: Callable[[Payload], Any],
    ) -> None:
        self._ranks = ranks
        self._op = op
        self._peer = src
        self._tag = tag
        self._deadline = deadline
        self._error = self.source = None
        self._nbytes = nbytes
        self._into = into
        self._read = read
        try:
            self._expect()
        except Exception as error:
            self.fail(error)

    def _expect(self) -> None:
        ranks, src = self._ranks, self._peer
        envelope = (ranks.group, Channel.MESSAGE, self._tag)
        if src is None:
            self._sources = ranks.others()
            others = [ranks.world[each] for each in self._sources]
            expected = ranks.messages.expect_any(others, envelope, nbytes=self._nbytes)
        else:
            rank = ranks.world[src]
            expected = ranks.messages.expect(rank, envelope, nbytes=self._nbytes, into=self._into)
        self._expected = expected
        expected.post()
        ranks.check_member(src)  # after the post: closing the group ends posted receives

    def _value(self) -> Any:
        return self._result

    def _finish(self, deadline: Deadline) -> None:
        while True:
            try:
                self._result = self._expected.take(deadline, self._read)
                break
            except MessageWithdrawnError:  # the sender's timeout passed: it was never sent
                self._expect()
        self.source = self._peer
        if self.source is None:
            self.source = self._ranks.last_source = self._sources[self._expected.index]

    def _is_done(self) -> bool:
        try:
            self._finish(AT_ONCE)  # also copies lent memory, which its sender waits for
        except DeadlineExceededError:
            return False
        except RankwireError as error:
            self._error = error.kept()
            return True
        self._deadline = None
        return True

    def _give_up(self) -> bool:
        self._expected.give_up()
        return False

    def __del__(self) -> None:
        # It may run anywhere, also where locks are held: so the next receive gives this one up.
        expected = getattr(self, "_expected", None)  # not set if the constructor was interrupted
        if expected is not None and self._deadline is not None and self._error is None:
            with suppress(ForkedProcessError):
                self._ranks.dropped.append(expected)
