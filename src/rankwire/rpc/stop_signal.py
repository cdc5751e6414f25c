"""Wait until an agent is told to stop serving: ``RpcAgent.serve`` and ``RpcAgent.stop``.

A stop is permanent, and may come before serving. It arrives as a request by the name ``STOP``,
which the polling thread answers at once. The signal handler only sets a flag, because it may run
while the main thread holds the lock of the event.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from rankwire import runtime
from rankwire.backends.base import Backend
from rankwire.deadline import Deadline
from rankwire.errors import ChannelClosedError, RankwireError

STOP = "\0stop"  # no function can be registered by this name

_RETURN_WITHIN = 60.0  # seconds; a launcher waits up to 30 before it restarts a rank
_CHECK_EVERY = 0.1  # seconds, to notice other ranks and signals; a stop wakes at once


class StopSignal:
    """Whether an agent is to stop serving. Every method is safe from any thread."""

    def __init__(self, backend: Backend, is_closed: Callable[[], bool]) -> None:
        self._backend = backend
        self._is_closed = is_closed
        self._told = runtime.Event()
        self.is_asked = False  # by the launcher
        self._alone: Deadline | None = None  # for lost ranks to return

    @property
    def is_told(self) -> bool:
        """Whether a rank or the launcher has told this rank to stop."""
        return self.is_asked or self._told.is_set()

    def tell(self) -> None:
        """Stop serving, permanently."""
        self._told.set()

    def wait(self, deadline: Deadline, watched: int | None) -> bool:
        """Wait until serving ends; return False if the deadline passes first.

        The end of the rank ``watched`` ends serving. Raises if that rank, or every other, is lost.
        """
        with self._sigterm_noted():
            while not self._is_over(watched):
                if deadline.expired:
                    return False
                patience = min(_CHECK_EVERY, deadline.sleep_limit())
                self._backend.clock.wait(self._told, patience)
                self._backend.mesh.read_others()
            return True

    def _is_over(self, watched: int | None) -> bool:
        backend = self._backend
        if self.is_told or self._is_closed() or backend.closed:
            return True
        others = [rank for rank in range(backend.world_size) if rank != backend.rank]
        failures = {rank: backend.failure_of(rank) for rank in others}
        failure = None if watched is None else failures.get(watched)
        if failure is not None:
            if isinstance(failure, ChannelClosedError):
                return True
            raise failure.copy()
        if not others or None in failures.values():
            self._alone = None
            return False
        return self._all_have_left([each for each in failures.values() if each is not None])

    def _all_have_left(self, failures: Iterable[RankwireError]) -> bool:
        backend = self._backend
        lost = [each for each in failures if not isinstance(each, ChannelClosedError)]
        if not lost:
            return True
        # No rank is left to serve; but if a launcher restarts ranks, they may return.
        if self._alone is None:
            self._alone = Deadline(_RETURN_WITHIN if backend.ranks_return else 0.0, backend.clock)
        if self._alone.expired:
            raise lost[0].copy()
        return False

    @contextmanager
    def _sigterm_noted(self) -> Iterator[None]:
        # Unless the program handles it itself.
        is_main = runtime.current_thread() is runtime.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            self.is_asked = True

        try:
            signal.signal(signal.SIGTERM, note)
            yield
        finally:
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            finally:  # an interrupt may have ended the first
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
