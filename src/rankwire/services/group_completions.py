"""The values of a group call as they come.

The thread that iterates does all the work. What it iterates over and the futures do not know the
``Completions``, so that one that is dropped is closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Self

from rankwire import runtime
from rankwire.deadline import Deadline
from rankwire.finalizers import hand_over
from rankwire.public_dir import PublicDir
from rankwire.rpc.future import RpcFuture


def cancel_all(futures: Iterable[RpcFuture[Any]]) -> None:
    """Cancel the calls that have not ended; the group call's error says what became of them."""
    for future in futures:
        future.cancel()
        future.disregard()


class Arrivals:
    """The futures of calls, in the order in which they end."""

    def __init__(self, futures: dict[int, RpcFuture[Any]]) -> None:
        self.pending = dict(futures)  # by rank
        self._ended: deque[int] = deque()
        self._event = runtime.Event()
        for rank, future in futures.items():
            future.when_ended(partial(self._note, rank))
            future.attend()

    def _note(self, rank: int, future: RpcFuture[Any]) -> None:
        self._ended.append(rank)
        self._event.set()

    def take(self) -> tuple[int, RpcFuture[Any]] | None:
        """Return the next one that has ended, or None."""
        self._event.clear()
        while self._ended:
            rank = self._ended.popleft()
            if rank in self.pending:  # an interrupt may have noted it twice
                return rank, self.pending.pop(rank)
        return None

    def wait(self, deadline: Deadline) -> bool:
        """Wait for the next one; return False if the deadline passes first."""
        return deadline.clock.wait(self._event, deadline.sleep_limit())

    def cancel(self) -> None:
        """Cancel those that have not been taken. Idempotent."""
        cancel_all(list(self.pending.values()))


class Completions(PublicDir):
    """The ranks of ``agent.as_completed`` with their values: iterate over it.

    Leaving the loop early cancels the other calls once this object is dropped; ``close``, or using
    it in a ``with`` block, does so at once. For one thread at a time.
    """

    _SHOWN = ("close",)

    def __init__(self, name: str, values: Iterator[tuple[int, Any]], arrivals: Arrivals) -> None:
        self._name = name
        self._values = values
        self._arrivals = arrivals

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, Any]:
        try:
            return next(self._values)
        except BaseException:  # its end, the error of the group call, or an interrupt
            try:
                self.close()
            finally:
                self.close()  # a second interrupt may have ended the first
            raise

    def close(self) -> None:
        """Cancel the calls that have not ended; no more values come. Idempotent."""
        self._values = iter(())
        self._arrivals.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        try:
            arrivals = self._arrivals
        except AttributeError:  # an interrupt ended its making
            return
        if arrivals.pending:
            hand_over(arrivals.cancel)

    def __repr__(self) -> str:
        return f"<Completions of {self._name!r}: {len(self._arrivals.pending)} ranks to come>"
