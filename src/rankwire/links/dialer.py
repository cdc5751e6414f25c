"""Authenticates a connection that this process has opened. The other end is ``acceptor``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rankwire import runtime
from rankwire.deadline import Deadline
from rankwire.errors import (
    AuthenticationError,
    DeadlineExceededError,
    NoConnectionError,
    RankwireError,
)
from rankwire.transports import stream_of
from rankwire.transports.byte_stream import ByteStream
from rankwire.transports.security import UNPROTECTED, Policy
from rankwire.transports.sockets import wait_patiently
from rankwire.wire.handshake import CHALLENGE_NBYTES, NONCE_NBYTES, VERDICT_NBYTES, Hello, Initiator
from rankwire.wire.seals import Seals

HANDSHAKE_LIMIT = 5.0  # seconds for an unauthenticated peer
_TLS_ALERT = b"\x15\x03"  # the answer of a TLS listener to other data


def authenticate(
    sock: runtime.Socket | ByteStream,
    hello: Hello,
    *,
    key: bytes,
    deadline: Deadline,
    check: Callable[[], None] = lambda: None,
    policy: Policy = UNPROTECTED,
) -> tuple[ByteStream, Seals | None]:
    """Prove to the other end that this one has the key, and verify the same of it.

    If this raises, the caller still has to close ``sock``. ``check`` is called repeatedly while
    waiting; an exception from it ends the wait. Returns the stream, inside TLS if the policy
    requires it, and the seals of its frames, if any.

    Raises:
        AuthenticationError: The key, TLS or the certificate of the other end is wrong, or it
            refuses this end's proof.
        NoConnectionError: It closed the connection, or refused (``RendezvousError`` when joining).
        DeadlineExceededError: It did not answer in time.
    """
    stream = policy.dial(stream_of(sock), deadline, check)
    if objection := policy.objection_to(stream, hello.listener):
        raise AuthenticationError(f"the other end is another process: {objection}")
    initiator = Initiator(
        replace(hello, protection=policy.protection_of(stream)),
        key=key,
        nonce=runtime.token_bytes(NONCE_NBYTES),
        binding=stream.binding,
    )
    try:
        stream.send_all(initiator.hello())
        challenge = _receive(stream, CHALLENGE_NBYTES, deadline, check)
        if challenge[:2] == _TLS_ALERT:
            raise AuthenticationError(
                "the other end wants TLS: give all ranks tls=, all launchers --tls"
            )
        if len(challenge) < CHALLENGE_NBYTES:
            raise NoConnectionError("the other end closed the connection before the handshake")
        stream.send_all(initiator.proof(challenge))
        verdict = _receive(stream, VERDICT_NBYTES, deadline, check)
    except RankwireError:
        raise  # some of our own errors are also OSErrors
    except OSError as error:
        raise NoConnectionError(f"the handshake failed: {error.strerror or error}") from error
    if len(verdict) < VERDICT_NBYTES:
        raise NoConnectionError("the other end closed the connection during the handshake")
    initiator.finish(verdict)
    return stream, initiator.seals()


def _receive(
    stream: ByteStream, nbytes: int, deadline: Deadline, check: Callable[[], None]
) -> bytes:
    data = b""
    while len(data) < nbytes:
        try:
            piece = stream.receive(nbytes - len(data))
        except BlockingIOError:
            if not wait_patiently(stream, runtime.POLLIN, deadline, check):
                raise DeadlineExceededError(
                    deadline.limit, detail="no answer in the handshake"
                ) from None
            continue
        except ConnectionResetError:
            break
        if not piece:
            break
        data += piece
    return data
