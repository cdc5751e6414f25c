"""Exchange: the messages of one operation on one rank.

It is all that an algorithm sees: rank, size, send and receive. It gives every message the
operation's envelope, lends large ones, and while it waits for one it looks up now and then for
other ranks' trouble. Used by one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rankwire.backends.base import Backend
from rankwire.backends.transport import Offer
from rankwire.collectives.fingerprints import NOTICE_TAG
from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError, MessageTooLargeError
from rankwire.wire.frames import Buffer, Channel, Payload
from rankwire.wire.loans import whole_of

if TYPE_CHECKING:
    from rankwire.collectives.operation import Operation

__all__ = ["BLOCK_NBYTES", "Exchange", "Piece", "blocks", "scratch"]

Array = np.ndarray[Any, Any]

# How long a rank waits before it looks whether something is wrong, and between two looks.
LOOK_EVERY = 0.05
# A block that is fetched and reduced at once stays in the cache in between. 64 MiB pulled and added
# take 17 ms in blocks of 64 KiB, 11.5 in 256 KiB, 9 in 512 KiB or 1 MiB.
BLOCK_NBYTES = 512 << 10

_SMALL = 16 << 10

_local = threading.local()


class Piece:
    """A received part of an array: here already, or still in the sender's memory."""

    __slots__ = ("_dtype", "_payload")

    def __init__(self, payload: Payload, dtype: np.dtype[Any]) -> None:
        self._payload = payload
        self._dtype = dtype

    def __len__(self) -> int:
        return len(self._payload) // self._dtype.itemsize

    def block(self, start: int, stop: int, scratch: Array) -> Array:
        """Return the elements from ``start`` to ``stop``, fetched to ``scratch`` if need be."""
        if isinstance(self._payload, bytearray):
            itemsize = self._dtype.itemsize
            return np.frombuffer(self._payload, self._dtype, stop - start, start * itemsize)
        block = scratch[: stop - start]
        self._payload.read_into(start * self._dtype.itemsize, block.view(np.uint8).data)
        return block

    def whole(self) -> Array:
        """Return all of it, in memory of its own, and let the sender go on."""
        return np.frombuffer(whole_of(self._payload), self._dtype)

    def copy_into(self, out: Array) -> None:
        """Copy all of it and let the sender go on."""
        if isinstance(self._payload, bytearray):
            out[...] = np.frombuffer(self._payload, self._dtype)
        elif len(self):
            self._payload.read_into(0, out.view(np.uint8).data)
            self._payload.give_back()

    def give_back(self) -> None:
        """Let the sender go on."""
        if not isinstance(self._payload, bytearray):
            self._payload.give_back()


class Exchange:
    """Send and receive, for one operation.

    Attributes:
        rank: This rank.
        size: The number of ranks.
    """

    __slots__ = (
        "_backend",
        "_deadline",
        "_group",
        "_next_look",
        "_offers",
        "_operation",
        "_sources",
        "_tag",
        "rank",
        "size",
    )

    def __init__(
        self, backend: Backend, operation: Operation, tag: int, deadline: Deadline
    ) -> None:
        self.rank = backend.rank
        self.size = backend.world_size
        self._backend = backend
        self._operation = operation
        self._group = backend.group
        self._tag = tag
        self._deadline = deadline
        self._next_look = deadline.sooner(LOOK_EVERY)
        self._offers: list[tuple[int, Offer]] = []
        self._sources: list[int] = []  # the ranks from which something was received

    @property
    def has_news(self) -> bool:
        """Whether a rank of which this one has read its messages has told something beside them."""
        for src in self._sources:
            if self._backend.has_arrived(src, (self._group, Channel.COLLECTIVE, NOTICE_TAG)):
                return True
        return False

    @property
    def others(self) -> list[int]:
        """All ranks but this one, the next one first: so no rank is the first of all."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks are on one host; all of them know that alike."""
        hosts = self._backend.hosts
        return all(host == hosts[0] for host in hosts)

    def begin_part(self, part: int) -> None:
        """Keep the messages from now on apart from earlier ones: the steps begin again."""
        self._tag = self._operation.tag_of_part(part)

    def send(self, dst: int, step: int, data: Array) -> None:
        """Send to a rank. The data must not change before ``settle``."""
        self.send_buffers(dst, step, (_bytes_of(data),), data.nbytes)

    def send_buffers(self, dst: int, step: int, buffers: Sequence[Buffer], nbytes: int) -> None:
        """Send bytes in pieces, as one message. They must not change before ``settle``."""
        if nbytes > self._backend.max_message_nbytes:
            raise MessageTooLargeError(nbytes, self._backend.max_message_nbytes)
        if self._next_look.expired:
            self._next_look = self._deadline.sooner(LOOK_EVERY)
        # A message of which only a part has left must be finished, so a large one is not given up.
        limit = self._next_look if nbytes <= _SMALL else self._deadline
        while True:
            try:
                offer = self._backend.offer(
                    dst,
                    (self._group, Channel.COLLECTIVE, self._tag + step),
                    (buffers, nbytes),
                    limit,
                    check=None if nbytes <= _SMALL else lambda: self._operation.look(dst),
                )
                break
            except DeadlineExceededError:
                self._operation.look(dst)
                if self._deadline.expired:
                    raise self._operation.too_late(dst) from None
                limit = self._next_look = self._deadline.sooner(LOOK_EVERY)
        if offer is not None:
            self._offers.append((dst, offer))

    def receive(self, src: int, step: int, nbytes: int | None = None) -> Payload:
        """Return what a rank sent in a step.

        Raises:
            RankwireError: It cannot come any more: a rank failed, or is doing something else.
        """
        self._sources.append(src)
        if self._next_look.expired:
            self._next_look = self._deadline.sooner(LOOK_EVERY)
        while True:
            try:
                envelope = (self._group, Channel.COLLECTIVE, self._tag + step)
                return self._backend.receive(src, envelope, self._next_look, nbytes=nbytes)
            except DeadlineExceededError:
                self._operation.look(src)
                if self._deadline.expired:
                    raise self._operation.too_late(src) from None
                self._next_look = self._deadline.sooner(LOOK_EVERY)

    def receive_piece(self, src: int, step: int, like: Array) -> Piece:
        """Return a part of an array that has the size and dtype of ``like``."""
        return Piece(self.receive(src, step, like.nbytes), like.dtype)

    def receive_pieces(self, step: int, likes: Sequence[Array]) -> list[Piece | None]:
        """Return a piece from every other rank, by rank; each has the size of its ``like``."""
        pieces: list[Piece | None] = [None] * self.size
        for src in reversed(self.others):
            pieces[src] = self.receive_piece(src, step, likes[src])
        return pieces

    def settle(self) -> None:
        """Wait until all that was sent may be changed again."""
        for dst, offer in self._offers:
            while not offer.wait(self._deadline.sooner(LOOK_EVERY)):
                self._operation.look(dst)
                if self._deadline.expired:
                    raise self._operation.too_late(dst)
            offer.revoke()
        self._offers.clear()

    def revoke(self) -> None:
        """Take back what was sent and not read: the operation has failed."""
        for _, offer in self._offers:
            offer.revoke()
        self._offers.clear()


def scratch(dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return two blocks of memory that are this thread's own, as arrays."""
    memory = getattr(_local, "blocks", None)
    if memory is None:
        memory = _local.blocks = np.empty((2, BLOCK_NBYTES), np.uint8)
    nbytes = BLOCK_NBYTES // dtype.itemsize * dtype.itemsize
    return memory[0, :nbytes].view(dtype), memory[1, :nbytes].view(dtype)


def blocks(count: int, dtype: np.dtype[Any]) -> Iterable[tuple[int, int]]:
    """Yield the bounds of the blocks of ``count`` elements."""
    step = max(1, BLOCK_NBYTES // dtype.itemsize)
    for start in range(0, count, step):
        yield start, min(start + step, count)


def _bytes_of(array: Array) -> memoryview:
    return array.view(np.uint8).data if array.size else memoryview(b"")
