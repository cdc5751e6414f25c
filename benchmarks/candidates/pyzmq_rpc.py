"""pyzmq: messages without any RPC on top, so a lower bound for what could be built on it.

One call at a time goes from a REQ socket; REQ allows a single request in flight, so ``many`` sends
from a DEALER instead. One ROUTER answers both kinds. Large buffers are sent and received uncopied.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import zmq

from . import Array


def serve(address: str, ready: Callable[[], None]) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        socket.bind(f"tcp://{address}")
        ready()
        while True:
            # Identity, empty delimiter, body: what came in goes out again, to whom it came from.
            socket.send_multipart(socket.recv_multipart(copy=False), copy=False)


class Client:
    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._request = self._context.socket(zmq.REQ)
        self._dealer = self._context.socket(zmq.DEALER)
        for socket in (self._request, self._dealer):
            socket.linger = 0
            socket.connect(f"tcp://{address}")

    def noop(self) -> None:
        self._request.send(b"")
        self._request.recv()

    def pack(self, array: Array) -> memoryview:
        return array.data

    def echo(self, payload: memoryview) -> zmq.Frame:
        self._request.send(payload, copy=False)
        reply = self._request.recv(copy=False)
        assert isinstance(reply, zmq.Frame)
        return reply

    def unpack(self, reply: zmq.Frame) -> Array:
        return np.frombuffer(reply.buffer, dtype=np.float32)

    def many(self, count: int, in_flight: int) -> None:
        sent = min(count, in_flight)
        for _ in range(sent):
            self._dealer.send_multipart((b"", b""))
        for _ in range(count):
            self._dealer.recv_multipart()
            if sent < count:
                self._dealer.send_multipart((b"", b""))
                sent += 1

    def close(self) -> None:
        self._request.close()
        self._dealer.close()
        self._context.term()
