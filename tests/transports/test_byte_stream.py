"""Sockets as streams; frames over them are in test_connection.py, waiting in test_sockets.py."""

import os
import socket

import pytest

from rankwire.transports import stream_of
from rankwire.transports.sockets import SocketStream
from worlds import PATIENCE


@pytest.fixture
def streams(sockets):
    return [stream_of(sock) for sock in sockets]


def test_the_methods_that_carry_bytes_are_those_of_the_socket(streams, sockets):
    """One call of a C function: no interrupt falls between the bytes and the count of them."""
    near, _ = streams
    for name in ("send", "recv_into"):
        assert getattr(near, name) == getattr(sockets[0], name)
        assert type(getattr(near, name)).__name__ == "builtin_function_or_method"


@pytest.mark.parametrize("transport", ["unix", "tcp"], indirect=True)
def test_a_stream_says_how_it_is_carried(streams, transport):
    near, _ = streams
    assert near.transport == transport
    assert (near.unacknowledged() is None) == (transport == "unix")


@pytest.mark.parametrize("transport", ["unix"], indirect=True)
def test_a_unix_socket_knows_the_process_at_the_other_end(streams):
    assert streams[0].peer_pid() == os.getpid()


def test_what_is_peeked_stays(streams):
    near, far = streams
    with pytest.raises(BlockingIOError):
        far.peek(10)
    near.send(b"hello")
    assert far.wait(PATIENCE)
    assert [far.peek(3), far.peek(10)] == [b"hel", b"hello"]
    near.shut_down()
    buffer = bytearray(10)
    assert far.recv_into(memoryview(buffer)) == 5
    assert far.wait(PATIENCE)
    assert far.peek(1) == b""


def test_a_wait_ends_with_its_time_or_what_comes_beside(streams, sockets):
    near, _ = streams
    assert not near.wait(0.01)
    assert near.wait(PATIENCE, to_write=True)
    while True:
        try:
            near.send(bytes(1 << 16))
        except BlockingIOError:
            break
    assert near.unsent_nbytes() > 0
    assert not near.wait(0.01, to_write=True)
    other, beside = socket.socketpair()
    closed = socket.socket()
    closed.close()
    with other, beside:
        beside.send(b"x")
        assert not near.wait(PATIENCE, [stream_of(other), stream_of(closed)], to_write=True)


def test_shutting_down_twice_is_harmless(streams):
    near, far = streams
    near.shut_down()
    near.shut_down()
    assert far.wait(PATIENCE)
    near.close()
    assert near.fileno() == -1


def test_a_stream_is_taken_as_it_is(streams, sockets):
    assert stream_of(streams[0]) is streams[0]
    assert isinstance(stream_of(sockets[0]), SocketStream)
