"""How a function that is being served waits for a call that it has made.

Unlike a program's wait, this one is reported to ranks that ask (``ServedCalls.describe``), and
after a while the thread checks between two slices of its wait whether calls wait for each other in
a cycle. Only the thread that runs the function checks: other threads of the user may end the
function in other ways.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from rankwire.deadline import Deadline
from rankwire.errors import CircularCallError
from rankwire.mesh.calls import CallPort
from rankwire.rpc.call import Call, MadeCall, Wait
from rankwire.rpc.call_cycles import ActiveCall, CallCycle, Key, find_cycle, still_to_ask

if TYPE_CHECKING:
    from rankwire.rpc.server import Server

_FIRST_CHECK = 1.0  # seconds of waiting before the first check
_NEXT_CHECK = 0.25
_INTERVAL_GROWTH = 1.5
_LONGEST_INTERVAL = 10.0
_SECOND_CHECK = 0.1  # seconds after a cycle was seen for the first time
_CHECK_LIMIT = 0.5  # seconds for asking all ranks concerned; unknown calls count as making progress
_MOST_CALLS = 1000

Ask = Callable[[int, Iterable[Key], Deadline], dict[Key, ActiveCall] | None]


class NestedWaits:
    """Waits for calls made by functions that are being served. Safe from any thread."""

    def __init__(self, server: Server, ask: Ask) -> None:
        self._server = server
        self._ask = ask
        self._numbers = itertools.count(1)

    def drive(self, call: Call, made: MadeCall, deadline: Deadline, *, patient: bool) -> bool:
        """Wait for the reply of a call made while serving ``call``; return False if it is late.

        A call in a cycle is given up: its wait ends with ``CircularCallError``. Unless ``patient``,
        the function waits for less than the call may take, so it is never stuck.
        """
        reply = made.reply
        if not patient or not self._server.is_run_here(call):
            return reply.drive(deadline)
        # Most replies come soon: a wait is recorded only after this.
        if reply.drive(deadline.sooner(_FIRST_CHECK)):
            return True
        wait = Wait(next(self._numbers), made.dst, made.name, [reply.request_id])

        def is_over(patience: Deadline) -> bool:
            call.waiting = wait
            return reply.drive(patience)

        try:
            return self._wait(call, is_over, deadline)
        except CircularCallError as error:
            made.give_up(error)
            return True

    def wait_for_room(
        self, call: Call, port: CallPort, dst: int, name: str, limit: int, deadline: Deadline
    ) -> bool:
        """Wait until fewer than ``limit`` calls to a rank are in flight; False if it is late.

        Raises:
            CircularCallError: The calls in flight wait for this one.
        """
        if not self._server.is_run_here(call):
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
                if seen is not None and suspected is not None:
                    if seen.evidence == suspected.evidence:
                        if seen.gives_up == key:
                            raise _error_of(seen)
                        seen = None  # another call of the cycle gives up
                suspected = seen
                interval = min(interval * _INTERVAL_GROWTH, _LONGEST_INTERVAL)
            return True
        finally:
            call.waiting = before

    def _check(self, start: Key, deadline: Deadline) -> CallCycle | None:
        """Ask ranks until it is known whether a call is stuck; return the cycle if it is."""
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


def _error_of(cycle: CallCycle) -> CircularCallError:
    names = [call.name for call in cycle.calls]
    ranks = [key.rank for key in cycle.members]
    return CircularCallError(
        list(zip(ranks, names, strict=True)), [call.doing for call in cycle.calls]
    )
