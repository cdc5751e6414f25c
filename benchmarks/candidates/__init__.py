"""The libraries compared, and the one small interface each of them is driven through.

A candidate is a module in this package with two names in it:

* ``serve(address, ready, **options)`` runs in the server process. It calls ``ready()`` as soon as
  a client may be started, and serves until SIGTERM raises ``SystemExit`` in it.
* ``Client(address, **options)`` runs in the client process and satisfies the protocol below.

This module imports none of the libraries, so the registry can be read when they are missing.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

REFERENCE = "torch"
"""The candidate whose figures the others are divided by."""


class Client(Protocol):
    """One connection to the server, used by one thread.

    ``pack`` and ``unpack`` run outside the clock: a candidate that carries only bytes is not
    charged for turning an array into bytes and back, which favours it over those that carry arrays.
    """

    def noop(self) -> None:
        """Call the function that does nothing and wait for its reply."""

    def pack(self, array: Array) -> Any:
        """Turn an array into what this library sends best."""

    def echo(self, payload: Any) -> Any:
        """Send a packed array and wait until it has come back."""

    def unpack(self, reply: Any) -> Array:
        """Turn what ``echo`` returned into an array."""

    def many(self, count: int, in_flight: int) -> None:
        """Make ``count`` no-op calls, ``in_flight`` of them under way at any time."""

    def close(self) -> None:
        """Disconnect."""


@dataclass(frozen=True)
class Candidate:
    """A row of the comparison.

    Attributes:
        name: what ``--only`` takes and the JSON uses as key.
        label: what tables and the chart show.
        module: the module in this package.
        package: the import that must be there, or the candidate is "not installed".
        carries: what an echo sends, and over what.
        options: passed to both ``serve`` and ``Client``.
        echoes_64mib: whether that figure is taken; ``False`` where it would take half a minute.
    """

    name: str
    label: str
    module: str
    package: str
    carries: str
    options: Mapping[str, Any] = field(default_factory=dict)
    echoes_64mib: bool = True

    @property
    def is_ours(self) -> bool:
        """Whether this row is rankwire and not a peer."""
        return self.package == "rankwire"

    def is_installed(self) -> bool:
        """Look for the package without importing it."""
        return importlib.util.find_spec(self.package) is not None

    def load(self) -> ModuleType:
        """Import the candidate's module, and with it the library."""
        return importlib.import_module(f"{__name__}.{self.module}")


CANDIDATES: tuple[Candidate, ...] = (
    Candidate(
        "rankwire",
        "rankwire",
        module="rankwire_rpc",
        package="rankwire",
        carries="arrays, default transport",
        options={"transport": "auto"},
    ),
    Candidate(
        "rankwire-tcp",
        "rankwire, TCP forced",
        module="rankwire_rpc",
        package="rankwire",
        carries="arrays, TCP",
        options={"transport": "tcp"},
    ),
    Candidate(
        "torch",
        "torch RPC",
        module="torch_rpc",
        package="torch",
        carries="tensors, TensorPipe's choice",
    ),
    Candidate("grpc", "gRPC", module="grpc_rpc", package="grpc", carries="bytes, TCP"),
    Candidate(
        "rpyc",
        "RPyC",
        module="rpyc_rpc",
        package="rpyc",
        carries="bytes, TCP",
        echoes_64mib=False,
    ),
    Candidate("pyzmq", "pyzmq (no RPC)", module="pyzmq_rpc", package="zmq", carries="buffers, TCP"),
    Candidate(
        "raw-socket",
        "blocking sockets (no RPC)",
        module="raw_socket_rpc",
        package="socket",
        carries="buffers, TCP",
    ),
)


def keep_in_flight(
    start: Callable[[], Any],
    finish: Callable[[Any], object],
    *,
    count: int,
    in_flight: int,
) -> None:
    """Start ``count`` calls, waiting for the oldest whenever ``in_flight`` are under way.

    The same loop for every library that hands out futures, so that none wins by its window.
    """
    pending: deque[Any] = deque()
    for _ in range(count):
        if len(pending) == in_flight:
            finish(pending.popleft())
        pending.append(start())
    while pending:
        finish(pending.popleft())
