"""A receive: one message that somebody wants, from when it is asked for to its end.

It ends exactly once, with a payload or with an error; which message it gets is the business of the
``mailbox``. Pure state, guarded by the mailbox's owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from rankwire.errors import RankwireError
from rankwire.wire.destinations import Destination
from rankwire.wire.frames import Envelope, Payload
from rankwire.wire.loans import whole_of


class Receive:
    """One message that somebody wants.

    Attributes:
        envelope: The one it must have.
        nbytes: The size it must have, if that is fixed; a message of another size ends the receive
            with an error and stays for the next one.
        done: Whether ``payload`` or ``error`` is set.
        into: Where its bytes are to come, if they can come there straight from a stream.
        posted: Whether somebody still wants it; False again once it was withdrawn.
        on_done: Called by the owner of the mailbox, outside its locks, once it is done.
    """

    __slots__ = ("_cell", "done", "envelope", "error", "into", "nbytes", "on_done", "posted")

    def __init__(
        self,
        envelope: Envelope,
        on_done: Callable[[Receive], None] | None = None,
        *,
        nbytes: int | None = None,
        into: Destination | None = None,
    ) -> None:
        self.envelope = envelope
        self.nbytes = nbytes
        self.into = into
        self.done = False
        self.posted = False
        self._cell: list[Payload] = []
        self.error: RankwireError | None = None
        self.on_done = on_done

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for it, and it has not ended."""
        return self.posted and not self.done

    @property
    def payload(self) -> Payload | None:
        """The message, if it has come."""
        return self._cell[0] if self._cell else None

    def take(self) -> Payload:
        """Return the payload or raise the error. Only when ``done``."""
        if not self._cell:
            assert self.error is not None
            raise self.error.copy()
        return self._cell[0]

    def fetch(self) -> None:
        """Bring the payload here, if it lies with its sender; it is gone if that took it back."""
        for payload in self._cell[:1]:
            try:
                whole = whole_of(payload)
            except RankwireError:
                self._cell.clear()
            else:
                with suppress(IndexError):  # another thread was faster, and has put it back
                    self._cell[0] = whole

    def result(self) -> bytearray:
        """Return the payload in memory of the caller's own, or raise the error likewise."""
        return whole_of(self.take())

    def complete(self, payload: Iterable[Payload]) -> None:
        """End it with the message, which ``payload`` gives."""
        self._cell.extend(payload)
        self.done = True

    def fail(self, error: RankwireError) -> None:
        """End it with an error, unless it has ended."""
        if not self._cell and not self.done:
            self.error = error
            self.done = True


class PostedReceive(Receive):
    """A receive that is posted before a thread waits for it.

    Attributes:
        is_awaited: Whether a thread waits for it now, and takes the message as soon as it is done.
            That thread sets it, and clears it under the lock of the mailbox's owner if it leaves
            without the message.
    """

    __slots__ = ("is_awaited",)

    def __init__(
        self,
        envelope: Envelope,
        on_done: Callable[[Receive], None] | None = None,
        *,
        nbytes: int | None = None,
        into: Destination | None = None,
    ) -> None:
        super().__init__(envelope, on_done, nbytes=nbytes, into=into)
        self.is_awaited = False
