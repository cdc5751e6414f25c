"""Wait for calls made by functions that are being served, and find calls that wait in a cycle.

Ranks that ask learn of such a wait (``ServedCalls.describe``), and after a while the waiting thread
checks for a cycle. Only the thread that runs the function checks: other threads of the user may end
the function in other ways.

A call *needs* other calls if one of them has to end before it can continue: the call it made, the
call that blocks the event loop, or those that occupy all workers. It is *stuck* if everything it
needs is stuck; unknown calls count as making progress. Ranks are asked one after the other, so a
cycle counts only when it is found twice with the same waits. The deepest call gives up, on every
rank the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rankwire.deadline import Deadline
from rankwire.errors import CircularCallError
from rankwire.mesh.call_port import CallPort
from rankwire.rpc.call import Call, MadeCall, Wait
from rankwire.wire.control_messages import ActiveCall, Key

if TYPE_CHECKING:
    from rankwire.rpc.server import Server

_FIRST_CHECK = 1.0  # seconds of waiting before the first check
_NEXT_CHECK = 0.25
_INTERVAL_GROWTH = 1.5
_LONGEST_INTERVAL = 10.0
_SECOND_CHECK = 0.1  # seconds after a cycle was seen for the first time
_CHECK_LIMIT = 0.5  # seconds for asking all ranks concerned; unknown calls count as making progress
_MOST_CALLS = 1000


Ask = Callable[[int, Collection[Key], Deadline], dict[Key, ActiveCall] | None]
# The calls that were asked about; None for those that their rank does not know.
Picture = Mapping[Key, ActiveCall | None]


class CallCycle(NamedTuple):
    """Calls that wait for each other."""

    members: tuple[Key, ...]  # each waits for the next, and the last for the first
    calls: tuple[ActiveCall, ...]
    gives_up: Key
    evidence: frozenset[tuple[Key, int, tuple[Key, ...]]]  # all waits that keep it stuck


def still_to_ask(picture: Picture, start: Key) -> set[Key]:
    """Return the calls to ask about next, to learn whether ``start`` is stuck."""
    if not _may_be_stuck(picture, start):
        return set()
    return {key for key in _reachable(picture, start) if key not in picture}


def find_cycle(picture: Picture, start: Key) -> CallCycle | None:
    """Return the cycle that keeps ``start`` from continuing, if there is one."""
    reachable = _reachable(picture, start)
    known = {key: call for key in reachable if (call := picture.get(key)) is not None}
    if len(known) < len(reachable) or not _may_be_stuck(picture, start):
        return None
    following = start
    path: dict[Key, int] = {}  # each with its place
    while following not in path:
        path[following] = len(path)
        following = min(known[following].needs)
    members = list(path)[path[following] :]
    waiting = [key for key in members if known[key].wait]
    if not waiting:
        return None
    gives_up = max(waiting, key=lambda key: (known[key].depth, key))
    first = members.index(min(members))  # so that all ranks see the same
    members = [*members[first:], *members[:first]]
    calls = tuple(known[key] for key in members)
    evidence = frozenset((key, call.wait, call.needs) for key, call in known.items())
    return CallCycle(tuple(members), calls, gives_up, evidence)


def _may_be_stuck(picture: Picture, start: Key) -> bool:
    needed_by: dict[Key, list[Key]] = {}
    for key, call in picture.items():
        for need in call.needs if call is not None else ():
            needed_by.setdefault(need, []).append(key)
    # Unknown calls count as stuck here.
    going_on = {key for key, call in picture.items() if call is None or not call.needs}
    return start not in _closure(going_on, needed_by)


def _reachable(picture: Picture, start: Key) -> set[Key]:
    needs = {key: call.needs for key, call in picture.items() if call is not None}
    return _closure({start}, needs)


def _closure(first: set[Key], following: Mapping[Key, Iterable[Key]]) -> set[Key]:
    reached = set(first)
    frontier = list(first)
    while frontier:
        new = set(following.get(frontier.pop(), ())) - reached
        reached |= new
        frontier += new
    return reached


# -- waiting ---------------------------------------------------------------------------------------


class NestedWaits:
    """Waits for calls made by functions that are being served. Safe from any thread."""

    def __init__(self, server: Server, ask: Ask) -> None:
        self._server = server
        self._ask = ask
        self._numbers = itertools.count(1)

    def drive(
        self,
        call: Call,
        made: MadeCall,
        deadline: Deadline,
        *,
        patient: bool,
        drive: Callable[[Deadline], bool] | None = None,
        others: Sequence[MadeCall] = (),
    ) -> bool:
        """Wait for the reply of a call made while serving ``call``; return False if it is late.

        In a cycle, the wait of the call that gives up ends with ``CircularCallError``. Unless
        ``patient``, the function waits for less than the call may take, so it is never stuck.
        ``drive`` waits for something else that the call, or one of the ``others``, brings, such as
        an item.
        """
        drive = made.reply.drive if drive is None else drive
        if not patient or not self._server.is_run_here(call):
            return drive(deadline)
        # Most replies come soon: a wait is recorded only after this.
        if drive(deadline.sooner(_FIRST_CHECK)):
            return True
        number, awaited = next(self._numbers), [made.reply.request_id]
        wait = Wait(number, made.dst, made.shown, awaited, others=others)

        def is_over(patience: Deadline) -> bool:
            call.waiting = wait
            return drive(patience)

        try:
            return self._wait(call, is_over, deadline)
        except CircularCallError as error:
            made.give_up(error)
            return True

    def wait_for_room(
        self, call: Call | None, port: CallPort, dst: int, name: str, limit: int, deadline: Deadline
    ) -> bool:
        """Wait until fewer than ``limit`` calls to a rank are in flight; False if it is late.

        Raises ``CircularCallError`` if the calls in flight wait for this one.
        """
        if call is None or not self._server.is_run_here(call):
            return port.wait_for_room(dst, limit, deadline)
        if port.wait_for_room(dst, limit, deadline.sooner(_FIRST_CHECK)):
            return True
        number = next(self._numbers)

        def is_over(patience: Deadline) -> bool:
            call.waiting = Wait(number, dst, name, port.calls_to(dst), is_for_room=True)
            return port.wait_for_room(dst, limit, patience)

        return self._wait(call, is_over, deadline)

    def _wait(self, call: Call, is_over: Callable[[Deadline], bool], deadline: Deadline) -> bool:
        before = call.waiting  # a callback may wait inside another wait
        interval = _NEXT_CHECK
        suspected: CallCycle | None = None
        try:
            while not is_over(deadline.sooner(_SECOND_CHECK if suspected else interval)):
                if deadline.expired:
                    return False
                key = self._server.active.key_of(call)
                if key is None:
                    continue
                seen = self._check(key, deadline)
                if seen and suspected and seen.evidence == suspected.evidence:
                    if seen.gives_up == key:
                        raise self._error_of(seen)
                    seen = None  # another call of the cycle gives up
                suspected = seen
                interval = min(interval * _INTERVAL_GROWTH, _LONGEST_INTERVAL)
            return True
        finally:
            call.waiting = before

    def _check(self, start: Key, deadline: Deadline) -> CallCycle | None:
        limit = deadline.sooner(_CHECK_LIMIT)
        picture: dict[Key, ActiveCall | None] = {}
        while (missing := still_to_ask(picture, start)) and len(picture) < _MOST_CALLS:
            rank = min(missing).rank
            asked = [key for key in missing if key.rank == rank]
            answer = self._ask(rank, asked, limit)
            if answer is None:
                return None
            picture.update(dict.fromkeys(asked))
            picture.update(answer)
        return find_cycle(picture, start)

    def _error_of(self, cycle: CallCycle) -> CircularCallError:
        world = self._server.active.world
        named = [(world.index(call.key.rank), call.name) for call in cycle.calls]
        return CircularCallError(named, [call.doing for call in cycle.calls])
