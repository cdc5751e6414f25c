"""Poller and bell for streams in memory: ``EpollPoller`` and ``PollBell`` without descriptors."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.transports.memory_stream import MemoryStream
from rankwire.transports.pipe import Pipe
from rankwire.transports.stream import Stream, Watched
from rankwire.transports.wakeup import Sleepers, sleeper, wake


class MemoryBell:
    """A lock of its own, which also hangs at the streams.

    Args:
        clock: By which the thread sleeps.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = runtime.Lock()
        self._lock.acquire()

    def release(self) -> None:
        """Have the thread wake up."""
        with suppress(RuntimeError):  # it was rung already
            self._lock.release()

    def listen(self, streams: Sequence[Watched], seconds: float) -> None:
        """Sleep until something can be read, the bell was rung, or the time has passed."""
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
        """There is nothing to give back."""


@dataclass(slots=True, eq=False)
class _Watch:
    """One stream of a poller."""

    pipe: Pipe  # what comes on it
    key: object
    is_once: bool
    is_armed: bool = True
    is_queued: bool = False


class MemoryPoller:
    """What one thread waits with for several streams in memory.

    Streams on which something may have come stand in a queue, in turn; who polls looks at them.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._watches: dict[Stream, _Watch] = {}
        self._queue: deque[_Watch] = deque()
        self._news = 0  # changes whenever there is something to look at
        self._sleepers: Sleepers = []
        self._is_woken = False
        self._is_closed = False

    def register(self, stream: Stream, key: object) -> None:
        """Watch a stream until it is unregistered."""
        self._watch(stream, key, is_once=False)

    def arm(self, stream: Stream, key: object) -> None:
        """Have ``poll`` return the key once; to be armed again after that."""
        watch = self._watches.get(stream)
        if watch is None:
            self._watch(stream, key, is_once=True)
        else:
            watch.is_armed = True
            self._look_at(watch)

    def _watch(self, stream: Stream, key: object, *, is_once: bool) -> None:
        assert isinstance(stream, MemoryStream)
        watch = self._watches[stream] = _Watch(stream.incoming, key, is_once)
        watch.pipe.on_news = partial(self._look_at, watch)
        self._look_at(watch)

    def unregister(self, stream: Stream) -> None:
        """Watch a stream no more; nothing happens if it was not watched."""
        watch = self._watches.pop(stream, None)
        if watch is not None:
            watch.is_armed = False
            watch.pipe.on_news = None

    def _look_at(self, watch: _Watch) -> None:
        """Have ``poll`` look at a stream: something may have come."""
        if not watch.is_queued:
            watch.is_queued = True
            self._queue.append(watch)
        self._news += 1
        wake(self._sleepers)

    def poll(self, seconds: float, spin: object = None) -> object | None:
        """Return the key of a stream that can be read. Nobody spins in one process."""
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
            watch.is_queued = False  # before the look: what comes after it is news
            gap = watch.pipe.readable_in() if watch.is_armed else None
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
        """Make ``poll`` return, now or the next time."""
        self._is_woken = True
        self._news += 1
        wake(self._sleepers)

    def close(self) -> None:
        """Watch nothing more; a ``poll`` ends."""
        self._is_closed = True
        for stream in list(self._watches):
            self.unregister(stream)
        self.wake()
