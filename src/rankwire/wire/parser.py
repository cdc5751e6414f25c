"""The parser: frames out of any split of a byte stream.

It is strict: a value that this version does not write is a ``ProtocolError``, and a length above
the limit is refused from the header alone, before anything is allocated. It is fed any split of the
stream and gives the same frames; its state is the connection's, so a reader may stop in the middle
of a frame and another one goes on. It does not know sockets, nor how memory is taken: its owner
hands it what does.

Size: what a parser knows is one tuple, and all that makes the next one of it is here.
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
    LOAN,
    SEAL_NBYTES,
    SEQUENCE_MASK,
    Channel,
    Envelope,
    Frame,
    broken_seal,
    describe_violation,
    is_farewell,
)
from rankwire.wire.receive import Destination, Placed
from rankwire.wire.ring import READ, RingReader

if TYPE_CHECKING:
    from rankwire.wire.seals import FrameMac, Seal

_new_frame = tuple.__new__  # 0.15 us instead of 0.24 for Frame(...), once for every message


class _Large(NamedTuple):
    """A payload too large for the buffer, which is received into memory of its own."""

    body: bytearray | memoryview
    envelope: Envelope
    filled: int
    mac: FrameMac | None  # of what has come of it, if it is sealed
    payload: bytearray | Placed  # it is in its body, but for the head of what is placed


# What does not change as long as every read brings one whole small frame:
_Place = tuple[
    int,  # where in the buffer the first incomplete frame begins,
    int,  # and where what has come of it ends
    int,  # how many frames with a good seal there were; unlike a sequence number it never repeats
    bytearray,  # the buffer,
    memoryview,  # and a view of it
    _Large | None,  # a large payload that is being received
]
# What a parser knows between two reads:
_State = tuple[
    deque[Frame],  # complete frames that nobody has taken
    list[int],  # how many bytes the last receive brought; empty before it
    int,  # the next sequence number
    _Place,
    int,  # how much has been read of the ring beside the stream, if there is one
]


_NO_FRAMES: deque[Frame] = deque()  # of all parsers that have not read; nothing is added to it


class FrameParser:
    """The receiving state of one direction of one connection. One reader at a time.

    A signal may end the reader between any two bytecodes, and another reader goes on where it
    stopped. So neither bytes nor frames are ever between two places: receiving and noting how much
    are one call of a C function (``read``), and all that parsing changes is replaced by one
    assignment (``commit``). Until then the old state stands, and parsing again gives the same.

    Beside the stream there may be a ring (``wire.ring``), whose records are frames of the same
    sequence: those of a number come before the stream's frame of that number.

    A large payload may come straight to where a receiver wants it (``wire.receive``).

    Args:
        max_nbytes: Largest payload that is accepted.
        seal: Checks the seals of this direction; None if there are none.
        allocate: Makes the memory of large payloads; what is in it is overwritten.
        buffer_nbytes: The size of the buffer, made at the first read. What does not fit there is
            large. Sealed frames need the default.
    """

    __slots__ = (
        "_allocate",
        "_between",
        "_buffer_nbytes",
        "_max_nbytes",
        "_seal",
        "_seal_nbytes",
        "find_place",
        "ring",
        "state",
        "violation",
    )

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
        # The place between two frames, if the next one may be taken as it comes: there is a buffer
        # and no seal. A state with this very tuple needs no further look.
        self._between: _Place | None = None
        self._max_nbytes = max_nbytes
        self._seal = seal
        self._seal_nbytes = 0 if seal is None else SEAL_NBYTES
        buffer = bytearray()
        self.state: _State = (_NO_FRAMES, [], 0, (0, 0, 0, buffer, memoryview(buffer), None), 0)
        self.ring: RingReader | None = None
        # Asked where a large payload belongs, by its envelope, size and beginning. Safe to repeat.
        self.find_place: Callable[[Envelope, int, memoryview], Destination | None] | None = None
        # Sticky. Frames before it are returned first, and nothing after it.
        self.violation: ProtocolError | None = None

    @property
    def frames(self) -> deque[Frame]:
        """The complete frames; whoever takes one removes it."""
        return self.state[0]

    def take_in(self, receive_into: Callable[[memoryview], int]) -> bool | None:
        """Receive; if that is one whole small frame, as it mostly is, it is in ``frames`` then.

        Returns:
            Whether it is; False if what came is to be parsed, None at the end of the stream. Those
            bytes come first that an interrupted reader has left.

        Raises:
            ProtocolError: The stream was not a valid one before.
        """
        _, counts, sequence, place, read = self.state
        if place is not self._between:
            if self.violation is not None:
                raise self.violation.copy()
            return False if self.read(receive_into) else None
        _, _, _, buffer, view, _ = place
        if not counts:
            counts.extend(map(receive_into, (view,)))
        count, ring = counts[0], self.ring
        if count < HEADER_NBYTES or (ring is not None and ring.has_records()):
            return False if count else None
        channel, number, group, tag, nbytes = HEADER.unpack_from(buffer)
        if nbytes + HEADER_NBYTES != count or number != sequence or not 0 < channel < FIRST_SPECIAL:
            return False
        frame = _new_frame(Frame, ((group, channel, tag), buffer[HEADER_NBYTES:count]))
        self.state = (deque((frame,)), [], (sequence + 1) & SEQUENCE_MASK, place, read)
        return True

    def take_records(self) -> bool:
        """Read what is in the ring and comes next; return whether it is in ``frames`` now.

        Only when there are no frames that nobody has taken.

        Raises:
            ProtocolError: What is there is not valid; nothing must be read any more.
        """
        _, counts, sequence, place, read = self.state
        ring = self.ring
        if ring is None or place[5] is not None or self.violation is not None:
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
        """Read no further: what a frame says is not what may be said there."""
        self.violation = self.violation or violation.kept()
        self._between = None

    @property
    def in_frame(self) -> bool:
        """Whether a frame has begun and is not complete."""
        _, counts, _, (start, end, _, _, _, large), _ = self.state
        return large is not None or end > start or any(counts)

    def receive_buffer(self) -> memoryview:
        """Return where the next bytes of the stream belong; never empty."""
        _, _, _, (_, end, _, _, view, large), _ = self.state
        if large is not None and large.filled < len(large.body):
            return memoryview(large.body)[large.filled :]
        return view[end:] if end else view or self._first_buffer()

    def _first_buffer(self) -> memoryview:
        buffer = bytearray(self._buffer_nbytes)
        view = memoryview(buffer)
        frames, counts, sequence, (_, _, sealed, _, _, _), read = self.state
        place = self._place(0, 0, sealed, buffer, view, None)
        self.state = (frames, counts, sequence, place, read)
        return view

    def _place(
        self,
        start: int,
        end: int,
        sealed: int,
        buffer: bytearray,
        view: memoryview,
        large: _Large | None,
    ) -> _Place:
        """Return where the reader is; between two frames always the same tuple, if it may be."""
        place = (start, end, sealed, buffer, view, large)
        if end or large is not None or self._seal is not None or self._max_nbytes < len(buffer):
            return place
        if self._between is None or self._between[3] is not buffer:
            self._between = place
        return self._between

    def read(self, receive_into: Callable[[memoryview], int]) -> int:
        """Receive, and return how many bytes came; those of an interrupted reader come first.

        Args:
            receive_into: Receives into a buffer. If it is not a C function, an interrupt may fall
                between the receive and the note of it.
        """
        counts = self.state[1]
        if not counts:
            counts.extend(map(receive_into, (self.receive_buffer(),)))
        return counts[0]

    def read_by(self, read: Callable[[memoryview, list[int]], None]) -> int:
        """Receive from a stream that is not written in C; return how many bytes came.

        Args:
            read: Receives into a buffer, and notes how much in the list, as one step.
        """
        counts = self.state[1]
        if not counts:
            read(self.receive_buffer(), counts)
        return counts[0]

    def received(self, count: int) -> None:
        """Note that ``count`` bytes were written to ``receive_buffer()``, after the last commit."""
        self.state[1].append(count)

    def commit(self, state: _State) -> None:
        """Make what ``parse`` has returned the state from now on."""
        self.state = state
        ring = self.ring
        if ring is not None:
            ring.words[READ] = state[4]

    def bytes_received(self, count: int) -> list[Frame]:
        """Take ``count`` bytes written to ``receive_buffer()``; return the frames they complete.

        All of the above in one, for owners that nothing interrupts.

        Raises:
            ProtocolError: The stream is not a valid one; the connection must not be used again.
        """
        self.received(count)
        self.commit(self.parse()[0])
        frames = list(self.frames)
        self.frames.clear()
        return frames

    def parse(self) -> tuple[_State, bool]:
        """Work out what the bytes that came last complete; nothing changes until ``commit``.

        Returns:
            The next state, and whether its frames have something special among them: a greeting, a
            farewell or a loan, or a violation behind them.

        Raises:
            ProtocolError: The stream is not a valid one.
        """
        if self.violation is not None:
            raise self.violation.copy()
        old, counts, sequence, (start, end, sealed, buffer, view, large), read = self.state
        frames = deque(old) if old else deque()
        if large is None:
            end += counts[0]
            return self._parse(frames, start, end, sequence, sealed, buffer, view, read)
        if large.filled == len(large.body):  # what came is the seal behind it, and more
            end += counts[0]
        else:
            large = self._filled_further(large, counts[0])
        if large.filled < len(large.body) or (large.mac and end < SEAL_NBYTES):
            return (frames, [], sequence, (start, end, sealed, buffer, view, large), read), False
        if large.mac:
            if not large.mac.matches(view[:SEAL_NBYTES]):
                self.violation = broken_seal()
                raise self.violation.copy()
            start = SEAL_NBYTES
            sealed += 1
        frames.append(Frame(large.envelope, large.payload))
        is_special = large.envelope[1] >= FIRST_SPECIAL
        return self._parse(
            frames, start, end, sequence, sealed, buffer, view, read, is_special=is_special
        )

    def _parse(
        self,
        frames: deque[Frame],
        start: int,
        end: int,
        sequence: int,
        sealed: int,
        buffer: bytearray,
        view: memoryview,
        read: int,
        *,
        is_special: bool = False,
    ) -> tuple[_State, bool]:
        """Find the frames in the buffer, and the records that come before each of them."""
        large: _Large | None = None
        seal_nbytes, ring = self._seal_nbytes, self.ring
        while end - start >= HEADER_NBYTES:
            if ring is not None:
                try:
                    read = ring.take(read, sequence, frames)
                except ProtocolError as error:
                    self.violation = error.kept()
                    break
            channel, number, group, tag, nbytes = HEADER.unpack_from(buffer, start)
            if channel not in CHANNELS or number != sequence or nbytes > self._max_nbytes:
                self.violation = describe_violation(
                    channel, number, sequence, nbytes, self._max_nbytes
                )
                break
            body = start + HEADER_NBYTES
            stop = body + nbytes
            if stop + seal_nbytes <= end:
                payload = buffer[body:stop]
                if seal_nbytes:
                    if not self._is_sealed(sealed, channel, view[start : stop + seal_nbytes]):
                        self.violation = broken_seal()
                        break
                    sealed += 1
                frames.append(_new_frame(Frame, ((group, channel, tag), payload)))
                start = stop + seal_nbytes
                if channel >= FIRST_SPECIAL:
                    is_special = True
                sequence = (sequence + 1) & SEQUENCE_MASK
            elif stop + seal_nbytes - start > self._buffer_nbytes and end - body >= seal_nbytes:
                envelope = (group, channel, tag)
                large = self._begin_large(envelope, nbytes, view[start:end], sealed, frames)
                if large is None:
                    break
                head_nbytes = len(large.payload) - len(large.body)
                start = body + seal_nbytes + head_nbytes + large.filled
                sequence = (sequence + 1) & SEQUENCE_MASK
                break
            else:
                break  # the rest of it comes later; of a large sealed one, first its header's seal
        if self.violation is not None:
            if not frames:
                raise self.violation.copy()
            is_special = True
        if start == end:
            start = end = 0
        elif start:
            # The rest of the frame must fit behind it. Copied, not moved: the old state stands.
            rest = self._allocate(self._buffer_nbytes)
            rest[: end - start] = view[start:end]
            buffer, view, start, end = rest, memoryview(rest), 0, end - start
        place = self._place(start, end, sealed, buffer, view, large)
        return (frames, [], sequence, place, read), is_special

    def _is_sealed(self, number: int, channel: int, frame: memoryview) -> bool:
        """Check the seal behind a whole frame."""
        assert self._seal is not None
        payload = frame[HEADER_NBYTES:-SEAL_NBYTES]
        mac = self._seal.begin(number, frame[:HEADER_NBYTES], channel, len(payload))
        mac.add(payload)
        return mac.matches(frame[-SEAL_NBYTES:])

    def is_farewell(self, tail: bytes) -> bool:
        """Whether a stream that ends with these bytes, all unread, ends with a genuine farewell."""
        if self._seal is None:
            return is_farewell(tail)
        header, seal = tail[-HEADER_NBYTES - SEAL_NBYTES : -SEAL_NBYTES], tail[-SEAL_NBYTES:]
        if not is_farewell(header):
            return False
        # Some frames may stand before it; how many its sequence number says.
        _, _, sequence, (_, _, sealed, _, _, large), _ = self.state
        ahead = (HEADER.unpack(header)[1] - sequence) & SEQUENCE_MASK
        number = sealed + (large is not None) + ahead
        return self._seal.begin(number, header, Channel.FAREWELL, 0).matches(seal)

    def _begin_large(
        self,
        envelope: Envelope,
        nbytes: int,
        come: memoryview,
        number: int,
        frames: deque[Frame],
    ) -> _Large | None:
        """Take memory for a large payload; None and a violation if its header is not genuine.

        Args:
            envelope: What it is sent under.
            nbytes: Its size.
            come: What has come of the frame.
            number: Which sealed frame it is.
            frames: Those before it that nobody has taken.
        """
        header, first = come[:HEADER_NBYTES], come[HEADER_NBYTES:]
        mac = None
        if self._seal is not None:
            seal, first = first[:SEAL_NBYTES], first[SEAL_NBYTES:]
            if not self._seal.begin_head(number, header).matches(seal):
                self.violation = broken_seal()
                return None
            mac = self._seal.begin(number, header, envelope[1], nbytes)
        first = first[:nbytes]
        place = self._placed(envelope, nbytes, first, frames)
        if place is not None:
            if mac is not None:
                mac = mac.plus(place.head)
            first = first[len(place.head) :]
            large = _Large(place.destination.view, envelope, 0, mac, place)
        elif (body := self._memory_for(nbytes)) is not None:
            large = _Large(body, envelope, 0, mac, body)
        else:
            return None
        large.body[: len(first)] = first
        return self._filled_further(large, len(first))

    def _placed(
        self, envelope: Envelope, nbytes: int, first: memoryview, frames: deque[Frame]
    ) -> Placed | None:
        """Return where a large payload goes, if that is to where its receiver wants it."""
        group, channel, tag = envelope
        before = envelope, (group, channel | LOAN, tag)
        if self.find_place is None or any(
            frame.envelope in before or isinstance(frame.payload, Placed) for frame in frames
        ):
            return None  # or the receiver may be that of a frame before it
        destination = self.find_place(envelope, nbytes, first)
        if destination is None:
            return None
        return Placed(bytes(first[: nbytes - len(destination.view)]), destination)

    def _memory_for(self, nbytes: int) -> bytearray | None:
        """Return memory for a large payload; None and a violation if there is none."""
        try:
            return self._allocate(nbytes)
        except MemoryError as error:
            self.violation = ProtocolError(f"no memory for a message of {nbytes} bytes")
            self.violation.__cause__ = error.with_traceback(None)
            return None

    def vacate(self, destination: Destination) -> None:
        """Have what has come and comes for a destination in memory of its own. Safe to repeat.

        Not while somebody reads, or takes frames.
        """
        frames, counts, sequence, place, read = self.state
        large = place[5]
        for at, (envelope, payload) in enumerate(frames):
            if isinstance(payload, Placed) and payload.destination is destination:
                frames[at] = Frame(envelope, payload.whole())
        if large is None or not isinstance(large.payload, Placed):
            return
        if large.payload.destination is not destination:
            return
        body = self._memory_for(len(large.payload))
        if body is None:
            return  # nothing is read any more
        head = large.payload.head
        body[: len(head)] = head
        body[len(head) :] = destination.view
        large = large._replace(body=body, payload=body, filled=len(head) + large.filled)
        self.state = (frames, counts, sequence, (*place[:5], large), read)

    def _filled_further(self, large: _Large, count: int) -> _Large:
        """Return a large payload of which ``count`` bytes more have come."""
        mac, filled = large.mac, large.filled
        if mac is not None:
            mac = mac.plus(memoryview(large.body)[filled : filled + count])
        return large._replace(filled=filled + count, mac=mac)
