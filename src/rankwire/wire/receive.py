"""Receives: the messages that this rank waits for, and the memory that they are received into.

A receive ends exactly once, with a payload or with an error; the ``mailbox`` decides which message
it gets. A large message may be received straight into a ``Destination``, for which the parser asks
the mailbox. A receiver that gives up first takes its memory back; the received bytes move away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rankwire.errors import RankwireError
from rankwire.interrupts import pop_into
from rankwire.wire.frames import LOAN, Envelope, Frame, Payload, whole_of

if TYPE_CHECKING:
    from rankwire.wire.seals import FrameMac

# A smaller message always comes through the parser's buffer.
PLACED_FROM = 64 << 10


@dataclass(slots=True, eq=False)
class Destination:
    """Memory for the bytes of one message; undefined until the message is complete."""

    view: memoryview

    def head_nbytes(self, nbytes: int, beginning: memoryview) -> int | None:
        """Return how many bytes of a message precede those for here; None if it does not fit."""
        return 0 if nbytes == len(self.view) else None


class MessageWithdrawnError(RankwireError):
    """The sender withdrew the message before it was read: it was never sent."""


@dataclass(slots=True, eq=False)
class Placed:
    """An ``UnreadPayload`` whose bytes, except its head, are in a destination."""

    head: bytes
    destination: Destination
    translate: Callable[[RankwireError], None] | None = None

    def __len__(self) -> int:
        return len(self.head) + len(self.destination.view)

    def read_into(self, start: int, view: memoryview) -> None:
        """Copy the bytes from ``start`` on into ``view``, filling it."""
        view[:] = memoryview(self.whole())[start : start + len(view)]

    def whole(self) -> bytearray:
        """Return all bytes in memory of the caller's own."""
        whole = bytearray(self.head)
        whole += self.destination.view
        return whole

    def release(self) -> None:
        """Do nothing: the sender's memory is not in use."""


def is_placed(payload: Payload) -> bool:
    """Return whether the bytes of a payload are in the receiver's own ``Destination``."""
    return isinstance(payload, Placed)


def copy_payload(payload: Payload, view: memoryview, start: int = 0) -> None:
    """Copy the bytes from ``start`` on into ``view``, unless they were received there."""
    if isinstance(payload, bytearray):
        view[:] = memoryview(payload)[start:]
    elif not isinstance(payload, Placed):
        payload.read_into(start, view)


class LargePayload(NamedTuple):
    """A payload that is too large for the parser's buffer, while it is received."""

    body: bytearray | memoryview  # the memory that it is received into
    envelope: Envelope
    filled: int  # how many bytes of the body have come
    mac: FrameMac | None  # of the bytes that have come, if the frame is sealed
    payload: bytearray | Placed  # the body, or a ``Placed`` with the same memory

    def plus(self, count: int) -> LargePayload:
        """Return this payload after ``count`` more bytes have come."""
        mac, filled = self.mac, self.filled
        if mac is not None:
            mac = mac.plus(memoryview(self.body)[filled : filled + count])
        return self._replace(filled=filled + count, mac=mac)

    def moved_to(self, body: bytearray) -> LargePayload:
        """Return this payload, which is placed, after copying it to other memory."""
        assert isinstance(self.payload, Placed)
        head = self.payload.head
        body[: len(head)] = head
        body[len(head) :] = self.body
        return self._replace(body=body, payload=body, filled=len(head) + self.filled)


FindPlace = Callable[[Envelope, int, memoryview], Destination | None]


def find_placed(
    find_place: FindPlace | None,
    envelope: Envelope,
    nbytes: int,
    first: memoryview,
    frames: Iterable[Frame],
) -> Placed | None:
    """Return where a large payload goes; ``frames`` are those before it that were not taken."""
    group, channel, tag = envelope
    before = envelope, (group, channel | LOAN, tag)
    if find_place is None or any(
        frame.envelope in before or isinstance(frame.payload, Placed) for frame in frames
    ):
        return None  # the memory may belong to the receiver of an earlier frame
    destination = find_place(envelope, nbytes, first)
    if destination is None:
        return None
    return Placed(bytes(first[: nbytes - len(destination.view)]), destination)


class Receive:
    """A request for one message."""

    __slots__ = ("_cell", "done", "envelope", "error", "into", "nbytes", "on_done", "posted")
    is_awaited = True

    def __init__(  # a data class with a list of its own would take 0.2 us more
        self,
        envelope: Envelope,
        on_done: Callable[[Receive], None] | None = None,
        *,
        nbytes: int | None = None,
        into: Destination | None = None,
    ) -> None:
        self.envelope = envelope
        self.nbytes = nbytes  # a message of another size fails this, and stays for the next
        self.into = into  # memory that the message may be received into
        self.done = False  # whether ``payload`` or ``error`` is set
        self.posted = False  # whether it is posted and not withdrawn
        self._cell: list[Payload] = []
        self.error: RankwireError | None = None
        self.on_done = on_done  # called by the mailbox's owner, outside its locks, once done

    @property
    def is_wanted(self) -> bool:
        """Whether it is posted and has not ended."""
        return self.posted and not self.done

    @property
    def payload(self) -> Payload | None:
        """The message, if it has come."""
        return self._cell[0] if self._cell else None

    def take(self) -> Payload:
        """Return the payload or raise the error, when ``done``."""
        if not self._cell:
            assert self.error is not None
            raise self.error.copy()
        return self._cell[0]

    def move_to(self, queue: deque[Payload]) -> bool:
        """Move the message to a queue, in one step; return False if none has come."""
        if self._cell:
            pop_into(queue.append, self._cell)
            return True
        return False

    def fetch(self) -> None:
        """Copy the payload out of the sender's memory; drop it if the sender has revoked it."""
        for payload in self._cell[:1]:
            try:
                whole = whole_of(payload)
            except RankwireError:
                self._cell.clear()
            else:
                with suppress(IndexError):  # another thread has put it back
                    self._cell[0] = whole

    def result(self) -> bytearray:
        """Return the payload in memory of the caller's own, or raise the error."""
        return whole_of(self.take())

    def complete(self, payload: Iterable[Payload]) -> None:
        """End it with the message that ``payload`` yields."""
        self._cell.extend(payload)
        self.done = True

    def fail(self, error: RankwireError) -> None:
        """End it with an error, unless it has ended."""
        if not self._cell and not self.done:
            self.error = error
            self.done = True


class PostedReceive(Receive):
    """A receive that is posted before a thread waits for it."""

    # The waiting thread sets it. If it leaves without the message, it clears it under the lock of
    # the mailbox's owner.
    is_awaited = False
