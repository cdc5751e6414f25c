"""A thread that serves a selector: it reads control connections and runs timers.

Other threads only post to it (``call_soon``) and close it; all other state belongs to the thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import RankwireError
from rankwire.fork import guard
from rankwire.links.connection import Connection
from rankwire.transports.byte_stream import Pollable
from rankwire.transports.wakeup import Wakeup
from rankwire.wire.frames import Frame

_log = logging.getLogger("rankwire")

_CATCHING_UP_NAP = 0.001


class EventThread:
    """Serves a selector from ``start`` to ``close``."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.clock = clock
        self._selector = runtime.DefaultSelector()
        self._wakeup = Wakeup(self._selector, self._handle)
        self._timers: list[_Timer] = []
        self._closing = False
        self._rounds = 0
        self._thread = runtime.Thread(target=self._run, name=name, daemon=True)
        guard(self)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def call_soon(self, action: Callable[[], None]) -> None:
        """Run ``action`` on this thread. Safe from any thread; ignored once closed."""
        self._wakeup.post(action)

    def catch_up(self, deadline: Deadline) -> None:
        """Wait until all that has come by now is read. Safe from any other thread."""
        seen = self._rounds + 2  # one round is under way; the next one sees what is there
        while self._rounds < seen and not self._closing and not deadline.expired:
            self._wakeup.release()
            self.clock.sleep(min(_CATCHING_UP_NAP, deadline.sleep_limit()))

    def call_every(self, seconds: float, action: Callable[[], None]) -> None:
        """Run ``action`` repeatedly. On this thread, or before ``start``.

        Connections that are readable at the same moment are read first.
        """
        self._timers.append(_Timer(seconds, action, Deadline(seconds, self.clock)))

    def call_no_more(self, action: Callable[[], None]) -> None:
        """Stop a timer of ``call_every``. On this thread, or after it has stopped."""
        self._timers = [timer for timer in self._timers if timer.action != action]

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs on this thread."""
        return runtime.current_thread() is self._thread

    def watch(
        self,
        connection: Connection,
        on_frames: Callable[[list[Frame]], None],
        on_end: Callable[[RankwireError], None],
    ) -> None:
        """Read a control connection. On this thread, or before ``start``."""

        def readable() -> None:
            try:
                frames = connection.read_ready()
                if frames:
                    on_frames(frames)
            except RankwireError as error:
                self.unwatch(connection)
                connection.fail(error)
                on_end(error)

        self._register(connection, runtime.EVENT_READ, readable)

    def flush_when_possible(self, connection: Connection) -> None:
        """Flush a connection as soon as its peer takes more. Safe from any thread."""

        def writable() -> None:
            try:
                connection.outbox.flush(AT_ONCE)
            except RankwireError as error:
                _log.debug("frames to rank %d were not sent: %s", connection.peer, error)
            if connection.failure is not None or not connection.outbox.is_holding:
                self.unwatch(connection)

        def begin() -> None:
            if connection.failure is None and connection.fileno() >= 0:
                self._register(connection, runtime.EVENT_WRITE, writable)

        self.call_soon(begin)

    def _register(self, file: Pollable, events: int, action: Callable[[], None]) -> None:
        self.unwatch(file)  # one with its number, that was closed elsewhere
        self._selector.register(file, events, action)

    def unwatch(self, file: Pollable) -> None:
        """Stop reading a control connection."""
        number = file.fileno()
        if number >= 0 and number in self._selector.get_map():
            self._selector.unregister(number)

    def close(self) -> None:
        """Stop the thread and close its resources. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._wakeup.release()
        if self._thread.is_alive() and self._thread is not runtime.current_thread():
            self.clock.join(self._thread)
        self._let_go()
        self._wakeup.close()
        self._selector.close()

    def close_in_child(self) -> None:
        """Close this child's copies of what the parent has, see ``fork``."""
        self._let_go()
        if not self._closing:  # else the number may be another's by now
            self._closing = True
            self._selector.close()
        self._wakeup.close_in_child()

    # -- for the subclass --------------------------------------------------------------------------

    def _let_go(self) -> None:
        """Close what the subclass has. The thread has stopped, or is the caller."""

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            self._rounds += 1
            due = min((timer.deadline.remaining() for timer in self._timers), default=None)
            for key, _ in self._selector.select(due):
                if self._closing:
                    return
                # A handler may have ended another one's registration in the same round, and its
                # number may have been taken by a newcomer.
                if self._selector.get_map().get(key.fd) is key:
                    self._handle(key.data)
            for timer in self._timers:
                if timer.deadline.expired:
                    timer.deadline = Deadline(timer.seconds, self.clock)
                    self._handle(timer.action)

    def _handle(self, action: Callable[[], None]) -> None:
        try:
            if not self._closing:
                action()
        except Exception:  # a mistake with one must not end it for all others
            _log.exception("%s could not handle an event", self._thread.name)


@dataclass(slots=True)
class _Timer:
    seconds: float
    action: Callable[[], None]
    deadline: Deadline  # for the next time
