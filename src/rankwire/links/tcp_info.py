"""What the kernel knows about a connection and does not tell by itself."""

from __future__ import annotations

import fcntl
import math
import socket
import struct
from array import array
from typing import TYPE_CHECKING

from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.links.sockets import AnySocket, Pollable

if TYPE_CHECKING:
    from rankwire.links.stream import Stream

_TCP_INFO_NBYTES = 60
_TCPI_UNACKED, _TCPI_LAST_ACK = 24, 56  # offsets of two 32-bit numbers in struct tcp_info
_SIOCOUTQ = 0x5411
_ACK_TOLERANCE = 0.05  # seconds: the kernel counts milliseconds, and rounds


class Unanswered:
    """For how long the other host has acknowledged nothing although there is something to.

    A process that does not read is told from a host that is gone: a full window is acknowledged.
    Neither keepalive (not while data is under way) nor the user timeout (which counts a full window
    too) tells this. One thread asks, again and again.
    """

    __slots__ = ("_acknowledged", "_clock", "_since")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: Deadline | None = None
        self._acknowledged = 0.0

    def look(self, stream: Stream) -> Deadline | None:
        """Return what was begun when the silence was first seen; None if there is none."""
        info = stream.tcp_info()
        if info is None:
            return None
        (under_way,) = struct.unpack_from("=I", info, _TCPI_UNACKED)
        (last_ms,) = struct.unpack_from("=I", info, _TCPI_LAST_ACK)
        acknowledged = self._clock.now() - last_ms / 1000
        if not under_way:
            self._since = None
        elif self._since is None or acknowledged > self._acknowledged + _ACK_TOLERANCE:
            self._since = Deadline(math.inf, self._clock)
            self._acknowledged = acknowledged
        return self._since


def tcp_info(sock: AnySocket) -> bytes | None:
    """Return the beginning of the kernel's ``struct tcp_info``; None if it is closed."""
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_NBYTES)
    except OSError:
        return None


def unsent_nbytes(sock: Pollable) -> int:
    """Return how many bytes wait in the kernel for the other end to take them."""
    count = array("i", [0])
    try:
        fcntl.ioctl(sock.fileno(), _SIOCOUTQ, count)
    except (OSError, ValueError):
        return 0  # it is closed
    return count[0]
