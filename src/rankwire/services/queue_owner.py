"""The queues that this rank owns, as other ranks use them.

A request is a call. If it must wait, the function returns a future, so it occupies no thread; the
request that lets it go on completes the future. If the caller gives a waiting call up or is lost,
the agent cancels the future, and the request leaves the queue.

A user is one agent of one process. When a rank is lost, or its agent closes, the queues drop its
requests and take back what it holds. Requests of a lost process that are served only later are
refused.

Locks: ``OwnedQueue._lock`` guards one queue, ``QueueOwner._lock`` the table of queues and of what
is gone. No future is completed or cancelled under a lock, and neither is taken under the other.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import astuple
from functools import partial
from numbers import Real
from types import NoneType
from typing import Any

from rankwire import runtime
from rankwire.backends.base import Backend
from rankwire.errors import InvalidMessageError, PeerLostError
from rankwire.rpc.call import current_call
from rankwire.rpc.registry import Function
from rankwire.services.queue_description import describe_wait
from rankwire.services.queue_items import Packed, pack, unpack
from rankwire.services.queue_settings import QueueSettings
from rankwire.services.queue_state import MOST_ITEMS, Get, QueueState, Settled
from rankwire.services.queue_supply import Item
from rankwire.services.queue_users import QueueOutcome, Ticket, User

_MOST_QUEUES = 1024
_MOST_REASONS = 256
_MOST_OPENING = 1024  # queues that one rank waits for

PREFIX = "\0rankwire.queue."  # of the names of the functions; no function of a user can have it
_SERVED = ("open", "put", "slot", "fill", "get", "acknowledge", "withdraw", "end", "leave", "stats")

Reply = list[Any]  # the outcome and what belongs to it


class WaitingRequest(Future[Any]):
    """The reply of a request that waits."""

    def __init__(self, describe: Callable[[], str]) -> None:
        super().__init__()
        self._describe = describe

    @property
    def doing(self) -> str:
        """What it waits for, in reports of what a rank is doing."""
        return self._describe()


class OwnedQueue:
    """One queue. Every method is safe from any thread.

    ``is_gone`` says whether a user is lost.
    """

    def __init__(
        self,
        name: str,
        settings: QueueSettings,
        now: Callable[[], float],
        is_gone: Callable[[User], bool],
    ) -> None:
        self.name = name
        self.settings = settings
        self._is_gone = is_gone
        self._lock = runtime.Lock()
        self._is_closed = False
        self._state = QueueState(settings, now)
        self._waiting: dict[Ticket, WaitingRequest] = {}
        # What requests waited for that the agent has ended, for callers that ask.
        self._reasons: OrderedDict[Ticket, str] = OrderedDict()

    def serve(self, ticket: Ticket, request: Callable[[QueueState], object]) -> Any:
        """Make a request; return its reply, or the future of it."""
        future = None
        with self._lock:
            # Under the lock: what a user requests who is forgotten later is forgotten too.
            if self._is_gone(ticket.user):
                return [int(QueueOutcome.UNWANTED), 0]
            if self._is_closed:
                return [int(QueueOutcome.CLOSED), 0]
            request(self._state)
            settled = self._taken()
            own = next((outcome for each, outcome in settled if each == ticket), None)
            if own is None:
                future = self._waiting[ticket] = WaitingRequest(partial(self._describe, ticket))
        self._complete(settled)
        if own is not None:
            return _reply(own)
        assert future is not None
        future.add_done_callback(lambda done: self._left(ticket, done))
        return future

    def change(self, change: Callable[[QueueState], Any]) -> Any:
        """Change the state; return what ``change`` returns."""
        with self._lock:
            result = change(self._state)
            settled = self._taken()
        self._complete(settled)
        return result

    def withdraw(self, ticket: Ticket, keep: int) -> list[Any]:
        """Undo a request; return how many items of a put were accepted, and what it waited for."""

        def withdraw(state: QueueState) -> list[Any]:
            reason = self._reasons.pop(ticket, None) or describe_wait(state, ticket)
            return [state.withdraw(ticket, keep), reason]

        return self.change(withdraw)  # type: ignore[no-any-return]

    def forget(self, rank: int, is_gone: Callable[[User], bool]) -> None:
        """Drop the requests of users of a rank who are gone, and take back what they hold."""
        self.change(lambda state: state.forget(rank, is_gone))
        self._refuse(lambda ticket: ticket.user[0] == rank and is_gone(ticket.user))

    def close(self) -> None:
        """Refuse the requests that wait, and those to come."""
        with self._lock:
            self._is_closed = True
        self._refuse(lambda ticket: True)

    def _describe(self, ticket: Ticket) -> str:
        with self._lock:
            return f"waits in queue {self.name!r}: {describe_wait(self._state, ticket)}"

    def _refuse(self, is_refused: Callable[[Ticket], bool]) -> None:
        closed = Settled(QueueOutcome.CLOSED, 0)
        self._complete([(ticket, closed) for ticket in list(self._waiting) if is_refused(ticket)])

    def _taken(self) -> list[tuple[Ticket, Settled]]:
        settled, self._state.settled = self._state.settled, []
        return settled

    def _complete(self, settled: list[tuple[Ticket, Settled]]) -> None:
        for ticket, outcome in settled:
            future = self._waiting.pop(ticket, None)
            if future is None:
                continue
            if future.set_running_or_notify_cancel():
                future.set_result(_reply(outcome))
            else:  # cancelled just now
                self._undo(ticket)

    def _left(self, ticket: Ticket, future: Future[Any]) -> None:
        # Only one thread removes the ticket: this one, or the one that wants to complete it.
        if future.cancelled() and self._waiting.pop(ticket, None) is not None:
            self._undo(ticket)

    def _undo(self, ticket: Ticket) -> None:
        def undo(state: QueueState) -> None:
            self._reasons[ticket] = describe_wait(state, ticket)
            if len(self._reasons) > _MOST_REASONS:
                self._reasons.popitem(last=False)
            state.withdraw(ticket)

        self.change(undo)


def _reply(settled: Settled) -> Reply:
    outcome, value = settled
    if type(value) is list:
        value = pack([item.payload for item in value])
    return [int(outcome), value]


class QueueOwner:
    """Serves the queues of an agent. Safe from any thread.

    ``use`` is what every request begins with: the number of the queue, the incarnation and the
    number of the agent that asks, and the number of the request; ``src`` is its rank.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = runtime.Lock()
        self._numbers = itertools.count(runtime.randbits(31) << 16)  # not those of a former process
        self._queues: dict[int, OwnedQueue] = {}
        self._by_name: dict[str, int] = {}
        self._awaited: dict[str, list[WaitingRequest]] = {}
        self._opening: Counter[int] = Counter()  # how many of these each rank waits for
        self._lost: dict[int, int] = {}  # by rank: the last incarnation that was lost
        self._is_closed = False
        self._stop_watching: Callable[[], None] | None = None

    def close(self) -> None:
        """Refuse the requests that wait, and those to come."""
        with self._lock:
            self._is_closed = True
            awaited, self._awaited = self._awaited, {}
        if self._stop_watching is not None:
            self._stop_watching()
        for waiting in awaited.values():
            _complete_all(waiting, [int(QueueOutcome.CLOSED), 0])
        for queue in list(self._queues.values()):
            queue.close()

    def functions(self) -> dict[str, Function]:
        """Return what other ranks call, by name."""

        def served(function: str) -> Callable[..., Any]:
            method: Callable[..., Any] = getattr(self, f"_{function}")
            name = PREFIX.lstrip("\0") + function

            def serve(*args: Any) -> Any:
                call = current_call()
                assert call is not None
                call.name = name  # in reports
                return [int(QueueOutcome.CLOSED), 0] if self._is_closed else method(call.src, *args)

            return serve

        functions = {PREFIX + name: Function(PREFIX + name, served(name)) for name in _SERVED}
        for each in functions.values():
            each.needs_worker = False  # a function that waits for another request may have it
        return functions

    # -- what other ranks call ---------------------------------------------------------------------

    def _open(self, src: int, name: str, settings: dict[str, Any] | None) -> Any:
        """Return the number and the settings of a queue; make it if there are settings.

        Without settings, wait until another rank makes it.
        """
        _check(type(name) is str, "the name of a queue is text")
        wanted = None if settings is None else QueueSettings.of(settings)
        future = None
        awaited: list[WaitingRequest] = []
        with self._lock:
            if self._is_closed:
                return [int(QueueOutcome.CLOSED), 0]
            number = self._by_name.get(name)
            if number is None and wanted is None:
                if self._opening[src] >= _MOST_OPENING:
                    return [int(QueueOutcome.TOO_MANY), 0]
                self._opening[src] += 1
                future = WaitingRequest(lambda: f"waits until a rank makes queue {name!r}")
                self._awaited.setdefault(name, []).append(future)
            elif number is None:
                assert wanted is not None
                if len(self._queues) >= _MOST_QUEUES:
                    return [int(QueueOutcome.TOO_MANY), 0]
                queue = OwnedQueue(name, wanted, self._backend.clock.now, self._is_lost)
                number = next(self._numbers)
                self._queues[number], self._by_name[name] = queue, number
                awaited = self._awaited.pop(name, [])
                if self._stop_watching is None:  # after that, as it reports former losses too
                    self._stop_watching = self._backend.on_peer_lost(self._on_lost)
        if future is not None:
            future.add_done_callback(lambda _: self._stopped_waiting(src, name, future))
            return future
        assert number is not None
        reply = [int(QueueOutcome.DONE), [number, self._queues[number].settings.as_dict()]]
        _complete_all(awaited, reply)
        return reply

    def _put(
        self, src: int, use: list[int], packed: Packed, version: float | None, key: float
    ) -> Any:
        """Put items."""
        _check_numbers(version, key)
        items = [Item(payload, len(payload), version, key) for payload in unpack(packed)]
        return self._request(src, use, lambda state, ticket: state.put(ticket, items))

    def _slot(self, src: int, use: list[int]) -> Any:
        """Take a slot."""
        return self._request(src, use, lambda state, ticket: state.take_slot(ticket))

    def _fill(
        self, src: int, use: list[int], packed: Packed, version: float | None, key: float
    ) -> Any:
        """Put an item into the slot of that number."""
        _check_numbers(version, key)
        (payload,) = unpack(packed)
        item = Item(payload, len(payload), version, key)
        return self._request(src, use, lambda state, ticket: state.fill(ticket, item))

    def _get(
        self,
        src: int,
        use: list[int],
        count: int,
        least: int,
        min_version: float | None,
        is_lease: bool,
        received: list[int],
    ) -> Any:
        """Take items."""
        _check_numbers(min_version)
        are_counts = type(count) is int and type(least) is int and type(is_lease) is bool
        _check(are_counts and 1 <= least <= count <= MOST_ITEMS, "a get is malformed")
        get = Get(count, least, min_version, is_lease)
        return self._request(src, use, lambda state, ticket: state.get(ticket, get, received))

    def _acknowledge(self, src: int, use: list[int]) -> Any:
        """Acknowledge a delivery; the value is whether that was in time."""
        return self._change(src, use, lambda state, ticket: state.acknowledge(ticket))

    def _withdraw(self, src: int, use: list[int], keep: int) -> Any:
        """Undo a request; the value is what is known of it."""
        _check(type(keep) is int and keep >= 0, "the number of items to keep is malformed")
        queue = self._queues.get(use[0])
        if queue is None:
            return [int(QueueOutcome.UNKNOWN), 0]
        return [int(QueueOutcome.DONE), queue.withdraw(_ticket(src, use), keep)]

    def _end(self, src: int, use: list[int]) -> Any:
        """End the part of the caller, or the queue."""
        return self._change(src, use, lambda state, ticket: state.end(ticket.user[0]))

    def _leave(self, src: int, use: list[int]) -> None:
        """Take back what an agent holds, which closes."""
        user = _ticket(src, use).user
        for queue in list(self._queues.values()):
            queue.forget(user[0], lambda other: other == user)

    def _stats(self, src: int, use: list[int]) -> Any:
        """Return the counts."""
        return self._change(src, use, lambda state, ticket: list(astuple(state.stats())))

    # -- users -------------------------------------------------------------------------------------

    def _request(
        self, src: int, use: list[int], request: Callable[[QueueState, Ticket], object]
    ) -> Any:
        queue, ticket = self._queues.get(use[0]), _ticket(src, use)
        if queue is None:
            return [int(QueueOutcome.UNKNOWN), 0]
        return queue.serve(ticket, lambda state: request(state, ticket))

    def _change(
        self, src: int, use: list[int], change: Callable[[QueueState, Ticket], Any]
    ) -> Reply:
        queue, ticket = self._queues.get(use[0]), _ticket(src, use)
        if queue is None:
            return [int(QueueOutcome.UNKNOWN), 0]
        return [int(QueueOutcome.DONE), queue.change(lambda state: change(state, ticket))]

    def _is_lost(self, user: User) -> bool:
        rank, incarnation, _ = user
        newest = self._backend.incarnation_of(rank)
        return not self._lost.get(rank, -1) < incarnation <= newest

    def _on_lost(self, error: PeerLostError) -> None:
        rank = error.peer
        newest = self._backend.incarnation_of(rank)
        # If it is back already, only the processes before the new one are lost.
        self._lost[rank] = newest if self._backend.failure_of(rank) is not None else newest - 1
        for queue in list(self._queues.values()):
            queue.forget(rank, self._is_lost)

    def _stopped_waiting(self, src: int, name: str, future: WaitingRequest) -> None:
        with self._lock:
            self._opening[src] -= 1
            awaited = self._awaited.get(name, [])
            if future in awaited:
                awaited.remove(future)
            if not awaited:
                self._awaited.pop(name, None)


def _complete_all(waiting: list[WaitingRequest], reply: Reply) -> None:
    for future in waiting:
        if future.set_running_or_notify_cancel():
            future.set_result(reply)


def _ticket(src: int, use: list[int]) -> Ticket:
    _check(all(type(each) is int for each in use), "a request has numbers only")
    _, incarnation, agent, number = use
    return Ticket((src, incarnation, agent), number)


def _check(is_valid: bool, text: str) -> None:
    # Before anything is changed that other ranks use too.
    if not is_valid:
        raise InvalidMessageError(text)


def _check_numbers(*values: Any) -> None:
    # Before they are compared with those of other ranks.
    for value in values:
        if not isinstance(value, (Real, NoneType)):
            raise InvalidMessageError(f"a version or key is a number, not {type(value).__name__}")
