"""The attendant: has replies read for futures that are waited for where Python does not see it.

``torch.futures.wait_all`` and ``collect_all`` wait in C++, and nothing tells that a future is among
those. To have every reply read as soon as it comes would cost more than the calls: the reading
thread and the one that calls would take turns at the interpreter. Most futures are waited for at
once, by threads that read by themselves. So a thread looks when no more calls are being made, for a
moment, and has those replies attended to that have not come by then.

While a thread waits in Python for a reply of a rank, it reads all replies of that rank, and the
calls to it are put aside. When it leaves, they are looked at again.

Thread: one, started by the first future, asleep while there is none.

Lock: ``_lock`` guards who reads and what is aside, for moments; nothing is taken under it.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from rankwire.clock import Clock
from rankwire.rpc.future import RpcFuture

_MOMENT = 0.0002  # seconds
_MOST_MOMENTS = 10  # after so many it looks, also while calls are being made


class Attendant:
    """Looks after futures of calls. Every method is safe from any thread.

    Args:
        clock: By which it waits.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._calls: deque[RpcFuture[Any]] = deque()
        self._lock = threading.Lock()
        self._readers: dict[int, int] = {}  # by thread, the rank whose replies it reads
        self._aside: list[RpcFuture[Any]] = []
        self._bell = threading.Semaphore(0)
        self._is_awake = False
        self._is_closed = False
        self._start_lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self, call: RpcFuture[Any]) -> None:
        """Have the reply of a call read soon, if no thread has read it by then."""
        self._calls.append(call)
        if not self._is_awake:  # after the append: whoever falls asleep looks once more
            self._is_awake = True
            if self._thread is None:
                self._start()
            self._bell.release()

    def begin_reading(self, rank: int) -> None:
        """This thread is going to read the replies of a rank, until ``end_reading``."""
        with self._lock:
            self._readers[threading.get_ident()] = rank

    def end_reading(self) -> None:
        """This thread reads no more. Safe to repeat."""
        with self._lock:
            self._readers.pop(threading.get_ident(), None)
            aside, self._aside = self._aside, []
        for call in aside:
            if not call.done():
                self.watch(call)

    def close(self) -> None:
        """Look after nothing any more."""
        self._is_closed = True
        self._bell.release()

    def _start(self) -> None:
        with self._start_lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="rankwire attendant", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while not self._is_closed:
            self._bell.acquire()
            while not self._is_closed:
                self._wait_for_a_pause()
                self._attend()
                self._is_awake = False
                if not self._calls:
                    break
                self._is_awake = True

    def _wait_for_a_pause(self) -> None:
        """Wait until no call is made for a moment: whoever makes them has not begun to wait."""
        for _ in range(_MOST_MOMENTS):
            count = len(self._calls)
            self._clock.sleep(_MOMENT)
            if len(self._calls) == count:
                return

    def _attend(self) -> None:
        for _ in range(len(self._calls)):
            call = self._calls.popleft()
            if not call.done() and not self._put_aside(call):
                call.attend()

    def _put_aside(self, call: RpcFuture[Any]) -> bool:
        """Leave a call to a thread that reads the replies of its rank, if there is one."""
        with self._lock:
            is_read = call.dst in self._readers.values()
            if is_read:
                self._aside.append(call)
        return is_read
