"""Rank-addressed RPC, messaging and collectives for the processes of a training job.

These are the public names; everything else is internal. The import loads numpy and msgspec only.
Names that most jobs do not use are loaded at first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy  # noqa: F401  (first: in the middle of our own modules its import takes 23 ms longer)

from rankwire.backends.base import Backend
from rankwire.backends.connect import connect
from rankwire.backends.handles import MessageHandle
from rankwire.backends.posting import ANY_RANK
from rankwire.backends.roles import Roles
from rankwire.backends.tcp import TcpBackend
from rankwire.codec.classes import message
from rankwire.codec.codec import Codec
from rankwire.codec.hooks import BuildContext, TakeContext
from rankwire.errors import *  # noqa: F403
from rankwire.errors import __all__ as _errors
from rankwire.rpc.call import Call, current_call
from rankwire.rpc.future import RpcFuture
from rankwire.rpc.stream import Stream
from rankwire.services.queue import Queue
from rankwire.services.queue_settings import QueueStats
from rankwire.services.rpc_agent import RpcAgent
from rankwire.services.task_map import TaskMap
from rankwire.task_outcome import TaskOutcome

__version__ = "0.3.0"

if TYPE_CHECKING:
    from rankwire.backends.faults import FaultPlan
    from rankwire.backends.simulated import SimulatedBackend
    from rankwire.backends.sub import SubBackend
    from rankwire.collectives.coalesced import (
        all_gather_coalesced,
        all_reduce_coalesced,
        reduce_scatter_coalesced,
    )
    from rankwire.collectives.objects import (
        all_gather_object,
        all_to_all_object,
        broadcast_object,
        gather_object,
        scatter_object,
    )
    from rankwire.collectives.operations import (
        all_gather,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        gather,
        reduce,
        reduce_scatter,
        scatter,
    )
    from rankwire.collectives.reductions import PremulSum
    from rankwire.collectives.work import Work
    from rankwire.device_mesh import DeviceMesh
    from rankwire.launch.local_world import LocalWorld, local
    from rankwire.services.group_result import GroupResult
    from rankwire.transports.security import Tls

__all__ = [
    "ANY_RANK",
    "Backend",
    "Call",
    "Codec",
    "DeviceMesh",
    "FaultPlan",
    "GroupResult",
    "LocalWorld",
    "MessageHandle",
    "PremulSum",
    "BuildContext",
    "Queue",
    "QueueStats",
    "Roles",
    "RpcAgent",
    "RpcFuture",
    "Stream",
    "TakeContext",
    "SimulatedBackend",
    "SubBackend",
    "TaskMap",
    "TaskOutcome",
    "TcpBackend",
    "Tls",
    "Work",
    "__version__",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_object",
    "barrier",
    "broadcast",
    "broadcast_object",
    "connect",
    "current_call",
    "gather",
    "gather_object",
    "local",
    "message",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "scatter",
    "scatter_object",
    *_errors,
]

_LOADED_LATER = {
    "backends.faults": "FaultPlan",
    "backends.simulated": "SimulatedBackend",
    "backends.sub": "SubBackend",
    "device_mesh": "DeviceMesh",
    "transports.security": "Tls",
    "launch.local_world": "LocalWorld local",
    "services.group_result": "GroupResult",
    "collectives.work": "Work",
    "collectives.coalesced": "all_gather_coalesced all_reduce_coalesced reduce_scatter_coalesced",
    "collectives.operations": "all_gather all_reduce all_to_all barrier broadcast gather reduce "
    "reduce_scatter scatter",
    "collectives.reductions": "PremulSum",
    "collectives.objects": "all_gather_object all_to_all_object broadcast_object gather_object "
    "scatter_object",
}
_HOME = {name: module for module, names in _LOADED_LATER.items() for name in names.split()}


def _meet(backend: Backend, timeout: float | None) -> None:
    from rankwire.collectives.operations import barrier

    barrier(backend, timeout=timeout)


Backend.meeting = _meet


if not TYPE_CHECKING:  # or a type checker would accept any name

    def __getattr__(name: str) -> Any:
        """Load a public name at first use."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"rankwire.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    modules = {"testing", "torch"} & globals().keys()  # if they were imported
    dunders = {name for name in globals() if name.startswith("__")}
    return sorted({*__all__, *modules, *dunders})
