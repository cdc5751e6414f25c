"""Helpers for tests, ours and users': worlds of ranks in one process, and the conformance suite.

``run_ranks`` runs a function as every rank of a world, in threads or processes. ``check_backend``
runs the conformance suite against any backend. Nothing here imports pytest.
"""

from rankwire.errors import RankFailedError, RanksStuckError
from rankwire.launch.function_run import RankOutcome
from rankwire.testing.conformance import CHECKS, check_backend
from rankwire.testing.ranks import (
    MakeWorld,
    in_parallel,
    run_ranks,
    simulated_world,
    sub_world,
    tcp_world,
)

__all__ = [
    "CHECKS",
    "MakeWorld",
    "RankOutcome",
    "RankFailedError",
    "RanksStuckError",
    "check_backend",
    "in_parallel",
    "run_ranks",
    "simulated_world",
    "sub_world",
    "tcp_world",
]
