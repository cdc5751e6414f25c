"""Exchange: the messages of one operation on one rank.

It is all that an algorithm sees: rank, size, send and receive. It gives every message the
operation's envelope, lends large ones, and while it waits for one it looks up now and then for
other ranks' trouble, which is the business of the ``operation`` that it is a part of. Used by one
thread.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rankwire.backends.base import Backend
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import DeadlineExceededError, MessageTooLargeError
from rankwire.mesh.transport import Expected, Offer
from rankwire.wire.frames import Buffer, Channel, Payload
from rankwire.wire.loans import whole_of
from rankwire.wire.receive import PLACED_FROM, Destination, Placed

if TYPE_CHECKING:
    from rankwire.collectives.hosts import Hosts
    from rankwire.collectives.slots import SharedSlots

Array = np.ndarray[Any, Any]

# How long a rank waits before it looks whether something is wrong, and between two looks.
LOOK_EVERY = 0.05
# The answer to the report that it makes then comes within a millisecond or two, so it looks sooner.
_LOOK_FOR_ANSWER = 0.01
# With so many ranks, and each more of them, it waits 50 ms longer: they rarely have a core each,
# and an operation that goes well should not be reported. At most half a second.
_MANY = 32
_LONGEST_LOOK = 0.5
# After so many seconds in shared memory a rank reads messages, if it has posted receives.
_FIRST_NAP = 1e-3
# A block that is fetched and reduced at once stays in the cache in between. 64 MiB pulled and added
# take 17 ms in blocks of 64 KiB, 11.5 in 256 KiB, 9 in 512 KiB or 1 MiB.
BLOCK_NBYTES = 512 << 10

_SMALL = 16 << 10
# So much is copied to be sent: 0.1 us, and a view of the array takes 0.5.
_COPIED = 4 << 10
_CHANNEL = int(Channel.COLLECTIVE)  # to look up a member takes 0.1 us

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

    def copy_into(self, out: Array) -> None:
        """Copy all of it and let the sender go on; what is placed is in ``out`` already."""
        if isinstance(self._payload, bytearray):
            out[...] = np.frombuffer(self._payload, self._dtype)
        elif len(self) and not isinstance(self._payload, Placed):
            self._payload.read_into(0, out.view(np.uint8).data)
            self._payload.give_back()

    def give_back(self) -> None:
        """Let the sender go on."""
        if not isinstance(self._payload, bytearray):
            self._payload.give_back()


class Arriving(NamedTuple):
    """A part of an array that is asked for, and may come straight to where it belongs."""

    src: int
    expected: Expected
    out: Array


class Exchange(ABC):
    """Send and receive, for one operation.

    Attributes:
        rank: This rank.
        size: The number of ranks.
        tag: That of step 0.
        shared: The memory that all ranks share, if they do.
        hosts: Where the ranks are, if they are on several hosts and each host shares memory.
        deadline: For all of it.
        offers: What was sent, and to whom, that may not be changed yet.
        expected: What was asked for before it is waited for.
    """

    __slots__ = (
        "_backend",
        "_group",
        "_looks",
        "_next_look",
        "deadline",
        "expected",
        "hosts",
        "offers",
        "rank",
        "shared",
        "size",
        "tag",
    )

    def __init__(self, backend: Backend) -> None:
        self.rank = backend.rank
        self.size = backend.world_size
        self._backend = backend
        self._group = backend.group
        self.tag = 0
        self.shared: SharedSlots | None = None
        self.hosts: Hosts | None = None
        self.deadline = self._next_look = AT_ONCE  # the latter until it first waits: many never do
        self._looks = 0
        self.offers: list[tuple[int, Offer]] = []
        self.expected: list[Expected] = []

    @abstractmethod
    def look(self, src: int) -> None:
        """See whether there is still a reason to wait for a rank.

        Raises:
            RankwireError: There is none.
        """

    @abstractmethod
    def too_late(self, src: int) -> DeadlineExceededError:
        """Return the error of an operation whose time is up while it waits for a rank."""

    @abstractmethod
    def tag_of_part(self, part: int) -> int:
        """Return the tag of step 0 of a part."""

    def open(self, tag: int, deadline: Deadline) -> None:
        """Begin, with the tag of step 0."""
        self.tag = tag
        self.deadline = deadline

    @property
    def others(self) -> list[int]:
        """All ranks but this one, the next one first: so no rank is the first of all."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks are on one host; all of them know that alike."""
        hosts = self._backend.hosts
        return all(host == hosts[0] for host in hosts)

    def in_group(self, rank: int) -> int:
        """Return the number that a rank has in the group."""
        return rank

    def begin_part(self, part: int) -> None:
        """Keep the messages from now on apart from earlier ones: the steps begin again."""
        self.tag = self.tag_of_part(part)

    def send(self, dst: int, step: int, data: Array) -> None:
        """Send to a rank. The data must not change before ``settle``."""
        nbytes = data.nbytes
        buffer = data.tobytes() if nbytes <= _COPIED else data.view(np.uint8).data
        self.send_buffers(dst, step, (buffer,), nbytes)

    def send_buffers(self, dst: int, step: int, buffers: Sequence[Buffer], nbytes: int) -> None:
        """Send bytes in pieces, as one message. They must not change before ``settle``."""
        if nbytes > self._backend.max_message_nbytes:
            raise MessageTooLargeError(nbytes, self._backend.max_message_nbytes)
        # A message of which only a part has left must be finished, so a large one is not given up.
        limit = self.next_look() if nbytes <= _SMALL else self.deadline
        while True:
            try:
                offer = self._backend.offer(
                    dst,
                    (self._group, _CHANNEL, self.tag + step),
                    (buffers, nbytes),
                    limit,
                    check=None if nbytes <= _SMALL else partial(self.look, dst),
                )
                break
            except DeadlineExceededError:
                pass  # not a part of the error that the look may raise
            self._look_up(dst)
            limit = self._next_look
        if offer is not None:
            self.offers.append((dst, offer))

    def receive(self, src: int, step: int, nbytes: int | None = None) -> Payload:
        """Return what a rank sent in a step.

        Raises:
            RankwireError: It cannot come any more: a rank failed, or is doing something else.
        """
        envelope = (self._group, _CHANNEL, self.tag + step)
        patience = self.next_look()
        while True:
            try:
                return self._backend.receive(src, envelope, patience, nbytes=nbytes)
            except DeadlineExceededError:
                pass  # not a part of the error that the look may raise
            self._look_up(src)
            patience = self._next_look

    def next_look(self) -> Deadline:
        """Return until when to wait for a rank before looking up."""
        if self._next_look.expired:
            self._next_look = self.deadline.sooner(self._interval())
        return self._next_look

    def _interval(self) -> float:
        """Return the seconds until the next look."""
        if 0 < self._looks < 3:
            return _LOOK_FOR_ANSWER
        return min(LOOK_EVERY * max(1, self.size // _MANY), max(LOOK_EVERY, _LONGEST_LOOK))

    def sleeps(self, sleeps_until: Callable[[Deadline], bool]) -> bool:
        """Sleep where no message wakes this rank, and read now and then what others have sent.

        If receives are posted it does so soon, and then after twice as long each time.

        Args:
            sleeps_until: Sleeps until a deadline; returns False then, or if there is news.

        Returns:
            What that returns; False also when it is time to look up.
        """
        nap = _FIRST_NAP
        while True:
            look = self.next_look()
            patience = look.sooner(nap) if self._backend.has_posted() else look
            if sleeps_until(patience):
                return True
            self._backend.read_others()
            if look.expired or not patience.expired:
                return False
            nap = min(2.0 * nap, LOOK_EVERY)

    def look_up(self, src: int) -> None:
        """Look up from waiting for a rank outside of messages; that one may have left.

        Raises:
            RankwireError: There is no reason to wait any more.
        """
        self._look_up(src)
        failure = self._backend.failure_of(src)
        if failure is not None:
            raise failure.copy()

    def _look_up(self, src: int) -> None:
        self.look(src)
        if self.deadline.expired:
            raise self.too_late(src)
        self._looks += 1
        self._next_look = self.deadline.sooner(self._interval())

    def receive_array(self, src: int, step: int, like: Array) -> Array:
        """Return an array that has the size and dtype of ``like``, in memory of its own."""
        payload = self.receive(src, step, like.nbytes)
        if not isinstance(payload, bytearray):
            payload = whole_of(payload)
        return np.frombuffer(payload, like.dtype)

    def expect_into(self, src: int, step: int, out: Array) -> Arriving:
        """Ask for an array of the size and dtype of ``out``: from now on it may come there.

        So it does while this rank sends. Only for what nobody sends before all ranks have come.
        """
        envelope = (self._group, _CHANNEL, self.tag + step)
        into = Destination(out.view(np.uint8).data)
        expected = self._backend.expect(src, envelope, nbytes=out.nbytes, into=into)
        self.expected.append(expected)
        expected.post()
        return Arriving(src, expected, out)

    def take_in(self, arriving: Arriving) -> None:
        """Wait until what was asked for is there."""
        src, expected, out = arriving
        patience = self.next_look()
        while True:
            try:
                payload = expected.take(patience)
                break
            except DeadlineExceededError:
                pass  # not a part of the error that the look may raise
            self._look_up(src)
            patience = self._next_look
        Piece(payload, out.dtype).copy_into(out)
        self.expected.remove(expected)

    def receive_into(self, src: int, step: int, out: Array) -> None:
        """Receive an array of the size and dtype of ``out`` into it."""
        if out.nbytes >= PLACED_FROM:
            self.take_in(self.expect_into(src, step, out))
            return
        payload = self.receive(src, step, out.nbytes)
        if isinstance(payload, bytearray):
            out[...] = np.frombuffer(payload, out.dtype)
        else:
            Piece(payload, out.dtype).copy_into(out)

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
        for dst, offer in self.offers:
            while not offer.wait(self.next_look()):
                self._look_up(dst)
            offer.revoke()
        self.offers.clear()

    def revoke(self) -> None:
        """Take back what was sent and not read: the operation has failed."""
        slots = self.shared if self.hosts is None else self.hosts.slots
        if slots is not None:
            slots.retract(self)
        for expected in self.expected:
            expected.give_up()
        self.expected.clear()
        for _, offer in self.offers:
            offer.revoke()
        self.offers.clear()


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
