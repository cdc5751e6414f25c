"""Exchange: the messages of one operation on one rank; all that an algorithm sees.

It adds the operation's envelope to every message and lends large ones. While it waits it calls
``look`` at intervals, with which the ``operation`` checks for failures of other ranks. For one
thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rankwire import runtime
from rankwire.backends.base import Backend
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import DeadlineExceededError, MessageTooLargeError, RankwireError
from rankwire.wire.frames import Buffer, Channel, Payload, whole_of
from rankwire.wire.receive import PLACED_FROM, Destination, copy_payload

if TYPE_CHECKING:
    from rankwire.collectives.slots import Hosts, SharedSlots
    from rankwire.links.receive_handle import ReceiveHandle
    from rankwire.links.send_handle import SendHandle

Array = np.ndarray[Any, Any]

# Seconds between two looks of a waiting rank for failures of other ranks.
LOOK_EVERY = 0.05
# A rank reports at the first look. The answer comes within 2 ms, so the next looks are sooner.
_LOOK_FOR_ANSWER = 0.01
# Each so many ranks add 50 ms, up to half a second: many ranks rarely have a core each, and an
# operation that succeeds should not be reported.
_MANY = 32
_LONGEST_LOOK = 0.5
# Seconds in shared memory after which a rank with posted receives reads messages.
_FIRST_NAP = 1e-3
# A block stays in the cache between fetch and reduction. 64 MiB take 17 ms in blocks of 64 KiB,
# 11.5 in 256 KiB, 9 in 512 KiB or 1 MiB.
BLOCK_NBYTES = 512 << 10

_SMALL = 16 << 10
# Up to this size a copy (0.1 us) is cheaper than a view of the array (0.5 us).
_COPIED = 4 << 10
_CHANNEL = int(Channel.COLLECTIVE)  # the lookup of an enum member takes 0.1 us

_local = runtime.local()

# A tag has 48 bits hashed from the operation's description, number and epoch, and 16 bits for the
# step. So messages of different operations never match.
_DIGEST_NBYTES = 6
_DIGEST_MASK = (1 << 8 * _DIGEST_NBYTES) - 1
_STEP_BITS = 16
# A ``Notice`` truncates long descriptions, and then they would no longer be equal.
_MOST_WORDS = 1000
# Odd, so that different numbers give different tags; the bits of the golden ratio.
_SPREAD = 0x9E3779B97F4B
_EPOCH_SPREAD = 0xBB67AE8584CB  # the bits of the root of 3


class Piece:
    """A received part of an array: in this process, or still in the sender's memory."""

    __slots__ = ("_dtype", "_payload")

    def __init__(self, payload: Payload, dtype: np.dtype[Any]) -> None:
        self._payload = payload
        self._dtype = dtype

    def block(self, start: int, stop: int, scratch: Array) -> Array:
        """Return the elements from ``start`` to ``stop``, fetched to ``scratch`` if necessary."""
        if isinstance(self._payload, bytearray):
            itemsize = self._dtype.itemsize
            return np.frombuffer(self._payload, self._dtype, stop - start, start * itemsize)
        block = scratch[: stop - start]
        self._payload.read_into(start * self._dtype.itemsize, block.view(np.uint8).data)
        return block

    def copy_into(self, out: Array) -> None:
        """Copy all elements, unless they arrived in place, and release the sender's memory."""
        copy_payload(self._payload, out.view(np.uint8).data)
        self.release()

    def release(self) -> None:
        """Release the sender's memory."""
        if not isinstance(self._payload, bytearray):
            self._payload.release()


class Arriving(NamedTuple):
    """A posted receive of a part of an array, possibly in place."""

    src: int
    expected: ReceiveHandle
    out: Array


class Exchange(ABC):
    """Sends and receives, for one operation."""

    __slots__ = (
        "_backend",
        "_looks",
        "_messages",
        "_next_look",
        "_world",
        "deadline",
        "expected",
        "hosts",
        "offers",
        "rank",
        "shared",
        "size",
        "tag",
    )

    def __init__(self, backend: Backend, rank: int, world: Sequence[int]) -> None:
        self._backend = backend
        self._messages = backend.messages
        self._world = world  # the world rank of each rank
        self.rank = rank
        self.size = len(world)
        self.tag = 0
        self.shared: SharedSlots | None = None  # the slots that all ranks share
        self.hosts: Hosts | None = None  # if there are several, and each has slots
        self.deadline = self._next_look = AT_ONCE  # _next_look is set when it first waits
        self._looks = 0
        # Receivers and messages, whose memory must not change yet.
        self.offers: list[tuple[int, SendHandle]] = []
        self.expected: list[ReceiveHandle] = []

    @abstractmethod
    def look(self, src: int) -> None:
        """Raise if the operation cannot succeed. A waiting rank calls this at intervals."""

    @abstractmethod
    def too_late(self, src: int) -> DeadlineExceededError:
        """Return the error of an operation that times out while it waits for a rank."""

    @property
    def others(self) -> list[int]:
        """All other ranks, from the next one on, so that not every rank begins with rank 0."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks are on one host."""
        hosts = self._backend.hosts
        return all(host == hosts[0] for host in hosts)

    def in_group(self, rank: int) -> int:
        """Return the group rank of a rank of this exchange."""
        return rank

    def send(self, dst: int, step: int, data: Array) -> None:
        """Send an array. It must not change before ``settle``."""
        nbytes = data.nbytes
        buffer = data.tobytes() if nbytes <= _COPIED else data.view(np.uint8).data
        self.send_buffers(dst, step, (buffer,), nbytes)

    def send_buffers(self, dst: int, step: int, buffers: Sequence[Buffer], nbytes: int) -> None:
        """Send buffers as one message. They must not change before ``settle``."""
        if nbytes > self._backend.max_message_nbytes:
            raise MessageTooLargeError(nbytes, self._backend.max_message_nbytes)
        # A partly sent message must be finished, so a large one has the whole time.
        limit = self.next_look() if nbytes <= _SMALL else self.deadline
        while True:
            try:
                offer = self._messages.offer(
                    self._world[dst],
                    (self._backend.group, _CHANNEL, self.tag + step),
                    (buffers, nbytes),
                    limit,
                    check=None if nbytes <= _SMALL else partial(self.look, dst),
                )
                break
            except DeadlineExceededError:
                pass  # not the context of an error that the look may raise
            self._look_up(dst)
            limit = self._next_look
        if offer is not None:
            self.offers.append((self.in_group(dst), offer))

    def receive(self, src: int, step: int, nbytes: int | None = None) -> Payload:
        """Return the payload that a rank sent in a step."""
        envelope = (self._backend.group, _CHANNEL, self.tag + step)
        patience = self.next_look()
        while True:
            try:
                return self._messages.receive(self._world[src], envelope, patience, nbytes=nbytes)
            except DeadlineExceededError:
                pass  # not the context of an error that the look may raise
            self._look_up(src)
            patience = self._next_look

    def next_look(self) -> Deadline:
        """Return the deadline of the next look."""
        if self._next_look.expired:
            self._next_look = self.deadline.sooner(self._interval())
        return self._next_look

    def sleeps(self, sleeps_until: Callable[[Deadline], bool]) -> bool:
        """Sleep where no message wakes this rank, and read messages at intervals.

        ``sleeps_until`` sleeps until a deadline, and returns False then or if there is news. Return
        its result, or False when it is time to look up.
        """
        nap, lookout = _FIRST_NAP, self._backend.mesh.lookout
        while True:
            look = self.next_look()
            patience = look.sooner(nap) if lookout.has_posted() else look
            if sleeps_until(patience):
                return True
            lookout.read()
            if look.expired or not patience.expired:
                return False
            nap = min(2.0 * nap, LOOK_EVERY)

    def look_up(self, src: int) -> None:
        """Look up while waiting for a rank outside of messages; raise if that rank has left."""
        self._look_up(src)
        failure = self._backend.failure_of(self.in_group(src))
        if failure is not None:
            raise failure.copy()

    def _look_up(self, src: int) -> None:
        try:
            self.look(src)
            if self.deadline.expired:
                raise self.too_late(src)
        except RankwireError as error:
            error.is_local = True  # unlike those of the mesh, which have world ranks
            raise
        self._looks += 1
        self._next_look = self.deadline.sooner(self._interval())

    def _interval(self) -> float:
        if 0 < self._looks < 3:
            return _LOOK_FOR_ANSWER
        times = self._backend.world_size // _MANY
        return LOOK_EVERY if times < 2 else min(LOOK_EVERY * times, max(LOOK_EVERY, _LONGEST_LOOK))

    def expect_into(self, src: int, step: int, out: Array) -> Arriving:
        """Post a receive of an array into ``out``, so that it can arrive while this rank sends.

        Only for messages that a rank sends after all ranks are known to be in the operation.
        """
        envelope = (self._backend.group, _CHANNEL, self.tag + step)
        into = Destination(out.view(np.uint8).data)
        expected = self._messages.expect(self._world[src], envelope, nbytes=out.nbytes, into=into)
        self.expected.append(expected)
        expected.post()
        return Arriving(src, expected, out)

    def take_in(self, arriving: Arriving) -> None:
        """Wait for a posted receive."""
        src, expected, out = arriving
        read = partial(copy_payload, view=out.view(np.uint8).data)
        patience = self.next_look()
        while True:
            try:
                expected.take(patience, read)
                break
            except DeadlineExceededError:
                pass  # not the context of an error that the look may raise
            self._look_up(src)
            patience = self._next_look
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
        """Receive a part of an array that has the size and dtype of ``like``."""
        return Piece(self.receive(src, step, like.nbytes), like.dtype)

    def settle(self) -> None:
        """Wait until the memory of all sent messages may change again."""
        for dst, offer in self.offers:
            while not offer.wait(self.next_look()):
                self._look_up(dst)
            offer.revoke()
        self.offers.clear()

    def revoke(self) -> None:
        """Withdraw messages that were not read, because the operation has failed."""
        slots = self.shared if self.hosts is None else self.hosts.slots
        if slots is not None:
            slots.retract(self)
        for expected in self.expected:
            expected.give_up()
        self.expected.clear()
        for _, offer in self.offers:
            offer.revoke()
        self.offers.clear()


def receive_array(x: Exchange, src: int, step: int, like: Array) -> Array:
    """Return a received array of the size and dtype of ``like``, in memory of its own."""
    payload = x.receive(src, step, like.nbytes)
    if not isinstance(payload, bytearray):
        payload = whole_of(payload)
    return np.frombuffer(payload, like.dtype)


def receive_pieces(x: Exchange, step: int, likes: Sequence[Array]) -> list[Piece | None]:
    """Receive a piece from every other rank, by rank; each has the size of its ``like``."""
    pieces: list[Piece | None] = [None] * x.size
    for src in reversed(x.others):
        pieces[src] = x.receive_piece(src, step, likes[src])
    return pieces


def scratch(dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return two blocks of memory of this thread, as arrays."""
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


@lru_cache(maxsize=1024)
def describe(kind: str, *details: Any) -> str:
    """Return a description such as ``all_reduce(sum, <f4, (1024,))``."""
    return f"{kind}({', '.join(map(str, details))})"


@lru_cache(maxsize=1024)
def describe_many(kind: str, *details: Any, each: tuple[tuple[str, tuple[int, ...]], ...]) -> str:
    """Return the description of an operation on many arrays, with runs of equal ones counted."""
    counted = ((words, len(list(same))) for words, same in groupby(f"{d} {s}" for d, s in each))
    text = ", ".join(words if count == 1 else f"{count} x {words}" for words, count in counted)
    if len(text) > _MOST_WORDS:
        text = f"{text[:_MOST_WORDS]}..., {len(each)} in all, digest {_digest(text):x}"
    return describe(kind, *details, f"[{text}]")


@lru_cache(maxsize=1024)
def _digest(description: str) -> int:
    digest = blake2b(description.encode(), digest_size=_DIGEST_NBYTES).digest()
    return int.from_bytes(digest, "little")


def tag_of(description: str, sequence: int, epoch: int = 0) -> int:
    """Return the tag of step 0; the tags of later steps follow it."""
    place = sequence * _SPREAD + epoch * _EPOCH_SPREAD
    return ((_digest(description) + place) & _DIGEST_MASK) << _STEP_BITS
