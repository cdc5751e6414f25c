"""A pending reply: a receive that knows the inbox where it was posted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from rankwire.deadline import Deadline
from rankwire.errors import RankwireError
from rankwire.wire.frames import Envelope, whole_of
from rankwire.wire.receive import Receive

if TYPE_CHECKING:
    from rankwire.links.inbox import Inbox

_log = logging.getLogger("rankwire")


class Reply(Receive):
    """The pending reply of one call. Every method is safe from any thread.

    Args:
        on_done: Called once it is done, in any thread, without locks held.

    Attributes:
        translate: Puts an error into the terms of a group of ranks, if the call is one's.
    """

    __slots__ = ("_inbox", "request_id", "translate")

    def __init__(
        self, envelope: Envelope, on_done: Callable[[Receive], None] | None, inbox: Inbox
    ) -> None:
        self.envelope = envelope
        self.nbytes = None
        self.into = None
        self.done = False
        self.posted = False
        self._cell = []
        self.error = None
        self.on_done = on_done
        self._inbox = inbox
        self.request_id = envelope[2]
        self.translate: Callable[[RankwireError], None] | None = None

    def wait(self, deadline: Deadline) -> bytearray:
        """Return the reply, reading for other threads meanwhile.

        Raises:
            DeadlineExceededError: It did not come in time; the reply is withdrawn.
            RankwireError: The callee is gone, or the call was aborted.
        """
        try:
            payload = self._inbox.wait(self, deadline)
            return payload if type(payload) is bytearray else whole_of(payload)
        except RankwireError as error:
            if self.translate is not None:
                self.translate(error)
            raise

    def drive(self, deadline: Deadline) -> bool:
        """Wait until it is done; False at the deadline, and then it may still come."""
        if self.done:
            self._inbox.call_back_due()  # its reader may have been interrupted before that
            return True
        self._inbox.send_held(deadline)
        return self._inbox.drive(self, deadline)

    def withdraw(self) -> bool:
        """Cancel the reply; False if it has come already."""
        return self._inbox.withdraw(self)

    def abort(self, error: RankwireError) -> bool:
        """Fail the reply at this end, within 0.1 s for a waiting thread; False if it has come."""
        return self._inbox.abort(self, error)
