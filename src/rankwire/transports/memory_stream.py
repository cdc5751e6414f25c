"""Streams in memory: two ends in one process, without descriptors, and how a thread waits for them.

Two pipes (``pipe``) are a connection, one each way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.override import override
from rankwire.transports.byte_stream import ByteStream, Exposure
from rankwire.transports.pipe import Pipe, Route
from rankwire.transports.wakeup import Sleepers, sleeper, wake
from rankwire.wire.frames import Buffer


class MemoryStream(ByteStream):
    """One end of two pipes."""

    __slots__ = ("_clock", "incoming", "outgoing")

    transport = "memory"
    exposure: Exposure = "none"
    # A parser that never reads more at once makes a small buffer: there may be 65,000 of them.
    buffer_nbytes = 512

    def __init__(self, incoming: Pipe, outgoing: Pipe, clock: Clock) -> None:
        self._clock = clock
        self.incoming = incoming
        self.outgoing = outgoing

    @override
    def read(self, buffer: memoryview, counts: list[int]) -> None:
        self.incoming.read(buffer, counts)

    @override
    def write(self, pieces: Sequence[Buffer], counts: list[int]) -> None:
        self.outgoing.write(pieces, counts)

    @override
    def peek(self, nbytes: int) -> bytes:
        return self.incoming.peek(nbytes)

    @override
    def wait(
        self, seconds: float, beside: Sequence[ByteStream] = (), *, to_write: bool = False
    ) -> bool:
        incoming, outgoing, clock = self.incoming, self.outgoing, self._clock
        limit = clock.now() + seconds
        others = [other.incoming for other in beside if isinstance(other, MemoryStream)]
        pipes = others if to_write else [incoming, *others]
        places = [pipe.readers for pipe in pipes]
        if to_write:
            places.append(outgoing.writers)

        def is_ready() -> bool:
            return outgoing.is_writable if to_write else incoming.readable_in() == 0.0

        while not is_ready():
            left = limit - clock.now()
            if left <= 0.0 or _is_any_readable(others):
                return False
            with sleeper(clock, *places) as sleep:
                if not is_ready() and not _is_any_readable(others):
                    gaps = [gap for pipe in pipes if (gap := pipe.readable_in()) is not None]
                    sleep(min(left, *gaps) if gaps else left)
        return True

    @override
    def unsent_nbytes(self) -> int:
        return self.outgoing.load_nbytes

    @override
    def shut_down(self) -> None:
        """End both directions: written bytes arrive, visible bytes can be read."""
        self.outgoing.end()
        self.incoming.cut()

    def abort(self) -> None:
        """Simulate a cut cable: bytes that are not visible by now are lost."""
        self.outgoing.cut()
        self.incoming.cut()

    @override
    def close(self) -> None:
        self.shut_down()
        self.incoming.discard()


def memory_pair(
    limit: int, clock: Clock, there: Route | None = None, back: Route | None = None
) -> tuple[MemoryStream, MemoryStream]:
    """Return two connected ends, each of which takes ``limit`` bytes, or one larger message.

    ``there`` delays the messages of the first end, ``back`` those of the second.
    """
    one, other = Pipe(limit, there), Pipe(limit, back)
    return MemoryStream(other, one, clock), MemoryStream(one, other, clock)


def _is_any_readable(pipes: Sequence[Pipe]) -> bool:
    return any(pipe.readable_in() == 0.0 for pipe in pipes)


class MemoryWaiter:
    """A thread that waits for streams in memory, see ``poller.Waiter``."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = runtime.Lock()
        self._lock.acquire()

    def release(self) -> None:
        """Wake the thread."""
        with suppress(RuntimeError):  # already released
            self._lock.release()

    def wait(self, streams: Sequence[ByteStream], seconds: float) -> None:
        """Sleep until there is input, ``release`` was called, or the time has passed."""
        pipes = [stream.incoming for stream in streams if isinstance(stream, MemoryStream)]
        try:
            for pipe in pipes:
                pipe.readers.append(self)
            gaps = [gap for pipe in pipes if (gap := pipe.readable_in()) is not None]
            self._clock.acquire(self._lock, True, min(seconds, *gaps) if gaps else seconds)
        finally:
            for pipe in pipes:
                with suppress(ValueError):
                    pipe.readers.remove(self)

    def close(self) -> None:
        """Do nothing: there are no resources."""


@dataclass(slots=True, eq=False)
class _Watch:
    pipe: Pipe  # its incoming pipe
    key: object
    is_once: bool
    is_armed: bool = True
    is_queued: bool = False


class MemoryPoller:
    """Waits for several streams in memory, see ``poller.Poller``; checks them in turn."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._watches: dict[ByteStream, _Watch] = {}
        self._queue: deque[_Watch] = deque()
        self._news = 0  # changes whenever there is something to check
        self._sleepers: Sleepers = []
        self._is_woken = False
        self._is_closed = False

    def register(self, stream: ByteStream, key: object) -> None:
        """Watch a stream until it is unregistered."""
        self._watch(stream, key, is_once=False)

    def arm(self, stream: ByteStream, key: object) -> None:
        """Make ``poll`` return the key once."""
        watch = self._watches.get(stream)
        if watch is None:
            self._watch(stream, key, is_once=True)
        else:
            watch.is_armed = True
            self._look_at(watch)

    def _watch(self, stream: ByteStream, key: object, *, is_once: bool) -> None:
        assert isinstance(stream, MemoryStream)
        watch = self._watches[stream] = _Watch(stream.incoming, key, is_once)
        watch.pipe.on_news = partial(self._look_at, watch)
        self._look_at(watch)

    def unregister(self, stream: ByteStream) -> None:
        """Stop watching a stream."""
        watch = self._watches.pop(stream, None)
        if watch is not None:
            watch.is_armed = False
            watch.pipe.on_news = None

    def _look_at(self, watch: _Watch) -> None:
        if not watch.is_queued:
            watch.is_queued = True
            self._queue.append(watch)
        self._news += 1
        wake(self._sleepers)

    def poll(self, seconds: float, spin: object = None) -> object | None:
        """Return the key of a stream that can be read. No thread spins in one process."""
        limit = self._clock.now() + seconds
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
            left = limit - self._clock.now()
            if left <= 0.0:
                return None
            with sleeper(self._clock, self._sleepers) as sleep:
                if news == self._news:
                    sleep(left if gap is None else min(left, gap))

    def _look(self) -> tuple[_Watch | None, float | None]:
        """Return a stream that can be read, or in how many seconds there will be one."""
        nearest: float | None = None
        for _ in range(len(self._queue)):
            watch = self._queue.popleft()
            watch.is_queued = False  # before the check: later input counts as new
            gap = watch.pipe.readable_in() if watch.is_armed else None
            if gap is None:
                continue
            if gap == 0.0 and watch.is_once:
                watch.is_armed = False
                return watch, None
            watch.is_queued = True  # there may be more, now or later
            self._queue.append(watch)
            if gap == 0.0:
                return watch, None
            nearest = gap if nearest is None else min(nearest, gap)
        return None, nearest

    def wake(self) -> None:
        """Make ``poll`` return, now or the next time."""
        self._is_woken = True
        self._news += 1
        wake(self._sleepers)

    def close(self) -> None:
        """Stop watching; a ``poll`` ends."""
        self._is_closed = True
        for stream in list(self._watches):
            self.unregister(stream)
        self.wake()
