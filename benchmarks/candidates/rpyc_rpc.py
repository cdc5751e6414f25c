"""RPyC over its threaded server, on bytes (arrays would go by reference, element by element).

``many`` uses ``rpyc.async_``, RPyC's own form of a call that does not wait. Remote functions are
looked up once: writing ``connection.root.noop()`` each time would cost a second round trip.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import numpy as np
import rpyc
from rpyc.core.channel import Channel
from rpyc.core.stream import SocketStream
from rpyc.utils.server import ThreadedServer

from . import Array, keep_in_flight

# Out of the box RPyC deflates whatever is longer than 3000 bytes, though float noise hardly
# shrinks, and leaves Nagle's algorithm on, which holds the last byte of a long message back for
# 40 ms. Both are off here on both sides: a 1 MiB echo takes 6 ms instead of 116. What remains is
# that sending copies the rest of a message for every 64 kB of it, so that 64 MiB take 25 s.
Channel.COMPRESSION_THRESHOLD = 1 << 40


class EchoService(rpyc.Service):  # type: ignore[misc]  # RPyC is untyped
    def exposed_noop(self) -> None:
        pass

    def exposed_echo(self, payload: bytes) -> bytes:
        return payload


def serve(address: str, ready: Callable[[], None]) -> None:
    host, port = address.split(":")
    server = ThreadedServer(EchoService, hostname=host, port=int(port))
    # Accepted connections inherit it.
    server.listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # `start` does it again, but only after `ready`, when a client might already be refused.
    server.listener.listen()
    ready()
    server.start()


class Client:
    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self._connection = rpyc.connect_stream(
            SocketStream.connect(host, int(port), nodelay=True),
            config={"sync_request_timeout": None},
        )
        self._noop = self._connection.root.noop
        self._echo = self._connection.root.echo
        self._noop_async = rpyc.async_(self._noop)

    def noop(self) -> None:
        self._noop()

    def pack(self, array: Array) -> bytes:
        return array.tobytes()

    def echo(self, payload: bytes) -> bytes:
        reply: bytes = self._echo(payload)
        return reply

    def unpack(self, reply: bytes) -> Array:
        return np.frombuffer(reply, dtype=np.float32)

    def many(self, count: int, in_flight: int) -> None:
        keep_in_flight(
            self._noop_async,
            lambda result: result.wait(),
            count=count,
            in_flight=in_flight,
        )

    def close(self) -> None:
        self._connection.close()
