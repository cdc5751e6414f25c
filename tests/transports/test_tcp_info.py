"""What the kernel says about a connection: bytes not taken, and acknowledgements that do not come.

A host that is gone cannot be had here; tests/faults has some. This shows what must not be mistaken
for one.
"""

import socket
import time

import pytest

from rankwire.clock import REAL_TIME
from rankwire.transports import stream_of
from rankwire.transports.tcp_stream import Unanswered
from real_time import Deadline


@pytest.mark.parametrize("transport", ["unix", "tcp"], indirect=True)
def test_bytes_that_the_other_end_has_not_taken_are_counted(sockets):
    near, far = sockets
    stream = stream_of(near)
    assert stream.unsent_nbytes() == 0
    sent = 0
    while True:
        try:
            sent += near.send(bytes(65536))
        except BlockingIOError:
            break
    assert 0 < stream.unsent_nbytes()
    limit = Deadline(10.0)
    while stream.unsent_nbytes() and not limit.expired:
        try:
            far.recv(1 << 20)
        except BlockingIOError:
            time.sleep(0.001)
    assert stream.unsent_nbytes() == 0


def test_a_closed_socket_has_nothing_to_tell():
    sock = socket.socket()
    sock.close()
    assert stream_of(sock).unsent_nbytes() == 0
    assert Unanswered(REAL_TIME).look(stream_of(sock)) is None


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
def test_an_idle_connection_is_not_unanswered_and_neither_is_the_first_message_after(sockets):
    near, far = sockets
    looker = Unanswered(REAL_TIME)
    near.send(b"x")
    assert far.recv(1) == b"x"
    for _ in range(3):
        assert looker.look(stream_of(near)) is None
        time.sleep(0.3)
    near.send(b"after a pause")
    time.sleep(0.1)
    assert looker.look(stream_of(near)) is None


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
def test_a_peer_that_does_not_read_is_not_unanswered(sockets):
    """Its window is full, and the kernel over there says so again and again."""
    near, _ = sockets
    looker = Unanswered(REAL_TIME)
    longest = 0.0
    end = Deadline(3.0)
    while not end.expired:
        try:
            near.send(bytes(65536))
        except BlockingIOError:
            time.sleep(0.05)
        silence = looker.look(stream_of(near))
        longest = max(longest, 0.0 if silence is None else silence.waited)
    assert longest < 2.5


@pytest.mark.parametrize("transport", ["unix"], indirect=True)
def test_unix_sockets_need_no_answer(sockets):
    near, _ = sockets
    near.send(b"x")
    assert Unanswered(REAL_TIME).look(stream_of(near)) is None
