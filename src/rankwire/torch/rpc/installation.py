"""Install rankwire's RPC as ``torch.distributed.rpc``, for libraries that import that themselves.

The names in torch's modules become rankwire's, also where modules of torch imported them by name. A
name that a program or library imported before (``from torch.distributed.rpc import rpc_sync``)
stays torch's, so install first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from rankwire.torch.rpc import api, functions, lifecycle, options, replacements
from rankwire.torch.rpc.functions import exposed
from rankwire.torch.rpc.rref import RRef
from rankwire.torch.rpc.session import WorkerInfo

_PACKAGE = "torch.distributed.rpc"
_EXTENSION = "torch._C._distributed_rpc"

_CALLS: dict[str, Any] = {
    "RRef": RRef,
    "PyRRef": RRef,
    "WorkerInfo": WorkerInfo,
    "get_worker_info": api.get_worker_info,
    "get_rpc_timeout": api.get_rpc_timeout,
    "remote": api.remote,
    "rpc_async": api.rpc_async,
    "rpc_sync": api.rpc_sync,
    "shutdown": lifecycle.shutdown,
    "_all_gather": api._all_gather,
    "_barrier": api._barrier,
    "_get_current_rpc_agent": api.current_agent,
    "_is_current_rpc_agent_set": api._is_current_rpc_agent_set,
    "_require_initialized": api._require_initialized,
    "_rref_context_get_debug_info": api.rref_debug_info,
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
        "TensorPipeAgent": api.AgentView,
        "exposed": exposed,
        "init_rpc": lifecycle.init_rpc,
        "_init_rpc_backend": lifecycle.init_rpc_in,
        "is_available": lifecycle.is_available,
    },
    f"{_PACKAGE}.api": _CALLS,
    f"{_PACKAGE}.functions": {"async_execution": functions.async_execution},
    f"{_PACKAGE}.options": _OPTIONS,
    f"{_PACKAGE}.backend_registry": {
        **_OPTIONS,
        "construct_rpc_backend_options": options.construct_rpc_backend_options,
    },
    # Libraries ask torch's extension for the class of references and whether RPC is initialized.
    _EXTENSION: {name: _CALLS[name] for name in _IN_EXTENSION},
    # Imported, and its TorchScript compiled, before torch's names are replaced.
    **replacements.NAMES,
}


def install(*, allow: Iterable[Any] | str = (), pickle: bool = False) -> Callable[[], None]:
    """Replace ``torch.distributed.rpc`` by rankwire's RPC in this process.

    Call it before ``init_rpc``, and before importing libraries that use RPC. Not thread-safe.

    Args:
        allow: The default of ``init_rpc``'s argument.
        pickle: The default of ``init_rpc``'s argument.

    Returns:
        A function that undoes it.
    """
    replacements.put_back()  # ``init_rpc`` may have been called first
    for module_name in _NAMES:
        importlib.import_module(module_name)
    replaced = replacements.replace(_NAMES, everywhere=False)
    defaults = lifecycle.Defaults.allow, lifecycle.Defaults.pickle
    lifecycle.Defaults.allow, lifecycle.Defaults.pickle = allow, pickle

    def uninstall() -> None:
        replacements.restore(replaced)
        lifecycle.Defaults.allow, lifecycle.Defaults.pickle = defaults

    return uninstall
