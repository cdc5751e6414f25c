"""Handle tensors that are not in host memory.

The group's backend for their device (``"cpu:rankwire,cuda:nccl"``) handles them, created at first
use, as torch creates none for a custom group class. Without one, copies in host memory are used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rankwire.errors import ConfigurationError

_log = logging.getLogger("rankwire")

Operation = Callable[..., Any]


class Devices:
    """Runs a group's operations on tensors of other devices."""

    def __init__(self, group: Any, timeout: timedelta) -> None:
        self._group = group
        self._timeout = timeout
        self._made: set[str] = set()
        self._is_said = False

    def others(self) -> dict[str, str]:
        """Return the group's other backends, by device."""
        config = c10d._world.pg_backend_config.get(self._group, "")
        backends = dict(part.split(":") for part in config.split(",") if ":" in part)
        return {device: name for device, name in backends.items() if name != "rankwire"}

    def device_of(self, args: Sequence[Any]) -> str:
        """Return the device type of the first tensor among the arguments."""
        for value in args:
            while isinstance(value, list | tuple) and value:
                value = value[0]
            if isinstance(value, torch.Tensor):
                return str(value.device.type)
        return "cpu"

    def run(self, name: str, device: str, operation: Operation, args: Any, kwargs: Any) -> Any:
        """Run an operation of the group on tensors of another device."""
        if device in self._made or self._make(device):
            return getattr(dist.ProcessGroup, name)(self._group, *args, **kwargs)
        if not self._is_said:
            self._is_said = True
            advice = f'init_process_group("cpu:rankwire,{device}:...") selects another backend'
            _log.warning("tensors on %s are copied through host memory; %s", device, advice)
        return self._through_host(operation, args, kwargs)

    def _make(self, device: str) -> bool:
        name = self.others().get(device)
        if name is None:
            return False
        group, store = self._group, c10d.PrefixStore(f"{device}/", self._group.get_group_store())
        kind, backend = _new_backend(name, store, group.rank(), group.size(), self._timeout)
        group._register_backend(torch.device(device), kind, backend)
        self._made.add(device)
        return True

    def _through_host(self, operation: Operation, args: Any, kwargs: Any) -> Any:
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        work = operation(*_on_host(args, copies), **kwargs)
        if work is not None:
            work.wait()
        for tensor, copy in copies:
            tensor.copy_(copy)
        return work


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor or parameter as a plain ``torch.Tensor`` on the same memory."""
    if type(tensor) is torch.Tensor:
        return tensor
    return tensor.detach().as_subclass(torch.Tensor)


def _on_host(value: Any, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_on_host(each, copies) for each in value)
    if isinstance(value, torch.Tensor):
        copies.append((value, plain(value).cpu()))
        return copies[-1][1]
    return value


def _new_backend(
    name: str, store: Any, rank: int, size: int, timeout: timedelta
) -> tuple[Any, Any]:
    kinds = dist.ProcessGroup.BackendType
    if name == "gloo":
        return kinds.GLOO, c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
    if name == "nccl" and dist.is_nccl_available():
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return kinds.NCCL, c10d.ProcessGroupNCCL(store, rank, size, options)
    raise ConfigurationError(
        f"backend {name!r} is not available here: use 'nccl' or 'gloo' beside rankwire"
    )
