"""A receive: one message that somebody wants, from when it is asked for to its end.

It ends exactly once, with a payload or with an error; which message it gets is the business of the
``mailbox``. Pure state, guarded by the mailbox's owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from rankwire.errors import RankwireError
from rankwire.wire.frames import Envelope, Payload
from rankwire.wire.loans import whole_of

# What is smaller comes through the parser's buffer in any case.
PLACED_FROM = 64 << 10


class Destination:
    """Where the bytes of one message belong.

    Args:
        view: Writable bytes. They mean nothing until the message is there.
    """

    __slots__ = ("view",)

    def __init__(self, view: memoryview) -> None:
        self.view = view

    def head_nbytes(self, nbytes: int, beginning: memoryview) -> int | None:
        """Return how much of a message stands before what belongs here; None if it does not fit.

        That may be more than has come.

        Args:
            nbytes: The size of the message.
            beginning: What has come of it.
        """
        return 0 if nbytes == len(self.view) else None


class Placed:
    """A payload that is where its receiver wants it, but for its head. A parcel that is here.

    Attributes:
        head: What stands before it.
        destination: Where the rest is.
    """

    __slots__ = ("destination", "head")

    def __init__(self, head: bytes, destination: Destination) -> None:
        self.head = head
        self.destination = destination

    def __len__(self) -> int:
        return len(self.head) + len(self.destination.view)

    def read_into(self, start: int, view: memoryview) -> None:
        """Copy the bytes from ``start`` on into ``view``, all of it."""
        view[:] = memoryview(self.whole())[start : start + len(view)]

    def whole(self) -> bytearray:
        """Return all of it, in memory of the caller's own."""
        whole = bytearray(self.head)
        whole += self.destination.view
        return whole

    def give_back(self) -> None:
        """There is nobody who waits for it."""


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
