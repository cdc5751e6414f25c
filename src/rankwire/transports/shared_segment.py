"""The segment: shared memory in which the ranks of a group on one host exchange data in steps.

A small collective on one host consists of *steps*, the same on all ranks. In a step, a rank writes
its bytes into its *slot* and then *publishes* the step with the tag of the operation
(``collectives.exchange``); the other ranks wait for that and read the slot.

Every rank has two slots, for even and odd steps. A rank that writes step k overwrites step k - 2,
so it waits until all others have published k - 1. After most steps this is known already.

The memory, little-endian::

    ======  ==============================================================================
    offset  what
    ======  ==============================================================================
    192     a word that is free for the processes that share the memory
    256     a line of 128 bytes for each rank, which that rank alone writes:
            the last step that it has published; whether it sleeps until another one does;
            the tags of its last even and odd step; the bytes that are in their slots
    then    the slots, at multiples of 4096: of even steps by rank, of odd ones by rank
    ======  ==============================================================================

One store of eight bytes publishes a step, after its bytes, tag and size. This is correct on
processors that keep stores in order (x86); the owner uses segments nowhere else.

A waiting rank polls for a moment, then sleeps by futex(2), called by number because the C library
has no function for it. The thread that learns that a rank is lost calls ``disturb``.
"""

from __future__ import annotations

import ctypes
import math
from functools import partial

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.transports.shared_memory import SharedMemory, open_shared
from rankwire.transports.spin import Spin

_LINES = 256
_LINE_NBYTES = 128
_ALIGN = 4096
_LARGEST_SLOT = 2 << 20  # larger arrays are read from a rank's memory
# Indices of the words in a line, whose word 0 is the last published step. Of two words, the first
# is for even steps.
ASLEEP, _TAGS, _SIZES = 1, 2, 4
_RETRACTED = 0  # instead of a tag
SEGMENT_SIZES = range(_LINES, 1 << 34)


def segment_nbytes(slots_nbytes: int, size: int) -> int:
    """Return the size of a segment of ``size`` ranks; 0 if the slots would be too small."""
    slot = min(slots_nbytes // (2 * size) // _ALIGN * _ALIGN, _LARGEST_SLOT)
    return _slots_at(size) + 2 * size * slot if slot else 0


def is_segment_of(size: int, nbytes: int) -> bool:
    """Return whether memory of ``nbytes`` can be the segment of ``size`` ranks."""
    return segment_nbytes(nbytes - _slots_at(size), size) == nbytes


def _slots_at(size: int) -> int:
    return (_LINES + size * _LINE_NBYTES + _ALIGN - 1) // _ALIGN * _ALIGN


class Segment:
    """One rank's view of the memory, zeroed before any rank began. One thread at a time.

    Attributes:
        words: The lines, for code that cannot afford a call.
        lines: The index in ``words`` where the line of each rank begins.
        others: The same for all ranks but this one.
        step: The last step that this rank has begun.
        slots: The slots of all ranks for even steps, and for odd steps.
    """

    def __init__(self, memory: memoryview, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.words = memory[: _slots_at(size)].cast("Q")
        self.lines = [(_LINES + at * _LINE_NBYTES) // 8 for at in range(size)]
        self._mine = self.lines[rank]
        self.others = [line for line in self.lines if line != self._mine]
        start = _slots_at(size)
        self.slot_nbytes = nbytes = (len(memory) - start) // (2 * size)
        slots = [memory[start + at * nbytes :][:nbytes] for at in range(2 * size)]
        self.slots = slots[:size], slots[size:]
        self.step = 0
        self._behind = False  # whether others may not have published the last step yet

    def begin(self) -> bool:
        """Begin the next step; return False if all others must first publish the step before."""
        self.step += 1
        return not self._behind

    def publish(self, tag: int, nbytes: int = 0) -> None:
        """Publish that this rank's slot is written."""
        words, mine, odd = self.words, self._mine, self.step & 1
        words[mine + _TAGS + odd] = tag
        words[mine + _SIZES + odd] = nbytes
        words[mine] = self.step
        self._behind = True

    def retract(self, tag: int) -> None:
        """Retract the step that this rank has published last, if it has this tag."""
        at = self._mine + _TAGS + (self.step & 1)
        if self.words[at] == tag:  # else it belongs to an earlier operation, which succeeded
            self.words[at] = _RETRACTED

    def all_came(self, tag: int) -> bool:
        """Return whether all other ranks have published this step with this tag."""
        words, step = self.words, self.step
        at_tag = _TAGS + (step & 1)
        for line in self.others:
            if words[line] < step or words[line + at_tag] != tag:
                return False
        self._behind = False
        return True

    def has_come(self, rank: int, step: int) -> bool:
        """Return whether a rank has published a step, with any tag."""
        return self.words[self.lines[rank]] >= step

    def came(self, rank: int, tag: int) -> bool:
        """Return whether a rank has published this step with this tag."""
        return self.has_come(rank, self.step) and self.tag_of(rank) == tag

    def tag_of(self, rank: int) -> int:
        """Return the tag of a rank that has published this step."""
        return self.words[self.lines[rank] + _TAGS + (self.step & 1)]

    def nbytes_of(self, rank: int) -> int:
        """Return the size of the data of a rank that has published this step."""
        return self.words[self.lines[rank] + _SIZES + (self.step & 1)]


_FUTEX = 202  # of the system call, on x86-64
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF

_library = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def sleep_while(address: int, value: int, seconds: float) -> None:
    """Sleep while the four bytes at an aligned address have a value, or until woken or a signal."""
    fraction, whole = math.modf(seconds)
    limit = _Timespec(int(whole), int(fraction * 1e9))
    _library.syscall(
        _FUTEX, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(value), ctypes.byref(limit), 0, 0
    )


def wake_all(address: int) -> None:
    """Wake all threads, of any process, that sleep at this address."""
    _library.syscall(_FUTEX, ctypes.c_void_p(address), _WAKE, _ALL, 0, 0, 0)


# For ranks that share cores: long enough for the others to run. An all_reduce of 8 B takes 97 us
# with 100 us of this, 51 with 400, 65 with 1500 (4 ranks on 2 cores; 318, 318, 287 with 8; 981,
# 751, 632 with 16).
_YIELDING = 400e-6


class SharedSegment(Segment):
    """One rank's end of a segment. One thread waits at a time; ``disturb`` is safe from any.

    ``spin`` is how many seconds a rank polls before it sleeps; 0 if ranks share cores. ``made`` is
    the memory, if this process made it.
    """

    def __init__(
        self,
        memory: memoryview,
        rank: int,
        size: int,
        *,
        spin: float,
        clock: Clock,
        made: SharedMemory | None = None,
    ) -> None:
        super().__init__(memory, rank, size)
        self._made = made
        self._spin = Spin(spin or _YIELDING, clock, yields=spin <= 0.0)
        self._asks = [partial(self.words.__getitem__, line) for line in self.lines]
        self._is_disturbed = False
        self._sleeps_at: int | None = None
        self._barrier = runtime.Lock()
        start = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
        self._addresses = [start + 8 * line for line in self.lines]

    @classmethod
    def make(cls, nbytes: int, rank: int, size: int, *, spin: float, clock: Clock) -> SharedSegment:
        """Make a segment of ``nbytes`` for all slots; ``OSError`` if too few, or no memory."""
        whole_nbytes = segment_nbytes(nbytes, size)
        if not whole_nbytes:
            raise OSError(f"{nbytes} bytes are too little for {size} ranks")
        made = SharedMemory(whole_nbytes)
        return cls(made.view, rank, size, spin=spin, clock=clock, made=made)

    @classmethod
    def open(
        cls, pid: int, offer: bytes, rank: int, size: int, *, spin: float, clock: Clock
    ) -> SharedSegment:
        """Open another process's segment; ``OSError`` if forbidden, ``ValueError`` if invalid."""
        memory = open_shared(pid, offer, SEGMENT_SIZES)
        if not is_segment_of(size, len(memory)):
            raise ValueError(f"{len(memory)} bytes are no segment for {size} ranks")
        return cls(memory, rank, size, spin=spin, clock=clock)

    @property
    def offer(self) -> bytes:
        """What others need in order to open it, until ``keep_private``."""
        return self._made.offer if self._made is not None else b""

    def keep_private(self) -> None:
        """Prevent further opening. The memory exists as long as it is used."""
        if self._made is not None:
            self._made.close()

    def looks_until(self, step: int, rank: int) -> bool:
        """Poll for a while whether a rank has published a step."""
        words, line = self.words, self.lines[rank]
        while (published := words[line]) < step:
            if self._spin.finds(self._asks[rank], published) is None:
                return False
        return True

    def sleeps_until(self, step: int, rank: int, deadline: Deadline) -> bool:
        """Sleep until a rank has published a step; False at the deadline, or when disturbed."""
        words, line, asleep = self.words, self.lines[rank], self.lines[self.rank] + ASLEEP
        try:
            words[asleep] = 1
            while (published := words[line]) < step:
                left = deadline.sleep_limit()
                if left <= 0.0 or self._is_disturbed:
                    self._is_disturbed = False
                    return False
                # The kernel checks the word once more, after this rank is seen to be asleep.
                self._sleeps_at = self._addresses[rank]
                sleep_while(self._sleeps_at, published & 0xFFFFFFFF, left)
        finally:
            self._sleeps_at = None
            words[asleep] = 0
        return True

    def wake_others(self) -> None:
        """Wake the ranks that sleep until this one publishes. After every ``publish``."""
        words = self.words
        with self._barrier:  # a memory barrier: what was published is seen before the check
            pass
        for line in self.others:
            if words[line + ASLEEP]:
                wake_all(self._addresses[self.rank])
                return

    def disturb(self) -> None:
        """Make a waiting rank check whether it still has to wait."""
        self._is_disturbed = True
        address = self._sleeps_at
        if address is not None:
            wake_all(address)
