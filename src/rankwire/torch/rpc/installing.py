"""Installing: rankwire's RPC under the name of torch's, for libraries that import that themselves.

``torch.distributed.rpc`` keeps its modules; the names in them that programs use become ours. So do
the same objects where modules of torch have imported them by name before. What a program or
library has imported by name before (``from torch.distributed.rpc import rpc_sync``) stays torch's:
install first.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from rankwire.torch.rpc import agent_view, api, autograd, functions, options, starting
from rankwire.torch.rpc.exposing import exposed
from rankwire.torch.rpc.optimizer import DistributedOptimizer
from rankwire.torch.rpc.remote_module import RemoteModule
from rankwire.torch.rpc.rref import RRef
from rankwire.torch.rpc.workers import WorkerInfo

_PACKAGE = "torch.distributed.rpc"
_EXTENSION = "torch._C._distributed_rpc"
_MISSING = object()

_CALLS: dict[str, Any] = {
    "RRef": RRef,
    "PyRRef": RRef,
    "WorkerInfo": WorkerInfo,
    "get_worker_info": api.get_worker_info,
    "get_rpc_timeout": api.get_rpc_timeout,
    "remote": api.remote,
    "rpc_async": api.rpc_async,
    "rpc_sync": api.rpc_sync,
    "shutdown": starting.shutdown,
    "_all_gather": api._all_gather,
    "_barrier": api._barrier,
    "_get_current_rpc_agent": agent_view.current_agent,
    "_is_current_rpc_agent_set": api._is_current_rpc_agent_set,
    "_require_initialized": api._require_initialized,
    "_rref_context_get_debug_info": agent_view.rref_debug_info,
    "_set_rpc_timeout": api._set_rpc_timeout,
    "_thread_local_var": api._thread_local_var,
    "_to_worker_info": api._to_worker_info,
    "_wait_all": api._wait_all,
    "_wait_all_workers": api._wait_all_workers,
}
_IN_EXTENSION = (
    *("PyRRef", "WorkerInfo", "get_rpc_timeout", "_get_current_rpc_agent"),
    *("_is_current_rpc_agent_set", "_rref_context_get_debug_info", "_set_rpc_timeout"),
)
_OPTIONS: dict[str, Any] = {
    "BackendType": options.BackendType,
    "RpcBackendOptions": options.RpcBackendOptions,
    "TensorPipeRpcBackendOptions": options.TensorPipeRpcBackendOptions,
}
_NAMES: dict[str, dict[str, Any]] = {
    _PACKAGE: {
        **_CALLS,
        **_OPTIONS,
        "TensorPipeAgent": agent_view.AgentView,
        "exposed": exposed,
        "init_rpc": starting.init_rpc,
        "_init_rpc_backend": starting.init_rpc_in,
        "is_available": starting.is_available,
    },
    f"{_PACKAGE}.api": _CALLS,
    f"{_PACKAGE}.functions": {"async_execution": functions.async_execution},
    f"{_PACKAGE}.options": _OPTIONS,
    f"{_PACKAGE}.backend_registry": {
        **_OPTIONS,
        "construct_rpc_backend_options": options.construct_rpc_backend_options,
    },
    "torch.distributed.autograd": autograd.NAMES,
    # Libraries ask torch's extension what a reference is, and whether RPC is initialized.
    _EXTENSION: {name: _CALLS[name] for name in _IN_EXTENSION},
    # Imported, and its TorchScript compiled, while torch's own names are still there.
    "torch.distributed.optim.optimizer": {"DistributedOptimizer": DistributedOptimizer},
    "torch.distributed.optim": {"DistributedOptimizer": DistributedOptimizer},
    "torch.distributed.nn.api.remote_module": {"RemoteModule": RemoteModule},
    "torch.distributed.nn": {"RemoteModule": RemoteModule},
}


def install(*, allow: Iterable[Any] | str = (), pickle: bool = False) -> Callable[[], None]:
    """Put rankwire's RPC in the place of ``torch.distributed.rpc``, in this process.

    Call it before libraries that use it are imported, and before ``init_rpc``. Not safe from
    several threads at once.

    Args:
        allow: As for ``init_rpc``, for calls of that without it.
        pickle: Likewise.

    Returns:
        A function that undoes it.
    """
    undo: list[tuple[ModuleType, str, Any]] = []
    replaced: dict[int, Any] = {}
    modules = {module_name: importlib.import_module(module_name) for module_name in _NAMES}
    for module_name, names in _NAMES.items():
        module = modules[module_name]
        for name, ours in names.items():
            theirs = vars(module).get(name, _MISSING)
            undo.append((module, name, theirs))
            if theirs is not _MISSING and theirs is not ours:
                replaced[id(theirs)] = ours
            setattr(module, name, ours)
    undo += _replace_elsewhere(replaced)
    defaults = starting.Defaults.allow, starting.Defaults.pickle
    starting.Defaults.allow, starting.Defaults.pickle = allow, pickle

    def uninstall() -> None:
        for module, name, theirs in reversed(undo):
            if theirs is _MISSING:
                vars(module).pop(name, None)
            else:
                setattr(module, name, theirs)
        starting.Defaults.allow, starting.Defaults.pickle = defaults
        undo.clear()

    return uninstall


def _replace_elsewhere(replaced: dict[int, Any]) -> list[tuple[ModuleType, str, Any]]:
    """Replace what modules of torch have imported by name; return what was there."""
    found = [
        (module, name, value)
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("torch.distributed.") and isinstance(module, ModuleType)
        for name, value in list(vars(module).items())
        if id(value) in replaced
    ]
    for module, name, value in found:
        setattr(module, name, replaced[id(value)])
    return found
