"""Accepts connections and authenticates them, on one background thread per process.

The thread serves a selector: it also reads control connections and runs timers (``EventThread``).
Handshakes run concurrently, with a timeout of five seconds each, TLS included. Silent and garbage
connections are closed without an answer; a peer with the wrong secret receives a refusal. When all
slots are taken, the oldest connection is closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import AuthenticationError, RankwireError
from rankwire.fork import guard
from rankwire.links.connection import Connection
from rankwire.links.dialer import HANDSHAKE_LIMIT
from rankwire.transports import listener_of
from rankwire.transports.byte_stream import ByteStream, Listener, Pollable
from rankwire.transports.security import UNPROTECTED, Policy
from rankwire.transports.wakeup import Wakeup
from rankwire.wire.frames import Frame
from rankwire.wire.handshake import (
    HELLO_NBYTES,
    NONCE_NBYTES,
    PROOF_NBYTES,
    Hello,
    Responder,
    Status,
)
from rankwire.wire.seals import Seals

_log = logging.getLogger("rankwire")

_CATCHING_UP_NAP = 0.001
_LEAST_ROOM = 256
_SWEEP_EVERY = 0.2  # seconds
_ACCEPTS_A_ROUND = 64
_ACCEPT_PAUSE = 0.05  # seconds, when the process is out of file descriptors or memory

Key = bytes | Callable[[Hello], bytes]


class EventThread:
    """Serves a selector from ``start`` to ``close``.

    Other threads only post to it (``call_soon``) and close it; all other state belongs to it.
    """

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
        """Wait until everything that has arrived by now is read. Safe from any other thread."""
        seen = self._rounds + 2  # one round is in progress; the next one sees what has arrived
        while self._rounds < seen and not self._closing and not deadline.expired:
            self._wakeup.release()
            self.clock.sleep(min(_CATCHING_UP_NAP, deadline.sleep_limit()))

    def call_every(self, seconds: float, action: Callable[[], None]) -> None:
        """Run ``action`` repeatedly, after reading. On this thread, or before ``start``."""
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
        self.unwatch(file)  # a file with its number that was closed elsewhere
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
        """Close this child's copies of the parent's resources, see ``fork``."""
        self._let_go()
        if not self._closing:  # else another file may have the number by now
            self._closing = True
            self._selector.close()
        self._wakeup.close_in_child()

    def _let_go(self) -> None:
        """Close the subclass's resources. The thread has stopped, or is the caller."""

    def _run(self) -> None:
        while not self._closing:
            self._rounds += 1
            due = min((timer.deadline.remaining() for timer in self._timers), default=None)
            for key, _ in self._selector.select(due):
                if self._closing:
                    return
                # A handler may have unregistered it, and a new file may have its number.
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
        except Exception:  # an error with one file must not end the thread for all others
            _log.exception("%s could not handle an event", self._thread.name)


@dataclass(slots=True)
class _Timer:
    seconds: float
    action: Callable[[], None]
    deadline: Deadline  # for the next call


def room_for(world_size: int) -> int:
    """Return the maximum of concurrent handshakes: all ranks may dial, some of them again."""
    return max(_LEAST_ROOM, 2 * world_size)


class House(Protocol):
    """The owner of an acceptor. Called on its thread; must not block."""

    def admit(self, hello: Hello) -> tuple[Status, int]:
        """Return the status for an authenticated peer, and a number for the text of a refusal."""

    def enter(self, hello: Hello, stream: ByteStream, seals: Seals | None) -> None:
        """Take the connection of a welcome peer. If this raises, the acceptor closes it."""


class Acceptor(EventThread):
    """Accepts connections from ``start`` to ``close``.

    ``key`` may be a function that finds the handshake key. Change ``room``, the maximum of
    concurrent handshakes, on this thread or before ``start``.
    """

    def __init__(
        self,
        house: House,
        clock: Clock,
        *,
        key: Key,
        policy: Policy = UNPROTECTED,
        room: int = _LEAST_ROOM,
    ) -> None:
        self.room = room
        self._house = house
        self._key = key
        self._policy = policy
        self._listeners: list[Listener] = []
        # In order of arrival, with their deadlines.
        self._strangers: dict[_Stranger, Deadline] = {}
        super().__init__("rankwire-acceptor", clock)

    def listen(self, listener: runtime.Socket | Listener) -> None:
        """Accept at this listener too, and own it. Before ``start``."""
        listener = listener_of(listener)
        self._listeners.append(listener)
        self._register(listener, runtime.EVENT_READ, partial(self._accept, listener))

    def _let_go(self) -> None:
        for listener in self._listeners:
            listener.close()
        for stranger in self._strangers:
            stranger.stream.close()
        self._strangers.clear()

    def _accept(self, listener: Listener) -> None:
        for _ in range(_ACCEPTS_A_ROUND):  # a flood must not delay handshakes in progress
            try:
                stream = listener.accept()
            except BlockingIOError:
                return
            except ConnectionError as error:  # the peer hung up, or must not connect
                _log.debug("dropped a connection: %s", error)
                continue
            except OSError as error:
                self._pause_accepting(error)
                return
            self._receive_stranger(stream)

    def _pause_accepting(self, error: OSError) -> None:
        _log.warning("cannot accept connections for a moment: %s", error.strerror)
        for listener in self._listeners:
            self._selector.unregister(listener)
        self.call_every(_ACCEPT_PAUSE, self._resume_accepting)

    def _resume_accepting(self) -> None:
        self.call_no_more(self._resume_accepting)
        for listener in self._listeners:
            self._register(listener, runtime.EVENT_READ, partial(self._accept, listener))

    def _receive_stranger(self, stream: ByteStream) -> None:
        while len(self._strangers) >= self.room:
            self._drop(next(iter(self._strangers)), "too many connections are in their handshake")
        try:
            stranger = _Stranger(self._policy.accept(stream), self._key)
        except OSError:  # the peer has closed it
            stream.close()
            return
        if not self._strangers:
            self.call_every(_SWEEP_EVERY, self._sweep)
        self._strangers[stranger] = Deadline(HANDSHAKE_LIMIT, self.clock)
        self._register(stranger.stream, runtime.EVENT_READ, partial(self._advance, stranger))

    def _sweep(self) -> None:
        """Close the connections past their deadline. One timer for each would take N squared."""
        for stranger, deadline in list(self._strangers.items()):
            if not deadline.expired:
                return
            self._drop(stranger, "no handshake in time")

    def _advance(self, stranger: _Stranger) -> None:
        try:
            message = stranger.receive()
            if message is None:
                return
            if not stranger.greeted:
                stranger.greeted = True
                stranger.wanted = PROOF_NBYTES
                stranger.stream.send_all(stranger.responder.challenge(message))
            else:
                try:
                    hello = stranger.responder.verify(message)
                except AuthenticationError:
                    stranger.stream.send_all(stranger.responder.refusal())
                    raise
                self._judge(stranger, hello)
        except OSError as error:  # some of our own errors are OSErrors
            self._drop(stranger, str(error))
        except BaseException:
            self._drop(stranger, "a mistake of this end")
            raise

    def _judge(self, stranger: _Stranger, hello: Hello) -> None:
        demanded = self._policy.protection_of(stranger.stream)
        if demanded & ~hello.protection:
            status, detail = Status.TOO_LITTLE_PROTECTION, int(demanded)
        elif objection := self._policy.objection_to(stranger.stream, hello.dialler):
            status, detail = Status.WRONG_CERTIFICATE, 0
            _log.warning("refused a connection as rank %d: %s", hello.rank, objection)
        else:
            status, detail = self._house.admit(hello)
        stranger.stream.send_all(stranger.responder.verdict(status, detail))
        if status is not Status.WELCOME:
            self._drop(stranger, f"rank {hello.rank}: {status.name}")
            return
        self._release(stranger)
        # Before this thread reads anything else, so that a welcome peer's frames are received.
        try:
            self._house.enter(hello, stranger.stream, stranger.responder.seals())
        except BaseException:
            stranger.stream.shut_down()  # wakes a thread that reads it already
            stranger.stream.close()
            raise

    def _drop(self, stranger: _Stranger, reason: str) -> None:
        _log.debug("dropped a connection: %s", reason)
        if stranger in self._strangers:
            self._release(stranger)
            stranger.stream.close()

    def _release(self, stranger: _Stranger) -> None:
        del self._strangers[stranger]
        if not self._strangers:
            self.call_no_more(self._sweep)
        self._selector.unregister(stranger.stream)


class _Stranger:
    def __init__(self, stream: ByteStream, key: Key) -> None:
        self.stream = stream
        self.responder = Responder(
            key=key, nonce=runtime.token_bytes(NONCE_NBYTES), binding=stream.binding
        )
        self.greeted = False
        self.wanted = HELLO_NBYTES
        self._received = b""

    def receive(self) -> bytes | None:
        """Return the expected message once it is complete. Reads no byte beyond it."""
        if not self.stream.shake_hands():
            return None
        try:
            piece = self.stream.receive(self.wanted - len(self._received))
        except BlockingIOError:
            return None
        if not piece:
            raise ConnectionError("hung up in the handshake")
        self._received += piece
        if len(self._received) < self.wanted:
            return None
        message, self._received = self._received, b""
        return message
