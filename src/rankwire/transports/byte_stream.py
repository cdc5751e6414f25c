"""Byte streams: what a connection needs of a transport, and what a listener gives it.

CONTRIBUTING says how to add a transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat, starmap
from termios import FIONREAD
from typing import Literal, Protocol

from rankwire import runtime
from rankwire.wire.frames import DEFAULT_BUFFER_NBYTES, Buffer, first_bytes

# Which other processes could read or change the bytes: only those of this user; those of this host;
# any on the way.
Exposure = Literal["none", "loopback", "network"]
# The arguments of ``Spin.finds``. All functions are in C: one in Python would double the cost.
Look = tuple[
    Callable[[], object], object, Callable[[], object], Callable[[], object] | None, object
]
_NOTHING = bytes(4)  # what FIONREAD writes


class Pollable(Protocol):
    """A socket, or a stream around one."""

    def fileno(self) -> int:
        """Return the descriptor; -1 if there is none."""


class ByteStream:
    """A connected stream of bytes, both ways. One reader and one writer at a time.

    A subclass has at least ``read``, ``write``, ``peek``, ``fileno``, ``shut_down`` and ``close``,
    and sets ``look`` if it can be polled (``look_at``). Only ``wait`` sleeps.

    ``read`` and ``write`` append the number of bytes to a list. From that moment on a byte counts
    as read or written: an interrupt then neither loses nor doubles it.

    Attributes:
        transport: The scheme, for errors and statistics.
        exposure: Decides whether frames are sealed, and whether TLS is used.
        binding: A hash of the listener's certificate, if any, to which the handshake is bound.
        buffer_nbytes: The best size of a read.
        has_pending: Whether ``read`` has more at once, which no poller sees.
        hides_input: Whether input may arrive that the descriptor does not show; then a thread calls
            ``before_sleep`` before it waits for the descriptor.
        look: How to poll it, for ``Spin.finds``.
        recv_into: A C function that reads and returns the number of bytes, if there is one.
            ``counts.extend(map(stream.recv_into, (view,)))`` then replaces ``read``, which takes
            0.3 to 0.4 us more (60 bytes, Unix socket, loaded machine).
        send: The same for ``write``.
    """

    __slots__ = ()

    transport: str = ""
    exposure: Exposure = "network"
    binding: bytes = b""
    buffer_nbytes = DEFAULT_BUFFER_NBYTES
    has_pending: bool = False
    hides_input: bool = False
    look: Look = (bool, False, bool, None, None)
    recv_into: Callable[[memoryview], int] | None = None
    send: Callable[[Buffer], int] | None = None

    def read(self, buffer: memoryview, counts: list[int]) -> None:
        """Fill the beginning of a buffer and append how much; 0 at the end of the stream.

        Raises ``BlockingIOError`` if there is nothing to read now, ``OSError`` if it has failed.
        """
        raise NotImplementedError

    def write(self, pieces: Sequence[Buffer], counts: list[int]) -> None:
        """Take the beginning of several pieces and append how much.

        Raises ``BlockingIOError`` if nothing can be written now, ``OSError`` if it has failed.
        """
        raise NotImplementedError

    def wait(
        self, seconds: float, beside: Sequence[ByteStream] = (), *, to_write: bool = False
    ) -> bool:
        """Sleep until there is input, the end included, or something can be written.

        Returns False after so many seconds, or as soon as a stream ``beside`` it can be read.
        """
        if not to_write and self.before_sleep():
            return True
        if any(other.before_sleep() for other in beside):
            return False
        numbers = [number for other in beside if (number := other.fileno()) >= 0]
        event = runtime.POLLOUT if to_write else runtime.POLLIN
        return wait_for(self, event, seconds, numbers) != 0

    def before_sleep(self) -> bool:
        """Make all later input show at the descriptor; return whether there is hidden input now."""
        return False

    def peek(self, nbytes: int) -> bytes:
        """Return the beginning of the input, and leave it; empty at the end. Raises as ``read``."""
        raise NotImplementedError

    def fileno(self) -> int:
        """Return the descriptor for pollers; -1 if there is none."""
        return -1

    def shut_down(self) -> None:
        """End both directions and wake waiting threads. Idempotent; safe from any thread."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the resources. Only when no thread uses it any more."""
        raise NotImplementedError

    def unsent_nbytes(self) -> int:
        """Return how many written bytes the other end has not taken."""
        return 0

    def unacknowledged(self) -> tuple[int, int] | None:
        """Return the segments under way and the last acknowledgement's age in ms, if known."""
        return None

    def peer_pid(self) -> int:
        """Return the process at the other end, as the kernel reports it; 0 if it does not."""
        return 0

    def shake_hands(self) -> bool:
        """Continue a handshake of the stream itself; False if the other end must answer first.

        Raises ``AuthenticationError`` if one end refuses the other, ``OSError`` if the connection
        ended.
        """
        return True

    def receive(self, nbytes: int) -> bytes:
        """Return up to ``nbytes``; raises as ``read`` does. Takes nothing beyond them."""
        buffer, counts = bytearray(nbytes), list[int]()
        self.read(memoryview(buffer), counts)
        return bytes(buffer[: counts[0]])

    def send_all(self, data: bytes) -> None:
        """Write a short message at once, as is possible on a new connection."""
        sent = list[int]()
        while sum(sent) < len(data):
            self.write((data[sum(sent) :],), sent)


def look_at(descriptor: int) -> Look:
    """Return how to ask a descriptor whether it has bytes to read; it does not show the end.

    A read that fails costs an exception, 0.9 us more, and ``ioctl`` with bytes instead of a buffer
    0.5 us more. Each step of the iterator calls it and yields its result beside the buffer.
    """
    waiting = bytearray(4)
    asking = starmap(runtime.ioctl, repeat((descriptor, FIONREAD, waiting)))
    return zip(asking, repeat(waiting), strict=False).__next__, (0, _NOTHING), bool, None, None


class Listener(Protocol):
    """A place where other processes connect."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when a connection waits to be accepted."""

    def accept(self) -> ByteStream:
        """Return the next connection.

        Raises ``BlockingIOError`` if none is waiting, ``ConnectionError`` if the waiting one is
        gone or must not connect, ``OSError`` if none can be accepted now.
        """

    def close(self) -> None:
        """Stop listening."""


def wait_for(sock: Pollable, events: int, seconds: float, also_readable: Sequence[int] = ()) -> int:
    """Sleep until the socket has one of the ``POLL*`` events; return its events.

    Returns 0 after ``seconds``, or when one of the other descriptors is readable.
    """
    poller = runtime.poll()
    for other in also_readable:
        poller.register(other, runtime.POLLIN)
    descriptor = sock.fileno()
    if descriptor < 0:
        return events  # it was closed meanwhile; its next use raises
    also_input = runtime.POLLIN if descriptor in also_readable else 0
    poller.register(descriptor, events | also_input)
    # Rounded up: poll(0) for the last fraction of a millisecond would spin.
    for ready, which in poller.poll(int(seconds * 1000.0) + 1 if seconds > 0 else 0):
        if ready == descriptor:
            return which if events & runtime.POLLIN else which & ~runtime.POLLIN
    return 0


def join_first(pieces: Sequence[Buffer], nbytes: int) -> bytes | memoryview:
    """Return the first ``nbytes`` in one piece; copies only if they are in several."""
    views = first_bytes(pieces, nbytes)
    return views[0] if len(views) == 1 else b"".join(views)
