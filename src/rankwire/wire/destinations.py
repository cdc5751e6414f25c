"""Destinations: memory of a receiver's own, into which a message may come straight from a stream.

Only a message that is too large for the parser's buffer does. From its header on, and the beginning
that came with it, the parser asks whether somebody waits for it and where it is to go; then the
stream is read to there. Whoever gives up waiting takes its memory back first: what has come so far
moves out, and nothing is lost. Pure: who reads and who waits is the business of their owners.
"""

from __future__ import annotations

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
