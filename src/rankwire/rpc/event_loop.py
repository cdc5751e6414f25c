"""One event loop in one thread, for functions that are ``async def``.

The first call of one starts it and imports asyncio, which takes as long as importing this package.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.fork import guard

if TYPE_CHECKING:
    import asyncio

_CLOSE_PATIENCE = 1.0


class _HasTask(Protocol):
    task: asyncio.Task[None] | None


class EventLoop:
    """Runs coroutines. Every method is safe from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = runtime.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: runtime.Thread | None = None
        self._closed = False
        self._is_in_child = False
        guard(self)

    @property
    def ident(self) -> int | None:
        """The identifier of its thread, once it runs."""
        return None if self._thread is None else self._thread.ident

    def run(self, make: Callable[[], Coroutine[Any, Any, None]], holder: _HasTask) -> bool:
        """Start a coroutine and set ``holder.task``; return False if the loop is closed."""
        loop = self._running_loop()
        if loop is None:
            return False

        def start() -> None:
            holder.task = loop.create_task(make())

        try:
            loop.call_soon_threadsafe(start)
        except RuntimeError:  # the loop has just closed
            return False
        return True

    def _running_loop(self) -> asyncio.AbstractEventLoop | None:
        with self._lock:
            if self._closed:
                return None
            if self._loop is None:
                self._loop = runtime.new_event_loop()
                self._thread = runtime.Thread(
                    target=self._run_loop,
                    args=(self._loop,),
                    name="rankwire-event-loop",
                    daemon=True,
                )
                self._thread.start()
            return self._loop

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        import asyncio

        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            if not self._is_in_child:
                _end(loop)

    def close_in_child(self) -> None:
        """Stop in a forked child, where the loop shares its selector with the parent's."""
        self._is_in_child = True
        if self._loop is not None:
            self._loop.stop()

    def close(self, patience: float = _CLOSE_PATIENCE) -> None:
        """Cancel all tasks and end the thread; wait up to ``patience`` s for it. Idempotent."""
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
            self._loop = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            # A coroutine may close the agent that serves it.
            if thread is not runtime.current_thread():
                self._clock.join(thread, patience)


def _end(loop: asyncio.AbstractEventLoop) -> None:
    import asyncio

    loop.run_until_complete(asyncio.sleep(0))  # starts tasks that were submitted before the stop
    while tasks := sorted(asyncio.all_tasks(loop), key=_order):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def _order(task: asyncio.Task[Any]) -> tuple[int, str]:
    # By age, as their names sort: Task-9, Task-10.
    return len(task.get_name()), task.get_name()
