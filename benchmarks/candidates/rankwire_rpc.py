"""rankwire: ``rpc_sync`` and ``rpc_async`` on numpy arrays, transport by option.

The client is rank 0 and the server rank 1. The barrier after registration is what tells the client
that the functions are there.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import closing
from typing import Any

import rankwire

from . import Array, keep_in_flight

SERVER = 1
WORLD_SIZE = 2
# Longer than any echo takes on a busy machine; a hang is the harness's to notice.
TIMEOUT = 60.0


def serve(address: str, ready: Callable[[], None], *, transport: str) -> None:
    # Ranks may start in any order, so the client need not wait for this one to be up.
    ready()
    backend = rankwire.TcpBackend(SERVER, WORLD_SIZE, address, transport=transport, timeout=TIMEOUT)
    with backend, closing(rankwire.RpcAgent(backend)) as agent:
        agent.register("noop", noop)
        agent.register("echo", echo)
        backend.barrier()
        signal.pause()


def noop() -> None:
    """Do nothing."""


def echo(array: Array) -> Array:
    return array


class Client:
    def __init__(self, address: str, *, transport: str) -> None:
        self._backend = rankwire.TcpBackend(
            0, WORLD_SIZE, address, transport=transport, timeout=TIMEOUT
        )
        self._agent = rankwire.RpcAgent(self._backend)
        self._backend.barrier()

    def noop(self) -> None:
        self._agent.rpc_sync(SERVER, "noop")

    def pack(self, array: Array) -> Array:
        return array

    def echo(self, payload: Array) -> Any:
        return self._agent.rpc_sync(SERVER, "echo", payload)

    def unpack(self, reply: Any) -> Array:
        result: Array = reply
        return result

    def many(self, count: int, in_flight: int) -> None:
        keep_in_flight(
            lambda: self._agent.rpc_async(SERVER, "noop"),
            lambda future: future.result(),
            count=count,
            in_flight=in_flight,
        )

    def close(self) -> None:
        self._agent.close()
        self._backend.close()
