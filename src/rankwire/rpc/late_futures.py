"""Futures of calls whose deadline has passed: how they are found, explained and ended.

A thread that waits for a future ends it exactly in time. The others are found by a look now and
then. Many calls are often late together, because one rank is busy or stands still: that rank is
asked once about all of them. Callbacks of futures may take long, so a serving thread ends each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError
from rankwire.rpc.future import RpcFuture
from rankwire.rpc.questions import Explain, Questions

_CHECK_EVERY = 0.05  # seconds


class LateFutures:
    """Ends the futures of one agent that are late. Every method is safe from any thread.

    Args:
        clock: By which they are late.
        questions: Asks the callees.
        run_soon: Has something done by a serving thread.
        fail: Ends a future with an error, and tells the callee.
    """

    def __init__(
        self,
        clock: Clock,
        questions: Questions,
        *,
        run_soon: Callable[[Callable[[], None]], None],
        fail: Callable[[RpcFuture[Any], DeadlineExceededError], None],
    ) -> None:
        self._clock = clock
        self._questions = questions
        self._run_soon = run_soon
        self._fail = fail
        self._next_check = Deadline(0.0, clock)
        self._under_way: set[int] = set()  # found, and their callees are being asked

    def expire(self, future: RpcFuture[Any]) -> None:
        """End one that a thread waits for. This takes a moment: the callee is asked why."""
        number, limit = future.request_id, future.deadline.limit
        self._end(self._questions.about_late(future.dst, [number], limit), future)

    def look(self, futures: Mapping[int, RpcFuture[Any]]) -> None:
        """Have those ended that are late; does not wait for that."""
        if not self._next_check.expired:
            return
        self._next_check = Deadline(_CHECK_EVERY, self._clock)
        late: dict[int, list[RpcFuture[Any]]] = {}
        for number, future in list(futures.items()):
            if future.deadline.expired and number not in self._under_way:
                self._under_way.add(number)
                late.setdefault(future.dst, []).append(future)
        for dst, of_one_rank in late.items():
            self._run_soon(partial(self._expire_all, dst, of_one_rank))

    def _expire_all(self, dst: int, futures: list[RpcFuture[Any]]) -> None:
        numbers = [future.request_id for future in futures]
        try:
            limit = max(future.deadline.limit for future in futures)
            end = partial(self._end, self._questions.about_late(dst, numbers, limit))
            for future in futures:
                self._run_soon(partial(future.expire, end))
        finally:
            self._under_way.difference_update(numbers)

    def _end(self, explain: Explain, future: RpcFuture[Any]) -> None:
        error = DeadlineExceededError(future.deadline.limit, waiting_for=[future.dst])
        error.may_have_run = True
        explain(error, future.request_id, future.name)
        self._fail(future, error)
