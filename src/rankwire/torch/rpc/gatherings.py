"""Gather values of several workers at one of them.

The worker with the first name leads. Each other one calls it with its value, and the reply is
deferred until all have called: one round trip. If a worker is lost, all waiting workers get an
error that names it.

Lock: ``_lock`` guards the gatherings; nothing is called while it is held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rankwire import runtime
from rankwire.errors import OverloadedError, PeerLostError
from rankwire.torch.rpc.verbs import GATHER, register, sender

if TYPE_CHECKING:
    from rankwire.torch.rpc.session import Session

Names = tuple[str, ...]

_MOST_WAITING = 1024  # calls of one worker; as many as it can have in flight


@dataclass
class _Gathering:
    """The values of one gathering so far, and the calls that wait for the rest."""

    given: dict[str, Any] = field(default_factory=dict)
    waiters: list[Future[Any]] = field(default_factory=list)


class Gatherings:
    """The gatherings that this worker takes part in or leads. Safe from any thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = runtime.Lock()
        self._counts: Counter[Names] = Counter()
        self._waiting: Counter[int] = Counter()
        self._gatherings: dict[tuple[Names, int], _Gathering] = {}
        register(session.agent, GATHER, self._join)

    def gather(self, value: Any, names: Names, limit: float) -> dict[str, Any]:
        """Contribute a value and return the values of all workers, by name."""
        with self._lock:
            number = self._counts[names]
            self._counts[names] += 1
        leader = self._session.ranks[names[0]]
        args = (list(names), number, value)
        return self._session.agent.rpc_sync(leader, GATHER, *args, timeout=limit)  # type: ignore[no-any-return]

    def lose(self, rank: int, error: PeerLostError) -> None:
        """Fail the gatherings that wait for a lost worker."""
        name = self._session.workers[rank].name
        with self._lock:
            ended = [
                self._gatherings.pop(key)
                for key, gathering in list(self._gatherings.items())
                if name in key[0] and name not in gathering.given
            ]
        for gathering in ended:
            for waiter in gathering.waiters:
                _end(waiter, lambda w: w.set_exception(error.copy()))

    def _join(self, names: list[str], number: int, value: Any) -> Future[Any]:
        src, key = sender(), (tuple(names), number)
        name, me = self._session.workers[src].name, self._session.me.name
        if name not in names or names[0] != me or not self._session.ranks.keys() >= set(names):
            raise PermissionError(f"{name} does not take part in a gathering of {names} on {me}")
        waiter: Future[Any] = Future()
        with self._lock:
            if self._waiting[src] >= _MOST_WAITING:
                raise OverloadedError(f"{name} waits in {_MOST_WAITING} gatherings here")
            self._waiting[src] += 1
            gathering = self._gatherings.setdefault(key, _Gathering())
            gathering.given[name] = value
            gathering.waiters.append(waiter)
            is_complete = len(gathering.given) == len(names)
            if is_complete:
                del self._gatherings[key]
        waiter.add_done_callback(partial(self._leave, key, src))
        if is_complete:
            for each in gathering.waiters:
                _end(each, lambda w: w.set_result(gathering.given))
        return waiter

    def _leave(self, key: tuple[Names, int], src: int, waiter: Future[Any]) -> None:
        """Forget a call that has ended, and a gathering that no worker waits for."""
        with self._lock:
            self._waiting[src] -= 1
            gathering = self._gatherings.get(key)
            if gathering is not None and all(each.cancelled() for each in gathering.waiters):
                del self._gatherings[key]


def _end(waiter: Future[Any], how: Callable[[Future[Any]], None]) -> None:
    if waiter.set_running_or_notify_cancel():
        how(waiter)
