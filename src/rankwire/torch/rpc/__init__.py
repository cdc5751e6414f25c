"""torch RPC on rankwire: ``import rankwire.torch.rpc as rpc`` instead of ``torch.distributed.rpc``.

Calls, remote objects and handles with torch's names and arguments, without pickle: a worker runs
only functions that its naming rule allows. No other part of rankwire imports this package.
"""

from __future__ import annotations

from rankwire.torch.rpc import api, autograd, functions, options
from rankwire.torch.rpc.api import (
    RRef,
    WorkerInfo,
    get_rpc_timeout,
    get_worker_info,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from rankwire.torch.rpc.functions import exposed
from rankwire.torch.rpc.initialization import init_rpc, install, is_available
from rankwire.torch.rpc.naming_rule import NameRefusedError
from rankwire.torch.rpc.optimizer import DistributedOptimizer
from rankwire.torch.rpc.options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions
from rankwire.torch.rpc.remote_module import RemoteModule

# torch programs use these names.
constants = options
dist_autograd = autograd
_all_gather = api._all_gather
_barrier = api._barrier
_is_current_rpc_agent_set = api._is_current_rpc_agent_set
_require_initialized = api._require_initialized
_set_rpc_timeout = api._set_rpc_timeout
_wait_all = api._wait_all

__all__ = [
    "BackendType",
    "DistributedOptimizer",
    "NameRefusedError",
    "RRef",
    "RemoteModule",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "_all_gather",
    "_barrier",
    "_is_current_rpc_agent_set",
    "_require_initialized",
    "_set_rpc_timeout",
    "_wait_all",
    "api",
    "autograd",
    "constants",
    "dist_autograd",
    "exposed",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "install",
    "is_available",
    "options",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]
