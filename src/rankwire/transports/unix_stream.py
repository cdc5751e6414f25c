"""Unix sockets: to processes of this host and user, with rings in shared memory beside them.

A ring (``wire.ring``) carries small frames while its reader polls. The reader makes its memory.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

from rankwire import runtime
from rankwire.deadline import Deadline
from rankwire.errors import ConfigurationError
from rankwire.fork import renew_in_child
from rankwire.override import override
from rankwire.transports.byte_stream import Exposure
from rankwire.transports.shared_memory import SharedMemory, open_shared
from rankwire.transports.sockets import BACKLOG, SocketStream, connect, describe, open_socket
from rankwire.wire.ring import RING_NBYTES, RingReader, RingWriter

_RING_SIZES = range(RING_NBYTES, RING_NBYTES + 1)
_SEND_BUFFER_NBYTES = 1 << 20  # room for a burst of small frames; the kernel limits it
_CREDENTIALS = struct.Struct("3i")  # process, user, group

_barrier = runtime.Lock()
renew_in_child(_barrier)


class UnixStream(SocketStream):
    """A Unix socket, and the ring that this end reads, if any."""

    transport = "unix"
    exposure: Exposure = "none"

    def __init__(self, sock: runtime.Socket) -> None:
        super().__init__(sock)
        self.ring: RingReader | None = None
        self._shared: SharedMemory | None = None

    @classmethod
    def admit(cls, sock: runtime.Socket) -> UnixStream:
        """Return an accepted socket as a stream; raises ``OSError`` if it is another user's."""
        tune_unix(sock)
        if unix_peer(sock)[1] != os.geteuid():
            raise PermissionError("a process of another user")
        return cls(sock)

    def offer_ring(self) -> bytes:
        """Make the ring that this end reads; return what the peer needs, or raise ``OSError``."""
        self._shared = SharedMemory(RING_NBYTES)
        self.read_ring(RingReader(self._shared.view))
        return self._shared.offer

    def read_ring(self, ring: RingReader) -> None:
        """Poll a ring, and the socket less often."""
        ask, idle, *_ = self.look
        self.look = (ring.is_empty, True, ring.start_polling, ask, idle)
        self.ring, self.hides_input = ring, True

    def ring_is_open(self) -> None:
        """Close the descriptor of the ring: the peer has opened it."""
        if self._shared is not None:
            self._shared.close()

    def open_ring(self, offer: bytes) -> RingWriter:
        """Return the ring that the peer offers to read; raises as ``open_shared`` does."""
        return RingWriter(open_shared(self.peer_pid(), offer, _RING_SIZES))

    def drop_ring(self) -> None:
        """Release the shared memory; it is freed once no thread uses it."""
        self.ring_is_open()
        self.ring = self._shared = None

    @override
    def before_sleep(self) -> bool:
        ring = self.ring
        if ring is None:
            return False
        ring.stop_polling()
        # What the peer wrote before it saw that is visible now: taking a lock is a memory barrier.
        with _barrier:
            pass
        return not ring.is_empty()

    @override
    def shut_down(self) -> None:
        ring = self.ring
        if ring is not None:
            ring.stop_polling()  # the peer then writes to the socket, and finds its end
        super().shut_down()

    @override
    def peer_pid(self) -> int:
        return max(unix_peer(self.sock)[0], 0)


def tune_unix(sock: runtime.Socket) -> None:
    """Set the options of a connected socket."""
    sock.setblocking(False)
    sock.setsockopt(runtime.SOL_SOCKET, runtime.SO_SNDBUF, _SEND_BUFFER_NBYTES)


def unix_peer(sock: runtime.Socket) -> tuple[int, int]:
    """Return the process and the user at the other end, as the kernel reports them."""
    packed = sock.getsockopt(runtime.SOL_SOCKET, runtime.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    return pid, uid


def listen_unix(path: str) -> runtime.Socket:
    """Listen on a socket file that only this user can reach (its folder is 0700)."""
    sock = open_socket(runtime.AF_UNIX)
    try:
        sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigurationError(f"cannot listen on {path}: {describe(error)}") from error
    return sock


def connect_unix(
    path: str, deadline: Deadline, *, check: Callable[[], None] = lambda: None
) -> runtime.Socket:
    """Connect once to a socket file; raises as ``sockets.connect`` does."""
    sock = open_socket(runtime.AF_UNIX)
    connect(sock, path, path, deadline, check)
    tune_unix(sock)
    return sock


def dial_unix(where: str, deadline: Deadline, check: Callable[[], None]) -> UnixStream:
    """Connect to a socket file, see ``transports.dial``."""
    return UnixStream(connect_unix(where, deadline, check=check))
