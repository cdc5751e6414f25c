"""Leave the workers: ``shutdown``, which waits until no call is in progress on any rank."""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

from rankwire.backends.base import Backend
from rankwire.codec.codec import Codec
from rankwire.collectives.objects import all_gather_object
from rankwire.deadline import Deadline
from rankwire.errors import ChannelClosedError, CollectiveAbortedError, PeerLostError, RankwireError
from rankwire.torch.rpc.options import DEFAULT_SHUTDOWN_TIMEOUT
from rankwire.torch.rpc.session import Session, current, state

_log = logging.getLogger("rankwire")

_GRACE = 5.0
_LOOK_EVERY = 0.002
_GONE = (PeerLostError, ChannelClosedError)

# By rank: whether a call or update is in progress there, and its number of calls.
Told = dict[int, tuple[bool, int]]

_codec = Codec()


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the workers.

    Args:
        graceful: Whether to wait until every worker has called this or is lost, and no call is in
            progress anywhere. Calls are served until then. Lost workers are logged.
        timeout: Seconds for that; 0 is no limit.

    Raises:
        RuntimeError: RPC is not initialized, or other workers did not call this in time. This
            worker leaves in any case.
    """
    session = current()
    try:
        if graceful:
            wait_for_all(session, timeout)
    finally:
        try:
            session.close(_GRACE)
        finally:
            state.at_end.close()
            state.session = None


def wait_for_all(session: Session, timeout: float) -> None:
    """Return when each rank called this or is lost, and two rounds in a row found no call."""
    limit = timeout if timeout > 0.0 else math.inf
    deadline = Deadline(limit, session.agent.backend.clock)
    farewell = _Farewell(session.agent.backend, deadline)
    last: Told = {}
    try:
        for look in itertools.count():
            is_busy, count = session.activity()
            told = farewell.tell(is_busy, count - look)
            is_quiet = bool(told) and not any(is_busy for is_busy, _ in told.values())
            if is_quiet and told == last:
                break
            last = told
            if told and not is_quiet:
                deadline.clock.sleep(min(_LOOK_EVERY, deadline.sleep_limit()))
    except RankwireError as error:
        raise RuntimeError(f"not all workers came to shutdown: {error}") from error
    _log_lost_workers(session)


def _log_lost_workers(session: Session) -> None:
    for worker in session.workers:
        failure = session.agent.backend.failure_of(worker.id) if worker != session.me else None
        if isinstance(failure, PeerLostError):
            _log.warning("the workers shut down without %s: %s", worker, failure)


class _Farewell:
    """Exchanges the ranks' activity. For one thread.

    It uses a collective until the loss of a rank fails that on all ranks. Then each rank reports to
    the lowest remaining rank, and gets all reports from it.
    """

    def __init__(self, backend: Backend, deadline: Deadline) -> None:
        self._backend = backend
        self._deadline = deadline
        self._is_complete = True
        self._gone: set[int] = set()

    def tell(self, is_busy: bool, count: int) -> Told:
        """Return the reports of all remaining ranks, or {} if the round must be repeated."""
        own = is_busy, count
        if self._is_complete:
            try:
                told = all_gather_object(self._backend, own, timeout=self._deadline.remaining())
            except (*_GONE, CollectiveAbortedError):
                self._is_complete = False
                return {}
            return dict(enumerate(told))
        lowest = min(set(range(self._backend.world_size)) - self._gone)
        return self._lead(own) if lowest == self._backend.rank else self._follow(lowest, own)

    # When a leader is lost, all start again with the next one: both sides are in the same round.

    def _follow(self, leader: int, own: tuple[bool, int]) -> Told:
        try:
            self._send(own, leader)
            told: Told = self._receive(leader)
        except _GONE:
            self._gone.add(leader)
            return {}
        return told

    def _lead(self, own: tuple[bool, int]) -> Told:
        told = {self._backend.rank: own}
        others = set(range(self._backend.rank + 1, self._backend.world_size))
        for rank in sorted(others - self._gone):
            try:
                told[rank] = self._receive(rank)
            except _GONE:
                self._gone.add(rank)
        for rank in sorted(others - self._gone):
            try:
                self._send(told, rank)
            except _GONE:
                self._gone.add(rank)
        return told

    def _send(self, value: Any, rank: int) -> None:
        buffers, _ = _codec.encode(value)
        self._backend.send(buffers, rank, timeout=self._deadline.remaining())

    def _receive(self, rank: int) -> Any:
        return _codec.decode(self._backend.recv(rank, timeout=self._deadline.remaining()))
