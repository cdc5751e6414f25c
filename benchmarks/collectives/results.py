"""What a run found: the shape of ``benchmarks/results/collectives.json``, read and written.

As in ``benchmarks.results``: times are seconds, and nothing names the machine.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec

from benchmarks.collectives.figures import Figure
from benchmarks.results import ROOT, Machine, describe_machine

RESULTS_PATH = ROOT / "benchmarks" / "results" / "collectives.json"
CHART_PATH = ROOT / "docs" / "images" / "collectives.svg"
PACKAGES = ("rankwire", "numpy", "torch", "mpi4py")


class CandidateResult(msgspec.Struct, kw_only=True):
    """A column: its medians, and the rounds they come from, each by the key of the figure."""

    label: str
    carries: str
    status: Literal["measured", "not installed", "failed"]
    """``failed`` if any world was; what the others found is there all the same."""
    reason: str | None = None
    median: dict[str, float] = {}
    rounds: list[dict[str, float]] = []


class MessageCount(msgspec.Struct, kw_only=True):
    """What one operation sends on the simulated backend."""

    operation: str
    """With its size, as the tables show it."""
    world_size: int
    messages: int
    """Of all ranks together."""
    most_messages: int
    """Of the rank that sends most."""
    most_nbytes: int
    """Of the rank that sends most."""


class Run(msgspec.Struct, kw_only=True):
    """How it was measured."""

    rounds: int
    seconds: float
    fewest_repeats: int
    quick: bool


class Results(msgspec.Struct, kw_only=True):
    """One whole run."""

    date: str
    machine: Machine
    run: Run
    candidates: dict[str, CandidateResult]
    message_counts: list[MessageCount] = []

    def time(self, candidate: str, figure: Figure) -> float | None:
        """Return a candidate's median, ``None`` if it was not measured."""
        result = self.candidates.get(candidate)
        return None if result is None else result.median.get(figure.key)

    def speedup(self, candidate: str, figure: Figure, *, over: str) -> float | None:
        """How many times as fast as another candidate."""
        mine, other = self.time(candidate, figure), self.time(over, figure)
        return None if mine is None or other is None else other / mine


def median_of(rounds: Iterable[dict[str, float]]) -> dict[str, float]:
    """Take the median of each figure by itself, over the rounds that have it."""
    values: dict[str, list[float]] = {}
    for each in rounds:
        for key, value in each.items():
            values.setdefault(key, []).append(value)
    return {key: median(several) for key, several in values.items()}


def describe() -> Machine:
    """Describe this machine, with the version of Open MPI among the packages."""
    machine = describe_machine(PACKAGES)
    try:
        text = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    except OSError:
        return machine
    if found := re.search(r"\(Open MPI\) (\S+)", text):
        machine.packages["Open MPI"] = found[1]
    return machine


def load(path: Path = RESULTS_PATH) -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results)
