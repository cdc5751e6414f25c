"""Blocking TCP sockets with a length prefix: the floor of what waiting in the kernel costs.

There is no RPC here: no function name, no codec, no matching of replies. ``many`` pipelines: it
keeps that many requests on the wire, one send each, and reads replies in order from a buffer.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from io import BufferedReader
from typing import cast

import numpy as np

from . import Array

LENGTH = struct.Struct("!Q")
EMPTY = LENGTH.pack(0)
# Enough for a window of 64 prefixes in one read; long bodies bypass the buffer.
BUFFER_NBYTES = 64 * 1024


def serve(address: str, ready: Callable[[], None]) -> None:
    host, port = address.split(":")
    with socket.create_server((host, int(port))) as listener:
        ready()
        connection, _ = listener.accept()
        with connection, _reader(connection) as reader:
            while (body := _receive(reader)) is not None:
                _send(connection, body)


class Client:
    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self._socket = socket.create_connection((host, int(port)))
        self._reader = _reader(self._socket)

    def noop(self) -> None:
        _send(self._socket, b"")
        _receive(self._reader)

    def pack(self, array: Array) -> memoryview:
        return array.data.cast("B")

    def echo(self, payload: memoryview) -> memoryview:
        _send(self._socket, payload)
        reply = _receive(self._reader)
        assert reply is not None
        return reply

    def unpack(self, reply: memoryview) -> Array:
        return np.frombuffer(reply, dtype=np.float32)

    def many(self, count: int, in_flight: int) -> None:
        sent = min(count, in_flight)
        for _ in range(sent):
            _send(self._socket, b"")
        for _ in range(count):
            _receive(self._reader)
            if sent < count:
                _send(self._socket, b"")
                sent += 1

    def close(self) -> None:
        self._reader.close()
        self._socket.close()


def _reader(connection: socket.socket) -> BufferedReader:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return cast(BufferedReader, connection.makefile("rb", buffering=BUFFER_NBYTES))


def _send(connection: socket.socket, body: bytes | memoryview) -> None:
    if not body:
        connection.sendall(EMPTY)
        return
    prefix = LENGTH.pack(len(body))
    sent = connection.sendmsg((prefix, body))
    connection.sendall(memoryview(body)[sent - len(prefix) :])


def _receive(reader: BufferedReader) -> memoryview | None:
    """Read one message; ``None`` when the peer has closed."""
    prefix = reader.read(LENGTH.size)
    if len(prefix) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(prefix)
    # Uninitialised memory: zeroing 64 MiB first would be charged to the socket.
    body = np.empty(length, dtype=np.uint8).data
    if length:
        reader.readinto(body)
    return body
