"""torch RPC on rankwire: ``import rankwire.torch.rpc as rpc`` instead of ``torch.distributed.rpc``.

Calls, remote objects and handles with torch's names and arguments, without pickle: a worker runs
functions of the program for others, and no others (``naming_rule``). It needs torch (``pip install
'rankwire[torch]'``). No other part of rankwire imports this package.
"""

from __future__ import annotations

from rankwire.torch.rpc import api, autograd, constants, functions, options
from rankwire.torch.rpc.api import get_rpc_timeout, get_worker_info
from rankwire.torch.rpc.functions import exposed
from rankwire.torch.rpc.installation import install
from rankwire.torch.rpc.lifecycle import init_rpc, is_available, shutdown
from rankwire.torch.rpc.naming_rule import NameRefusedError
from rankwire.torch.rpc.optimizer import DistributedOptimizer
from rankwire.torch.rpc.options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions
from rankwire.torch.rpc.remote_calls import all_gather as _all_gather
from rankwire.torch.rpc.remote_calls import barrier as _barrier
from rankwire.torch.rpc.remote_calls import rpc_async, rpc_sync
from rankwire.torch.rpc.remote_calls import wait_all as _wait_all
from rankwire.torch.rpc.remote_module import RemoteModule
from rankwire.torch.rpc.rref import RRef, remote
from rankwire.torch.rpc.session import WorkerInfo

dist_autograd = autograd  # torch programs use this name
_is_current_rpc_agent_set = api._is_current_rpc_agent_set
_require_initialized = api._require_initialized
_set_rpc_timeout = api._set_rpc_timeout

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
