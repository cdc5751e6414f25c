"""Ending: ``shutdown``, and how the workers find out that all of them are done.

A graceful end waits until every worker has come to it and no call is under way anywhere: a call may
have started others that no caller waits for. A worker that is lost, or that left without waiting,
does not come any more; the others go on serving each other, and end without it.
"""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

from rankwire.backends.base import Backend
from rankwire.codec.codec import Codec
from rankwire.collectives.objects import all_gather_object
from rankwire.deadline import Deadline
from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    PeerLostError,
    RankwireError,
)
from rankwire.torch.rpc import companions
from rankwire.torch.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT
from rankwire.torch.rpc.session import Session, current, state

_log = logging.getLogger("rankwire")

_GRACE = 5.0
_LOOK_EVERY = 0.002
_GONE = (PeerLostError, ChannelClosedError)

# By rank: whether anything is under way there, and the number of calls that it has made.
Told = dict[int, tuple[bool, int]]

_codec = Codec()


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the workers.

    Args:
        graceful: Whether to wait until every worker has come to this or is lost, and no call is
            under way anywhere. Calls are served until then. Lost workers are named in the log.
        timeout: Seconds for that; 0 is no limit.

    Raises:
        RuntimeError: RPC is not initialized; or the others did not come in time. This worker has
            left all the same.
    """
    session = current()
    try:
        if graceful:
            wait_for_all(session, timeout)
    finally:
        end(session)


def wait_for_all(session: Session, timeout: float) -> None:
    """Return once every rank has called this or is gone, and no call is under way anywhere.

    Quiet means that twice in a row no rank has had a call under way, and none has made or served
    one between the two looks.
    """
    limit = timeout if timeout > 0.0 else math.inf
    deadline = Deadline(limit, session.backend.clock)
    farewell = _Farewell(session.backend, deadline)
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
    for worker in session.workers:
        failure = session.backend.failure_of(worker.id) if worker != session.me else None
        if isinstance(failure, PeerLostError):
            _log.warning("the workers shut down without %s: %s", worker, failure)


class _Farewell:
    """Where the ranks tell each other how busy they are. For one thread.

    While all are there, that is a collective. When a rank is gone, all collectives of the world
    fail; then each rank tells the lowest one that is left, which passes on what all have told.

    Args:
        backend: The world, which is the session's alone.
        deadline: For all of it.
    """

    def __init__(self, backend: Backend, deadline: Deadline) -> None:
        self._backend = backend
        self._deadline = deadline
        self._is_complete = True
        self._gone: set[int] = set()

    def tell(self, is_busy: bool, count: int) -> Told:
        """Return what all ranks tell that are not gone; nothing if it has to be told again.

        Raises:
            RankwireError: Not all came in time.
        """
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

    # Two ranks have one sequence of messages between them, of which the lower rank is the leader.
    # When a leader is gone, all begin with the next one. So both sides are at the same look.

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


def end(session: Session) -> None:
    """Close the session of this process."""
    try:
        session.close(_GRACE)
    finally:
        companions.put_back()
        state.session = None
