"""The proxy does to a stream what its toxics say, byte for byte."""

import contextlib
import socket

import pytest

from faults.proxy import (
    Proxy,
    Reset,
    bandwidth,
    drop,
    flip_bit,
    latency,
    limit_data,
    replay,
    slicer,
    slow_close,
)
from worlds import PATIENCE, Running

DATA = bytes(range(256)) * 4


def carried(*toxics, data=DATA):
    """Return what comes out at the target when this goes in."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with Proxy(listener.getsockname(), up=toxics) as proxy:
            near = socket.create_connection(proxy.address, timeout=PATIENCE)
            far, _ = listener.accept()
            far.settimeout(PATIENCE)
            with near, far:
                sending = Running(near.sendall, data)
                sending.result()
                with contextlib.suppress(OSError):  # a toxic may have ended the connection already
                    near.shutdown(socket.SHUT_WR)
                out = b""
                while piece := far.recv(1 << 16):
                    out += piece
                return out


@pytest.mark.parametrize(
    ("toxics", "expected"),
    [
        ((), DATA),
        ((latency(0.01),), DATA),
        ((bandwidth(100_000),), DATA),
        ((slicer(1),), DATA),
        ((slow_close(0.01),), DATA),
        ((slicer(7), flip_bit(300, 3)), DATA[:300] + bytes([DATA[300] ^ 8]) + DATA[301:]),
        ((slicer(7), replay(10, 20)), DATA[:20] + DATA[10:20] + DATA[20:]),
        ((replay(10, 20),), DATA[:20] + DATA[10:20] + DATA[20:]),
        ((slicer(7), drop(10, 20)), DATA[:10] + DATA[20:]),
        ((drop(10, 20),), DATA[:10] + DATA[20:]),
        ((limit_data(100),), DATA[:100]),
        ((slicer(3), limit_data(100)), DATA[:100]),
    ],
)
def test_the_stream_comes_out_as_it_should(toxics, expected):
    assert carried(*toxics) == expected


def test_a_reset_is_a_reset():
    with pytest.raises(ConnectionResetError):
        carried(slicer(10), limit_data(50, then=Reset), data=DATA[:60])


def test_silence_holds_everything_back_until_it_is_healed():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with Proxy(listener.getsockname()) as proxy:
            near = socket.create_connection(proxy.address, timeout=PATIENCE)
            far, _ = listener.accept()
            with near, far:
                near.sendall(b"a")
                far.settimeout(PATIENCE)
                assert far.recv(1) == b"a"
                proxy.silence()
                near.sendall(b"b")
                far.settimeout(0.1)
                with pytest.raises(TimeoutError):
                    far.recv(1)
                proxy.heal()
                far.settimeout(PATIENCE)
                assert far.recv(1) == b"b"


def test_a_refusing_proxy_refuses_connections():
    with socket.create_server(("127.0.0.1", 0)) as listener, Proxy(listener.getsockname()) as proxy:
        where = proxy.address
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(where)
