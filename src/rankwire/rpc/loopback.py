"""Calls to oneself, without a connection.

Encoding, limits, deadlines and serving threads are the same as for any other call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from rankwire.backends.calls import OWN, IncomingCall
from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError, RankwireError
from rankwire.wire.frames import Buffer, Channel
from rankwire.wire.mailbox import Mailbox, Receive

__all__ = ["Loopback"]


class Loopback:
    """The part of ``CallPort`` that a caller uses, for the rank itself. Safe from any thread.

    Args:
        rank: This rank.
        serve: Takes a request for the serving threads.
        cancel: Takes the id of a request that is not wanted any more.
    """

    def __init__(
        self, rank: int, serve: Callable[[IncomingCall], None], cancel: Callable[[int], None]
    ) -> None:
        self._rank = rank
        self._serve = serve
        self._cancel = cancel
        self._mailbox = Mailbox(keep_unmatched=False)
        self._changed = threading.Condition()

    def call(
        self,
        dst: int,
        request_id: int,
        buffers: Sequence[Buffer],
        nbytes: int,
        deadline: Deadline,
        on_reply: Callable[[Receive], None] | None = None,
        *,
        hold: bool = False,
    ) -> Receive:
        """See ``CallPort.call``."""
        receive = Receive((0, Channel.REPLY, request_id), on_reply)
        with self._changed:
            self._mailbox.post(receive)
        if not receive.done:
            self._serve(IncomingCall(self._rank, request_id, bytearray().join(buffers), OWN))
        return receive

    def reply(self, request_id: int, buffers: Sequence[Buffer]) -> None:
        """End the call that asked."""
        with self._changed:
            receive = self._mailbox.deliver(
                (0, Channel.REPLY, request_id), bytearray().join(buffers)
            )
            self._changed.notify_all()
        if receive is not None and receive.on_done is not None:
            receive.on_done(receive)

    def wait(self, dst: int, receive: Receive, deadline: Deadline) -> bytearray:
        """See ``CallPort.wait``."""
        if not self.drive(dst, receive, deadline) and self.forget(dst, receive):
            raise DeadlineExceededError(deadline.limit, waiting_for=[dst])
        return receive.result()

    def drive(self, dst: int, receive: Receive, deadline: Deadline) -> bool:
        """See ``CallPort.drive``."""
        with self._changed:
            return self._changed.wait_for(lambda: receive.done, deadline.sleep_limit())

    def forget(self, dst: int, receive: Receive) -> bool:
        """See ``CallPort.forget``."""
        with self._changed:
            self._changed.notify_all()  # there is room again
            return self._mailbox.withdraw(receive)

    def abort(self, dst: int, receive: Receive, error: RankwireError) -> bool:
        """See ``CallPort.abort``."""
        with self._changed:
            if not self._mailbox.withdraw(receive):
                return False
            receive.fail(error)
            self._changed.notify_all()
        if receive.on_done is not None:
            receive.on_done(receive)
        return True

    def cancel(self, dst: int, request_id: int) -> None:
        """See ``CallPort.cancel``."""
        self._cancel(request_id)

    def wait_for_room(self, dst: int, limit: int, deadline: Deadline) -> bool:
        """See ``CallPort.wait_for_room``."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._mailbox.keys_wanted < limit, deadline.sleep_limit()
            )

    def calls_to(self, dst: int) -> list[int]:
        """See ``CallPort.calls_to``."""
        with self._changed:
            return self._mailbox.tags_wanted()

    def in_flight(self) -> int:
        """See ``CallPort.in_flight``."""
        return self._mailbox.keys_wanted

    def close(self, cause: RankwireError) -> None:
        """End every wait."""
        with self._changed:
            ended = self._mailbox.fail(cause)
            self._changed.notify_all()
        for receive in ended:
            if receive.on_done is not None:
                receive.on_done(receive)
