"""Rank-addressed RPC, messaging and collectives for the processes of a training job.

These are the public names; everything else is internal. Importing this package loads numpy and
msgspec, and nothing optional.
"""

from rankwire.backends.base import Backend
from rankwire.backends.faults import FaultPlan
from rankwire.backends.simulated import SimulatedBackend
from rankwire.backends.sub import SubBackend
from rankwire.backends.tcp import TcpBackend
from rankwire.errors import *  # noqa: F403
from rankwire.errors import __all__ as _errors
from rankwire.launch.environment import connect
from rankwire.rpc.agent import RpcAgent
from rankwire.rpc.context import Call, current_call
from rankwire.rpc.future import RpcFuture
from rankwire.version import __version__
from rankwire.wire.codec import Codec

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
