"""RemoteModule: a module on another rank that runs like a local one.

It replaces ``torch.distributed.nn.RemoteModule``, on CPUs and without TorchScript. It calls the
module through a handle (``rref``), so distributed autograd and the rules for methods apply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rankwire.codec.hooks import BuildContext, TakeContext
from rankwire.errors import InvalidMessageError
from rankwire.override import override
from rankwire.torch.rpc.api import rpc_sync
from rankwire.torch.rpc.functions import exposed
from rankwire.torch.rpc.rref import RRef
from rankwire.torch.rpc.session import current

_CPU = "cpu"
# The methods that torch's class refuses, and newer ones: there are no local parameters.
_REFUSED = (
    *("add_module", "apply", "bfloat16", "buffers", "children", "cpu", "cuda", "double"),
    *("extra_repr", "float", "half", "ipu", "load_state_dict", "modules", "mtia", "named_buffers"),
    *("named_children", "named_modules", "named_parameters", "parameters"),
    *("register_backward_hook", "register_buffer", "register_forward_hook"),
    *("register_forward_pre_hook", "register_module", "register_parameter", "requires_grad_"),
    *("share_memory", "state_dict", "to", "to_empty", "type", "xpu", "zero_grad"),
)


class RemoteModule(nn.Module):  # type: ignore[misc]
    """A module that is created and run on another worker. Safe from any thread.

    As an argument or result of a call, it is sent as a handle of the same module.

    Args:
        remote_device: The worker: ``"worker1"``, ``"worker1/cpu"`` or ``"rank:1/cpu"``.
        module_cls: The module's class or a function that creates it: one of torch's layers, or one
            that the worker's naming rule allows.
        args: Positional arguments for it.
        kwargs: Keyword arguments for it.

    Attributes:
        on: The worker as given, or its name if the module came from another rank.
        module_rref: The handle of the module.

    Raises:
        RuntimeError: RPC is not initialized, there is no such worker, or it refuses the class.
        ValueError: ``remote_device`` is invalid or not a CPU, or the result is not a module.
    """

    is_scriptable = False
    is_device_map_set = False

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        on = _worker_of(remote_device)
        made = rpc_sync(on, make_module, args=(module_cls, list(args or ()), dict(kwargs or {})))
        self._set_up(on, made)

    def _set_up(self, on: str | int, module_rref: RRef[Any]) -> None:
        nn.Module.__init__(self)
        self.on = on
        self.device = _CPU
        self.module_rref = module_rref

    @classmethod
    def _of(cls, on: str | int, module_rref: RRef[Any]) -> RemoteModule:
        module = cls.__new__(cls)
        module._set_up(on, module_rref)
        return module

    @staticmethod
    @exposed
    def init_from_module_rref(remote_device: str, module_rref: RRef[Any]) -> RemoteModule:
        """Return a ``RemoteModule`` for an existing module, which may be on another worker."""
        if not isinstance(module_rref, RRef):
            raise TypeError(f"module_rref is an RRef, not {type(module_rref).__name__}")
        on = _worker_of(remote_device)
        current().rank_of(on)
        return RemoteModule._of(on, module_rref)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on its worker, and return its result."""
        return self.module_rref.rpc_sync().__call__(*args, **kwargs)

    def forward_async(self, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
        """Start running the module on its worker, and return a future of its result."""
        return self.module_rref.rpc_async().__call__(*args, **kwargs)

    def remote_parameters(self, recurse: bool = True) -> list[RRef[Any]]:
        """Return handles of the parameters, for a ``DistributedOptimizer``."""
        rref = self.module_rref
        return rpc_sync(rref.owner(), parameters_of, args=(rref, recurse))  # type: ignore[no-any-return]

    def get_module_rref(self) -> RRef[Any]:
        """Return the handle of the module."""
        return self.module_rref

    @override
    def train(self, mode: bool = True) -> RemoteModule:
        rpc_sync(self.module_rref.owner(), set_training, args=(self.module_rref, mode))
        self.training = mode
        return self

    @override
    def eval(self) -> RemoteModule:
        return self.train(False)

    def __getstate__(self) -> Any:
        raise RuntimeError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when "
            "using RPC"
        )

    def __repr__(self) -> str:
        return f"RemoteModule(on={self.on!r}, device={self.device!r})"


def _refusing(name: str) -> Callable[..., Any]:
    instead = " Please use ``remote_parameters`` instead." if name == "parameters" else ""

    def refuse(self: RemoteModule, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule.{instead}")

    refuse.__name__ = name
    refuse.__qualname__ = f"RemoteModule.{name}"
    return refuse


for _name in _REFUSED:
    setattr(RemoteModule, _name, _refusing(_name))


def _worker_of(remote_device: str) -> str | int:
    worker, slash, device = remote_device.partition("/")
    if not worker or "/" in device or (slash and not device):
        raise ValueError(
            f"Could not parse remote_device: {remote_device}. The valid format is "
            "'<workername>/<device>' or 'rank:<rank>/<device>'"
        )
    if torch.device(device or _CPU).type != _CPU:
        raise ValueError(
            f"{remote_device!r}: a RemoteModule of rankwire is on a CPU, not on {device}"
        )
    rank = worker.removeprefix("rank:")
    return int(rank) if rank != worker and rank.isdecimal() else worker


def take_remote_module(module: RemoteModule, sending: TakeContext) -> list[Any]:
    """Return a ``RemoteModule`` in encoded form: its handle and device."""
    return [module.module_rref, module.device]


def build_remote_module(parts: Any, receiving: BuildContext) -> RemoteModule:
    """Return the ``RemoteModule`` that another rank sent."""
    match parts:
        case [RRef() as module_rref, "cpu"]:
            return RemoteModule._of(module_rref.owner_name(), module_rref)
    raise InvalidMessageError("malformed RemoteModule")


@exposed
def make_module(module_cls: Any, args: list[Any], kwargs: dict[str, Any]) -> RRef[Any]:
    """Create a module on this rank, for another rank."""
    # Check first: not every class that may be sent may be instantiated.
    made: Any = module_cls
    if not isinstance(module_cls, type) or issubclass(module_cls, nn.Module):
        made = current().servable(module_cls)(*args, **kwargs)
    if not isinstance(made, nn.Module):
        kind = made if isinstance(made, type) else type(made)
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but "
            f"it returns an instance of {kind}."
        )
    return RRef(made)


@exposed
def parameters_of(module_rref: RRef[Any], recurse: bool) -> list[RRef[Any]]:
    """Return handles of the parameters of a module of this rank, for another rank."""
    return [RRef(parameter) for parameter in _local_module(module_rref).parameters(recurse)]


@exposed
def set_training(module_rref: RRef[Any], mode: bool) -> None:
    """Set the training mode of a module of this rank, for another rank."""
    _local_module(module_rref).train(mode)


def _local_module(module_rref: RRef[Any]) -> nn.Module:
    module = module_rref.local_value()
    if not isinstance(module, nn.Module):
        raise TypeError(f"{type(module).__name__} is not a module of this rank")
    return module
