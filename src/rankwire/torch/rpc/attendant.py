"""The attendant: has replies read for futures that are waited for where Python does not see it.

``torch.futures.wait_all`` and ``collect_all`` wait in C++, and nothing tells that a future is among
those. To have every reply read as soon as it comes would cost more than the calls: the reading
thread and the one that calls would take turns at the interpreter. Most futures are waited for at
once, by threads that read by themselves. So a thread looks a moment later, and has those replies
attended to that have not come by then.

Thread: one, started by the first future, asleep while there is none.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from rankwire.clock import Clock
from rankwire.rpc.future import RpcFuture

_MOMENT = 0.0002  # seconds


class Attendant:
    """Looks after futures of calls. Every method is safe from any thread.

    Args:
        clock: By which it waits.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._calls: deque[RpcFuture[Any]] = deque()
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
                self._clock.sleep(_MOMENT)
                self._attend()
                self._is_awake = False
                if not self._calls:
                    break
                self._is_awake = True

    def _attend(self) -> None:
        for _ in range(len(self._calls)):
            call = self._calls.popleft()
            if not call.done():
                call.attend()
