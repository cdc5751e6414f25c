"""What is aimed for, and whether a run reached it. Nothing here fails a run."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import results as rpc_results
from benchmarks import targets as rpc_targets
from benchmarks.collectives.candidates import CANDIDATES, OURS
from benchmarks.collectives.figures import KIB, MIB, Figure
from benchmarks.collectives.results import Results
from benchmarks.targets import Verdict


@dataclass(frozen=True)
class Target:
    """So many times as fast as a peer: at least, or with ``strictly`` more than that."""

    figure: Figure
    peer: str
    factor: float
    strictly: bool = False


TARGETS = (
    Target(Figure("ping_pong", 2, 64 * MIB), "mpi", 0.8),
    Target(Figure("all_reduce", 2, 8), "gloo", 8.0),
    Target(Figure("all_reduce", 2, 4 * KIB), "gloo", 8.0),
    Target(Figure("all_reduce", 2, MIB), "gloo", 3.0),
    Target(Figure("all_reduce", 2, 64 * MIB), "gloo", 1.5),
    Target(Figure("all_reduce", 2, 64 * KIB), "mpi", 1.0),
    Target(Figure("all_reduce", 2, MIB), "mpi", 0.8),
    Target(Figure("all_reduce", 2, 16 * MIB), "mpi", 1.1),
    Target(Figure("all_reduce", 2, 64 * MIB), "mpi", 2.5),
    Target(Figure("all_gather", 2, MIB), "mpi", 0.8),
    Target(Figure("broadcast", 2, MIB), "mpi", 0.8),
    Target(Figure("reduce_scatter", 2, MIB), "mpi", 0.8),
    Target(Figure("all_reduce", 4, 4 * KIB), "gloo", 1.0, strictly=True),
    Target(Figure("all_reduce", 4, 64 * MIB), "gloo", 1.0, strictly=True),
    Target(Figure("barrier", 2), "gloo", 8.0),
)
RPC_ECHO_AT_LEAST = 3.0


def judge(results: Results) -> list[Verdict]:
    """Compare a run with every target, in order; the first is of the last full run of RPC."""
    labels = {candidate.name: candidate.label for candidate in CANDIDATES}
    verdicts = [judge_rpc_echo()]
    for target in TARGETS:
        factor = results.speedup(OURS, target.figure, over=target.peer)
        verdicts.append(
            Verdict(
                target.figure.label,
                wanted=f"{'>' if target.strictly else '>='} {target.factor:g}x "
                f"{labels[target.peer]}",
                measured="-" if factor is None else f"{factor:.2f}x",
                met=None
                if factor is None
                else factor > target.factor or (factor == target.factor and not target.strictly),
            )
        )
    return verdicts


def judge_rpc_echo() -> Verdict:
    """Judge the echo of 64 MiB over RPC, which ``benchmarks.run`` has measured and saved."""
    factor, date = None, ""
    if rpc_results.RESULTS_PATH.exists():
        saved = rpc_results.load()
        factor = rpc_targets.speedup(saved, "rankwire", "echo_64mib_p50")
        date = f", of {saved.date}"
    return Verdict(
        f"64 MiB array echo by RPC (rpc.json{date})",
        wanted=f">= {RPC_ECHO_AT_LEAST:g}x torch RPC",
        measured="-" if factor is None else f"{factor:.2f}x",
        met=None if factor is None else factor >= RPC_ECHO_AT_LEAST,
    )
