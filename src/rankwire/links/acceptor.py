"""Accept connections and authenticate them, on one background thread per process.

The thread accepts on all listening sockets, runs all handshakes concurrently without blocking, and
hands authenticated streams to their owner. A handshake, TLS included, has five seconds. Silent and
garbage connections are closed without an answer; a peer with the wrong secret receives a refusal.
When all slots are taken, the oldest connection is closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import AuthenticationError
from rankwire.links.dialer import HANDSHAKE_LIMIT
from rankwire.links.event_thread import EventThread
from rankwire.transports import listener_of
from rankwire.transports.byte_stream import ByteStream, Listener
from rankwire.transports.security import UNPROTECTED, Policy
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

    All ranks may dial at once, and a rank dials again while its cut connection still counts.
    """
    return max(_LEAST_ROOM, 2 * world_size)


class House(Protocol):
    """The owner of an acceptor. Called on its thread; must not block."""

    def admit(self, hello: Hello) -> tuple[Status, int]:
        """Return the status for an authenticated peer, and a number for the text of a refusal."""

    def enter(self, hello: Hello, stream: ByteStream, seals: Seals | None) -> None:
        """Take the connection of a welcome peer. If this raises, the acceptor closes it."""


class Acceptor(EventThread):
    """Accepts connections from ``start`` to ``close``.

    Args:
        key: The handshake key, or a function that finds it; called on the acceptor's thread.
        room: How many connections may be in their handshake at once. Change the attribute on this
            thread, or before ``start``.
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
        # In the order in which they came, each with the end of its time.
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

    # -- accepting ---------------------------------------------------------------------------------

    def _accept(self, listener: Listener) -> None:
        for _ in range(_ACCEPTS_A_ROUND):  # a flood must not keep handshakes from going on
            try:
                stream = listener.accept()
            except BlockingIOError:
                return
            except ConnectionError as error:  # that one hung up, or must not connect
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
        except OSError:  # it is gone already
            stream.close()
            return
        if not self._strangers:
            self.call_every(_SWEEP_EVERY, self._sweep)
        self._strangers[stranger] = Deadline(HANDSHAKE_LIMIT, self.clock)
        self._register(stranger.stream, runtime.EVENT_READ, partial(self._advance, stranger))

    def _sweep(self) -> None:
        """Close the connections whose time has passed.

        One timer serves all: with one each, the CPU time of N handshakes would grow with N squared.
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
                stranger.stream.send_all(stranger.responder.challenge(message))
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
            stranger.stream.send_all(stranger.responder.refusal())
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
        # After the verdict, but before this thread reads anything else: what a welcome peer sends
        # before it leaves is still received.
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
        """Stop serving a handshake; the stream stays open."""
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
