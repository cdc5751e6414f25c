"""Options of RPC and their defaults, under torch's names."""

from __future__ import annotations

from datetime import timedelta
from enum import Enum
from typing import Any

import torch

DEFAULT_RPC_TIMEOUT_SEC: float = 60.0
DEFAULT_INIT_METHOD: str = "env://"
DEFAULT_SHUTDOWN_TIMEOUT: float = 0  # no limit
DEFAULT_NUM_WORKER_THREADS: int = 16
DEFAULT_PROCESS_GROUP_TIMEOUT: timedelta = timedelta(milliseconds=2**31 - 1)
# The call has the default timeout.
UNSET_RPC_TIMEOUT: float = -1.0


class RpcBackendOptions:
    """Options of every backend.

    Args:
        rpc_timeout: Default timeout of calls in seconds; 0 is no limit.
        init_method: Where the ranks meet: ``env://``, ``tcp://host:port`` or ``file:///path``.
    """

    def __init__(
        self,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
    ) -> None:
        if isinstance(rpc_timeout, bool) or not isinstance(rpc_timeout, int | float):
            raise TypeError(
                f"incompatible constructor arguments: rpc_timeout is seconds, not {rpc_timeout!r}"
            )
        if rpc_timeout < 0:
            raise ValueError(f"rpc_timeout is 0 or more seconds, not {rpc_timeout}")
        self.rpc_timeout = float(rpc_timeout)
        self.init_method = init_method


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """The options of torch's TensorPipe backend.

    Args:
        num_worker_threads: The number of calls that run at once.
        rpc_timeout: Default timeout of calls in seconds; 0 is no limit.
        init_method: Where the ranks meet.
        device_maps: May map the CPU to itself; tensors of other devices cannot be sent.
        devices: May name the CPU; another device raises ``ValueError``.
        _transports: Not used.
        _channels: Not used.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: dict[str, dict[Any, Any]] | None = None,
        devices: list[Any] | None = None,
        _transports: list[str] | None = None,
        _channels: list[str] | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        if num_worker_threads < 1:
            raise ValueError(f"num_worker_threads is 1 or more, not {num_worker_threads}")
        self.num_worker_threads = num_worker_threads
        self.device_maps: dict[str, dict[torch.device, torch.device]] = {}
        self.devices: list[torch.device] = []
        for to, device_map in (device_maps or {}).items():
            self.set_device_map(to, device_map)
        self.set_devices(devices or [])

    def set_device_map(self, to: str, device_map: dict[Any, Any]) -> None:
        """Map devices to those of another worker; only the CPU is accepted."""
        own = self.device_maps.setdefault(to, {})
        own.update({_cpu(source): _cpu(target) for source, target in device_map.items()})

    def set_devices(self, devices: list[Any]) -> None:
        """Set the devices; only the CPU is accepted."""
        self.devices = [_cpu(device) for device in devices]


class BackendType(Enum):
    """The backends that ``init_rpc`` accepts; both names select the same one."""

    TENSORPIPE = "TENSORPIPE"
    RANKWIRE = "RANKWIRE"

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"


def construct_rpc_backend_options(
    backend: BackendType,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = DEFAULT_INIT_METHOD,
    **options: Any,
) -> TensorPipeRpcBackendOptions:
    """Return the options of a backend."""
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **options)


def _cpu(device: Any) -> torch.device:
    found = torch.device(device)
    if found.type != "cpu":
        raise ValueError(
            f"rankwire's RPC carries tensors of the CPU, not of {found}: call .cpu() before sending"
        )
    return found
