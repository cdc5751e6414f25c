"""A lane: the way of a call to its destination, as far as callers know it.

``CallPort`` is one, and so is ``Loopback``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from rankwire.deadline import Deadline
from rankwire.wire.frames import Buffer
from rankwire.wire.mailbox import Receive

__all__ = ["Lane"]


class Lane(Protocol):
    """See ``CallPort`` for what each does."""

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
        """Send a request."""

    def wait(self, dst: int, receive: Receive, deadline: Deadline) -> bytearray:
        """Return the reply."""

    def drive(self, dst: int, receive: Receive, deadline: Deadline) -> bool:
        """Wait for the reply."""

    def forget(self, dst: int, receive: Receive) -> bool:
        """Give up a reply."""

    def cancel(self, dst: int, request_id: int) -> None:
        """Tell the callee."""

    def wait_for_room(self, dst: int, limit: int, deadline: Deadline) -> bool:
        """Wait until fewer than ``limit`` calls are in flight."""
