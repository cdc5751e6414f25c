"""The caller's side of a call, as plain data: its lane, what it waits for, how it is given up.

A *lane* is the way of a call to its destination, as far as callers know it: ``CallPort`` is one,
and so is ``Loopback``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from rankwire.deadline import Deadline
from rankwire.errors import RankwireError
from rankwire.wire.frames import Buffer
from rankwire.wire.mailbox import Receive

__all__ = ["Lane", "Outgoing", "Wait"]


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

    def abort(self, dst: int, receive: Receive, error: RankwireError) -> bool:
        """End a call here."""

    def cancel(self, dst: int, request_id: int) -> None:
        """Tell the callee."""

    def wait_for_room(self, dst: int, limit: int, deadline: Deadline) -> bool:
        """Wait until fewer than ``limit`` calls are in flight."""

    def calls_to(self, dst: int) -> list[int]:
        """Return the calls in flight."""


class Outgoing(NamedTuple):
    """A call in flight that a function being served has made."""

    lane: Lane
    dst: int
    request_id: int
    name: str
    receive: Receive

    def give_up(self, error: RankwireError) -> None:
        """End it here with an error, and tell the callee, unless its reply has come.

        Whoever waits for it gets the error; callbacks are called.
        """
        if self.lane.abort(self.dst, self.receive, error):
            self.lane.cancel(self.dst, self.request_id)


class Wait(NamedTuple):
    """What the thread of a function being served waits for.

    Attributes:
        number: Unique in this agent: the same number is the same wait.
        dst: The rank that is called.
        name: The function called there.
        request_ids: The calls to that rank of which one has to end.
        is_for_room: Whether it waits for its turn to call, and not for a reply.
    """

    number: int
    dst: int
    name: str
    request_ids: Sequence[int]
    is_for_room: bool = False
