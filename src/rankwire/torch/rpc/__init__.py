"""torch RPC on rankwire: ``import rankwire.torch.rpc as rpc`` instead of ``torch.distributed.rpc``.

It has calls, remote objects and handles with torch's names and arguments, without pickle: a worker
runs only functions that its naming rule allows. No other part of rankwire imports this package.
"""

from __future__ import annotations

from rankwire.torch.rpc import api, autograd, functions, options
from rankwire.torch.rpc.api import *  # noqa: F403
from rankwire.torch.rpc.functions import exposed
from rankwire.torch.rpc.initialization import init_rpc, install, is_available
from rankwire.torch.rpc.naming_rule import NameRefusedError
from rankwire.torch.rpc.optimizer import DistributedOptimizer
from rankwire.torch.rpc.options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions
from rankwire.torch.rpc.remote_module import RemoteModule

# torch programs use these names.
constants = options
dist_autograd = autograd

__all__ = [
    "BackendType",
    "DistributedOptimizer",
    "NameRefusedError",
    "RemoteModule",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "api",
    "autograd",
    "constants",
    "dist_autograd",
    "exposed",
    "functions",
    "init_rpc",
    "install",
    "is_available",
    "options",
]
__all__ += api.__all__
