"""Send handles: hold a sent message until its buffers are free.

``offer`` and ``post`` return a ``SendHandle`` if the buffers are still in use: because the peer
reads them from this process's memory, or because the message waits to be sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError, RankwireError
from rankwire.links.lender import Lent, Meanwhile, lend
from rankwire.links.outbox import Queued
from rankwire.wire.frames import LOAN, Envelope, Message
from rankwire.wire.loans import LoanRefusedError

if TYPE_CHECKING:
    from rankwire.links.connection import Connection


@dataclass(slots=True, eq=False)
class SendHandle:
    """A sent message whose buffers are still in use.

    Attributes:
        explain: Translates errors; a group sets it, to name its own ranks.
    """

    _connection: Connection
    _posted: Lent | Queued
    _envelope: Envelope
    _message: Message
    _meanwhile: Meanwhile | None
    explain: Callable[[RankwireError], RankwireError] | None = None

    def wait(self, deadline: Deadline) -> bool:
        """Wait until the buffers are free; return False if the deadline passes first."""
        posted = self._posted
        connection = self._connection
        try:
            if isinstance(posted, Lent):
                try:
                    return self._wait_for_receipt(posted, deadline)
                except LoanRefusedError:
                    posted.revoke()
                # Noted before it is sent: a repeated wait must not send it twice.
                self._posted = posted = Queued(connection.outbox, self._envelope, self._message)
            if posted.number is None:
                posted.outbox.enqueue(posted, connection.at_once)
            return posted.outbox.finish(posted, deadline, self._meanwhile)
        except RankwireError as error:
            if self.explain is None:
                raise
            raise self.explain(error) from error.__cause__

    def _wait_for_receipt(self, lent: Lent, deadline: Deadline) -> bool:
        if lent.was_read:  # and the thread that saw it was interrupted
            return True
        look_for_end = self._connection.look_for_end
        if lent.wait(deadline, look_for_end, self._meanwhile):
            return True
        look_for_end()  # an ended connection revokes its loans
        return False

    def settle(self, deadline: Deadline) -> None:
        """Wait until the buffers are free; if that fails, withdraw the message and raise."""
        is_taken = False
        try:
            is_taken = self.wait(deadline)
        except RankwireError:
            if not self.revoke():  # else the peer read it, and then the connection ended
                raise
        finally:
            is_taken = self.revoke() or is_taken
        if not is_taken:
            raise DeadlineExceededError(
                deadline.limit,
                waiting_for=[self._connection.peer],
                detail="it does not take the message",
            )

    def is_over(self) -> bool:
        """Whether the buffers are free. Does not read, send or wait."""
        posted = self._posted
        return posted.outbox.has_left(posted) if isinstance(posted, Queued) else posted.is_over

    def revoke(self) -> bool:
        """Free the buffers now; return whether the message arrives, or may. Idempotent."""
        return _take_back(self._posted)


def _take_back(posted: Lent | Queued) -> bool:
    return not posted.outbox.withdraw(posted) if isinstance(posted, Queued) else posted.revoke()


def offer(
    connection: Connection,
    envelope: Envelope,
    message: Message,
    deadline: Deadline,
    meanwhile: Meanwhile | None = None,
    *,
    while_sending: Meanwhile | None = None,
) -> SendHandle | None:
    """Send one message without waiting for a peer that reads it from this process's memory.

    The thread reads ``while_sending`` or ``meanwhile``, the handle ``meanwhile``. Returns None if
    the buffers are free.
    """
    reading = while_sending or meanwhile
    if message[1] >= connection.lend_from and connection.can_lend:
        loan = lend(*message)
        if loan is not None:
            lent, description = loan
            try:
                connection.send_small(*_loan(envelope, description), deadline, False, reading)
                return SendHandle(connection, lent, envelope, message, meanwhile)
            except BaseException:
                try:
                    lent.revoke()
                finally:
                    lent.revoke()  # a second interrupt may have stopped the first
                raise
    connection.send_small(envelope, message, deadline, False, reading)
    return None


def post(
    connection: Connection, envelope: Envelope, message: Message, meanwhile: Meanwhile | None = None
) -> SendHandle | None:
    """Send one message without waiting. Returns None if the buffers are free.

    The connection keeps the buffers until the message is sent, even if the handle is dropped.
    """
    loan = None
    if message[1] >= connection.lend_from and connection.can_lend:
        loan = lend(*message)
    posted: Lent | Queued | None = None
    try:
        if loan is None:
            posted = connection.post_small(envelope, message, connection.at_once)
            if posted is None:
                return None
        else:
            posted, description = loan
            connection.keep(posted)
            connection.post_small(*_loan(envelope, description), connection.at_once)
        return SendHandle(connection, posted, envelope, message, meanwhile)
    except BaseException:
        if posted is not None:
            try:
                _take_back(posted)
            finally:
                _take_back(posted)  # as in ``offer``
        raise


def _loan(envelope: Envelope, description: bytes) -> tuple[Envelope, Message]:
    group, channel, tag = envelope
    return (group, channel | LOAN, tag), ((description,), len(description))
