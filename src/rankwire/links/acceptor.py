"""The acceptor: one background thread a process that lets connections in.

It is not on the way of any message or call. It accepts on all listening sockets, runs every
handshake concurrently and without blocking, and gives an authenticated socket to its owner. A
stranger costs a slot for at most five seconds: silent and garbage connections are dropped without
a word, one with the wrong secret is told so, and when all slots are taken the acceptor drops the
oldest. With TLS, its handshake is a part of the same five seconds.

As an ``EventThread`` it also reads the *control connections* handed to ``watch``, and does small
things at regular times. All state belongs to the thread.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Protocol

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import AuthenticationError
from rankwire.links.dialer import HANDSHAKE_LIMIT
from rankwire.links.event_thread import EventThread
from rankwire.transports.security import UNPROTECTED, Policy
from rankwire.transports.sockets import AnySocket, tune, unix_peer
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

_LEAST_ROOM = 256
_SWEEP_EVERY = 0.2  # seconds
_ACCEPTS_A_ROUND = 64
_ACCEPT_PAUSE = 0.05  # seconds, when the process is out of file descriptors or memory

Key = bytes | Callable[[Hello], bytes]


def room_for(world_size: int) -> int:
    """Return how many connections may be in their handshake at once in a world of this size.

    All ranks may dial at the same moment, and a rank whose connection was cut dials again while
    the old connection still counts.
    """
    return max(_LEAST_ROOM, 2 * world_size)


class House(Protocol):
    """Who the acceptor works for. Called on its thread; must not block."""

    def admit(self, hello: Hello) -> tuple[Status, int]:
        """Judge an authenticated peer: the status, and a number for the text of a refusal."""

    def enter(self, hello: Hello, sock: AnySocket, seals: Seals | None) -> None:
        """Take a connection whose peer was welcomed, and the seals of its frames."""


class Acceptor(EventThread):
    """Runs from ``start`` to ``close``.

    Args:
        house: Decides who may enter.
        clock: By which a handshake takes too long.
        key: The handshake key, or how to find it for who dials; called on the acceptor's thread.
        policy: How connections must be protected.
        room: How many connections may be in their handshake at once.

    Attributes:
        room: The same. Change it on this thread, or before ``start``.
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
        self._listeners: list[runtime.Socket] = []
        # In the order in which they came, each with the end of its time.
        self._strangers: dict[_Stranger, Deadline] = {}
        super().__init__("rankwire-acceptor", clock)

    def listen(self, listener: runtime.Socket) -> None:
        """Accept on this socket too; owned from now on. Before ``start``."""
        listener.setblocking(False)
        self._listeners.append(listener)
        self._register(listener, runtime.EVENT_READ, partial(self._accept, listener))

    def _let_go(self) -> None:
        for sock in (*self._listeners, *(stranger.sock for stranger in self._strangers)):
            sock.close()
        self._strangers.clear()

    # -- accepting ---------------------------------------------------------------------------------

    def _accept(self, listener: runtime.Socket) -> None:
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
        self.call_every(_ACCEPT_PAUSE, self._resume_accepting)

    def _resume_accepting(self) -> None:
        self.call_no_more(self._resume_accepting)
        for listener in self._listeners:
            self._register(listener, runtime.EVENT_READ, partial(self._accept, listener))

    def _receive_stranger(self, sock: runtime.Socket) -> None:
        try:
            tune(sock)
            foreign = sock.family == runtime.AF_UNIX and unix_peer(sock)[1] != os.geteuid()
        except OSError:
            foreign = True  # it is gone already
        if foreign:
            sock.close()
            return
        while len(self._strangers) >= self.room:
            self._drop(next(iter(self._strangers)), "too many connections are in their handshake")
        stranger = _Stranger(self._policy.accept(sock), self._key)
        if not self._strangers:
            self.call_every(_SWEEP_EVERY, self._sweep)
        self._strangers[stranger] = Deadline(HANDSHAKE_LIMIT, self.clock)
        self._register(stranger.sock, runtime.EVENT_READ, partial(self._advance, stranger))

    def _sweep(self) -> None:
        """Drop the connections whose time is over.

        One timer serves all of them: with one for each, every round of this thread would look at
        every timer, and the CPU time of N handshakes would grow with N squared.
        """
        for stranger, deadline in list(self._strangers.items()):
            if not deadline.expired:
                return
            self._drop(stranger, "no handshake in time")

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
                self._judge(stranger, self._verify(stranger, message))
        except OSError as error:  # our own errors of this kind included
            self._drop(stranger, str(error))
        except BaseException:
            self._drop(stranger, "a mistake of this end")
            raise

    def _verify(self, stranger: _Stranger, proof: bytes) -> Hello:
        try:
            return stranger.responder.verify(proof)
        except AuthenticationError:
            stranger.sock.sendall(stranger.responder.refusal())
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
        self._release(stranger)
        # After the verdict, but before this thread hears anything else: a peer that is welcome,
        # sends and leaves is still heard.
        self._house.enter(hello, stranger.sock, stranger.responder.seals())

    def _drop(self, stranger: _Stranger, reason: str) -> None:
        _log.debug("dropped a connection: %s", reason)
        if stranger in self._strangers:
            self._release(stranger)
            stranger.sock.close()

    def _release(self, stranger: _Stranger) -> None:
        """End what this thread does for a stranger; its socket stays open."""
        del self._strangers[stranger]
        if not self._strangers:
            self.call_no_more(self._sweep)
        self._selector.unregister(stranger.sock)


class _Stranger:
    """A connection in its handshake: which message it owes and what has come of it."""

    def __init__(self, sock: AnySocket, key: Key) -> None:
        self.sock = sock
        self.responder = Responder(
            key=key, nonce=runtime.token_bytes(NONCE_NBYTES), binding=getattr(sock, "binding", b"")
        )
        self.greeted = False
        self.wanted = HELLO_NBYTES
        self._received = b""

    def receive(self) -> bytes | None:
        """Return the message it owes once it is whole. Reads not one byte more."""
        if not isinstance(self.sock, runtime.Socket) and not self.sock.shake_hands():
            return None
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
