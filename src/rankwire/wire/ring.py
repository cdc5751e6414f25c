"""The ring: shared memory beside a stream, for small frames to a reader that is polling.

A small frame through a socket takes two system calls, 2.4 us together; through a ring none. The
writer uses it only while the reader polls it (*awake*) and only if there is room; other frames go
through the stream. A *record*, which is a frame as in the stream, has the sequence number of the
next frame there. The reader takes the records of a number before that frame (``parser``).

The memory, little-endian, each word on its own cache line::

    ======  ==============================================================================
    offset  what
    ======  ==============================================================================
    0       total bytes of records written; changed by the writer alone, after the record
    64      total bytes of records read; changed by the reader alone
    128     1 while the reader polls, else 0; changed by the reader alone
    192     free for the processes that share the memory
    256     the records, at multiples of 32; a record that does not fit before the end starts at
            the beginning, and a header of channel 0 marks the gap
    ======  ==============================================================================

One store of eight bytes publishes a record, after its bytes. This is correct on processors that
keep stores in order (x86); the owner uses rings nowhere else. What the other process writes is
checked like bytes from a network.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable
from functools import partial

from rankwire.errors import ProtocolError
from rankwire.wire.frames import FIRST_SPECIAL, HEADER, HEADER_NBYTES, SEQUENCE_MASK, Frame

_DATA_NBYTES = 1 << 16
_DATA = 256
RING_NBYTES = _DATA + _DATA_NBYTES
WRITTEN, READ, AWAKE = 0, 8, 16  # indices of words of eight bytes
_IN_RING = _DATA_NBYTES - 1
_UNIT = HEADER_NBYTES - 1  # a record takes a multiple of a header
_HALF = 1 << 31

_new_frame = tuple.__new__  # as in ``parser``


class RingWriter:
    """The writing end. One thread at a time.

    The reader can write to all of the memory. Whatever it writes, a record is written inside the
    ring or not at all. Call ``is_polled``, a C function, after ``put`` and a memory barrier, such
    as any lock: a reader that has stopped polling may have missed the record and must be woken.
    """

    __slots__ = ("_data", "is_polled", "words")

    def __init__(self, memory: memoryview) -> None:
        self.words = words = memory.cast("Q")
        self.is_polled: Callable[[], int] = partial(words.__getitem__, AWAKE)
        self._data = memory[_DATA:]

    @property
    def unread_nbytes(self) -> int:
        """The bytes of records that were not read yet."""
        return max(self.words[WRITTEN] - self.words[READ], 0)

    def put(self, frame: bytes) -> bool:
        """Write a record; return False without a change if there is no room or reader."""
        words = self.words
        if not words[AWAKE]:
            return False
        nbytes = len(frame)
        written = words[WRITTEN]
        room = _DATA_NBYTES - (written - words[READ])
        size = (nbytes + _UNIT) & ~_UNIT
        at = written & _IN_RING
        if at + size > _DATA_NBYTES:
            left = _DATA_NBYTES - at
            if left + size > room or left < HEADER_NBYTES:
                return False
            HEADER.pack_into(self._data, at, 0, 0, 0, 0, 0)
            written += left
            at = 0
        elif size > room:
            return False
        self._data[at : at + nbytes] = frame
        try:
            words[WRITTEN] = written + size
        except ValueError:  # the reader has changed the word, and the sum is too large
            return False
        return True


class RingReader:
    """The reading end. One reader at a time, except for ``is_empty``.

    The reader sets ``words[READ]`` to the result of ``take`` when the frames are safe. After
    ``stop_polling`` and a memory barrier it must look once more, because the writer may have seen
    it polling. The attributes are C functions, as for ``Spin.finds``.
    """

    __slots__ = ("_data", "is_empty", "start_polling", "stop_polling", "words")

    def __init__(self, memory: memoryview) -> None:
        self.words = words = memory.cast("Q")
        self._data = memory[_DATA:]
        written, read = words[WRITTEN : WRITTEN + 1], words[READ : READ + 1]
        self.is_empty: Callable[[], bool] = partial(operator.eq, written, read)
        self.start_polling: Callable[[], None] = partial(words.__setitem__, AWAKE, 1)
        self.stop_polling: Callable[[], None] = partial(words.__setitem__, AWAKE, 0)

    def take(self, place: int, sequence: int, frames: deque[Frame]) -> int:
        """Append the records before the stream's frame of a sequence number to ``frames``.

        ``place`` is the total of bytes read before; return the total now. Frames before an invalid
        record are appended too.
        """
        written, data = self.words[WRITTEN], self._data
        if not 0 <= written - place <= _DATA_NBYTES:
            raise ProtocolError("a ring has more in it than fits")
        while place != written:
            at = place & _IN_RING
            channel, number, group, tag, nbytes = HEADER.unpack_from(data, at)
            if not channel:
                place += _DATA_NBYTES - at
                if place > written:
                    raise ProtocolError("a ring ends before its records do")
                continue
            if number != sequence:
                if (number - sequence) & SEQUENCE_MASK < _HALF:
                    break  # it comes after frames in the stream
                raise ProtocolError(f"a record has number {number}, expected {sequence}")
            start, stop = at + HEADER_NBYTES, at + HEADER_NBYTES + nbytes
            size = (HEADER_NBYTES + nbytes + _UNIT) & ~_UNIT
            if channel >= FIRST_SPECIAL or stop > _DATA_NBYTES or place + size > written:
                raise ProtocolError(f"a record of channel {channel} and {nbytes} bytes")
            frames.append(_new_frame(Frame, ((group, channel, tag), bytearray(data[start:stop]))))
            place += size
        return place
