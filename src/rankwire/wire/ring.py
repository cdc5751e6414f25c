"""The ring: a lane in shared memory beside a stream, for small frames to a reader that is looking.

A small frame takes two system calls on its way through a socket, 2.4 us together; through memory
that both processes have it takes none. So beside one direction of a stream there may be a ring of
*records*, frames as they would be in the stream. The writer uses it only while the reader looks at
it (*awake*), and only if there is room: everything else goes through the stream. Nobody ever waits
for a ring, and nobody sleeps on one.

Order: a record's sequence number is that of the next frame in the stream. So a reader takes the
records of a number before the stream's frame of that number (``parser.FrameParser``), and both
lanes together are the one sequence that was sent.

The memory, little-endian; words on cache lines of their own::

    ======  ==============================================================================
    offset  what
    ======  ==============================================================================
    0       bytes of records written, ever; changed by the writer alone, after the record
    64      bytes of records read, ever; changed by the reader alone
    128     1 while the reader looks, else 0; changed by the reader alone
    192     left to those who share the memory
    256     the records, at multiples of 32; one that does not fit before the end begins anew,
            and a header of channel 0 says so
    ======  ==============================================================================

A record is published by one store of eight bytes, after its own bytes. That is right on processors
that keep stores in order (x86); the owner sees to it that a ring is used nowhere else. A writer
that is interrupted before it has published nothing. Pure: memory in, frames out; it knows neither
processes nor sockets. What the other process writes there is checked like what comes over a wire.
"""

from __future__ import annotations

from collections import deque

from rankwire.errors import ProtocolError
from rankwire.wire.frames import (
    FIRST_SPECIAL,
    HEADER,
    HEADER_NBYTES,
    SEQUENCE_MASK,
    Frame,
)

_DATA_NBYTES = 1 << 16
_DATA = 256
RING_NBYTES = _DATA + _DATA_NBYTES
WRITTEN, READ, AWAKE = 0, 8, 16  # which words of eight bytes these are
_IN_RING = _DATA_NBYTES - 1
_UNIT = HEADER_NBYTES - 1  # a record takes a multiple of a header
_HALF = 1 << 31

_new_frame = tuple.__new__  # as in ``parser``


class RingWriter:
    """The writing end. One thread at a time.

    The reader can write to all of the memory: whatever is found in the words, a record is written
    within the ring or not at all, and what then comes out of it is the reader's business.

    Attributes:
        words: The words at the head, for those who cannot afford a function. After ``put`` and a
            memory barrier, such as any lock, ``words[AWAKE]`` has to be looked at: a reader that
            has stopped looking meanwhile may have missed the record, and is to be told.
    """

    __slots__ = ("_data", "words")

    def __init__(self, memory: memoryview) -> None:
        self.words = memory.cast("Q")
        self._data = memory[_DATA:]

    @property
    def unread_nbytes(self) -> int:
        """Bytes of records that have not been read."""
        return max(self.words[WRITTEN] - self.words[READ], 0)

    def put(self, frame: bytes) -> bool:
        """Write a record; False if there is no room, or nobody looks, and nothing was done."""
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
        except ValueError:  # more than a word takes: not what was written here before
            return False
        return True


class RingReader:
    """The reading end. One reader at a time, but for ``has_records``.

    Attributes:
        words: The words at the head, for those who cannot afford a function: ``words[AWAKE]`` is
            set to 1 by who looks and to 0 by who looks away (and then, after a memory barrier,
            looks once more); ``words[READ]`` to what ``take`` has returned, once its frames are
            safe.
    """

    __slots__ = ("_data", "words")

    def __init__(self, memory: memoryview) -> None:
        self.words = memory.cast("Q")
        self._data = memory[_DATA:]

    def has_records(self) -> bool:
        """Whether there is something to read."""
        words = self.words
        return words[WRITTEN] != words[READ]

    def take(self, place: int, sequence: int, frames: deque[Frame]) -> int:
        """Read the records that come before the stream's frame of a number.

        Nothing changes until the word is set.

        Args:
            place: How much was read before.
            sequence: The number.
            frames: Where they go.

        Returns:
            How much has been read now.

        Raises:
            ProtocolError: What is there is not a record; ``frames`` has those before it.
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
                    break  # it comes after what is on its way in the stream
                raise ProtocolError(f"a record has number {number}, expected {sequence}")
            start, stop = at + HEADER_NBYTES, at + HEADER_NBYTES + nbytes
            size = (HEADER_NBYTES + nbytes + _UNIT) & ~_UNIT
            if channel >= FIRST_SPECIAL or stop > _DATA_NBYTES or place + size > written:
                raise ProtocolError(f"a record of channel {channel} and {nbytes} bytes")
            frames.append(_new_frame(Frame, ((group, channel, tag), bytearray(data[start:stop]))))
            place += size
        return place
