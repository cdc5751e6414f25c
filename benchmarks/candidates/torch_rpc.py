"""torch.distributed.rpc on TensorPipe, with its default options, on torch tensors.

TensorPipe picks its own transports; on one host that is shared memory for small messages and
cross-memory attach for tensors where the kernel allows it. Nothing is forced.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import torch
import torch.distributed.rpc as rpc

from . import Array, keep_in_flight

CLIENT = "client"
SERVER = "server"
# Longer than any echo takes on a busy machine; a hang is the harness's to notice.
TIMEOUT = 60.0


def serve(address: str, ready: Callable[[], None]) -> None:
    # `init_rpc` returns when both sides have joined, so the client must be let in before.
    ready()
    _join(SERVER, address, rank=1)
    signal.pause()


def noop() -> None:
    """Do nothing."""


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Client:
    def __init__(self, address: str) -> None:
        _join(CLIENT, address, rank=0)

    def noop(self) -> None:
        rpc.rpc_sync(SERVER, noop)

    def pack(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array)

    def echo(self, payload: torch.Tensor) -> torch.Tensor:
        reply: torch.Tensor = rpc.rpc_sync(SERVER, echo, args=(payload,))
        return reply

    def unpack(self, reply: torch.Tensor) -> Array:
        result: Array = reply.numpy()
        return result

    def many(self, count: int, in_flight: int) -> None:
        keep_in_flight(
            lambda: rpc.rpc_async(SERVER, noop),
            lambda future: future.wait(),
            count=count,
            in_flight=in_flight,
        )

    def close(self) -> None:
        # A graceful shutdown waits for the server to ask for the same, which is ended by a signal.
        rpc.shutdown(graceful=False)


def _join(name: str, address: str, *, rank: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://{address}", rpc_timeout=TIMEOUT)
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        name, rank=rank, world_size=2, rpc_backend_options=options
    )
