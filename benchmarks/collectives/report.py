"""The results as tables: in the terminal with rich, and in Markdown for the README.

Each table is first a list of rows of text, the head first, then printed one way or the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from rich.console import Console
from rich.table import Table

from benchmarks.collectives.candidates import OURS
from benchmarks.collectives.figures import FIGURES, KIB, MIB, WORLD_SIZES, Figure, Operation
from benchmarks.collectives.messages import message_table
from benchmarks.collectives.results import CandidateResult, Results
from benchmarks.collectives.targets import judge
from benchmarks.report import LINE_LENGTH, format_factor, format_time, print_verdicts

# More ranks than these only show growth, in a table of its own.
COMPARED_WORLD_SIZES = (2, 4)
GROWING: tuple[tuple[Operation, int], ...] = (
    ("all_reduce", 4 * KIB),
    ("all_reduce", MIB),
    ("barrier", 0),
)
COUNTED = "Messages sent, by the busiest rank / by all ranks together"


def print_report(results: Results, console: Console) -> None:
    """Print the comparison, the growth, the messages and the targets."""
    _print(
        comparison_table(results),
        console,
        title="Collectives and bulk messages on one host",
        caption="against: times as fast as that peer. Medians over the rounds.",
    )
    _print(growth_table(results), console, title="Growth with the number of ranks")
    if results.message_counts:
        _print(message_table(results.message_counts), console, title=f"{COUNTED}, by ranks")
    print_verdicts(judge(results), console)
    for result in results.candidates.values():
        if result.reason is not None:
            console.print(f"{_label(result)}: {result.reason}", highlight=False, markup=False)


def markdown(results: Results) -> str:
    """Return the block that the README shows: tables, and how they were measured."""
    lines = _markdown_table(comparison_table(results))
    lines += ["", "Against: how many times as fast as that peer.", ""]
    lines += ["More ranks on the same machine:", ""]
    lines += _markdown_table(growth_table(results))
    if results.message_counts:
        lines += ["", f"{COUNTED}, for 2 and more ranks:", ""]
        lines += _markdown_table(message_table(results.message_counts))
    method = fill(_method(results), LINE_LENGTH, break_on_hyphens=False)
    return "\n".join([*lines, "", method]) + "\n"


def comparison_table(results: Results) -> list[list[str]]:
    """One row a figure: the time of every candidate, then our speed against each peer."""
    names = list(results.candidates)
    peers = [name for name in names if name != OURS] if OURS in names else []
    head = ["", *(_label(results.candidates[name]) for name in names)]
    rows = [[*head, *(f"against {results.candidates[name].label}" for name in peers)]]
    for figure in FIGURES:
        if figure.world_size in COMPARED_WORLD_SIZES and _is_measured(results, figure):
            factors = [results.speedup(OURS, figure, over=name) for name in peers]
            rows.append(
                [
                    figure.label,
                    *(_time(results, name, figure) for name in names),
                    *("-" if factor is None else format_factor(factor) for factor in factors),
                ]
            )
    return rows


def growth_table(results: Results) -> list[list[str]]:
    """One row an operation and candidate, one column a number of ranks."""
    rows = [["", *(f"{world_size} ranks" for world_size in WORLD_SIZES)]]
    for operation, nbytes in GROWING:
        figures = [Figure(operation, world_size, nbytes) for world_size in WORLD_SIZES]
        for name, result in results.candidates.items():
            if result.median:
                times = [_time(results, name, figure) for figure in figures]
                rows.append([f"{figures[0].name}, {result.label}", *times])
    return rows


def _is_measured(results: Results, figure: Figure) -> bool:
    return any(results.time(name, figure) is not None for name in results.candidates)


def _time(results: Results, name: str, figure: Figure) -> str:
    seconds = results.time(name, figure)
    return "-" if seconds is None else format_time(seconds)


def _label(result: CandidateResult) -> str:
    return result.label if result.status == "measured" else f"{result.label} ({result.status})"


def _print(
    rows: Sequence[Sequence[str]], console: Console, *, title: str, caption: str = ""
) -> None:
    head, *body = rows
    table = Table(title=title, caption=caption or None)
    for index, name in enumerate(head):
        table.add_column(name, justify="right" if index else "left")
    for row in body:
        table.add_row(*row)
    console.print(table)


def _markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = rows
    lines = ["| " + " | ".join(row) + " |" for row in (head, *body)]
    return [lines[0], "|---|" + "---:|" * (len(head) - 1), *lines[1:]]


def _method(results: Results) -> str:
    machine, run = results.machine, results.run
    versions = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    carries = "; ".join(f"{each.label}: {each.carries}" for each in results.candidates.values())
    return (
        f"Measured {results.date} on {machine.cpu}, {machine.cores} cores, {machine.kernel}, "
        f"Python {machine.python} ({versions}); median of {run.rounds} interleaved rounds of "
        f"{run.seconds:g} s a figure, load average {machine.load_before:g} at the start. float32, "
        "by the clock of rank 0; sums in place, into arrays that were there before. From 1 MiB on, "
        "the ranks meet before each repeat, outside the clock. The bytes of all_gather are those "
        "of the result; a ping-pong is there and back. All with their defaults "
        f"({carries}). Ranks of Open MPI never sleep while they wait: they keep their cores busy."
    )
