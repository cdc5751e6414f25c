"""A segment in memory that processes share, and how a rank waits in it.

A rank polls the segment for a moment, because most waits are short; where ranks share cores it
yields between two looks. Then it sleeps by futex(2), called by number because the C library has no
function for it. A rank that publishes wakes the sleepers.

A segment does not notice that a rank is lost: the thread that learns of it calls ``disturb``, and a
waiting rank checks. One thread waits at a time; ``disturb`` is safe from any thread.
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
from rankwire.wire.segment import ASLEEP, SEGMENT_SIZES, Segment, is_segment_of, segment_nbytes

_FUTEX = 202  # of the system call, on x86-64
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF

_library = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def sleep_while(address: int, value: int, seconds: float) -> None:
    """Sleep while the aligned four bytes at an address have a value, until woken or a signal comes.

    The kernel compares the value and puts the thread to sleep in one step.
    """
    fraction, whole = math.modf(seconds)
    limit = _Timespec(int(whole), int(fraction * 1e9))
    _library.syscall(
        _FUTEX, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(value), ctypes.byref(limit), 0, 0
    )


def wake_all(address: int) -> None:
    """Wake all threads, of any process, that sleep at this address."""
    _library.syscall(_FUTEX, ctypes.c_void_p(address), _WAKE, _ALL, 0, 0, 0)


# Where ranks share cores: long enough for the others to run. An all_reduce of 8 B takes 97 us with
# 100 us of this, 51 with 400, 65 with 1500 (4 ranks on 2 cores; 318, 318, 287 with 8; 981, 751, 632
# with 16). Who has waited in vain does so for half as long the next time.
_YIELDING = 400e-6


class SharedSegment(Segment):
    """One rank's end of a segment.

    Args:
        spin: Seconds that a rank polls before it sleeps; 0 if ranks share cores.
        clock: Measures that. The kernel sleeps in real time.
        made: The memory, if this process made it.
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
        """Make a segment with so many bytes for the slots of all ranks together.

        Raises ``OSError`` if there is no memory for it, or ``nbytes`` is too small.
        """
        whole_nbytes = segment_nbytes(nbytes, size)
        if not whole_nbytes:
            raise OSError(f"{nbytes} bytes are too little for {size} ranks")
        made = SharedMemory(whole_nbytes)
        return cls(made.view, rank, size, spin=spin, clock=clock, made=made)

    @classmethod
    def open(
        cls, pid: int, offer: bytes, rank: int, size: int, *, spin: float, clock: Clock
    ) -> SharedSegment:
        """Open a segment that another process has made.

        Raises:
            OSError: The system does not allow it.
            ValueError: It is no segment, or not for so many ranks.
        """
        memory = open_shared(pid, offer, SEGMENT_SIZES)
        if not is_segment_of(size, len(memory)):
            raise ValueError(f"{len(memory)} bytes are no segment for {size} ranks")
        return cls(memory, rank, size, spin=spin, clock=clock)

    @property
    def offer(self) -> bytes:
        """What others need in order to open it, until ``keep_private``."""
        return self._made.offer if self._made is not None else b""

    def keep_private(self) -> None:
        """Prevent further opening. The memory lives as long as it is used."""
        if self._made is not None:
            self._made.close()

    # -- waiting -----------------------------------------------------------------------------------

    def await_step(self, step: int, rank: int, deadline: Deadline) -> bool:
        """Wait until a rank has published a step; False at the deadline, or when disturbed."""
        return self.looks_until(step, rank) or self.sleeps_until(step, rank, deadline)

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
                # The kernel looks at the word once more, after this rank is seen to be asleep.
                self._sleeps_at = self._addresses[rank]
                sleep_while(self._sleeps_at, published & 0xFFFFFFFF, left)
        finally:
            self._sleeps_at = None
            words[asleep] = 0
        return True

    def wake_others(self) -> None:
        """Wake the ranks that sleep until this one publishes. After every ``publish``."""
        words = self.words
        with self._barrier:  # a memory barrier: what was published is seen before we look
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
