"""The results as tables: in the terminal with rich, and in Markdown for the README."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from textwrap import fill

from rich.console import Console
from rich.table import Table

from benchmarks.candidates import CANDIDATES, REFERENCE
from benchmarks.results import CandidateResult, Results
from benchmarks.targets import Verdict, judge, speedup

LINE_LENGTH = 120  # of the pages


def format_time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{_three_digits(seconds * 1e6)} us"
    if seconds < 1.0:
        return f"{_three_digits(seconds * 1e3)} ms"
    return f"{seconds:.2f} s"


def format_rate(calls_per_second: float) -> str:
    if calls_per_second >= 1e3:
        return f"{_three_digits(calls_per_second / 1e3)} k/s"
    return f"{calls_per_second:.0f} /s"


def format_factor(value: float) -> str:
    return (
        f"{value:.0f}x" if value >= 9.95 else f"{value:.1f}x" if value >= 0.95 else f"{value:.2g}x"
    )


def _three_digits(value: float) -> str:
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


@dataclass(frozen=True)
class Column:
    """A figure that every candidate has."""

    key: str
    title: str
    format: Callable[[float], str]


COLUMNS = (
    Column("noop_p50", "no-op call p50", format_time),
    Column("noop_p99", "no-op call p99", format_time),
    Column("calls_per_second", "calls/s, 64 in flight", format_rate),
    Column("echo_1mib_p50", "1 MiB echo", format_time),
    Column("echo_64mib_p50", "64 MiB echo", format_time),
)
OURS = frozenset(candidate.name for candidate in CANDIDATES if candidate.is_ours)


def print_report(results: Results, console: Console) -> None:
    """Print the comparison, the start-up figures and the targets."""
    comparison = Table(
        title="Two processes on one host",
        caption="(n x): times as good as torch RPC. Medians over the rounds.",
    )
    comparison.add_column("")
    for column in COLUMNS:
        comparison.add_column(column.title, justify="right")
    for name, result in results.candidates.items():
        comparison.add_row(
            _label(result), *_cells(results, name), style="bold green" if name in OURS else None
        )
    console.print(comparison)

    print_verdicts(judge(results), console)
    if results.startup is not None:
        console.print(_startup_sentence(results).replace("`", ""), highlight=False)


def print_verdicts(verdicts: Iterable[Verdict], console: Console) -> None:
    """Print every target beside what was measured."""
    targets = Table(title="Targets")
    for title in ("", "wanted", "measured", ""):
        targets.add_column(title)
    styles = {True: "[green]met[/]", False: "[red]missed[/]", None: "[dim]not measured[/]"}
    for verdict in verdicts:
        targets.add_row(verdict.label, verdict.wanted, verdict.measured, styles[verdict.met])
    console.print(targets)


def markdown(results: Results) -> str:
    """Return the block that the README shows: a table, and how it was measured."""
    lines = [
        "| | " + " | ".join(column.title for column in COLUMNS) + " |",
        "|---|" + "---:|" * len(COLUMNS),
    ]
    for name, result in results.candidates.items():
        label = f"**{_label(result)}**" if name in OURS else _label(result)
        lines.append(f"| {label} | " + " | ".join(_cells(results, name)) + " |")
    lines += ["", "In brackets: how many times as good as torch RPC.", ""]
    method = _method(results)
    if results.startup is not None:
        method += " " + _startup_sentence(results)
    lines += [fill(method, LINE_LENGTH, break_on_hyphens=False)]
    return "\n".join(lines) + "\n"


def _cells(results: Results, name: str) -> list[str]:
    result = results.candidates[name]
    if result.median is None:
        return ["-"] * len(COLUMNS)
    cells = []
    for column in COLUMNS:
        value = results.metric(name, column.key)
        text = "-" if value is None else column.format(value)
        factor = speedup(results, name, column.key)
        if factor is not None and name != REFERENCE:
            text += f" ({format_factor(factor)})"
        cells.append(text)
    return cells


def _label(result: CandidateResult) -> str:
    return result.label if result.status == "measured" else f"{result.label} ({result.status})"


def _method(results: Results) -> str:
    machine, run = results.machine, results.run
    versions = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    return (
        f"Measured {results.date} on {machine.cpu}, {machine.cores} cores, {machine.kernel}, "
        f"Python {machine.python} ({versions}); median of {run.rounds} interleaved rounds of "
        f"{run.seconds:g} s a figure, load average {machine.load_before:g} at the start. "
        "gRPC and RPyC echo bytes, pyzmq and the sockets plain buffers without any RPC; torch and "
        "rankwire arrays. All but rankwire's default and torch go over TCP. RPyC runs without "
        "compression and with TCP_NODELAY; its 64 MiB echo takes about 25 s and is left out."
    )


def _startup_sentence(results: Results) -> str:
    startup = results.startup
    assert startup is not None
    return (
        f"`import numpy` takes {startup.import_numpy * 1e3:.0f} ms, `import rankwire` (numpy "
        f"included) {startup.import_rankwire * 1e3:.0f} ms; a world of {startup.world_size} ranks "
        f"is ready after {startup.world_ready:.2f} s, where {startup.world_size} processes that "
        f"only import numpy take {startup.world_floor:.2f} s."
    )
