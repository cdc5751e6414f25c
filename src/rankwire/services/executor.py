"""``RankExecutor``: a ``concurrent.futures.Executor`` whose calls run on the ranks of a world.

A thread of its own drives the pool. Lock: ``_lock`` guards what was submitted and whether the
executor is shut down; nothing is called under it but ``wake``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar, overload

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.errors import RankwireError
from rankwire.public_dir import PublicDir
from rankwire.rpc.proxies import Later
from rankwire.services.task_pool import PoolJob, PoolTask, TaskPool

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("rankwire")


class RankExecutor(PublicDir, Executor):
    """Runs served functions on ranks, as a ``concurrent.futures.Executor``. Safe from any thread.

    Made by ``agent.executor``.
    """

    _SHOWN = ("map", "shutdown", "submit")

    def __init__(self, pool: TaskPool, clock: Clock, job_of: Callable[[Any], PoolJob]) -> None:
        self._pool = pool
        self._clock = clock
        self._job_of = job_of
        self._lock = runtime.Lock()
        self._submitted: deque[tuple[PoolTask, Future[Any]]] = deque()
        self._running: dict[int, Future[Any]] = {}  # by the tasks' index; for the thread alone
        self._count = 0
        self._is_shut_down = False
        self._thread: runtime.Thread | None = None

    @overload
    def submit(self, fn: str, /, *args: Any, **kwargs: Any) -> Future[Any]: ...
    @overload
    def submit(
        self, fn: Callable[P, Later[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]: ...
    @overload
    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function on the rank with the fewest calls, and return the call's future.

        The call waits here, and can be cancelled, while all ranks have their ``depth`` of calls. Do
        not change the arguments before it runs.

        Args:
            fn: A name registered on the ranks, or a function registered here under the same name.
            *args: Positional arguments.
            **kwargs: Keyword arguments.

        Raises:
            RuntimeError: The executor is shut down.
            ConfigurationError: The function is not registered here.
        """
        job = self._job_of(fn)
        future: Future[Any] = Future()
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("cannot submit calls after shutdown")
            self._submitted.append((PoolTask(self._count, job, args, kwargs), future))
            self._count += 1
            if self._thread is None:
                self._pool.workers.begin(None, self._pool.terms.limit)
                self._thread = runtime.Thread(target=self._run, name="rankwire-pool", daemon=True)
                self._thread.start()
        self._pool.wake()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse further calls, and wait for those under way. Idempotent.

        Args:
            wait: Whether to wait.
            cancel_futures: Whether to cancel calls that no rank has yet.
        """
        with self._lock:
            self._is_shut_down = True
            dropped = list(self._submitted) if cancel_futures else []
            thread = self._thread
        for _, future in dropped:
            future.cancel()
        self._pool.wake()
        if wait and thread is not None and thread is not runtime.current_thread():
            self._clock.join(thread)

    def _run(self) -> None:
        pool = self._pool
        try:
            while True:
                pool.take_in()
                pool.give_out(self._take)
                self._settle()
                if self._is_over():
                    return
                pool.wait()
        except RankwireError as error:  # this agent is closed
            self._fail_all(error)
        except BaseException as error:
            _log.exception("the executor has ended")
            self._fail_all(error)
        finally:
            pool.close()

    def _take(self) -> PoolTask | None:
        while True:
            with self._lock:
                if not self._submitted:
                    return None
                task, future = self._submitted.popleft()
            if future.set_running_or_notify_cancel():
                self._running[task.index] = future
                return task

    def _settle(self) -> None:
        results = self._pool.results
        while results:
            result = results.popleft()
            future = self._running.pop(result.task.index)
            if result.error is None:
                future.set_result(result.value)
            else:
                future.set_exception(result.error)

    def _is_over(self) -> bool:
        with self._lock:
            return self._is_shut_down and not self._submitted and not self._running

    def _fail_all(self, error: BaseException) -> None:
        with self._lock:
            self._is_shut_down = True
            waiting = [future for _, future in self._submitted]
            self._submitted.clear()
        waiting = [future for future in waiting if future.set_running_or_notify_cancel()]
        for future in (*self._running.values(), *waiting):
            future.set_exception(error)

    def __repr__(self) -> str:
        state = "shut down" if self._is_shut_down else f"{len(self._submitted)} calls wait"
        ranks = [worker.rank for worker in self._pool.workers.all]
        return f"<RankExecutor on ranks {ranks}: {self._pool.count} calls under way, {state}>"
