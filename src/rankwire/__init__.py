"""Rank-addressed RPC, messaging and collectives for the processes of a training job.

These are the public names; everything else is internal. Importing this package loads numpy and
msgspec, and nothing optional; what a job does not use is loaded when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy  # noqa: F401  (first: in the middle of our own modules its import takes 23 ms longer)

from rankwire.backends.base import Backend
from rankwire.backends.tcp import TcpBackend
from rankwire.errors import *  # noqa: F403
from rankwire.errors import __all__ as _errors
from rankwire.launch.environment import connect
from rankwire.rpc.agent import RpcAgent
from rankwire.rpc.context import Call, current_call
from rankwire.rpc.future import RpcFuture
from rankwire.version import __version__
from rankwire.wire.codec import Codec

if TYPE_CHECKING:
    from rankwire.backends.faults import FaultPlan
    from rankwire.backends.simulated import SimulatedBackend
    from rankwire.backends.sub import SubBackend

__all__ = [
    "Backend",
    "Call",
    "Codec",
    "FaultPlan",
    "RpcAgent",
    "RpcFuture",
    "SimulatedBackend",
    "SubBackend",
    "TcpBackend",
    "__version__",
    "connect",
    "current_call",
    *_errors,
]

_LOADED_LATER = {
    "FaultPlan": "rankwire.backends.faults",
    "SimulatedBackend": "rankwire.backends.simulated",
    "SubBackend": "rankwire.backends.sub",
}


def __getattr__(name: str) -> Any:
    """Load one of the names that most jobs do not use."""
    if name not in _LOADED_LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LOADED_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
