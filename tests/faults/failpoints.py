"""Faults at an exact place inside a rank: after so many bytes of a frame it is killed or stopped.

Nothing of this is in the package. A rank process of the tests calls ``install``, which puts the
point around the stream of a connection, where bytes leave. An argument, or the variable
``TESTS_FAILPOINT``, says what happens where::

    sent:160=kill        after 160 bytes of the message connection
    sent:192=stop        SIGSTOP instead
    sent:40=raise        an OSError at that place
"""

import os
import signal
from typing import Any

VARIABLE = "TESTS_FAILPOINT"


class FailingStream:
    """A stream that writes so many bytes, and then something happens.

    Everything else is the real stream's.
    """

    def __init__(self, real: Any, nbytes: int, action: str) -> None:
        self._real = real
        self._left: int | None = nbytes  # None once it has happened
        self._action = action

    def write(self, pieces: Any, counts: list[int]) -> None:
        data = b"".join(bytes(piece) for piece in pieces)
        self._real.write([data[: self._left]], counts)
        if self._left is not None:
            self._left -= counts[-1]
            if self._left == 0:
                self._left = None
                _act(self._action)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _act(action: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "raise":
        raise ConnectionAbortedError("a failpoint")
    else:
        raise ValueError(f"no such action: {action!r}")


def install(backend: Any, peer: int, point: str = "") -> None:
    """Have the next bytes that a ``TcpBackend`` sends to a peer meet the failpoint.

    The connection must stand already: the count begins with the next frame.
    """
    point = point or os.environ[VARIABLE]
    where, _, action = point.partition("=")
    kind, _, nbytes = where.partition(":")
    if kind != "sent":
        raise ValueError(f"no such failpoint: {point!r}")
    if int(nbytes) < 1:
        raise ValueError("a failpoint is after one byte or more")
    writer = backend.mesh.peers[peer].messages.outbox
    writer._stream = FailingStream(writer._stream, int(nbytes), action)
    writer._send = None  # so that all bytes go through ``write``
