"""Streams in memory: two ends in one process, without descriptors, and what may befall them.

A *pipe* is one direction: bounded, FIFO, written and read by one thread at a time. Like a socket it
takes what there is room for (what has no content always has), its reader wakes up when something
comes, and what was written before an end can still be read. Two pipes are a connection
(``memory_pair``); each end is a ``Stream``.

On its way a message may meet a *course* (``Course``): it becomes visible only after a delay, one at
a time where the reader is slow, and is counted when it is written whole. No thread is needed for
that: who sleeps knows when the next message is visible. A pipe that is *cut* loses what is not
visible by then.

What is written, or read, is so from the moment at which it is noted in the list that the caller
gave (``Stream.write``, ``Stream.read``): a signal may end a thread between any two bytecodes, and
bytes must be neither lost nor doubled then. So a chunk carries the list in which it is noted, and
the next writer or reader puts in order what it finds.

Nothing here takes a lock: each field has one owner, the writer or the reader, or is set once; and
deques and lists change in one step. A thread that sleeps leaves a lock of its own, looks once more,
and waits until somebody releases it.
"""

from __future__ import annotations

import errno
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import starmap
from operator import methodcaller
from time import monotonic
from typing import NamedTuple

from rankwire.links.stream import Stream, Watched
from rankwire.wire.frames import HEADER_NBYTES, Buffer, Channel, unpack_size

__all__ = ["Course", "Gate", "MemoryPoller", "MemoryStream", "memory_pair"]

_COURTESIES = (Channel.FAREWELL, Channel.GREETING)
_ONCE = ((),)
_release = methodcaller("release")


class Gate:
    """Lets one message through at a time, from all streams to one reader.

    Args:
        seconds: Between two of them.
    """

    __slots__ = ("_seconds", "free_at")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.free_at = 0.0  # monotonic

    def take(self, now: float) -> None:
        """A message is read now."""
        self.free_at = now + self._seconds


class Course:
    """What the messages of one direction meet on their way.

    Args:
        delays: How many seconds each takes in turn; None if they take none.
        gate: What lets them through at the reader.
        on_message: Called in the writer's thread when a message is written whole; it must not wait.
    """

    __slots__ = ("_delays", "gate", "on_message")

    def __init__(
        self,
        delays: Iterator[float] | None = None,
        gate: Gate | None = None,
        on_message: Callable[[], None] = lambda: None,
    ) -> None:
        self._delays = delays
        self.gate = gate
        self.on_message = on_message

    def arrival(self, earliest: float) -> float:
        """Return when a message that is written now becomes visible."""
        return max(earliest, 0.0 if self._delays is None else monotonic() + next(self._delays))


class _Place(NamedTuple):
    """Where in a message a writer is."""

    left: int = 0  # bytes of it that are still to come; 0 at a header
    head: bytes = b""  # what has come of the header
    when: float = 0.0  # when it becomes visible
    is_message: bool = False  # and not a greeting or a farewell


class _Chunk(NamedTuple):
    """Bytes that were written at once, of one message if there is a course."""

    data: bytes
    end: int  # where they end in all that was ever written
    counts: list[int]  # it is written once this list
    nth: int  # has something at this place
    when: float = 0.0
    begins: bool = False  # whether a message begins with it
    place: _Place = _Place()  # after it

    @property
    def is_written(self) -> bool:
        return len(self.counts) > self.nth


_NO_CHUNKS: deque[_Chunk] = deque()  # of all pipes that were never written to


class _Pipe:
    """One direction.

    Args:
        limit: Bytes above which nothing more is taken, unless the pipe is empty.
        course: What messages meet, if anything.
    """

    __slots__ = (
        "_chunks",
        "_course",
        "_cut_at",
        "_flushers",
        "_is_ended",
        "_last",
        "_limit",
        "_place",
        "_read_to",
        "_reading",
        "_written_to",
        "readers",
        "watch",
        "writers",
    )

    def __init__(self, limit: int, course: Course | None) -> None:
        self._limit = limit
        self._course = course
        self._chunks = _NO_CHUNKS
        # The writer's.
        self._last: _Chunk | None = None  # while it is being written
        self._written_to = 0
        self._place = _Place()
        # The reader's.
        self._reading: tuple[list[int], int] | None = None
        self._read_to = 0
        # Anybody's.
        self._is_ended = False
        self._cut_at: float | None = None
        self.readers: list[threading.Lock] = []  # of threads that sleep
        self.writers: list[threading.Lock] = []
        self.watch: _Watch | None = None
        self._flushers: list[Callable[[], None]] = []

    # -- the writer --------------------------------------------------------------------------------

    def write(self, pieces: Sequence[Buffer], counts: list[int]) -> None:
        """See ``Stream.write``."""
        self._settle_writing()
        if self._is_ended or self._cut_at is not None:
            raise BrokenPipeError(errno.EPIPE, "the stream has ended")
        room = self._room()
        if room <= 0:
            if sum(map(len, pieces)) > HEADER_NBYTES:
                raise BlockingIOError
            room = 0  # a message without content, or a farewell
        chunk = self._next_chunk(_first_bytes(pieces, room + HEADER_NBYTES), counts)
        if self._chunks is _NO_CHUNKS:
            self._chunks = deque()
        self._last = chunk
        self._chunks.append(chunk)
        try:
            counts.append(len(chunk.data))  # from here on it is written
            self._settle_writing()
            self.wake_readers()
        except BaseException:
            self.wake_readers()  # interrupted: nobody else would
            raise
        if self._course is not None and chunk.place.is_message and not chunk.place.left:
            if not chunk.place.head:
                self._course.on_message()

    def _next_chunk(self, data: bytes, counts: list[int]) -> _Chunk:
        """Return what is written next: all of the data, or what belongs to one message."""
        if self._course is None:
            return _Chunk(data, self._written_to + len(data), counts, len(counts))
        left, head, when, is_message = self._place
        begins = False
        if not left:
            missing = HEADER_NBYTES - len(head)
            if len(data) < missing:
                place = _Place(0, head + data, when, is_message)
                end = self._written_to + len(data)
                return _Chunk(data, end, counts, len(counts), when, False, place)
            channel, nbytes = unpack_size(head + data[:missing])
            left = missing + nbytes
            begins = is_message = channel not in _COURTESIES
            if is_message:
                when = self._course.arrival(when)
        data = data[:left]
        place = _Place(left - len(data), b"", when, is_message)
        end = self._written_to + len(data)
        return _Chunk(data, end, counts, len(counts), when, begins, place)

    def _settle_writing(self) -> None:
        """Note what the last writer has written, or drop what it has not. Safe to repeat."""
        last = self._last
        if last is None:
            return
        if last.is_written:
            self._written_to, self._place = last.end, last.place
        elif self._chunks and self._chunks[-1] is last:
            self._chunks.pop()
        self._last = None

    def _room(self) -> int:
        """Return how many bytes more are taken; headers, one a chunk, do not count."""
        nbytes = self._written_to - self._read_to
        if not nbytes:
            return sys.maxsize
        return self._limit - nbytes + HEADER_NBYTES * len(self._chunks)

    @property
    def is_writable(self) -> bool:
        """Whether something can be written, or it turns out that nothing can be any more."""
        return self._room() > 0 or self._is_ended or self._cut_at is not None

    @property
    def load_nbytes(self) -> int:
        """Bytes that were written and not read."""
        return max(self._written_to - self._read_to, 0)

    def flush_when_possible(self, flush: Callable[[], None]) -> None:
        """Have something called by whoever reads next, when there is room."""
        self._flushers.append(flush)
        self.wake_readers()  # there may be room already

    def end(self) -> None:
        """Write no more; what was written can be read."""
        self._is_ended = True
        self.wake_readers()
        _wake(self.writers)

    def cut(self) -> None:
        """Lose what is not visible by now. Any thread."""
        if self._cut_at is None:
            self._cut_at = monotonic()
        self.wake_readers()
        _wake(self.writers)

    # -- the reader --------------------------------------------------------------------------------

    def read(self, buffer: memoryview, counts: list[int]) -> None:
        """See ``Stream.read``."""
        self._settle_reading()
        is_over = self._is_ended or self._cut_at is not None  # before the look at what is there
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
            self._room_made()
        except BaseException:
            self._settle_reading()
            _wake(self.writers)  # interrupted: nobody else would
            raise

    def peek(self, nbytes: int) -> bytes:
        """See ``Stream.peek``. Any thread."""
        buffer = bytearray(min(nbytes, self.load_nbytes))
        is_over = self._is_ended or self._cut_at is not None
        count = self._fill(memoryview(buffer), is_read=False)
        if not count and not (is_over and self._has_no_more()):
            raise BlockingIOError
        return bytes(buffer[:count])

    def readable_in(self) -> float | None:
        """Return in how many seconds there is something to read; None if that is not known.

        The end counts, and so does what is held back for want of room.
        """
        is_over = self._is_ended or self._cut_at is not None
        chunk = self._head()
        if chunk is None:
            return 0.0 if is_over or (self._flushers and self._room() > 0) else None
        if self._cut_at is not None or self._course is None:
            return 0.0
        now = monotonic()
        opens_at = max(chunk.when, self._opens_at(chunk))
        return opens_at - now if opens_at > now else 0.0

    def _fill(self, buffer: memoryview, *, is_read: bool) -> int:
        """Copy what is visible into a buffer; return how much."""
        read_to, filled, index = self._read_to, 0, 0
        latest = self._cut_at
        if latest is None:
            latest = monotonic() if self._course is not None else 0.0
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
            if is_read and chunk.begins and not start and self._course is not None:
                gate = self._course.gate
                if gate is not None and self._cut_at is None:
                    if filled or gate.free_at > latest:
                        break
                    gate.take(latest)
            count = min(len(data) - start, len(buffer) - filled)
            buffer[filled : filled + count] = memoryview(data)[start : start + count]
            filled += count
            read_to = chunk.end - len(data) + start + count
        return filled

    def _opens_at(self, chunk: _Chunk) -> float:
        """Return when the gate is open for a message that has not been begun."""
        gate = None if self._course is None else self._course.gate
        is_begun = self._read_to > chunk.end - len(chunk.data)
        return 0.0 if gate is None or is_begun or not chunk.begins else gate.free_at

    def _head(self) -> _Chunk | None:
        """Return the first chunk that is written and not read."""
        index = 0
        with suppress(IndexError):
            while True:
                chunk = self._chunks[index]
                if chunk.end > self._read_to:
                    return chunk if chunk.is_written else None
                index += 1
        return None

    def _has_no_more(self) -> bool:
        """Whether nothing is left of a pipe that has ended."""
        chunk = self._head()
        return chunk is None or (self._cut_at is not None and chunk.when > self._cut_at)

    def _settle_reading(self) -> None:
        """Note what the last reader has read. Safe to repeat."""
        if self._reading is not None:
            counts, read_to = self._reading
            if counts:
                self._read_to = read_to
            self._reading = None
        while self._chunks and self._chunks[0].end <= self._read_to:
            self._chunks.popleft()

    def _room_made(self) -> None:
        _wake(self.writers)
        if self._flushers:
            self._flush()

    def _flush(self) -> bool:
        """Call who waits for room, if there is any; return whether somebody was called."""
        if self._room() <= 0:
            return False
        flushers, self._flushers = self._flushers, []
        for flush in flushers:
            flush()
        return bool(flushers)

    def wake_readers(self) -> None:
        """Have whoever waits for something to read look again."""
        if self.watch is not None:
            self.watch.notify()
        _wake(self.readers)

    def discard(self) -> None:
        """Forget what nobody will read."""
        self._chunks = deque()


class MemoryStream:
    """One end of two pipes. See ``Stream``."""

    __slots__ = ("_incoming", "_outgoing")

    transport = "memory"
    # A parser that never reads more at once makes a small buffer: there may be 65,000 of them.
    buffer_nbytes = 1024
    recv_pending = None

    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._incoming = incoming
        self._outgoing = outgoing

    @property
    def write(self) -> Callable[[Sequence[Buffer], list[int]], None]:
        """See ``Stream``."""
        return self._outgoing.write

    @property
    def read(self) -> Callable[[memoryview, list[int]], None]:
        """See ``Stream``."""
        return self._incoming.read

    def send(self, data: Buffer) -> int:
        """See ``Stream``."""
        return self.sendmsg((data,))

    def sendmsg(self, pieces: Sequence[Buffer]) -> int:
        """See ``Stream``."""
        counts: list[int] = []
        self._outgoing.write(pieces, counts)
        return counts[0]

    def recv_into(self, buffer: memoryview) -> int:
        """See ``Stream``."""
        counts: list[int] = []
        self._incoming.read(buffer, counts)
        return counts[0]

    def peek(self, nbytes: int) -> bytes:
        """See ``Stream``."""
        return self._incoming.peek(nbytes)

    def wait_readable(self, seconds: float) -> bool:
        """See ``Stream``."""
        limit = monotonic() + seconds
        while (gap := self._incoming.readable_in()) != 0.0:
            left = limit - monotonic()
            if left <= 0.0:
                return False
            with _Sleep(self._incoming.readers) as sleep:
                gap = self._incoming.readable_in()
                if gap != 0.0:
                    sleep(left if gap is None else min(left, gap))
        return True

    def wait_writable(self, seconds: float, beside: Sequence[Watched] = ()) -> bool:
        """See ``Stream``."""
        limit = monotonic() + seconds
        others = [other._incoming for other in beside if isinstance(other, MemoryStream)]
        while not self._outgoing.is_writable:
            left = limit - monotonic()
            if left <= 0.0 or _is_any_readable(others):
                return False
            with _Sleep(self._outgoing.writers, *(other.readers for other in others)) as sleep:
                if self._outgoing.is_writable or _is_any_readable(others):
                    continue
                gaps = [gap for other in others if (gap := other.readable_in()) is not None]
                sleep(min(left, *gaps) if gaps else left)
        return True

    def readable_in(self) -> float | None:
        """Return in how many seconds there is something to read; None if that is not known."""
        return self._incoming.readable_in()

    def watch(self, watch: _Watch | None) -> None:
        """Notify a poller when something comes."""
        self._incoming.watch = watch

    def flush_when_possible(self, flush: Callable[[], None]) -> None:
        """Have something called by the other end's reader when it has made room."""
        self._outgoing.flush_when_possible(flush)

    def unsent_nbytes(self) -> int:
        """See ``Stream``."""
        return self._outgoing.load_nbytes

    def tcp_info(self) -> None:
        """See ``Stream``."""
        return None

    def peer_pid(self) -> int:
        """See ``Stream``."""
        return 0

    def fileno(self) -> int:
        """See ``Stream``."""
        return -1

    def shut_down(self) -> None:
        """See ``Stream``. What was written arrives, what is visible here can be read."""
        self._outgoing.end()
        self._incoming.cut()

    def abort(self) -> None:
        """End both directions as if a cable were cut: what is not visible by now is lost."""
        self._outgoing.cut()
        self._incoming.cut()

    def close(self) -> None:
        """See ``Stream``."""
        self.shut_down()
        self._incoming.discard()


def memory_pair(
    limit: int, there: Course | None = None, back: Course | None = None
) -> tuple[MemoryStream, MemoryStream]:
    """Return two ends that are connected.

    Args:
        limit: Bytes of one direction above which a writer waits; a message may be larger if there
            is no other.
        there: What messages from the first end to the second one meet.
        back: The same for those from the second one.
    """
    one, other = _Pipe(limit, there), _Pipe(limit, back)
    return MemoryStream(other, one), MemoryStream(one, other)


class _Watch:
    """One stream of a poller."""

    __slots__ = ("_poller", "is_armed", "is_once", "is_queued", "key", "stream")

    def __init__(
        self, poller: MemoryPoller, stream: MemoryStream, key: object, *, is_once: bool
    ) -> None:
        self._poller = poller
        self.stream = stream
        self.key = key
        self.is_once = is_once
        self.is_armed = True
        self.is_queued = False

    def notify(self) -> None:
        """Something may have come."""
        self._poller.look_at(self)


class MemoryPoller:
    """See ``Poller``, for streams in memory.

    Streams on which something may have come stand in a queue, in turn; who polls looks at them.
    """

    def __init__(self) -> None:
        self._watches: dict[Stream, _Watch] = {}
        self._queue: deque[_Watch] = deque()
        self._news = 0  # changes whenever there is something to look at
        self._sleepers: list[threading.Lock] = []
        self._is_woken = False
        self._is_closed = False

    def register(self, stream: Stream, key: object) -> None:
        """See ``Poller``."""
        self._watch(stream, key, is_once=False)

    def arm(self, stream: Stream, key: object) -> None:
        """See ``Poller``."""
        watch = self._watches.get(stream)
        if watch is None:
            self._watch(stream, key, is_once=True)
        else:
            watch.is_armed = True
            watch.notify()

    def _watch(self, stream: Stream, key: object, *, is_once: bool) -> None:
        assert isinstance(stream, MemoryStream)
        watch = self._watches[stream] = _Watch(self, stream, key, is_once=is_once)
        stream.watch(watch)
        watch.notify()

    def unregister(self, stream: Stream) -> None:
        """See ``Poller``."""
        watch = self._watches.pop(stream, None)
        if watch is not None:
            watch.is_armed = False
            watch.stream.watch(None)

    def look_at(self, watch: _Watch) -> None:
        """Have ``poll`` look at a stream."""
        if not watch.is_queued:
            watch.is_queued = True
            self._queue.append(watch)
        self._news += 1
        _wake(self._sleepers)

    def poll(self, seconds: float, spin: object = None) -> object | None:
        """Return the key of a stream that can be read. Nobody spins in one process."""
        limit = monotonic() + seconds
        while True:
            news = self._news
            if self._is_closed:
                raise ValueError("this poller is closed")
            if self._is_woken:
                self._is_woken = False
                return None
            ready, gap = self._look()
            if ready is not None:
                return ready.key
            left = limit - monotonic()
            if left <= 0.0:
                return None
            with _Sleep(self._sleepers) as sleep:
                if news == self._news:
                    sleep(left if gap is None else min(left, gap))

    def _look(self) -> tuple[_Watch | None, float | None]:
        """Return a stream that can be read, or in how many seconds there will be one."""
        nearest: float | None = None
        for _ in range(len(self._queue)):
            watch = self._queue.popleft()
            watch.is_queued = False  # before the look: what comes after it is news
            gap = watch.stream.readable_in() if watch.is_armed else None
            if gap is None:
                continue
            if gap == 0.0 and watch.is_once:
                watch.is_armed = False
                return watch, None
            watch.is_queued = True  # there may be more, or will be
            self._queue.append(watch)
            if gap == 0.0:
                return watch, None
            nearest = gap if nearest is None else min(nearest, gap)
        return None, nearest

    def wake(self) -> None:
        """See ``Poller``."""
        self._is_woken = True
        self._news += 1
        _wake(self._sleepers)

    def close(self) -> None:
        """See ``Poller``."""
        self._is_closed = True
        for stream in list(self._watches):
            self.unregister(stream)
        self.wake()


class _Sleep:
    """A thread that is about to sleep in one or several lists, where it can be woken up.

    Within the block it looks once more and then sleeps; a wake-up between the two is not lost.
    """

    def __init__(self, *places: list[threading.Lock]) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._lock.acquire()

    def __enter__(self) -> Callable[[float], None]:
        for place in self._places:
            place.append(self._lock)
        return self._sleep

    def _sleep(self, seconds: float) -> None:
        self._lock.acquire(timeout=seconds)

    def __exit__(self, *_: object) -> None:
        for place in self._places:
            with suppress(ValueError):
                place.remove(self._lock)


def _wake(sleepers: list[threading.Lock]) -> None:
    """Wake all who sleep. Taking one from the list and waking it are one call of a C function."""
    while sleepers:
        with suppress(IndexError, RuntimeError):  # another thread was faster, in any of its places
            deque(map(_release, starmap(sleepers.pop, _ONCE)), 0)


def _is_any_readable(pipes: Sequence[_Pipe]) -> bool:
    return any(pipe.readable_in() == 0.0 for pipe in pipes)


def _first_bytes(pieces: Sequence[Buffer], nbytes: int) -> bytes:
    """Return the beginning of a message in pieces, in memory that nobody changes."""
    if len(pieces) == 1 and type(pieces[0]) is bytes and len(pieces[0]) <= nbytes:
        return pieces[0]
    views: list[memoryview] = []
    for piece in pieces:
        view = memoryview(piece).cast("B")[:nbytes]
        views.append(view)
        nbytes -= len(view)
        if nbytes <= 0:
            break
    return b"".join(views)
