"""Gatherings: what several workers give comes together at one of them.

The worker whose name comes first leads. Each other one calls it with what it gives, and the reply
is deferred until all have come: one round trip, and a killed worker is named to all who wait.

Lock: ``_lock`` guards the meetings; nothing is called under it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rankwire.errors import OverloadedError, PeerLostError
from rankwire.torch.rpc.verbs import GATHER, register, sender

if TYPE_CHECKING:
    from rankwire.torch.rpc.session import Session

Names = tuple[str, ...]

_MOST_WAITING = 1024  # calls of one worker; as many as it has in flight by itself


@dataclass
class _Meeting:
    """What has come of one gathering, and who waits for the rest."""

    given: dict[str, Any] = field(default_factory=dict)
    waiters: list[Future[Any]] = field(default_factory=list)


class Gatherings:
    """The gatherings of this worker, and those that it leads. Safe from any thread.

    Args:
        session: Knows the workers.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._counts: Counter[Names] = Counter()
        self._waiting: Counter[int] = Counter()
        self._gatherings: dict[tuple[Names, int], _Meeting] = {}
        register(session.agent, GATHER, self._come)

    def gather(self, value: Any, names: Names, limit: float) -> dict[str, Any]:
        """Give a value and return what each worker gave, by name.

        Raises:
            RankwireError: They did not all come in time, or one is lost.
        """
        with self._lock:
            number = self._counts[names]
            self._counts[names] += 1
        leader = self._session.ranks[names[0]]
        args = (list(names), number, value)
        return self._session.agent.rpc_sync(leader, GATHER, *args, timeout=limit)  # type: ignore[no-any-return]

    def lose(self, rank: int, error: PeerLostError) -> None:
        """End the meetings that a lost worker does not come to any more."""
        name = self._session.workers[rank].name
        with self._lock:
            ended = [
                self._gatherings.pop(key)
                for key, meeting in list(self._gatherings.items())
                if name in key[0] and name not in meeting.given
            ]
        for meeting in ended:
            for waiter in meeting.waiters:
                _end(waiter, lambda w: w.set_exception(error.copy()))

    def _come(self, names: list[str], number: int, value: Any) -> Future[Any]:
        """Let a worker give its part; the reply is everything."""
        src, key = sender(), (tuple(names), number)
        name, me = self._session.workers[src].name, self._session.me.name
        if name not in names or names[0] != me or not self._session.ranks.keys() >= set(names):
            raise PermissionError(f"{name} does not take part in a gathering of {names} at {me}")
        waiter: Future[Any] = Future()
        with self._lock:
            if self._waiting[src] >= _MOST_WAITING:
                raise OverloadedError(f"{name} waits in {_MOST_WAITING} gatherings here")
            self._waiting[src] += 1
            meeting = self._gatherings.setdefault(key, _Meeting())
            meeting.given[name] = value
            meeting.waiters.append(waiter)
            is_complete = len(meeting.given) == len(names)
            if is_complete:
                del self._gatherings[key]
        waiter.add_done_callback(partial(self._leave, key, src))
        if is_complete:
            for each in meeting.waiters:
                _end(each, lambda w: w.set_result(meeting.given))
        return waiter

    def _leave(self, key: tuple[Names, int], src: int, waiter: Future[Any]) -> None:
        """Forget a call that has ended, and a gathering that no worker waits for any more."""
        with self._lock:
            self._waiting[src] -= 1
            meeting = self._gatherings.get(key)
            if meeting is not None and all(each.cancelled() for each in meeting.waiters):
                del self._gatherings[key]


def _end(waiter: Future[Any], how: Callable[[Future[Any]], None]) -> None:
    if waiter.set_running_or_notify_cancel():
        how(waiter)
