"""A bell for streams in memory: the twin of ``bells.PollBell``, without descriptors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.transports.memory_stream import MemoryStream
from rankwire.transports.stream import Watched


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
