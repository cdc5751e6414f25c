"""Dialling: from an address to an authenticated connection, seen from the end that opens it.

Blocking, in the thread that needs the connection, within its deadline. The listening end is
``doorkeeper``.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from secrets import token_bytes

from rankwire.deadline import Deadline
from rankwire.errors import (
    AuthenticationError,
    DeadlineExceededError,
    NoConnectionError,
    RankwireError,
)
from rankwire.links.sockets import wait_patiently
from rankwire.wire.handshake import (
    CHALLENGE_NBYTES,
    NONCE_NBYTES,
    VERDICT_NBYTES,
    Hello,
    Initiator,
)

__all__ = ["HANDSHAKE_LIMIT", "authenticate"]

HANDSHAKE_LIMIT = 5.0  # seconds for the handshake with a stranger


def authenticate(
    sock: socket.socket,
    hello: Hello,
    *,
    key: bytes,
    deadline: Deadline,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Prove to the other end that this one knows the secret, and have it prove the same.

    Args:
        sock: Connected and non-blocking.
        hello: Who this is, and what the connection is for.
        key: The handshake key.
        deadline: For all of it.
        check: Called now and then while waiting; what it raises ends the wait.

    Raises:
        AuthenticationError: It does not know the secret, or closed the connection on seeing our
            proof.
        NoConnectionError: It closed the connection before it saw the proof, or refused
            (``RendezvousError`` when joining).
        DeadlineExceededError: It did not answer in time.
    """
    initiator = Initiator(hello, key=key, nonce=token_bytes(NONCE_NBYTES))
    try:
        sock.sendall(initiator.hello())
        challenge = _receive(sock, CHALLENGE_NBYTES, deadline, check)
        if challenge is None:
            raise NoConnectionError("the other end closed the connection before the handshake")
        sock.sendall(initiator.proof(challenge))
        verdict = _receive(sock, VERDICT_NBYTES, deadline, check)
    except RankwireError:
        raise  # some of ours are also OSErrors
    except OSError as error:
        raise NoConnectionError(f"the handshake failed: {error.strerror or error}") from error
    if verdict is None:
        raise AuthenticationError(
            "the other end closed the connection on seeing our proof: the secrets differ"
        )
    initiator.finish(verdict)


def _receive(
    sock: socket.socket, nbytes: int, deadline: Deadline, check: Callable[[], None]
) -> bytes | None:
    """Return exactly ``nbytes``, or None at the end of the stream."""
    data = b""
    while len(data) < nbytes:
        if not wait_patiently(sock, select.POLLIN, deadline, check):
            raise DeadlineExceededError(deadline.limit, detail="no answer in the handshake")
        try:
            piece = sock.recv(nbytes - len(data))
        except BlockingIOError:
            continue
        except ConnectionResetError:
            return None
        if not piece:
            return None
        data += piece
    return data
