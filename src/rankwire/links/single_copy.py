"""Single copy: a process of this host reads another one's memory (``process_vm_readv``, Linux).

The kernel copies straight from the lender's arrays into the borrower's destination: 64 MiB in 6 ms
where a Unix socket takes 20 to 30. It allows that between processes of one user, unless told
otherwise (Yama's ``ptrace_scope``, a container's seccomp filter, separate pid namespaces);
``probe`` asks.

Lender: ``lend`` returns a ``Lent`` and the description to send; ``settle`` waits for the receipt,
or revokes. Borrower: a ``Borrowed`` parcel. The protocol between them is in ``wire.loans``.

The words that peers read and write live in an *arena* that is never freed: a late receipt must not
land in memory that means something else by now. A pair of words is used again only after its
receipt has come, so a receipt that comes late cannot hide another one's.

Locks: ``_Arena._lock`` guards the free pairs; the locks of ``Lent`` and ``Borrowed`` their state.
Only the arena's are taken under a ``Lent``'s.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import starmap
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError, PeerLostError, ProtocolError, RankwireError
from rankwire.fork import guard
from rankwire.wire.frames import Buffer, allocate
from rankwire.wire.loans import (
    DECIDING,
    MAX_PIECES,
    REFUSED,
    REVOKED,
    Loan,
    LoanRefusedError,
    LoanRevokedError,
    Parcel,
    pack_loan,
)

if TYPE_CHECKING:
    from rankwire.links.tls import Stream

__all__ = ["Borrowed", "Lent", "Meanwhile", "lend", "probe"]

_WORD_NBYTES = 8
_PAIR_NBYTES = 2 * _WORD_NBYTES
_ARENA_NBYTES = 64 << 10
_NONE = 0

# How a lender waits: it looks all the time while the receipt may come any moment, then in naps of
# an eighth of what it has waited, so that it is late by that much at most.
_LOOK_FOR = 200e-6
_SHORTEST_NAP, _LONGEST_NAP = 50e-6, 1e-3
# So long the peer may just be copying; then the lender looks for what others have sent. What it
# fetches for later is copied once more, so it should not be in a hurry.
_MEANWHILE_AFTER = 1e-3
_SLOW_COPY = 4e9  # bytes a second, half of what was measured
_LOOK_FOR_END_EVERY = 0.05
# A lender decides within microseconds; if it is stopped in between, its process is as good as gone.
_DECISION_PATIENCE = 1.0


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Meanwhile(Protocol):
    """What a thread does while its peer does not take what it sends.

    It reads, so that ranks which all send first do not wait for each other.
    """

    def watch(self) -> list[int]:
        """Return the descriptors on which something to read may come."""

    def read(self) -> None:
        """Read what is there, without waiting. Must not send, nor call anything that may."""


# -- what the kernel allows ------------------------------------------------------------------------


def _system_calls() -> tuple[Callable[..., int], Callable[..., int]] | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None, use_errno=True)
    calls = []
    for name in ("process_vm_readv", "process_vm_writev"):
        function = getattr(library, name, None)
        if function is None:
            return None
        function.restype = ctypes.c_ssize_t
        function.argtypes = [ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong]
        calls.append(function)
    return calls[0], calls[1]


_CALLS = _system_calls()


def probe(sock: Stream) -> tuple[int, str]:
    """Ask whether this process may read the memory of the one at the other end of a Unix socket.

    The process id is the kernel's word, not the peer's.

    Returns:
        The peer's process id, or 0 and why not.
    """
    if _CALLS is None:
        return 0, f"{sys.platform} has no process_vm_readv"
    if sock.family != socket.AF_UNIX:
        return 0, "it is not connected by a Unix socket"
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid = int(struct.unpack("3i", credentials)[0])
    if pid <= 0:
        return 0, "its process is not visible here: it is in another pid namespace"
    # Permission is checked before the address: a bad address is the good answer.
    for call in _CALLS:
        number = _transfer(call, pid, [(ctypes.addressof(_probe_word), 8)], [(8, 8)])[1]
        if number != errno.EFAULT:
            return 0, f"the kernel refuses to copy memory of process {pid}: {os.strerror(number)}"
    return pid, ""


_probe_word = ctypes.c_uint64()


def _transfer(
    call: Callable[..., int],
    pid: int,
    here: Sequence[tuple[int, int]],
    there: Sequence[tuple[int, int]],
) -> tuple[int, int]:
    """Copy between two processes; return the bytes copied, or -1 and the error number."""
    local = (_Vector * len(here))(*(_Vector(*piece) for piece in here))
    remote = (_Vector * len(there))(*(_Vector(*piece) for piece in there))
    count = call(pid, local, len(here), remote, len(there), 0)
    return count, ctypes.get_errno() if count < 0 else 0


# -- the lender ------------------------------------------------------------------------------------


class _Arena:
    """Pairs of words, a guard and a receipt each, at addresses that stay for ever."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.fence = threading.Lock()
        self._free: list[tuple[memoryview, int]] = []
        self._pages: list[mmap.mmap] = []  # also those whose pairs are all taken or spent
        self.numbers = itertools.count(1)
        guard(self)

    def take(self) -> tuple[memoryview, int]:
        """Return a pair and its address."""
        with self._lock:
            if not self._free:
                page = mmap.mmap(-1, _ARENA_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                words = memoryview(page).cast("Q")
                base = _address_of(page)
                # In one call of a C function: thousands of steps in which no interrupt falls.
                pieces = map(slice, range(0, len(words), 2), range(2, len(words) + 2, 2))
                pairs = map(words.__getitem__, pieces)
                addresses = range(base, base + _ARENA_NBYTES, _PAIR_NBYTES)
                self._pages.append(page)  # before: it must not end with the last of its pairs
                self._free.extend(zip(pairs, addresses, strict=True))
            return self._free.pop()

    def forsake(self) -> None:
        """See ``Forkable``. What the parent has lent is its own business."""
        self._lock = threading.Lock()
        self.fence = threading.Lock()
        self._free = []
        guard(self)  # a child may have children

    def put(self, pair: tuple[memoryview, int]) -> None:
        """Take a pair back whose receipt has come."""
        with self._lock:
            self._free.append(pair)


_arena = _Arena()


def lend(buffers: Sequence[Buffer], nbytes: int) -> tuple[Lent, bytes] | None:
    """Lend memory; None if it is in too many pieces.

    The caller sends the description and then calls ``settle``, or ``revoke`` if it cannot.

    Returns:
        The loan, which keeps the memory alive, and its description.
    """
    views = [memoryview(buffer) for buffer in buffers]
    pieces = [(_address_of(view), view.nbytes) for view in views if view.nbytes]
    if not 1 <= len(pieces) <= MAX_PIECES:
        return None
    lent = Lent(buffers, nbytes)
    description = pack_loan(lent.number, lent.address, lent.address + 8, pieces, nbytes)
    return lent, description


class Lent:
    """Memory that a peer may read until it has said so, or until this end revokes."""

    __slots__ = ("_buffers", "_lock", "_nbytes", "_pair", "_was_read", "address", "number")

    def __init__(self, buffers: Sequence[Buffer], nbytes: int) -> None:
        self._buffers: Sequence[Buffer] | None = buffers
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._was_read = False
        self.number = next(_arena.numbers)
        self._pair, self.address = _arena.take()
        self._pair[1] = _NONE
        self._pair[0] = self.number

    @property
    def is_settled(self) -> bool:
        """Whether the receipt has come."""
        return self._pair[1] == self.number

    def revoke(self) -> bool:
        """End the loan now; return whether it was read after all. Idempotent.

        If not, the peer can tell from the guard, whenever it looks.
        """
        try:
            return self._end()
        except BaseException:
            self._end()  # interrupted: a peer that finds it undecided would wait
            raise

    def _end(self) -> bool:
        """Decide whether it was read; may be interrupted and repeated."""
        with self._lock:
            if self._buffers is not None:
                self._pair[0] = self.number | DECIDING
                # The lock is also the fence between the two words: either we see the receipt here,
                # or the peer sees the mark.
                with _arena.fence:
                    self._was_read = self._was_read or self.is_settled
                self._pair[0] = self.number if self._was_read else self.number | REVOKED
                self._buffers = None
                if self._was_read:
                    _arena.put((self._pair, self.address))
                # Else the peer may be about to write its receipt: these words are not used again.
            return self._was_read

    def settle(
        self,
        deadline: Deadline,
        peer: int,
        look_for_end: Callable[[], None],
        meanwhile: Meanwhile | None,
    ) -> None:
        """Wait for the receipt; on any other end the loan is revoked.

        Raises:
            DeadlineExceededError: It was not read in time; the message was not sent.
        """
        try:
            self.wait(deadline, look_for_end, meanwhile)
        except LoanRefusedError:
            raise
        except RankwireError:
            if not self.revoke():  # else it was read, and then its peer went
                raise
        finally:
            was_read = self.revoke()
        if not was_read:
            raise DeadlineExceededError(
                deadline.limit, waiting_for=[peer], detail="it does not take the message"
            )

    def wait(
        self, deadline: Deadline, look_for_end: Callable[[], None], meanwhile: Meanwhile | None
    ) -> bool:
        """Wait for the receipt; False if the deadline passes first, and then the loan stands.

        Args:
            deadline: How long.
            look_for_end: Raises if the connection has ended.
            meanwhile: What to read while waiting.

        Raises:
            LoanRefusedError: The peer cannot read it.
        """
        pair, number = self._pair, self.number
        patience = _MEANWHILE_AFTER + self._nbytes / _SLOW_COPY
        start = perf_counter()
        next_look = 0.0
        while pair[1] != number:
            if pair[1] == number | REFUSED:
                raise LoanRefusedError("the peer cannot read this memory")
            waited = perf_counter() - start
            if waited < _LOOK_FOR:
                os.sched_yield()  # the peer may have been put on this core, because we woke it up
                continue
            if waited >= next_look:
                look_for_end()
                next_look = waited + _LOOK_FOR_END_EVERY
            if deadline.expired or self._buffers is None:
                return False
            if meanwhile is not None and waited > patience:
                _wait_readable(meanwhile.watch(), _LONGEST_NAP)
                if pair[1] != number:  # else what has come is best left to whoever wants it
                    meanwhile.read()
            else:
                sleep(max(_SHORTEST_NAP, min(waited / 8, _LONGEST_NAP)))
        return True


def _wait_readable(descriptors: list[int], seconds: float) -> None:
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    poller.poll(int(seconds * 1000))


# -- the borrower ----------------------------------------------------------------------------------


class Borrowed(Parcel):
    """A payload in the memory of another process.

    Args:
        loan: Where it lies.
        pid: The process.
        peer: Its rank, for errors.
        fail: Called with the cause if the process is gone; returns what to raise.
    """

    __slots__ = (
        "_fail",
        "_is_settled",
        "_loan",
        "_lock",
        "_memory",
        "_peer",
        "_pid",
        "_receipt",
        "_revoked",
    )

    def __init__(
        self, loan: Loan, pid: int, peer: int, fail: Callable[[RankwireError], RankwireError]
    ) -> None:
        self._loan = loan
        self._pid = pid
        self._peer = peer
        self._fail = fail
        self._lock = threading.Lock()
        self._revoked = False
        # Each step is noted before the next, so that after an interrupt it is not taken twice.
        self._memory: bytearray | None = None  # all of it, once it was read
        self._receipt: list[int] = []  # what writing the receipt returned
        self._is_settled = False

    def __len__(self) -> int:
        return self._loan.nbytes

    @property
    def is_revoked(self) -> bool:
        """Whether the sender has taken it back by now."""
        with self._lock:
            return self._revoked or self._guard() == self._loan.number | REVOKED

    def read_into(self, start: int, view: memoryview) -> None:
        """See ``Parcel``."""
        if len(view):
            with self._lock:
                if self._memory is not None:  # read as a whole by a thread that was interrupted
                    view[:] = memoryview(self._memory)[start : start + len(view)]
                else:
                    self._pull(start, view)

    def whole(self) -> bytearray:
        """See ``Parcel``."""
        with self._lock:
            if self._memory is None:
                try:
                    memory = allocate(self._loan.nbytes)
                except MemoryError as error:
                    raise ProtocolError(f"no memory for a message of {len(self)} bytes") from error
                self._pull(0, memoryview(memory))
                self._memory = memory
            self._give_back()
            return self._memory

    def give_back(self) -> None:
        """See ``Parcel``."""
        with self._lock:
            self._give_back()

    def _pull(self, start: int, view: memoryview) -> None:
        if self._revoked:
            raise LoanRevokedError("the sender took the message back")
        if self._receipt:
            raise ProtocolError("this message has been given back")  # a mistake of ours
        assert _CALLS is not None
        guard = ctypes.c_uint64(_NONE)
        address, wanted = _address_of(view), len(view)
        done, number = 0, 0
        while done < wanted:
            local = [(address + done, wanted - done), (ctypes.addressof(guard), _WORD_NBYTES)]
            remote = _cut(self._loan.pieces, start + done, wanted - done)
            remote.append((self._loan.guard, _WORD_NBYTES))
            count, number = _transfer(_CALLS[0], self._pid, local, remote)
            if count <= 0:
                break
            done += count  # with the last part comes the guard, and more than was wanted
        if done == wanted:
            guard.value = self._guard() or _NONE
        if done < wanted or guard.value != self._loan.number:
            raise self._why_not(number)

    def _guard(self) -> int | None:
        """Return what the guard holds; None if the process is gone."""
        assert _CALLS is not None
        guard = ctypes.c_uint64(_NONE)
        local = [(ctypes.addressof(guard), _WORD_NBYTES)]
        count, _ = _transfer(_CALLS[0], self._pid, local, [(self._loan.guard, _WORD_NBYTES)])
        return guard.value if count == _WORD_NBYTES else None

    def _why_not(self, number: int) -> RankwireError:
        """The memory could not be read: it was taken back, or refused, or its owner is gone."""
        guard = self._guard()
        if guard is None:
            reason = os.strerror(number) if number else "only a part of it is there"
            return self._fail(
                PeerLostError(self._peer, f"the memory of its message cannot be read: {reason}")
            )
        if guard == self._loan.number:
            self._write_receipt(self._loan.number | REFUSED)
        self._revoked = True
        return LoanRevokedError("the sender took the message back, or sends it in another way")

    def _give_back(self) -> None:
        """Write the receipt; raise if the sender had taken the loan back by then."""
        if self._is_settled or self._revoked:
            return
        if not self._receipt:
            self._write_receipt(self._loan.number)
        patience = Deadline(_DECISION_PATIENCE)
        guard = self._guard()
        while guard == self._loan.number | DECIDING and not patience.expired:
            sleep(_SHORTEST_NAP)
            guard = self._guard()
        if guard is not None and guard in (
            self._loan.number | REVOKED,
            self._loan.number | DECIDING,
        ):
            self._revoked = True
            raise LoanRevokedError("the sender took the message back")
        self._is_settled = True

    def _write_receipt(self, value: int) -> None:
        """Write it, and note that in the same step: a second one might be another loan's."""
        assert _CALLS is not None
        word = ctypes.c_uint64(value)
        local = (_Vector * 1)(_Vector(ctypes.addressof(word), _WORD_NBYTES))
        remote = (_Vector * 1)(_Vector(self._loan.receipt, _WORD_NBYTES))
        # If it cannot be written, its owner is gone and does not wait.
        arguments = ((self._pid, local, 1, remote, 1, 0),)
        self._receipt.extend(starmap(_CALLS[1], arguments))

    def __repr__(self) -> str:
        state = "revoked" if self._revoked else "given back" if self._receipt else "lent"
        return f"<Borrowed {len(self)} bytes of rank {self._peer}, {state}>"


def _cut(pieces: Sequence[tuple[int, int]], start: int, nbytes: int) -> list[tuple[int, int]]:
    """Return the pieces that hold ``nbytes`` from ``start`` on."""
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


def _address_of(buffer: Buffer | mmap.mmap) -> int:
    """Return where a buffer that is not empty begins, writable or not."""
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])
