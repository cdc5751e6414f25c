"""The libraries compared, and the one small interface each of them is driven through.

A candidate is a module in this package with one name in it: ``Rank(rank, world_size, address)``,
which joins a world in a process of its own and satisfies the protocol below.

This module imports none of the libraries, so the registry can be read when they are missing.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from benchmarks.candidates import Array

TIMEOUT = 60.0
"""Seconds, longer than anything takes on a busy machine; a hang is the harness's to notice."""


class Rank(Protocol):
    """One rank of a world, used by one thread.

    ``pack`` runs outside the clock and shares the array's memory, so that results can be checked.
    Every operation works on packed arrays that were there before.
    """

    rank: int
    world_size: int

    def pack(self, array: Array) -> Any:
        """Turn an array into what this library works on."""

    def all_reduce(self, payload: Any) -> None:
        """Replace the array by its sum over all ranks."""

    def broadcast(self, payload: Any, root: int) -> None:
        """Replace the array by that of ``root``."""

    def all_gather(self, payload: Any, out: Any) -> None:
        """Fill ``out``, flat, with the arrays of all ranks in order."""

    def reduce_scatter(self, payload: Any, out: Any) -> None:
        """Fill ``out`` with this rank's part of the sum of all ranks' arrays."""

    def barrier(self) -> None:
        """Wait until all ranks are here."""

    def send(self, payload: Any, dst: int) -> None:
        """Send the array to one rank."""

    def recv(self, payload: Any, src: int) -> None:
        """Receive an array of the same size from one rank."""

    def close(self) -> None:
        """Leave the world."""


@dataclass(frozen=True)
class Candidate:
    """A column of the comparison.

    Attributes:
        name: what ``--only`` takes and the JSON uses as key.
        label: what tables and the chart show.
        module: the module in this package.
        package: the import that must be there, or the candidate is "not installed".
        carries: what is sent, and over what.
        launcher: the command that starts the ranks where the library has one of its own; the number
            of ranks follows it, and then a Python program. Must be on the PATH.
        runner: options of the interpreter in front of that program.
    """

    name: str
    label: str
    module: str
    package: str
    carries: str
    launcher: tuple[str, ...] = ()
    runner: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        """Whether this is rankwire and not a peer."""
        return self.package == "rankwire"

    def find_missing(self) -> str | None:
        """Say what has to be installed first, without importing anything; ``None`` if nothing."""
        if importlib.util.find_spec(self.package) is None:
            return f"no Python package {self.package}"
        if self.launcher and shutil.which(self.launcher[0]) is None:
            return f"no {self.launcher[0]} on the PATH"
        return None

    def load(self) -> ModuleType:
        """Import the candidate's module, and with it the library."""
        return importlib.import_module(f"{__name__}.{self.module}")


OURS = "rankwire"
"""The candidate whose speed is compared with that of each of the others."""

CANDIDATES: tuple[Candidate, ...] = (
    Candidate(
        OURS,
        "rankwire",
        module="rankwire_rank",
        package="rankwire",
        carries="numpy arrays, default transport",
    ),
    Candidate(
        "gloo",
        "torch Gloo",
        module="gloo_rank",
        package="torch",
        carries="torch tensors, TCP over loopback",
    ),
    Candidate(
        "mpi",
        "Open MPI",
        module="mpi_rank",
        package="mpi4py",
        carries="numpy arrays by mpi4py, shared memory",
        # The first option lets it run in containers, where everyone is root; without the second it
        # refuses more ranks than cores. With both, 2 ranks on 2 cores are as fast as without.
        launcher=("mpirun", "--allow-run-as-root", "--oversubscribe", "-n"),
        # Without it, a rank that raises leaves the others waiting for ever.
        runner=("-m", "mpi4py"),
    ),
)
