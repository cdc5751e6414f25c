"""gRPC with generic handlers on plain bytes: no protobuf, so no message is parsed or built.

``many`` uses the future form of the same stubs. Message limits are lifted for the 64 MiB echo.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np

from . import Array, keep_in_flight

SERVICE = "rankwire.bench"
OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
# What gRPC's own Python examples start their servers with.
SERVER_THREADS = 10


def serve(address: str, ready: Callable[[], None]) -> None:
    server = grpc.server(ThreadPoolExecutor(SERVER_THREADS), options=OPTIONS)
    methods = {
        "noop": grpc.unary_unary_rpc_method_handler(noop),
        "echo": grpc.unary_unary_rpc_method_handler(echo),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    server.add_insecure_port(address)
    server.start()
    ready()
    try:
        server.wait_for_termination()
    finally:
        server.stop(grace=None)


def noop(request: bytes, context: Any) -> bytes:
    return b""


def echo(request: bytes, context: Any) -> bytes:
    return request


class Client:
    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        grpc.channel_ready_future(self._channel).result(timeout=30.0)
        self._noop = self._channel.unary_unary(f"/{SERVICE}/noop")
        self._echo = self._channel.unary_unary(f"/{SERVICE}/echo")

    def noop(self) -> None:
        self._noop(b"")

    def pack(self, array: Array) -> bytes:
        return array.tobytes()

    def echo(self, payload: bytes) -> bytes:
        reply: bytes = self._echo(payload)
        return reply

    def unpack(self, reply: bytes) -> Array:
        return np.frombuffer(reply, dtype=np.float32)

    def many(self, count: int, in_flight: int) -> None:
        keep_in_flight(
            lambda: self._noop.future(b""),
            lambda future: future.result(),
            count=count,
            in_flight=in_flight,
        )

    def close(self) -> None:
        self._channel.close()
