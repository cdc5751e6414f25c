"""The parser: splits a byte stream into frames.

It is strict: a value that this version does not write is a ``ProtocolError``, and a length above
the limit is refused before memory is allocated. Its state belongs to the connection, so one reader
may stop in the middle of a frame and another may continue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from rankwire.errors import ProtocolError
from rankwire.wire.frames import (
    CHANNELS,
    DEFAULT_BUFFER_NBYTES,
    DEFAULT_MAX_MESSAGE_NBYTES,
    FIRST_SPECIAL,
    HEADER,
    HEADER_NBYTES,
    SEAL_NBYTES,
    SEQUENCE_MASK,
    Channel,
    Envelope,
    Frame,
    broken_seal,
    describe_violation,
    is_farewell,
)
from rankwire.wire.receive import Destination, FindPlace, LargePayload, Placed, find_placed
from rankwire.wire.ring import READ, RingReader

if TYPE_CHECKING:
    from rankwire.wire.seals import Seal

_new_frame = tuple.__new__  # 0.15 us instead of 0.24 for Frame(...), once for every message


class _Place(NamedTuple):
    """The reader's place in the stream; the same while every read brings one small frame."""

    start: int  # where in the buffer the first incomplete frame begins,
    end: int  # and where its received part ends
    sealed: int  # number of frames with a valid seal; unlike a sequence number, it never repeats
    buffer: bytearray
    view: memoryview  # of the buffer
    large: LargePayload | None  # the large payload that is being received


# The state of a parser between two reads. A plain tuple: each frame makes one, and a named tuple
# costs 0.09 us more.
_State = tuple[
    deque[Frame],  # complete frames that were not taken yet
    list[int],  # how many bytes the last receive brought; empty before it
    int,  # the next sequence number
    _Place,
    int,  # bytes read of the ring beside the stream, if there is one
]
_NO_FRAMES: deque[Frame] = deque()  # shared by all parsers that have not read; stays empty


class FrameParser:
    """The receiving state of one direction of a connection. One reader at a time.

    One call of a C function receives bytes and notes their number, and one assignment replaces all
    that parsing changes (``commit``), so after an interrupt parsing again gives the same result.
    A ring's records (``wire.ring``) of a number come before the stream's frame of that number.

    ``max_nbytes`` is the largest accepted payload. ``seal`` checks the seals of this direction.
    ``allocate`` returns memory for large payloads, which need not be zeroed. The first read
    allocates the buffer; a payload that does not fit is large. Sealed frames need its default size.
    """

    __slots__ = (
        "_allocate", "_between", "_buffer_nbytes", "_seal", "_seal_nbytes",
        "find_place", "max_nbytes", "ring", "state", "violation",
    )  # fmt: skip

    def __init__(
        self,
        *,
        max_nbytes: int = DEFAULT_MAX_MESSAGE_NBYTES,
        seal: Seal | None = None,
        allocate: Callable[[int], bytearray] = bytearray,
        buffer_nbytes: int = DEFAULT_BUFFER_NBYTES,
    ) -> None:
        self._allocate = allocate
        self._buffer_nbytes = buffer_nbytes
        # The place between two frames, if there is a buffer and no seal. ``take_in`` compares by
        # identity: if the place is this tuple, the next frame may be taken as it comes.
        self._between: _Place | None = None
        self.max_nbytes = max_nbytes
        self._seal = seal
        self._seal_nbytes = 0 if seal is None else SEAL_NBYTES
        buffer = bytearray()
        place = _Place(0, 0, 0, buffer, memoryview(buffer), None)
        self.state: _State = (_NO_FRAMES, [], 0, place, 0)
        self.ring: RingReader | None = None
        # Returns where a large payload belongs, by envelope, size and first bytes. Repeatable.
        self.find_place: FindPlace | None = None
        # Final. Frames before it are returned first, and nothing after it.
        self.violation: ProtocolError | None = None

    @property
    def frames(self) -> deque[Frame]:
        """The complete frames; the reader removes each one that it takes."""
        return self.state[0]

    def take_in(self, receive_into: Callable[[memoryview], int]) -> bool | None:
        """Receive by a C function; if exactly one small frame came, as mostly, take it.

        Return True if it did, False if the bytes must be parsed, None at the end of the stream.
        Raise ``ProtocolError`` if the stream was invalid before.
        """
        _, counts, sequence, place, read = self.state
        if place is not self._between:
            if self.violation is not None:
                raise self.violation.copy()
            return False if self._receive(receive_into) else None
        _, _, _, buffer, view, _ = place
        if not counts:
            counts.extend(map(receive_into, (view,)))
        count, ring = counts[0], self.ring
        if count < HEADER_NBYTES or (ring is not None and not ring.is_empty()):
            return False if count else None
        channel, number, group, tag, nbytes = HEADER.unpack_from(buffer)
        if nbytes + HEADER_NBYTES != count or number != sequence or not 0 < channel < FIRST_SPECIAL:
            return False
        frame = _new_frame(Frame, ((group, channel, tag), buffer[HEADER_NBYTES:count]))
        self.state = (deque((frame,)), [], (sequence + 1) & SEQUENCE_MASK, place, read)
        return True

    def take_records(self) -> bool:
        """Read the ring's next records into ``frames``, which must be empty; return whether any.

        Raise ``ProtocolError`` if they are invalid; nothing must be read any more.
        """
        _, counts, sequence, place, read = self.state
        ring = self.ring
        if ring is None or place.large is not None or self.violation is not None:
            return False
        frames: deque[Frame] = deque()
        try:
            read = ring.take(read, sequence, frames)
        except ProtocolError as error:
            self.spoil(error)
            if not frames:
                raise
        self.state = (frames, counts, sequence, place, read)
        ring.words[READ] = read
        return bool(frames)

    def spoil(self, violation: ProtocolError) -> None:
        """Read no further, because a frame violates the protocol."""
        self.violation = self.violation or violation.kept()
        self._between = None

    @property
    def in_frame(self) -> bool:
        """Whether a frame has begun and is not complete."""
        _, counts, _, place, _ = self.state
        return place.large is not None or place.end > place.start or any(counts)

    def receive_buffer(self) -> memoryview:
        """Return the memory for the next bytes of the stream; never empty."""
        _, _, _, (_, end, _, _, view, large), _ = self.state
        if large is not None and large.filled < len(large.body):
            return memoryview(large.body)[large.filled :]
        return view[end:] if end else view or self._first_buffer()

    def _first_buffer(self) -> memoryview:
        buffer = bytearray(self._buffer_nbytes)
        view = memoryview(buffer)
        frames, counts, sequence, place, read = self.state
        place = self._place(0, 0, place.sealed, buffer, view, None)
        self.state = (frames, counts, sequence, place, read)
        return view

    def _place(
        self,
        start: int,
        end: int,
        sealed: int,
        buffer: bytearray,
        view: memoryview,
        large: LargePayload | None,
    ) -> _Place:
        """Return the reader's place: between two frames the same tuple each time, if possible."""
        if start == end:
            start = end = 0
        elif start:
            # Make room for the rest of the frame. Copied, not moved: the old state stays valid.
            rest = self._allocate(self._buffer_nbytes)
            rest[: end - start] = view[start:end]
            buffer, view, start, end = rest, memoryview(rest), 0, end - start
        place = _Place(start, end, sealed, buffer, view, large)
        if end or large is not None or self._seal is not None or self.max_nbytes < len(buffer):
            return place
        if self._between is None or self._between.buffer is not buffer:
            self._between = place
        return self._between

    def _receive(self, receive_into: Callable[[memoryview], int]) -> int:
        counts = self.state[1]
        if not counts:
            counts.extend(map(receive_into, (self.receive_buffer(),)))
        return counts[0]

    def read_by(self, read: Callable[[memoryview, list[int]], None]) -> int:
        """Receive by code that appends the number of bytes to the list, as one step.

        Return the number of these bytes, or of those that an interrupted reader received.
        """
        counts = self.state[1]
        if not counts:
            read(self.receive_buffer(), counts)
        return counts[0]

    def commit(self, state: _State) -> None:
        """Replace the state by one that ``parse`` returned."""
        self.state = state
        ring = self.ring
        if ring is not None:
            ring.words[READ] = state[4]

    def parse(self) -> tuple[_State, bool]:
        """Return the state after the last bytes; nothing changes until ``commit``.

        Also return whether there is a greeting, farewell, loan or violation to process.
        """
        if self.violation is not None:
            raise self.violation.copy()
        old, counts, sequence, place, read = self.state
        start, end, sealed, _, view, large = place
        frames = deque(old) if old else deque()
        if large is None:
            return self._parse(frames, start, end + counts[0], sealed)
        if large.filled == len(large.body):  # its seal came, and more
            end += counts[0]
        else:
            large = large.plus(counts[0])
        if large.filled < len(large.body) or (large.mac and end < SEAL_NBYTES):
            return (frames, [], sequence, place._replace(end=end, large=large), read), False
        if large.mac:
            if not large.mac.matches(view[:SEAL_NBYTES]):
                self.violation = broken_seal()
                raise self.violation.copy()
            start = SEAL_NBYTES
            sealed += 1
        frames.append(Frame(large.envelope, large.payload))
        is_special = large.envelope[1] >= FIRST_SPECIAL
        return self._parse(frames, start, end, sealed, is_special=is_special)

    def _parse(
        self, frames: deque[Frame], start: int, end: int, sealed: int, *, is_special: bool = False
    ) -> tuple[_State, bool]:
        """Find the frames in the buffer, and the ring's records that come before each of them."""
        _, _, sequence, (_, _, _, buffer, view, _), read = self.state
        large: LargePayload | None = None
        seal, seal_nbytes, ring = self._seal, self._seal_nbytes, self.ring
        while end - start >= HEADER_NBYTES:
            if ring is not None:
                read = self._take_records(ring, read, sequence, frames)
                if self.violation is not None:
                    break
            channel, number, group, tag, nbytes = HEADER.unpack_from(buffer, start)
            if channel not in CHANNELS or number != sequence or nbytes > self.max_nbytes:
                self.violation = describe_violation(
                    channel, number, sequence, nbytes, self.max_nbytes
                )
                break
            body = start + HEADER_NBYTES
            stop = body + nbytes
            if stop + seal_nbytes > end:  # incomplete
                if stop + seal_nbytes - start > self._buffer_nbytes:
                    envelope = (group, channel, tag)
                    large, taken = self._begin_large(
                        envelope, nbytes, view[start:end], sealed, frames
                    )
                    start += taken
                    sequence = (sequence + (large is not None)) & SEQUENCE_MASK
                break
            payload = buffer[body:stop]
            if seal is not None:
                if not seal.matches(sealed, channel, view[start : stop + seal_nbytes]):
                    self.violation = broken_seal()
                    break
                sealed += 1
            frames.append(_new_frame(Frame, ((group, channel, tag), payload)))
            start = stop + seal_nbytes
            is_special |= channel >= FIRST_SPECIAL
            sequence = (sequence + 1) & SEQUENCE_MASK
        if self.violation is not None:
            is_special = True
            self._raise_unless(frames)
        place = self._place(start, end, sealed, buffer, view, large)
        return (frames, [], sequence, place, read), is_special

    def _take_records(
        self, ring: RingReader, read: int, sequence: int, frames: deque[Frame]
    ) -> int:
        try:
            return ring.take(read, sequence, frames)
        except ProtocolError as error:
            self.violation = error.kept()
            return read

    def _raise_unless(self, frames: deque[Frame]) -> None:
        if self.violation is not None and not frames:
            raise self.violation.copy()

    def is_farewell(self, tail: bytes) -> bool:
        """Return whether a stream whose unread bytes end so ends with a genuine farewell."""
        if self._seal is None:
            return is_farewell(tail)
        header, seal = tail[-HEADER_NBYTES - SEAL_NBYTES : -SEAL_NBYTES], tail[-SEAL_NBYTES:]
        if not is_farewell(header):
            return False
        # Some frames may stand before it; its sequence number says how many.
        _, _, sequence, place, _ = self.state
        ahead = (HEADER.unpack(header)[1] - sequence) & SEQUENCE_MASK
        number = place.sealed + (place.large is not None) + ahead
        return self._seal.begin(number, header, Channel.FAREWELL, 0).matches(seal)

    def _begin_large(
        self, envelope: Envelope, nbytes: int, come: memoryview, number: int, frames: deque[Frame]
    ) -> tuple[LargePayload | None, int]:
        """Begin a large payload; also return how many of the received bytes it takes."""
        header, first = come[:HEADER_NBYTES], come[HEADER_NBYTES:]
        mac = None
        if self._seal is not None:
            if len(first) < SEAL_NBYTES:
                return None, 0
            seal, first = first[:SEAL_NBYTES], first[SEAL_NBYTES:]
            if not self._seal.begin_head(number, header).matches(seal):
                self.violation = broken_seal()
                return None, 0
            mac = self._seal.begin(number, header, envelope[1], nbytes)
        first = first[:nbytes]
        taken = HEADER_NBYTES + self._seal_nbytes + len(first)
        place = find_placed(self.find_place, envelope, nbytes, first, frames)
        if place is not None:
            if mac is not None:
                mac = mac.plus(place.head)
            first = first[len(place.head) :]
            large = LargePayload(place.destination.view, envelope, 0, mac, place)
        elif (body := self._memory_for(nbytes)) is not None:
            large = LargePayload(body, envelope, 0, mac, body)
        else:
            return None, 0
        large.body[: len(first)] = first
        return large.plus(len(first)), taken

    def _memory_for(self, nbytes: int) -> bytearray | None:
        try:
            return self._allocate(nbytes)
        except MemoryError as error:
            self.violation = ProtocolError(f"no memory for a message of {nbytes} bytes")
            self.violation.__cause__ = error.with_traceback(None)
            return None

    def vacate(self, destination: Destination) -> None:
        """Move received bytes out of a destination. Repeatable; not while a thread reads."""
        frames, counts, sequence, place, read = self.state
        large = place.large
        for at, (envelope, payload) in enumerate(frames):
            if isinstance(payload, Placed) and payload.destination is destination:
                frames[at] = Frame(envelope, payload.whole())
        if large is None or not isinstance(large.payload, Placed):
            return
        if large.payload.destination is not destination:
            return
        if (body := self._memory_for(len(large.payload))) is None:
            return  # nothing is read any more
        place = place._replace(large=large.moved_to(body))
        self.state = (frames, counts, sequence, place, read)
