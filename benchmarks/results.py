"""What a run found: the shape of ``benchmarks/results/rpc.json``, read and written.

Times are seconds throughout; reports choose the unit. The machine is described by what moves the
figures and by nothing that names it: no host, user, path or time of day.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec

ROOT = Path(__file__).resolve().parent.parent
RESULTS_PATH = ROOT / "benchmarks" / "results" / "rpc.json"
CHART_PATH = ROOT / "docs" / "images" / "rpc-latency.svg"
PACKAGES = ("rankwire", "numpy", "msgspec", "torch", "grpcio", "rpyc", "pyzmq")


class Metrics(msgspec.Struct, frozen=True):
    """The figures of one candidate: of one round, or the median of several."""

    noop_p50: float
    noop_p99: float
    echo_1mib_p50: float
    calls_per_second: float
    echo_64mib_p50: float | None = None


class CandidateResult(msgspec.Struct, kw_only=True):
    """A row: its median, and the rounds it comes from."""

    label: str
    carries: str
    status: Literal["measured", "not installed", "failed"]
    reason: str | None = None
    median: Metrics | None = None
    rounds: list[Metrics] = []


class Startup(msgspec.Struct, kw_only=True):
    """How long it takes until rankwire can be used, each a median."""

    import_numpy: float
    import_rankwire: float
    import_over_numpy: float
    world_size: int
    world_ready: float
    world_floor: float
    """The same number of processes that only import numpy: what no library can go below."""


class Machine(msgspec.Struct, kw_only=True):
    """What the figures depend on."""

    cpu: str
    cores: int
    kernel: str
    python: str
    packages: dict[str, str]
    load_before: float
    """One-minute load average when the run began; far above 0 means the figures are noisy."""


class Run(msgspec.Struct, kw_only=True):
    """How it was measured."""

    rounds: int
    seconds: float
    large_repeats: int
    in_flight: int
    quick: bool


class Results(msgspec.Struct, kw_only=True):
    """One whole run."""

    date: str
    machine: Machine
    run: Run
    candidates: dict[str, CandidateResult]
    startup: Startup | None = None

    def metric(self, candidate: str, key: str) -> float | None:
        """Return a candidate's median of that name, ``None`` if it was not measured."""
        result = self.candidates.get(candidate)
        if result is None or result.median is None:
            return None
        value: float | None = getattr(result.median, key)
        return value


def median_of(rounds: list[Metrics]) -> Metrics:
    """Take the median of each figure by itself; one that no round has stays out."""
    figures = {}
    for name in Metrics.__struct_fields__:
        values = [value for each in rounds if (value := getattr(each, name)) is not None]
        if values:
            figures[name] = median(values)
    return msgspec.convert(figures, Metrics)


def describe_machine(packages: Iterable[str] = PACKAGES) -> Machine:
    """Describe this machine, with the versions of those packages that are installed."""
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        packages=_package_versions(packages),
        load_before=round(os.getloadavg()[0], 2),
    )


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def save(results: msgspec.Struct, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")


def load(path: Path = RESULTS_PATH) -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results)


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.machine()


def _package_versions(packages: Iterable[str]) -> dict[str, str]:
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
