"""A pipe: one direction of a stream in memory, with delays of its messages.

It is bounded and FIFO, with one writing and one reading thread at a time. Like a socket it takes
what it has room for (and always frames without content), and what was written before an end can
still be read. A *cut* pipe loses what is not visible by then. Delayed messages need no thread: a
sleeping reader knows when the next one is visible.

Bytes count as written or read once the caller's list has their number. So a chunk carries that
list, and after an interrupt the next writer or reader restores order. No locks: each field belongs
to the writer or the reader, or is set once; and deques and lists change in one step.
"""

from __future__ import annotations

import errno
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from rankwire.transports.byte_stream import join_first
from rankwire.transports.wakeup import Sleepers, wake
from rankwire.wire.frames import HEADER_NBYTES, Buffer, Channel, unpack_size

_COURTESIES = (Channel.FAREWELL, Channel.GREETING)


@dataclass(slots=True, eq=False)
class Gate:
    """Lets one message through at a time, from all streams to one reader."""

    seconds: float  # between two messages
    free_at: float = 0.0  # when the next one may pass, in monotonic time


class Position(NamedTuple):
    """The position of a writer in a message."""

    left: int = 0  # bytes of it that are not written yet; 0 at a header
    head: bytes = b""  # the written part of the header
    when: float = 0.0  # when it becomes visible, in monotonic time
    is_message: bool = False  # and not a greeting or a farewell

    @property
    def is_at_header(self) -> bool:
        """Whether the next byte begins a frame."""
        return not self.left and not self.head

    @property
    def is_behind_message(self) -> bool:
        """Whether a message has just been completed."""
        return self.is_message and self.is_at_header


@dataclass(slots=True, eq=False)
class Route:
    """Delays and counts the messages of one direction."""

    now: Callable[[], float]  # the clock's
    delays: Iterator[float] | None = None  # seconds of each message in turn
    gate: Gate | None = None  # at the reader
    # Called in the writer's thread after a whole message; must not wait.
    on_message: Callable[[], None] = lambda: None

    def follow(self, position: Position, data: bytes) -> tuple[int, bool, Position]:
        """Follow the next bytes, as far as they belong to one message or part of a header.

        Messages stay in order; greetings and farewells are not delayed. Returns how many bytes that
        is, whether a message begins with them, and the position behind them.
        """
        left, head, when, is_message = position
        begins = False
        if not left:
            missing = HEADER_NBYTES - len(head)
            if len(data) < missing:
                return len(data), False, Position(0, head + data, when, is_message)
            channel, nbytes = unpack_size(head + data[:missing])
            left = missing + nbytes
            begins = is_message = channel not in _COURTESIES
            if is_message and self.delays is not None:
                when = max(when, self.now() + next(self.delays))
        taken = min(left, len(data))
        return taken, begins, Position(left - taken, b"", when, is_message)


class _Chunk(NamedTuple):
    data: bytes
    end: int  # where they end among all bytes ever written
    counts: list[int]  # it is written once this list
    nth: int  # has a number at this index
    is_cut: bool  # whether the rest of a frame is to follow
    when: float = 0.0
    begins: bool = False  # whether a message begins with it
    position: Position = Position()  # behind it

    @property
    def is_written(self) -> bool:
        return len(self.counts) > self.nth


_AT_HEADER = Position()
_MOST_FLUSHERS = 2  # one that runs, and may miss the newest bytes, and the next
_NO_CHUNKS: deque[_Chunk] = deque()  # of all pipes that were never written to


@dataclass(slots=True, eq=False)
class Pipe:
    """One direction of a stream."""

    _limit: int  # maximum of unread bytes, except for one larger message
    _route: Route | None
    _chunks: deque[_Chunk] = field(default_factory=lambda: _NO_CHUNKS)
    # The writer's.
    _last: _Chunk | None = None  # while it is being written
    _written_to: int = 0
    _position: Position = _AT_HEADER
    _is_midway: bool = False  # whether the rest of a frame is to follow
    # The reader's.
    _reading: tuple[list[int], int] | None = None
    _read_to: int = 0
    # Used by any thread.
    _is_ended: bool = False
    _cut_at: float | None = None
    readers: Sleepers = field(default_factory=list)  # threads that sleep
    writers: Sleepers = field(default_factory=list)
    on_news: Callable[[], None] | None = None  # a poller's
    _flushers: list[Callable[[], None]] = field(default_factory=list)

    def write(self, pieces: Sequence[Buffer], counts: list[int]) -> None:
        """Take the beginning of several pieces, as far as there is room, and note how much."""
        self._settle_writing()
        if self._is_over:
            raise BrokenPipeError(errno.EPIPE, "the stream has ended")
        offered, room = sum(map(len, pieces)), self._room()
        if room <= 0:
            if offered > HEADER_NBYTES or self._is_midway:
                raise BlockingIOError
            room = 0  # a message without content, or a farewell
        data = pieces[0]
        if len(pieces) > 1 or type(data) is not bytes or len(data) > room + HEADER_NBYTES:
            data = bytes(join_first(pieces, room + HEADER_NBYTES))  # a copy that does not change
        chunk = self._next_chunk(data, counts, is_cut=len(data) < offered)
        if self._chunks is _NO_CHUNKS:
            self._chunks = deque()
        self._last = chunk
        self._chunks.append(chunk)
        try:
            counts.append(len(chunk.data))  # from here on it is written
            self._settle_writing()
            self.wake_readers()
        except BaseException:
            self.wake_readers()  # interrupted: no other thread would
            raise
        if self._route is not None and chunk.position.is_behind_message:
            self._route.on_message()

    def _next_chunk(self, data: bytes, counts: list[int], *, is_cut: bool) -> _Chunk:
        if self._route is None:
            return _Chunk(data, self._written_to + len(data), counts, len(counts), is_cut)
        nbytes, begins, position = self._route.follow(self._position, data)
        end, is_cut, when = self._written_to + nbytes, not position.is_at_header, position.when
        return _Chunk(data[:nbytes], end, counts, len(counts), is_cut, when, begins, position)

    def _settle_writing(self) -> None:
        """Complete or drop an interrupted write. Safe to repeat."""
        last = self._last
        if last is None:
            return
        if last.is_written:
            self._written_to, self._position, self._is_midway = last.end, last.position, last.is_cut
        elif self._chunks and self._chunks[-1] is last:
            self._chunks.pop()
        self._last = None

    def _room(self) -> int:
        """Return how many more bytes fit; headers, one a chunk, do not count."""
        nbytes = self._written_to - self._read_to
        if not nbytes:
            return sys.maxsize
        return self._limit - nbytes + HEADER_NBYTES * len(self._chunks)

    @property
    def is_writable(self) -> bool:
        """Whether something can be written, or a write would fail."""
        return self._room() > 0 or self._is_over

    @property
    def load_nbytes(self) -> int:
        """Bytes that were written and not read."""
        return max(self._written_to - self._read_to, 0)

    def flush_when_possible(self, flush: Callable[[], None]) -> None:
        """Make the next reader call a function when there is room. For the writer."""
        if len(self._flushers) < _MOST_FLUSHERS:
            self._flushers.append(flush)
        self.wake_readers()  # there may be room already

    def lift_limit(self) -> None:
        """Take any number of bytes from now on."""
        self._limit = sys.maxsize
        wake(self.writers)

    def end(self) -> None:
        """End the pipe; what was written can be read."""
        self._is_ended = True
        self.wake_readers()
        wake(self.writers)

    def cut(self) -> None:
        """Lose what is not visible by now. Safe from any thread."""
        if self._cut_at is None:
            self._cut_at = self._now()
        self.wake_readers()
        wake(self.writers)

    @property
    def _is_over(self) -> bool:
        return self._is_ended or self._cut_at is not None

    def _now(self) -> float:
        """Return the time; without a route, everything is visible at time 0."""
        return 0.0 if self._route is None else self._route.now()

    # -- the reader --------------------------------------------------------------------------------

    def read(self, buffer: memoryview, counts: list[int]) -> None:
        """Fill the beginning of a buffer and note how much; 0 at the end."""
        self._settle_reading()
        is_over = self._is_over  # before the check for input
        nbytes = self._fill(buffer, is_read=True)
        if not nbytes:
            if self._flushers and self._flush():
                nbytes = self._fill(buffer, is_read=True)
            if not nbytes and not (is_over and self._has_no_more()):
                raise BlockingIOError
        self._reading = (counts, self._read_to + nbytes)
        try:
            counts.append(nbytes)  # from here on it is read
            self._settle_reading()
            wake(self.writers)
            if self._flushers:
                self._flush()
        except BaseException:
            self._settle_reading()
            wake(self.writers)  # interrupted: no other thread would
            raise

    def peek(self, nbytes: int) -> bytes:
        """Return the beginning of the input without removing it. Safe from any thread."""
        buffer = bytearray(min(nbytes, self.load_nbytes))
        is_over = self._is_over
        count = self._fill(memoryview(buffer), is_read=False)
        if not count and not (is_over and self._has_no_more()):
            raise BlockingIOError
        return bytes(buffer[:count])

    @property
    def is_silent(self) -> bool:
        """Whether no bytes and no end are under way. For a check of many pipes."""
        return not self._chunks and not self._is_over

    def readable_in(self) -> float | None:
        """Return in how many seconds there is input, the end included; None if not known."""
        is_over = self._is_over
        chunk = self._head()
        if chunk is None:
            return 0.0 if is_over or (self._flushers and self._room() > 0) else None
        if self._cut_at is not None or self._route is None:
            return 0.0
        opens_at, gate = chunk.when, self._route.gate
        is_begun = self._read_to > chunk.end - len(chunk.data)
        if gate is not None and chunk.begins and not is_begun:
            opens_at = max(opens_at, gate.free_at)
        return max(opens_at - self._route.now(), 0.0)

    def _fill(self, buffer: memoryview, *, is_read: bool) -> int:
        read_to, filled, index = self._read_to, 0, 0
        latest = self._now() if self._cut_at is None else self._cut_at
        while filled < len(buffer):
            try:
                chunk = self._chunks[index]
            except IndexError:
                break
            index += 1
            if chunk.end <= read_to:
                continue
            if not chunk.is_written or chunk.when > latest:
                break
            data = chunk.data
            start = max(read_to - (chunk.end - len(data)), 0)
            if is_read and chunk.begins and not start and self._is_held_up(filled > 0, latest):
                break
            count = min(len(data) - start, len(buffer) - filled)
            buffer[filled : filled + count] = memoryview(data)[start : start + count]
            filled += count
            read_to = chunk.end - len(data) + start + count
        return filled

    def _is_held_up(self, is_second: bool, now: float) -> bool:
        """Pass the gate with one message, or return True if it is closed."""
        gate = None if self._route is None else self._route.gate
        if gate is None or self._cut_at is not None:
            return False
        if is_second or gate.free_at > now:
            return True
        gate.free_at = now + gate.seconds
        return False

    def _head(self) -> _Chunk | None:
        index = 0
        with suppress(IndexError):
            while True:
                chunk = self._chunks[index]
                if chunk.end > self._read_to:
                    return chunk if chunk.is_written else None
                index += 1
        return None

    def _has_no_more(self) -> bool:
        chunk = self._head()
        return chunk is None or (self._cut_at is not None and chunk.when > self._cut_at)

    def _settle_reading(self) -> None:
        if self._reading is not None:
            counts, read_to = self._reading
            if counts:
                self._read_to = read_to
            self._reading = None
        while self._chunks and self._chunks[0].end <= self._read_to:
            self._chunks.popleft()

    def _flush(self) -> bool:
        if self._room() <= 0:
            return False
        flushers = list(self._flushers)
        for flush in flushers:
            flush()
            with suppress(ValueError):
                self._flushers.remove(flush)  # last: the call may be interrupted
        return bool(flushers)

    def wake_readers(self) -> None:
        """Wake the threads that wait for input."""
        if self.on_news is not None:
            self.on_news()
        wake(self.readers)

    def discard(self) -> None:
        """Drop what was not read."""
        self._chunks = deque()
