"""Reads a payload from the memory of another process of this host.

The receiving thread copies it directly to its destination; for a posted receive, the thread that
reads the connection does (``bring_to``). A receipt then releases the sender. The other end is
``lender``, the protocol ``wire.loans``. Lock: that of a ``Borrowed`` guards its state.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import PeerLostError, ProtocolError, RankwireError
from rankwire.interrupts import call_and_note
from rankwire.links.memory import READ, WORD_NBYTES, WRITE, Vector, address_of, allocate, transfer
from rankwire.wire.array_messages import HEAD_NBYTES
from rankwire.wire.frames import UnreadPayload
from rankwire.wire.loans import DECIDING, REFUSED, REVOKED, Loan
from rankwire.wire.receive import Destination, MessageWithdrawnError, Placed

_NONE = 0
# A lender decides within microseconds; if it stops in between, its process has most likely failed.
_DECISION_PATIENCE = 1.0
_NAP = 50e-6  # between two looks at its decision


@dataclass(eq=False, repr=False)
class Borrowed(UnreadPayload):
    """A payload in the memory of another process.

    Each step is noted before the next, so that an interrupted step is not repeated. ``place`` is
    the memory of a posted receive to which the payload is or was copied. ``_fail`` is called with
    the cause if that process is gone, and returns the error to raise.
    """

    _loan: Loan
    _pid: int
    _peer: int
    _clock: Clock
    _fail: Callable[[RankwireError], RankwireError]
    translate: Callable[[RankwireError], None] | None = None
    place: Destination | None = None

    def __post_init__(self) -> None:
        self._lock = runtime.Lock()
        self._revoked = False
        self._memory: bytearray | None = None  # all of it, once it was read
        self._beginning = bytearray()
        self._is_in_place = False
        self._receipt: list[int] = []  # what writing the receipt returned
        self._is_settled = False

    def __len__(self) -> int:
        return self._loan.nbytes

    @property
    def is_revoked(self) -> bool:
        """Whether the sender has withdrawn it."""
        with self._lock:
            return self._revoked or self._guard() == self._loan.number | REVOKED

    def read_into(self, start: int, view: memoryview) -> None:
        """Copy a part of the payload into a view, from the sender's memory."""
        if len(view):
            with self._lock:
                self._pull(start, view)

    def whole(self) -> bytearray:
        """Return a copy of the payload, and release the sender."""
        with self._lock:
            if self._memory is None:
                memory = self._allocate()
                self._pull(0, memoryview(memory))
                self._memory = memory
            self._release()
            return self._memory

    def _allocate(self) -> bytearray:
        try:
            return allocate(self._loan.nbytes)
        except MemoryError as error:
            raise ProtocolError(f"no memory for a message of {len(self)} bytes") from error

    def beginning(self) -> memoryview:
        """Return the first bytes, with which a destination decides whether it takes the payload."""
        with self._lock:
            if not self._beginning:
                beginning = bytearray(min(HEAD_NBYTES, len(self)))
                self._pull(0, memoryview(beginning))
                self._beginning = beginning
            return memoryview(self._beginning)

    def bring_to(self, place: Destination) -> Placed:
        """Copy the payload without its head to a destination, and release the sender.

        Safe to repeat. Call ``beginning`` first. Nothing else may use the destination meanwhile.
        """
        with self._lock:
            start = len(self) - len(place.view)
            if self.place is not place:
                self.place, self._is_in_place = place, False
            if not self._is_in_place:
                self._pull(start, place.view)
                self._is_in_place = True
            self._release()
            return Placed(bytes(self._beginning[:start]), place)

    def vacate(self) -> None:
        """Stop using the memory of a receive; move out what the sender no longer holds."""
        with self._lock:
            place = self.place
            if place is not None and self._is_in_place and self._memory is None and self._receipt:
                memory = self._allocate()
                start = len(memory) - len(place.view)
                memory[:start] = self._beginning[:start]
                memory[start:] = place.view
                self._memory = memory
            self.place, self._is_in_place = None, False

    def release(self) -> None:
        """Write the receipt: the sender may change its memory again."""
        with self._lock:
            self._release()

    def _pull(self, start: int, view: memoryview) -> None:
        if self._memory is not None:  # an interrupted thread has read all of it
            view[:] = memoryview(self._memory)[start : start + len(view)]
            return
        if self._revoked:
            raise MessageWithdrawnError("the sender took the message back")
        if self._receipt:
            raise ProtocolError("this message has been given back")  # an error in this module
        guard = ctypes.c_uint64(_NONE)
        address, wanted = address_of(view), len(view)
        done, number = 0, 0
        while done < wanted:
            local = [(address + done, wanted - done), (ctypes.addressof(guard), WORD_NBYTES)]
            remote = _cut(self._loan.pieces, start + done, wanted - done)
            remote.append((self._loan.guard, WORD_NBYTES))
            count, number = transfer(READ, self._pid, local, remote)
            if count <= 0:
                break
            done += count  # the last part brings the guard, and more bytes than were wanted
        if done == wanted:
            guard.value = self._guard() or _NONE
        if done < wanted or guard.value != self._loan.number:
            raise self._why_not(number)

    def _guard(self) -> int | None:
        guard = ctypes.c_uint64(_NONE)
        local = [(ctypes.addressof(guard), WORD_NBYTES)]
        count, _ = transfer(READ, self._pid, local, [(self._loan.guard, WORD_NBYTES)])
        return guard.value if count == WORD_NBYTES else None

    def _why_not(self, number: int) -> RankwireError:
        guard = self._guard()
        if guard is None:
            reason = os.strerror(number) if number else "only a part of it is there"
            error = self._fail(
                PeerLostError(self._peer, f"the memory of its message cannot be read: {reason}")
            )
            if self.translate is not None:
                self.translate(error)
            return error
        if guard == self._loan.number:
            self._write_receipt(self._loan.number | REFUSED)
        self._revoked = True
        return MessageWithdrawnError("the sender took the message back, or sends it in another way")

    def _release(self) -> None:
        """Write the receipt; raise if the sender had withdrawn the loan by then."""
        if self._is_settled or self._revoked:
            return
        if not self._receipt:
            self._write_receipt(self._loan.number)
        patience = Deadline(_DECISION_PATIENCE, self._clock)
        guard = self._guard()
        while guard == self._loan.number | DECIDING and not patience.expired:
            self._clock.sleep(_NAP)
            guard = self._guard()
        if guard in (self._loan.number | REVOKED, self._loan.number | DECIDING):
            self._revoked = True
            raise MessageWithdrawnError("the sender took the message back")
        self._is_settled = True

    def _write_receipt(self, value: int) -> None:
        """Write and note it in one step: a second receipt could overwrite another loan's word."""
        word = ctypes.c_uint64(value)
        local = (Vector * 1)(Vector(ctypes.addressof(word), WORD_NBYTES))
        remote = (Vector * 1)(Vector(self._loan.receipt, WORD_NBYTES))
        # If this fails, the lender is gone and does not wait.
        call_and_note(self._receipt, WRITE, self._pid, local, 1, remote, 1, 0)

    def __repr__(self) -> str:
        state = "revoked" if self._revoked else "given back" if self._receipt else "lent"
        return f"<Borrowed {len(self)} bytes of rank {self._peer}, {state}>"


def _cut(pieces: Sequence[tuple[int, int]], start: int, nbytes: int) -> list[tuple[int, int]]:
    cut = []
    for address, length in pieces:
        if start >= length:
            start -= length
            continue
        taken = min(length - start, nbytes)
        cut.append((address + start, taken))
        nbytes -= taken
        start = 0
        if not nbytes:
            break
    return cut
