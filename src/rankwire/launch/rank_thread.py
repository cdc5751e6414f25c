"""A rank of a world in this process: one thread for each function that it runs.

A rank that a fault plan or ``network.kill`` kills has ended at that moment. Its thread gets an
error from its next operation or keeps computing, and no thread waits for it. A thread cannot be
interrupted.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

from rankwire import runtime
from rankwire.backends.base import Backend
from rankwire.backends.simulated import SimulatedBackend
from rankwire.clock import REAL_TIME
from rankwire.launch.function_run import Rank, RankOutcome
from rankwire.observe.stacks import stacks
from rankwire.override import override

_LET_GO_PATIENCE = 0.2  # seconds for the thread of a killed rank to notice


class RankThread(Rank):
    """A rank that runs functions in threads of this process. Thread-safe.

    Args:
        backend: The rank's backend. The caller closes it.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend.rank)
        self._thread: runtime.Thread | None = None  # of the current or last function
        self._backend = backend
        self._network = backend.network if isinstance(backend, SimulatedBackend) else None
        if self._network is not None:
            self._network.on_kill(self._end_if_killed)

    @override
    def start(
        self, function: Callable[..., Any], args: tuple[Any, ...], *, leaves: bool = False
    ) -> Future[RankOutcome[Any]]:
        running = self._begin(getattr(function, "__name__", repr(function)))
        if not self._ended:
            self._thread = runtime.Thread(
                target=self._run,
                args=(running, function, args, leaves),
                name=f"rank {self.rank}",
                daemon=True,
            )
            self._thread.start()
        return running

    @override
    def ask_for_stacks(self) -> Future[str]:
        said: Future[str] = Future()
        ident = None if self._thread is None else self._thread.ident
        said.set_result("" if ident is None else stacks(only=[ident]))
        return said

    @override
    def interrupt(self) -> bool:
        return False

    def let_go(self) -> None:
        """Give the thread of a killed rank a moment to end."""
        if self._ended and self._thread is not None:
            REAL_TIME.join(self._thread, _LET_GO_PATIENCE)

    def _run(
        self,
        running: Future[RankOutcome[Any]],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        leaves: bool,
    ) -> None:
        try:
            with self._backend if leaves else nullcontext():
                outcome = RankOutcome(self.rank, function(self._backend, *args))
        except BaseException as error:  # reported to the caller
            outcome = RankOutcome(self.rank, error=error)
        network = self._network
        if network is not None and network.was_killed(self.rank):  # seen before the callback came
            self._end_if_killed(self.rank)
        self._finish(outcome, running)

    def _end_if_killed(self, rank: int) -> None:
        if rank == self.rank:
            self._ended = RankOutcome(rank, killed=True, reason="it was killed")
            self._finish(self._ended)
