"""Have replies read for futures that a thread waits for in C++ (``torch.futures.wait_all``).

Reading every reply as soon as it arrives would cost more than the calls: the reader would compete
with the caller for the interpreter, and most callers read for themselves. So a thread waits for a
pause between calls, and has the missing replies read. A thread that waits in Python reads all
replies of its rank; calls to that rank are put aside until it stops.

Thread: one, started by the first future. Lock: ``_lock`` guards the readers and the calls that are
put aside; nothing is called while it is held.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.rpc.future import RpcFuture

_MOMENT = 0.0002  # seconds
_MOST_MOMENTS = 10  # then it looks, even while calls are being made
_FEW_ASIDE = 64  # above this, calls that have ended are dropped now and then


class ReplyWatcher:
    """Watches futures of calls. Every method is safe from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # None makes the thread check the calls put aside, and whether it is closed.
        self._calls: runtime.SimpleQueue[RpcFuture[Any] | None] = runtime.SimpleQueue()
        self._lock = runtime.Lock()
        self._readers: dict[int, int] = {}  # by thread, the rank whose replies it reads
        self._aside: dict[int, list[RpcFuture[Any]]] = {}  # by rank
        self._most_aside: dict[int, int] = {}  # by rank; then ended ones are dropped
        self._is_closed = False
        self._start_lock = runtime.Lock()
        self._thread: runtime.Thread | None = None

    def watch(self, call: RpcFuture[Any]) -> None:
        """Have the reply of a call read soon, unless a thread has read it by then."""
        if self._thread is None:
            self._start()
        self._calls.put(call)

    def begin_reading(self, rank: int) -> None:
        """Note that this thread reads the replies of a rank, until ``end_reading``."""
        with self._lock:
            self._readers[runtime.get_ident()] = rank

    def end_reading(self) -> None:
        """Note that this thread has stopped reading. Safe to repeat."""
        with self._lock:
            rank = self._readers.pop(runtime.get_ident(), None)
            is_left = rank in self._aside and rank not in self._readers.values()
        if is_left:
            self._calls.put(None)

    def close(self) -> None:
        """Stop watching."""
        self._is_closed = True
        self._calls.put(None)

    def _start(self) -> None:
        with self._start_lock:
            if self._thread is None:
                self._thread = runtime.Thread(
                    target=self._run, name="rankwire reply watcher", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while not self._is_closed:
            self._look([self._calls.get()])

    def _look(self, calls: list[RpcFuture[Any] | None]) -> None:
        """Look at calls and at those made after them. It must not keep a call when it returns."""
        self._wait_for_a_pause()
        with suppress(runtime.Empty):
            while True:
                calls.append(self._calls.get_nowait())
        for call in self._unread(calls):
            call.attend()

    def _wait_for_a_pause(self) -> None:
        """Wait until no call is made for a moment: a thread that makes calls is not waiting yet."""
        for _ in range(_MOST_MOMENTS):
            count = self._calls.qsize()
            self._clock.sleep(_MOMENT)
            if self._calls.qsize() == count:
                return

    def _unread(self, calls: list[RpcFuture[Any] | None]) -> list[RpcFuture[Any]]:
        """Return the calls in progress whose replies no thread reads; put the others aside."""
        found = []
        with self._lock:
            read = set(self._readers.values())
            for rank in self._aside.keys() - read:
                calls += self._aside.pop(rank)
                self._most_aside.pop(rank, None)
            for call in calls:
                if call is None or call.done():
                    continue
                if call.dst in read:
                    self._put_aside(call)
                else:
                    found.append(call)
        return found

    def _put_aside(self, call: RpcFuture[Any]) -> None:
        aside = self._aside.setdefault(call.dst, [])
        aside.append(call)
        if len(aside) >= self._most_aside.get(call.dst, _FEW_ASIDE):
            aside[:] = [each for each in aside if not each.done()]
            self._most_aside[call.dst] = 2 * len(aside) + _FEW_ASIDE
