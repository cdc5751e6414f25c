"""The acceptor: one background thread a process that lets connections in.

It is not on the way of any message or call. It accepts on all listening sockets, runs every
handshake concurrently and without blocking, and gives an authenticated socket to its owner. A
stranger costs a slot for at most five seconds: silent, garbage and wrong-secret connections are
dropped without a word, and when all slots are taken the oldest goes. With TLS, its handshake is
a part of the same five seconds.

It also reads the *control connections* handed to ``watch``: their frames, and their end, are
reported to the owner on this thread, and it does small things at regular times (``call_every``).
All state belongs to the thread; other threads only use ``call_soon`` and ``close``.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from secrets import token_bytes
from time import sleep
from typing import TYPE_CHECKING, Protocol

from rankwire.deadline import Deadline
from rankwire.errors import RankwireError
from rankwire.fork import guard
from rankwire.links.connection import Connection
from rankwire.links.dialer import HANDSHAKE_LIMIT
from rankwire.links.security import UNPROTECTED, Policy
from rankwire.links.sockets import tune, unix_peer_uid
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

if TYPE_CHECKING:
    from rankwire.links.tls import AnySocket

__all__ = ["Acceptor", "House"]

_log = logging.getLogger("rankwire")

_MAX_STRANGERS = 256
_ACCEPTS_A_ROUND = 64
_ACCEPT_PAUSE = 0.05  # seconds, when the process is out of file descriptors or memory
_CATCHING_UP_NAP = 0.001

Key = bytes | Callable[[Hello], bytes]


class House(Protocol):
    """Who the acceptor works for. Called on its thread; must not block."""

    def admit(self, hello: Hello) -> tuple[Status, int]:
        """Judge an authenticated peer: the status, and a number for the text of a refusal."""

    def enter(self, hello: Hello, sock: AnySocket, seals: Seals | None) -> None:
        """Take a connection whose peer was welcomed, and the seals of its frames."""


class Acceptor:
    """Runs from ``start`` to ``close``.

    Args:
        house: Decides who may enter.
        key: The handshake key, or how to find it for who dials; called on the acceptor's thread.
        policy: How connections must be protected.
    """

    def __init__(self, house: House, *, key: Key, policy: Policy = UNPROTECTED) -> None:
        self._house = house
        self._key = key
        self._policy = policy
        self._selector = selectors.DefaultSelector()
        self._wake_lock = threading.Lock()  # guards the pipe against being used once closed
        self._has_pipe = True
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._run_posted)
        self._posted: deque[Callable[[], None]] = deque()
        self._timers: list[_Timer] = []
        self._listeners: list[socket.socket] = []
        self._accepting_again: Deadline | None = None
        self._strangers: dict[_Stranger, None] = {}
        self._closing = False
        self._rounds = 0
        self._thread = threading.Thread(target=self._run, name="rankwire-acceptor", daemon=True)
        guard(self)

    def listen(self, listener: socket.socket) -> None:
        """Accept on this socket too; owned from now on. Before ``start``."""
        listener.setblocking(False)
        self._listeners.append(listener)
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def call_soon(self, action: Callable[[], None]) -> None:
        """Run ``action`` on the acceptor's thread. Safe from any thread; ignored once closed."""
        self._posted.append(action)
        self._wake()

    def catch_up(self, deadline: Deadline) -> None:
        """Wait until all is read that has come by now. Safe from any thread but its own."""
        seen = self._rounds + 2  # one round is under way; the next one sees what is there
        while self._rounds < seen and not self._closing and not deadline.expired:
            self._wake()
            sleep(min(_CATCHING_UP_NAP, deadline.sleep_limit()))

    def call_every(self, seconds: float, action: Callable[[], None]) -> None:
        """Run ``action`` again and again. On the acceptor's thread, or before ``start``.

        Connections that are readable at the same moment are read first.
        """
        self._timers.append(_Timer(seconds, action))

    def call_no_more(self, action: Callable[[], None]) -> None:
        """End what ``call_every`` began. On the acceptor's thread, or after it has stopped."""
        self._timers = [timer for timer in self._timers if timer.action != action]

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs on the acceptor's thread."""
        return threading.current_thread() is self._thread

    def _wake(self) -> None:
        with self._wake_lock:  # or the descriptor might be closed, and somebody else's by now
            if self._has_pipe:
                with suppress(BlockingIOError):  # full of wake-ups: it will wake up
                    os.write(self._wake_write, b"\0")

    def watch(
        self,
        connection: Connection,
        on_frames: Callable[[list[Frame]], None],
        on_end: Callable[[RankwireError], None],
    ) -> None:
        """Read a control connection. On the acceptor's thread, or before ``start``."""

        def readable() -> None:
            try:
                frames = connection.read_ready()
                if frames:
                    on_frames(frames)
            except RankwireError as error:
                self.unwatch(connection)
                connection.fail(error)
                on_end(error)

        self._register(connection, selectors.EVENT_READ, readable)

    def flush_when_possible(self, connection: Connection) -> None:
        """Send what a connection holds back as soon as its peer takes it. Safe from any thread."""

        def writable() -> None:
            try:
                connection.flush(Deadline(0.0))
            except RankwireError as error:
                _log.debug("frames to rank %d were not sent: %s", connection.peer, error)
            if connection.failure is not None or not connection.is_holding:
                self.unwatch(connection)

        def begin() -> None:
            if connection.failure is None and connection.fileno() >= 0:
                self._register(connection, selectors.EVENT_WRITE, writable)

        self.call_soon(begin)

    def _register(
        self, file: AnySocket | Connection, events: int, action: Callable[[], None]
    ) -> None:
        number = file.fileno()
        if number in self._selector.get_map():  # one that was closed elsewhere
            self._selector.unregister(number)
        self._selector.register(file, events, action)

    def unwatch(self, connection: Connection) -> None:
        """Stop reading a control connection."""
        number = connection.fileno()
        if number >= 0 and number in self._selector.get_map():
            self._selector.unregister(number)

    def close(self) -> None:
        """Stop the thread, close the listening sockets and drop strangers. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        for listener in self._listeners:
            listener.close()
        for stranger in list(self._strangers):
            stranger.sock.close()
        self._strangers.clear()
        self._selector.close()
        with self._wake_lock:
            self._has_pipe = False
            os.close(self._wake_read)
            os.close(self._wake_write)

    def forsake(self) -> None:
        """See ``Forkable``."""
        self._wake_lock = threading.Lock()
        for sock in (*self._listeners, *(stranger.sock for stranger in self._strangers)):
            sock.close()
        if not self._closing:  # else the numbers may be somebody else's by now
            self._closing = True
            self._has_pipe = False
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            self._rounds += 1
            for key, _ in self._selector.select(self._patience()):
                if self._closing:
                    return
                # A handler may have ended another one's registration in the same round, and its
                # number may have been taken by a newcomer.
                if self._selector.get_map().get(key.fd) is key:
                    self._handle(key.data)
            self._drop_late_strangers()
            for timer in self._timers:
                if timer.deadline.expired:
                    timer.deadline = Deadline(timer.seconds)
                    self._handle(timer.action)
            if self._accepting_again is not None and self._accepting_again.expired:
                self._resume_accepting()

    def _handle(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:  # a mistake with one visitor must not close the door to all others
            _log.exception("the acceptor could not handle an event")

    def _patience(self) -> float | None:
        waits = [stranger.deadline.remaining() for stranger in self._strangers]
        waits += [timer.deadline.remaining() for timer in self._timers]
        if self._accepting_again is not None:
            waits.append(self._accepting_again.remaining())
        return min(waits) if waits else None

    def _run_posted(self) -> None:
        os.read(self._wake_read, 4096)
        while self._posted and not self._closing:
            self._handle(self._posted.popleft())

    # -- accepting ---------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_A_ROUND):  # a flood must not keep handshakes from going on
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ECONNABORTED:
                    continue  # that one hung up before it was accepted
                self._pause_accepting(error)
                return
            self._receive_stranger(sock)

    def _pause_accepting(self, error: OSError) -> None:
        _log.warning("cannot accept connections for a moment: %s", error.strerror)
        for listener in self._listeners:
            self._selector.unregister(listener)
        self._accepting_again = Deadline(_ACCEPT_PAUSE)

    def _resume_accepting(self) -> None:
        self._accepting_again = None
        for listener in self._listeners:
            self._selector.register(
                listener, selectors.EVENT_READ, lambda listener=listener: self._accept(listener)
            )

    def _receive_stranger(self, sock: socket.socket) -> None:
        try:
            tune(sock)
            foreign = sock.family == socket.AF_UNIX and unix_peer_uid(sock) != os.geteuid()
        except OSError:
            foreign = True  # it is gone already
        if foreign:
            sock.close()
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            self._drop(next(iter(self._strangers)), "too many connections are in their handshake")
        stranger = _Stranger(self._policy.accept(sock), self._key)
        self._strangers[stranger] = None
        self._register(stranger.sock, selectors.EVENT_READ, lambda: self._advance(stranger))

    # -- handshakes --------------------------------------------------------------------------------

    def _advance(self, stranger: _Stranger) -> None:
        try:
            message = stranger.receive()
            if message is None:
                return
            if not stranger.greeted:
                stranger.greeted = True
                stranger.wanted = PROOF_NBYTES
                stranger.sock.sendall(stranger.responder.challenge(message))
            else:
                self._judge(stranger, stranger.responder.verify(message))
        except OSError as error:  # our own errors of this kind included
            self._drop(stranger, str(error))
        except BaseException:
            self._drop(stranger, "a mistake of this end")
            raise

    def _judge(self, stranger: _Stranger, hello: Hello) -> None:
        demanded = self._policy.protection_of(stranger.sock)
        if demanded & ~hello.protection:
            status, detail = Status.TOO_LITTLE_PROTECTION, int(demanded)
        elif objection := self._policy.objection_to(stranger.sock, hello.dialler):
            status, detail = Status.WRONG_CERTIFICATE, 0
            _log.warning("refused a connection as rank %d: %s", hello.rank, objection)
        else:
            status, detail = self._house.admit(hello)
        stranger.sock.sendall(stranger.responder.verdict(status, detail))
        if status is not Status.WELCOME:
            self._drop(stranger, f"rank {hello.rank}: {status.name}")
            return
        self._selector.unregister(stranger.sock)
        del self._strangers[stranger]
        # After the verdict, but before this thread hears anything else: a peer that is welcome,
        # sends and leaves is still heard.
        self._house.enter(hello, stranger.sock, stranger.responder.seals())

    def _drop_late_strangers(self) -> None:
        for stranger in [s for s in self._strangers if s.deadline.expired]:
            self._drop(stranger, "no handshake in time")

    def _drop(self, stranger: _Stranger, reason: str) -> None:
        _log.debug("dropped a connection: %s", reason)
        if self._strangers.pop(stranger, self) is None:
            self._selector.unregister(stranger.sock)
            stranger.sock.close()


class _Timer:
    """Something to do every ``seconds``."""

    def __init__(self, seconds: float, action: Callable[[], None]) -> None:
        self.seconds = seconds
        self.action = action
        self.deadline = Deadline(seconds)


class _Stranger:
    """A connection in its handshake: which message it owes and what has come of it."""

    def __init__(self, sock: AnySocket, key: Key) -> None:
        self.sock = sock
        self._in_tls_handshake = not isinstance(sock, socket.socket)
        self.responder = Responder(
            key=key, nonce=token_bytes(NONCE_NBYTES), binding=getattr(sock, "binding", b"")
        )
        self.deadline = Deadline(HANDSHAKE_LIMIT)
        self.greeted = False
        self.wanted = HELLO_NBYTES
        self._received = b""

    def receive(self) -> bytes | None:
        """Return the message it owes once it is whole. Reads not one byte more."""
        if self._in_tls_handshake:
            assert not isinstance(self.sock, socket.socket)
            if not self.sock.shake_hands():
                return None
            self._in_tls_handshake = False
        try:
            piece = self.sock.recv(self.wanted - len(self._received))
        except BlockingIOError:
            return None
        if not piece:
            raise ConnectionError("hung up in the handshake")
        self._received += piece
        if len(self._received) < self.wanted:
            return None
        message, self._received = self._received, b""
        return message
