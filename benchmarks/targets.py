"""What is aimed for, and whether a run reached it. Nothing here fails a run."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.candidates import REFERENCE
from benchmarks.results import Results

HIGHER_IS_BETTER = frozenset({"calls_per_second"})


@dataclass(frozen=True)
class SpeedupTarget:
    """At least so many times as good as the reference."""

    label: str
    candidate: str
    metric: str
    at_least: float


@dataclass(frozen=True)
class SecondsTarget:
    """At most so many seconds, of a field of ``Startup``."""

    label: str
    field: str
    at_most: float


@dataclass(frozen=True)
class Verdict:
    """A target beside what was measured; ``met`` is ``None`` when it was not measured."""

    label: str
    wanted: str
    measured: str
    met: bool | None


SPEEDUP_TARGETS = (
    SpeedupTarget("no-op rpc_sync p50, default transport", "rankwire", "noop_p50", 20.0),
    SpeedupTarget("no-op rpc_sync p50, TCP forced", "rankwire-tcp", "noop_p50", 10.0),
    SpeedupTarget("calls per second, 64 in flight", "rankwire", "calls_per_second", 15.0),
    SpeedupTarget("1 MiB array echo", "rankwire", "echo_1mib_p50", 2.0),
)
SECONDS_TARGETS = (
    SecondsTarget("import rankwire, beyond import numpy", "import_over_numpy", 0.060),
    SecondsTarget("world of 8 local ranks ready", "world_ready", 2.0),
)


def speedup(results: Results, candidate: str, metric: str) -> float | None:
    """How many times as good as the reference; above 1 is better, whatever the metric."""
    ours = results.metric(candidate, metric)
    reference = results.metric(REFERENCE, metric)
    if ours is None or reference is None:
        return None
    return ours / reference if metric in HIGHER_IS_BETTER else reference / ours


def judge(results: Results) -> list[Verdict]:
    """Compare a run with every target, in order."""
    verdicts = []
    for target in SPEEDUP_TARGETS:
        factor = speedup(results, target.candidate, target.metric)
        verdicts.append(
            Verdict(
                target.label,
                wanted=f">= {target.at_least:g}x torch RPC",
                measured="-" if factor is None else f"{factor:.1f}x",
                met=None if factor is None else factor >= target.at_least,
            )
        )
    for limit in SECONDS_TARGETS:
        seconds = None if results.startup is None else getattr(results.startup, limit.field)
        verdicts.append(
            Verdict(
                limit.label,
                wanted=f"<= {_seconds(limit.at_most)}",
                measured="-" if seconds is None else _seconds(seconds),
                met=None if seconds is None else seconds <= limit.at_most,
            )
        )
    return verdicts


def _seconds(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if abs(value) < 1.0 else f"{value:.2f} s"
