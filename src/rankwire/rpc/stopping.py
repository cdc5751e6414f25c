"""Serving until told to stop: what ``RpcAgent.serve`` waits for, and who tells it.

It ends by whatever comes first: ``stop`` of any rank, SIGTERM (by which a launcher asks ranks to
end), the end of the agent or of its backend, the end of a rank that is watched, or that of all
others. Being told to stop is for good, and also counts if it comes before serving.

This module knows nothing of calls: a stop arrives as a request by the name ``STOP``, which the
polling thread answers at once, whatever the functions do.

Locks: none but the event's own. The handler of the signal only notes it: it runs between any two
steps of the main thread, which may hold that one.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rankwire.backends.base import Backend
from rankwire.deadline import Deadline
from rankwire.errors import ChannelClosedError

STOP = "\0stop"  # no function can be registered by such a name

_RETURN_WITHIN = 60.0  # seconds; a launcher pauses for up to 30 before it starts a rank anew
_LOOK_EVERY = 0.1  # seconds; a stop wakes at once, other ranks and signals are looked at


class Stopping:
    """Whether an agent is to stop serving. Every method is safe from any thread.

    Args:
        backend: Whose ranks are watched.
        is_closed: Whether the agent has ended.
    """

    def __init__(self, backend: Backend, is_closed: Callable[[], bool]) -> None:
        self._backend = backend
        self._is_closed = is_closed
        self._told = threading.Event()
        self._is_asked = False  # by the launcher
        self._alone: Deadline | None = None  # for the others to come back

    @property
    def is_asked(self) -> bool:
        """Whether the launcher has asked this rank to end."""
        return self._is_asked

    @property
    def is_told(self) -> bool:
        """Whether somebody has said so, on this rank or another, or the launcher has."""
        return self._is_asked or self._told.is_set()

    def tell(self) -> None:
        """Say so, for good."""
        self._told.set()

    def wait(self, deadline: Deadline, watched: int | None) -> bool:
        """Wait for the end of serving; False if the deadline passes first.

        Args:
            deadline: How long.
            watched: A rank without which there is nothing to serve for, or None.

        Raises:
            RankwireError: That rank is lost, or nobody is left who could call.
        """
        with self._listening_to_launcher():
            while not self._is_over(watched):
                if deadline.expired:
                    return False
                patience = min(_LOOK_EVERY, deadline.sleep_limit())
                self._backend.clock.wait(self._told, patience)
                self._backend.read_others()
            return True

    def _is_over(self, watched: int | None) -> bool:
        backend = self._backend
        if self.is_told or self._is_closed() or backend.closed:
            return True
        others = [rank for rank in range(backend.world_size) if rank != backend.rank]
        failures = {rank: backend.failure_of(rank) for rank in others}
        failure = None if watched is None else failures.get(watched)
        if failure is not None and not isinstance(failure, ChannelClosedError):
            raise failure.copy()
        if failure is not None:
            return True
        if not others or None in failures.values():
            self._alone = None
            return False
        lost = [each for each in failures.values() if not isinstance(each, ChannelClosedError)]
        if not lost:
            return True  # they have left in good order
        # There is nobody to serve; but where a launcher starts ranks anew, they may come back.
        if self._alone is None:
            self._alone = Deadline(_RETURN_WITHIN if backend.ranks_return else 0.0, backend.clock)
        if self._alone.expired:
            assert lost[0] is not None
            raise lost[0].copy()
        return False

    @contextmanager
    def _listening_to_launcher(self) -> Iterator[None]:
        """Take SIGTERM for a stop, where it would end the process, in the thread that gets it."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            self._is_asked = True

        try:
            signal.signal(signal.SIGTERM, note)
            yield
        finally:
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            finally:  # an interrupt may have fallen into the first
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
