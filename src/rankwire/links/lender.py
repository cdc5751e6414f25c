"""Lends memory of this process to a process of this host, and waits until it was read.

The other end is ``borrower``, the protocol ``wire.loans``. The kernel copies from the lender's
arrays into the borrower's destination: 64 MiB in 6 ms where a Unix socket takes 20 to 30.

The words that peers read and write are in an *arena* that is never freed, and are reused only after
their receipt: a late receipt must not overwrite other data.

Locks: ``_Arena._lock`` guards the free pairs, that of a ``Lent`` its state. Only the arena's are
taken under a ``Lent``'s.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from rankwire import runtime
from rankwire.deadline import Deadline
from rankwire.fork import guard
from rankwire.links.memory import WORD_NBYTES, address_of
from rankwire.transports.poller import wait_readable
from rankwire.transports.spin import Spin
from rankwire.wire.frames import Buffer
from rankwire.wire.loans import DECIDING, MAX_PIECES, REFUSED, REVOKED, LoanRefusedError, pack_loan

if TYPE_CHECKING:
    from rankwire.transports.byte_stream import ByteStream

_PAIR_NBYTES = 2 * WORD_NBYTES
_ARENA_NBYTES = 64 << 10
_NONE = 0

# A lender polls first, then naps for an eighth of its wait so far, which limits the delay.
_LOOK_FOR = 200e-6
_SHORTEST_NAP, _LONGEST_NAP = 50e-6, 1e-3
# The peer may take so long to copy; then the lender reads other ranks' messages, which may cost
# them one more copy.
_MEANWHILE_AFTER = 1e-3
_SLOW_COPY = 4e9  # bytes a second, half of what was measured
_LOOK_FOR_END_EVERY = 0.05


class Meanwhile(Protocol):
    """Reads while a thread's peer takes nothing, so that ranks that all send make progress."""

    def watch(self) -> Sequence[ByteStream]:
        """Return the streams to wait for."""

    def read(self) -> bool:
        """Read what has arrived, without waiting; False if some of it had to be left unread.

        It may send, but not to the peer that the thread waits for: that fails at once.
        """


class _Arena:
    """Pairs of words, a guard and a receipt each, at addresses that never change."""

    def __init__(self) -> None:
        self._lock = runtime.Lock()
        self.fence = runtime.Lock()
        self._free: list[tuple[memoryview, int]] = []
        self._pages: list[mmap.mmap] = []  # also those whose pairs are all taken or spent
        self.numbers = itertools.count(1)
        guard(self)

    def take(self) -> tuple[memoryview, int]:
        with self._lock:
            if not self._free:
                page = mmap.mmap(-1, _ARENA_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                words = memoryview(page).cast("Q")
                base = address_of(page)
                # In one call of a C function: no interrupt stops these thousands of steps.
                pieces = map(slice, range(0, len(words), 2), range(2, len(words) + 2, 2))
                pairs = map(words.__getitem__, pieces)
                addresses = range(base, base + _ARENA_NBYTES, _PAIR_NBYTES)
                self._pages.append(page)  # first: it must outlive its last pair
                self._free.extend(zip(pairs, addresses, strict=True))
            return self._free.pop()

    def close_in_child(self) -> None:
        """Start empty in a forked child: the parent keeps its loans."""
        self._lock = runtime.Lock()
        self.fence = runtime.Lock()
        self._free = []
        guard(self)  # a child may have children

    def put(self, pair: tuple[memoryview, int]) -> None:
        with self._lock:
            self._free.append(pair)


_arena = _Arena()


def lend(buffers: Sequence[Buffer], nbytes: int) -> tuple[Lent, bytes] | None:
    """Return a loan that holds the buffers, and its description; None for too many pieces."""
    views = [memoryview(buffer) for buffer in buffers]
    pieces = [(address_of(view), view.nbytes) for view in views if view.nbytes]
    if not 1 <= len(pieces) <= MAX_PIECES:
        return None
    lent = Lent(buffers, nbytes)
    description = pack_loan(lent.number, lent.address, lent.address + 8, pieces, nbytes)
    return lent, description


class Lent:
    """Memory that a peer may read until it writes a receipt (``was_read``) or this end revokes."""

    __slots__ = ("_buffers", "_lock", "_nbytes", "_pair", "address", "number", "was_read")

    def __init__(self, buffers: Sequence[Buffer], nbytes: int) -> None:
        self._buffers: Sequence[Buffer] | None = buffers
        self._nbytes = nbytes
        self._lock = runtime.Lock()
        self.was_read = False
        self.number = next(_arena.numbers)
        self._pair, self.address = _arena.take()
        self._pair[1] = _NONE
        self._pair[0] = self.number

    @property
    def is_settled(self) -> bool:
        """Whether the receipt has arrived."""
        return self._pair[1] == self.number

    @property
    def is_over(self) -> bool:
        """Whether the receipt has arrived or this end revoked."""
        return self.is_settled or self._buffers is None

    def revoke(self) -> bool:
        """End the loan now; return whether the peer had read it. Idempotent."""
        try:
            return self._end()
        except BaseException:
            self._end()  # interrupted: a peer that finds it undecided would wait
            raise

    def _end(self) -> bool:
        with self._lock:
            if self._buffers is not None:
                self._pair[0] = self.number | DECIDING
                # The lock is also the fence between the two words: either this end sees the
                # receipt, or the peer sees the mark.
                with _arena.fence:
                    self.was_read = self.was_read or self.is_settled
                self._pair[0] = self.number if self.was_read else self.number | REVOKED
                self._buffers = None
                if self.was_read:
                    _arena.put((self._pair, self.address))
                # Else the peer may be about to write its receipt: these words are not reused.
            return self.was_read

    def wait(
        self, deadline: Deadline, look_for_end: Callable[[], None], meanwhile: Meanwhile | None
    ) -> bool:
        """Wait for the receipt; False at the deadline, and then the loan remains.

        ``look_for_end`` raises if the connection has ended; the thread reads ``meanwhile``. Raises
        ``LoanRefusedError`` if the peer cannot read the memory.
        """
        pair, number, now = self._pair, self.number, deadline.clock.now
        patience = _MEANWHILE_AFTER + self._nbytes / _SLOW_COPY
        start = now()
        next_look = 0.0
        # It yields: the kernel may have put the peer on this core, because this thread woke it.
        Spin(_LOOK_FOR, deadline.clock, yields=True).finds(partial(pair.__getitem__, 1), _NONE)
        while pair[1] != number:
            if pair[1] == number | REFUSED:
                raise LoanRefusedError("the peer cannot read this memory")
            waited = now() - start
            if waited >= next_look:
                look_for_end()
                next_look = waited + _LOOK_FOR_END_EVERY
            if deadline.expired or self._buffers is None:
                return False
            if meanwhile is not None and waited > patience:
                wait_readable(meanwhile.watch(), _LONGEST_NAP)
                if pair[1] != number:  # else the receiving thread should read what has arrived
                    meanwhile.read()
            else:
                deadline.clock.sleep(max(_SHORTEST_NAP, min(waited / 8, _LONGEST_NAP)))
        return True
