"""A rank of a world in this process: one thread for each function that it runs.

A rank that a fault plan or ``network.kill`` kills has ended at that moment. Its thread gets an
error from its next operation or keeps computing, and no thread waits for it. A thread cannot be
interrupted.

Lock: ``_lock`` guards what the rank is running. Nothing is called under it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rankwire.backends.base import Backend
from rankwire.backends.simulated import SimulatedBackend
from rankwire.clock import REAL_TIME
from rankwire.errors import ConfigurationError
from rankwire.local_world.function_run import RankOutcome
from rankwire.observe.stacks import stacks

_LET_GO_PATIENCE = 0.2  # seconds for the thread of a killed rank to notice


class RankThread:
    """A rank that runs functions in threads of this process. Thread-safe.

    Args:
        backend: The rank's backend. The caller closes it.

    Attributes:
        rank: Its number.
        thread: The thread of the current or last function.
        ended: How the rank ended, as text; empty while it is alive.
    """

    def __init__(self, backend: Backend) -> None:
        self.rank = backend.rank
        self.thread: threading.Thread | None = None
        self.ended = ""
        self._backend = backend
        self._lock = threading.Lock()
        self._running: Future[RankOutcome[Any]] | None = None
        self._running_name = ""
        self._network = backend.network if isinstance(backend, SimulatedBackend) else None
        if self._network is not None:
            self._network.on_kill(self._hear_of_kill)

    def start(
        self, function: Callable[..., Any], args: tuple[Any, ...], *, leaves: bool = False
    ) -> Future[RankOutcome[Any]]:
        """Start ``function(backend, *args)`` in a thread; with ``leaves``, close the backend after.

        Raises:
            ConfigurationError: The rank is still running a function.
        """
        running: Future[RankOutcome[Any]] = Future()
        with self._lock:
            if self._running is not None:
                raise ConfigurationError(f"rank {self.rank} still runs {self._running_name!r}")
            if self.ended:
                running.set_result(RankOutcome(self.rank, killed=True, reason=self.ended))
                return running
            self._running = running
            self._running_name = getattr(function, "__name__", repr(function))
        self.thread = threading.Thread(
            target=self._run,
            args=(running, function, args, leaves),
            name=f"rank {self.rank}",
            daemon=True,
        )
        self.thread.start()
        return running

    def ask_for_stacks(self) -> Future[str]:
        """Return the stack of its thread."""
        said: Future[str] = Future()
        thread = self.thread
        ident = None if thread is None else thread.ident
        said.set_result("" if ident is None else stacks(only=[ident]))
        return said

    def interrupt(self) -> bool:
        """Return False: a thread cannot be interrupted."""
        return False

    def let_go(self) -> None:
        """Give the thread of a killed rank a moment to end."""
        if self.ended and self.thread is not None:
            REAL_TIME.join(self.thread, _LET_GO_PATIENCE)

    def _run(
        self,
        running: Future[RankOutcome[Any]],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        leaves: bool,
    ) -> None:
        try:
            if leaves:
                with self._backend:
                    outcome = RankOutcome(self.rank, function(self._backend, *args))
            else:
                outcome = RankOutcome(self.rank, function(self._backend, *args))
        except BaseException as error:  # reported to the caller
            outcome = RankOutcome(self.rank, error=error)
        network = self._network
        if network is not None and network.was_killed(self.rank):  # seen before the callback came
            self._hear_of_kill(self.rank)
        self._end(outcome, running)

    def _hear_of_kill(self, rank: int) -> None:
        if rank == self.rank:
            self.ended = "it was killed"
            self._end(RankOutcome(self.rank, killed=True, reason=self.ended))

    def _end(self, outcome: RankOutcome[Any], mine: Future[RankOutcome[Any]] | None = None) -> None:
        """Set the outcome, unless one was set already: a killed rank has no other."""
        with self._lock:
            running = self._running
            if running is None or mine not in (None, running):
                return
            self._running = None
        running.set_result(outcome)
