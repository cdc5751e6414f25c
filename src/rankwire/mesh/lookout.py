"""The lookout: what a waiting thread reads, so that ranks which all send first do not deadlock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.links.inbox import Inbox
from rankwire.transports.byte_stream import ByteStream

_CHECK_EVERY = 0.05


class Link(NamedTuple):
    """How messages to one rank travel."""

    transport: str  # "unix", "tcp" or "memory"
    single_copy: bool  # whether it reads large ones straight out of this process's memory
    reason: str  # why not, if it does not
    shared_memory: bool = False  # whether collectives with it meet in memory that both share
    incarnation: int = 0  # how many times its process was started anew alone


class Lookout:
    """Reads what other ranks have sent, for a thread that waits.

    So posted messages progress whatever the thread waits for, and ranks that all send first, in
    pairs or in a circle, do not deadlock.

    Args:
        clock: The clock for the calls of ``check``.
        inboxes: The inboxes of the ranks that have connected to this one.
        check: Called now and then; raises if waiting is pointless.
    """

    def __init__(
        self,
        clock: Clock,
        inboxes: list[Inbox] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._inboxes: list[Inbox] = [] if inboxes is None else inboxes
        self._check = check
        self.clock = clock
        self._next = Deadline(_CHECK_EVERY, clock)

    def checking(self, check: Callable[[], None]) -> Lookout:
        """Return one that also calls ``check`` now and then."""
        return Lookout(self.clock, self._inboxes, check)

    def add(self, inbox: Inbox) -> None:
        """Read an inbox whose rank has connected to this one. Safe from any thread."""
        if inbox not in self._inboxes:
            self._inboxes.append(inbox)

    def watch(self) -> list[ByteStream]:
        """Return the streams on which something to read may come."""
        return [stream for inbox in list(self._inboxes) for stream in inbox.watch()]

    def read(self) -> bool:
        """Read what is there, without waiting; return whether anything could be."""
        is_read = False
        for inbox in list(self._inboxes):
            is_read = inbox.read() or is_read
            if inbox.due:  # a receive from any rank, which takes back those from the others
                inbox.call_back_due()
            if inbox.is_over:
                with suppress(ValueError):  # another thread was faster
                    self._inboxes.remove(inbox)
                if not inbox.is_over:  # its rank has connected again before it was removed
                    self.add(inbox)
        if self._check is not None and self._next.expired:
            self._next = Deadline(_CHECK_EVERY, self.clock)
            self._check()
        return is_read

    def has_posted(self) -> bool:
        """Whether this rank waits for a message of a rank that has connected to it."""
        return any(inbox.wanted_by for inbox in list(self._inboxes))
