"""How a function that is being served waits for a call that it has made.

It waits as a program does, with three differences: the wait is known to this rank, which tells
others of it when they ask (``Server.account``); the call shares the fate of the one that is served
(``Call.began``); and when it has waited for a while, its thread looks whether calls wait for each
other in a circle, by asking the ranks concerned. A call of a program cannot be in a circle, because
nothing waits for a program: only for calls.

Looking is done by the thread that waits, between two slices of its wait, so nothing else pays for
it. Only the thread that runs the function counts as the function's wait: another one of the user's
may end the function in other ways.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Protocol

from rankwire.deadline import Deadline
from rankwire.errors import CircularCallError
from rankwire.mesh.calls import CallPort
from rankwire.rpc.call import Call, MadeCall, Wait
from rankwire.rpc.circles import ActiveCall, Circle, Key, find_circle, still_to_ask

_FIRST_LOOK = 1.0  # seconds that a call has waited
_NEXT_LOOK = 0.25
_LOOKS_GROW_BY = 1.5
_LONGEST_INTERVAL = 10.0
_SECOND_LOOK = 0.1  # seconds after a circle was seen for the first time
_LOOK_LIMIT = 0.5  # seconds for asking all ranks concerned; what is not known then goes on
_MOST_CALLS = 1000

Ask = Callable[[int, Iterable[Key], Deadline], dict[Key, ActiveCall] | None]


class _Server(Protocol):
    """The server, as far as it is known here."""

    def is_run_here(self, call: Call) -> bool: ...
    def key_of(self, call: Call) -> Key | None: ...


class Nested:
    """Waits of functions that are being served. Safe from any thread.

    Args:
        server: Knows the calls that are served here.
        ask: Asks a rank about calls that it serves; None if it does not say.
    """

    def __init__(self, server: _Server, ask: Ask) -> None:
        self._server = server
        self._ask = ask
        self._numbers = itertools.count(1)

    def drive(self, call: Call, made: MadeCall, deadline: Deadline, *, patient: bool) -> bool:
        """Wait for the reply of a call made while serving ``call``; False if it is too late.

        If it is in a circle it is given up, so that it ends with ``CircularCallError``.

        Args:
            call: What is being served.
            made: The call that was made.
            deadline: How long.
            patient: Whether the function waits for as long as the call may take; one that looks in
                now and then may go on in other ways.
        """
        reply = made.reply
        if not patient or not self._server.is_run_here(call):
            return reply.drive(deadline)
        # Most replies come soon; a wait that ends before the first look need not be known.
        if reply.drive(deadline.sooner(_FIRST_LOOK)):
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
        """Wait until fewer than ``limit`` calls to a rank are in flight; False if it is too late.

        Raises:
            CircularCallError: Those that are in flight wait for this one.
        """
        if not self._server.is_run_here(call):
            return port.wait_for_room(dst, limit, deadline)
        if port.wait_for_room(dst, limit, deadline.sooner(_FIRST_LOOK)):
            return True
        number = next(self._numbers)

        def is_over(patience: Deadline) -> bool:
            call.waiting = Wait(number, dst, name, port.calls_to(dst), is_for_room=True)
            return port.wait_for_room(dst, limit, patience)

        return self._wait(call, is_over, deadline)

    def _wait(self, call: Call, is_over: Callable[[Deadline], bool], deadline: Deadline) -> bool:
        """Wait in slices, with looks between them; ``is_over`` says what for, and waits."""
        before = call.waiting  # a callback may wait inside of another wait
        interval = _NEXT_LOOK
        suspected: Circle | None = None
        try:
            while not is_over(deadline.sooner(_SECOND_LOOK if suspected else interval)):
                if deadline.expired:
                    return False
                key = self._server.key_of(call)
                if key is None:
                    continue
                seen = self._look(key, deadline)
                if seen is not None and suspected is not None:
                    if seen.evidence == suspected.evidence:
                        if seen.gives_up == key:
                            raise _circular(seen)
                        seen = None  # another one gives up
                suspected = seen
                interval = min(interval * _LOOKS_GROW_BY, _LONGEST_INTERVAL)
            return True
        finally:
            call.waiting = before

    def _look(self, start: Key, deadline: Deadline) -> Circle | None:
        """Ask until it is known whether a call can go on; return the circle if it cannot."""
        limit = deadline.sooner(_LOOK_LIMIT)
        picture: dict[Key, ActiveCall | None] = {}
        while (missing := still_to_ask(picture, start)) and len(picture) < _MOST_CALLS:
            rank = min(missing).rank
            asked = [key for key in missing if key.rank == rank]
            answer = self._ask(rank, asked, limit)
            if answer is None:
                return None
            picture.update(dict.fromkeys(asked))
            picture.update(answer)
        return find_circle(picture, start)


def _circular(circle: Circle) -> CircularCallError:
    names = [call.name for call in circle.calls]
    ranks = [key.rank for key in circle.members]
    return CircularCallError(
        list(zip(ranks, names, strict=True)), [call.doing for call in circle.calls]
    )
