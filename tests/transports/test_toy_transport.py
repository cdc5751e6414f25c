"""A new transport is one file: here a toy one, by pairs of sockets within this process."""

import os
import socket
from collections import deque
from contextlib import closing, suppress

import pytest

from rankwire.clock import REAL_TIME
from rankwire.errors import ConfigurationError, NoConnectionError, PeerLostError
from rankwire.links.connection import Connection
from rankwire.transports import TRANSPORTS, Scheme, dial, listen
from rankwire.transports.byte_stream import ByteStream, look_at
from rankwire.wire.frames import Channel
from real_time import Deadline
from worlds import PATIENCE, tcp_world

# -- the transport


class ToyStream(ByteStream):
    """One end of a pair of sockets."""

    transport, exposure = "toy", "none"

    def __init__(self, sock):
        sock.setblocking(False)
        self._sock = sock
        self.look = look_at(sock.fileno())

    def read(self, buffer, counts):
        counts.extend(map(self._sock.recv_into, (buffer,)))

    def write(self, pieces, counts):
        counts.extend(map(self._sock.sendmsg, (pieces[:100],)))

    def peek(self, nbytes):
        return self._sock.recv(nbytes, socket.MSG_PEEK)

    def fileno(self):
        return self._sock.fileno()

    def shut_down(self):
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._sock.close()


class ToyListener:
    """A name, and the connections to it that wait to be accepted."""

    open = {}  # noqa: RUF012 - by name, for all

    def __init__(self, name):
        self._name, self._number = name, os.eventfd(0, os.EFD_NONBLOCK)
        self._waiting = deque()
        self.open[name] = self

    def connect(self):
        near, far = socket.socketpair()
        self._waiting.append(far)
        os.eventfd_write(self._number, 1)
        return ToyStream(near)

    def fileno(self):
        return self._number

    def accept(self):
        if not self._waiting:
            os.eventfd_read(self._number)
            raise BlockingIOError
        return ToyStream(self._waiting.popleft())

    def close(self):
        if self.open.pop(self._name, None) is not None:
            os.close(self._number)


def dial_toy(name, deadline, check):
    if name not in ToyListener.open:
        raise NoConnectionError(f"nothing listens at {name}")
    return ToyListener.open[name].connect()


TOY = Scheme(dial_toy, ToyListener)


# -- its use


def test_frames_go_over_it(monkeypatch):
    monkeypatch.setitem(TRANSPORTS, "toy", TOY)
    with pytest.raises(NoConnectionError, match="nothing listens"):
        dial("toy://here", Deadline(PATIENCE))
    with closing(listen("toy://here")) as listener:
        near, far = (
            Connection(stream, peer=peer, max_nbytes=1 << 20, clock=REAL_TIME)
            for peer, stream in (
                (1, dial("toy://here", Deadline(PATIENCE))),
                (0, listener.accept()),
            )
        )
    with closing(near), closing(far):
        for nbytes in (0, 3, 20_000, 100_000):
            near.send((0, Channel.MESSAGE, nbytes), ((bytes(nbytes),), nbytes), Deadline(PATIENCE))
            frames = []
            while not frames:
                frames = far.read(Deadline(PATIENCE))
            assert [(frame.envelope[2], len(frame.payload)) for frame in frames] == [(nbytes,) * 2]
        near.close()
        with pytest.raises(PeerLostError):
            far.read(Deadline(PATIENCE))


def test_a_world_forms_over_it(monkeypatch, own_runtime_folder):
    """Ranks of one host dial each other by the scheme of files."""
    monkeypatch.setitem(TRANSPORTS, "unix", TOY)
    with tcp_world(2, transport="unix") as (first, second):
        first.send(b"hello", 1)
        assert second.recv(0) == b"hello"
        assert first.link_to(1).transport == "toy"


def test_an_unknown_scheme_is_refused():
    for use in (listen, lambda address: dial(address, Deadline(PATIENCE))):
        with pytest.raises(ConfigurationError, match="no transport for 'quic://here'"):
            use("quic://here")
