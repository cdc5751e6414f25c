"""Ends of connections: two sockets, or a connection and a raw socket, over both transports."""

import socket
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from rankwire.clock import REAL_TIME
from rankwire.links.connection import Connection
from rankwire.transports.spin import Spin
from rankwire.transports.tcp_stream import tune_tcp
from rankwire.transports.unix_stream import tune_unix
from real_time import Deadline
from worlds import PATIENCE, noting


def socket_pair(transport):
    """Return two connected sockets as the package has them: tuned and non-blocking."""
    if transport == "unix":
        ends = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname())
            far, _ = listener.accept()
        ends = (near, far)
    for end in ends:
        (tune_unix if transport == "unix" else tune_tcp)(end)
    return ends


def write(stream, *pieces):
    """Write what a stream takes now; return how much that was."""
    counts = []
    stream.write(pieces, counts)
    return counts[0]


def read_into(stream, buffer):
    """Read into a buffer; return how much."""
    counts = []
    stream.read(memoryview(buffer), counts)
    return counts[0]


@dataclass
class Link:
    """A connection to rank 1, and the raw socket at rank 1's end, which blocks.

    ``lost`` has the causes that the connection reported.
    """

    connection: Connection
    raw: socket.socket
    lost: list = field(default_factory=list)

    def receive(self, nbytes):
        """Return exactly so many bytes that the connection has sent."""
        data = bytearray()
        while len(data) < nbytes:
            piece = self.raw.recv(nbytes - len(data))
            assert piece, f"the stream ended after {len(data)} of {nbytes} bytes"
            data += piece
        return bytes(data)


@pytest.fixture
def cleanup():
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["unix", "tcp"])
def transport(request):
    return request.param


@pytest.fixture
def sockets(transport, cleanup):
    """Two connected sockets, which do not block."""
    pair = socket_pair(transport)
    for sock in pair:
        cleanup.callback(sock.close)
    return pair


@pytest.fixture
def make_link(transport, cleanup):
    def make(*, max_nbytes=1 << 30, spin=0.0):
        near, far = socket_pair(transport)
        lost = []
        connection = Connection(
            near,
            peer=1,
            max_nbytes=max_nbytes,
            clock=REAL_TIME,
            spin=Spin(spin, REAL_TIME),
            on_lost=noting(lost),
        )
        far.settimeout(PATIENCE)
        cleanup.callback(far.close)
        cleanup.callback(connection.close)
        return Link(connection, far, lost)

    return make


@pytest.fixture
def link(make_link):
    return make_link()


@pytest.fixture
def connections(transport, cleanup):
    """Two connections to each other: of rank 0 to rank 1, and back."""
    ends = socket_pair(transport)
    pair = [
        Connection(end, peer=1 - rank, max_nbytes=1 << 30, clock=REAL_TIME)
        for rank, end in enumerate(ends)
    ]
    for connection in pair:
        cleanup.callback(connection.close)
    return pair


@pytest.fixture
def make_pair(cleanup):
    """A maker of two connections to each other, of rank 0 and of rank 1.

    Those over Unix sockets have introduced themselves, unless told otherwise.
    """

    def make(transport="unix", *, options=({}, {}), introduced=True):
        pair = []
        for rank, end in enumerate(socket_pair(transport)):
            chosen = {"max_nbytes": 1 << 30, "clock": REAL_TIME, **options[rank]}
            pair.append(Connection(end, peer=1 - rank, **chosen))
            cleanup.callback(pair[-1].close)
        if introduced:
            for connection in pair:
                connection.introduce()
            for connection in pair:
                connection.await_introduction(Deadline(PATIENCE), lambda: None)
        return pair

    return make


@pytest.fixture
def lending(make_pair):
    """Two connections that lend to each other."""
    near, far = make_pair()
    assert near.can_lend
    assert far.can_lend
    return near, far
