"""The whole comparison in one run: every candidate in turn, round after round, then the start-up.

Rounds are interleaved (A, B, C, A, B, C, ...), so that a busy spell of the machine falls on all of
them, and the median over the rounds is what counts. Nothing is judged by the exit code: a missed
target is shown, not raised.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.candidates import CANDIDATES, Candidate
from benchmarks.measure import Settings, measure
from benchmarks.processes import ChildError, exit_on_sigterm
from benchmarks.report import markdown, print_report
from benchmarks.results import (
    RESULTS_PATH,
    ROOT,
    CandidateResult,
    Results,
    Run,
    Startup,
    describe_machine,
    median_of,
    save,
    today,
)
from benchmarks.startup import count_steps, measure_startup

__all__ = ["main"]

# Into a file or a log the tables go unfolded.
FILE_WIDTH = 120

EPILOG = """\
candidates:
{candidates}

examples:
  python -m benchmarks.run                        the real thing: about 3 minutes, saves all
  python -m benchmarks.run --quick                does everything work? under 30 s, saves nothing
  python -m benchmarks.run --only rankwire,torch  while tuning; saves nothing
  python -m benchmarks.update_readme              put the saved figures into the README

A library that is not installed is left out and said to be. Keep the machine idle meanwhile: on
two cores, anything else that runs is in the figures.
"""


@dataclass(frozen=True)
class Plan:
    """What a run does, from the command line."""

    candidates: tuple[Candidate, ...]
    settings: Settings = field(default_factory=Settings)
    rounds: int = 3
    import_repeats: int = 15
    world_repeats: int = 5
    quick: bool = False

    @property
    def includes_startup(self) -> bool:
        """Start-up is rankwire's own figure; without rankwire there is none."""
        wanted = any(candidate.is_ours for candidate in self.candidates)
        return wanted and importlib.util.find_spec("rankwire") is not None

    def hurried(self) -> Plan:
        """The same with the fewest repeats that still go through every line."""
        settings = replace(self.settings, seconds=0.2, large_repeats=1)
        return replace(
            self, settings=settings, rounds=1, import_repeats=3, world_repeats=1, quick=True
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    plan = build_plan(parser, arguments)
    exit_on_sigterm()
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    notes = Console(stderr=True)
    try:
        results = execute(plan, notes)
    except KeyboardInterrupt:
        notes.print("stopped; nothing saved")
        return 130
    print_report(results, console)
    if arguments.markdown:
        print(markdown(results))
    save_all(results, arguments, notes, by_default=not (plan.quick or arguments.only))
    return 0


def build_parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {each.name:14}{each.label}: {each.carries}" for each in CANDIDATES)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description="Measure rankwire and its peers side by side on this machine.",
        epilog=EPILOG.format(candidates=names),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="NAME,...", help="measure these candidates only")
    parser.add_argument("--rounds", type=int, metavar="N", help="interleaved rounds (default: 3)")
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="time for each figure in a round (default: 2)"
    )
    parser.add_argument("--quick", action="store_true", help="smoke run: one short round")
    parser.add_argument(
        "--markdown", action="store_true", help="also print the README's table to stdout"
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="PATH",
        help="where to save the results (default: benchmarks/results/rpc.json; "
        "with --quick or --only: nowhere)",
    )
    parser.add_argument(
        "--chart",
        type=Path,
        metavar="PATH",
        help="where to save the chart (default: docs/images/rpc-latency.svg; "
        "with --quick or --only: nowhere)",
    )
    return parser


def build_plan(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Plan:
    candidates = CANDIDATES
    if arguments.only:
        names = [name.strip() for name in arguments.only.split(",")]
        known = {candidate.name: candidate for candidate in CANDIDATES}
        for name in names:
            if name not in known:
                parser.error(f"no candidate {name!r}; there are {', '.join(known)}")
        candidates = tuple(candidate for candidate in CANDIDATES if candidate.name in names)
    plan = Plan(candidates)
    if arguments.quick:
        plan = plan.hurried()
    if arguments.rounds is not None:
        if arguments.rounds < 1:
            parser.error("--rounds must be at least 1")
        plan = replace(plan, rounds=arguments.rounds)
    if arguments.seconds is not None:
        if arguments.seconds <= 0:
            parser.error("--seconds must be above 0")
        plan = replace(plan, settings=replace(plan.settings, seconds=arguments.seconds))
    return plan


def execute(plan: Plan, notes: Console) -> Results:
    """Measure everything in the plan, with a progress bar on ``notes``."""
    results = Results(
        date=today(),
        machine=describe_machine(),
        run=Run(
            rounds=plan.rounds,
            seconds=plan.settings.seconds,
            large_repeats=plan.settings.large_repeats,
            in_flight=plan.settings.in_flight,
            quick=plan.quick,
        ),
        candidates={
            candidate.name: CandidateResult(
                label=candidate.label,
                carries=candidate.carries,
                status="measured" if candidate.is_installed() else "not installed",
            )
            for candidate in plan.candidates
        },
    )
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=notes,
        # Drawing costs cycles that a measured process may want on a small machine.
        refresh_per_second=1,
        transient=True,
    )
    with bar:
        measure_rounds(plan, results, bar)
        if plan.includes_startup:
            results.startup = measure_start(plan, bar)
    return results


def measure_rounds(plan: Plan, results: Results, bar: Progress) -> None:
    """Fill in every candidate's rounds and median; one that fails is not tried again."""
    task = bar.add_task("", total=plan.rounds * len(plan.candidates))
    for number in range(1, plan.rounds + 1):
        for candidate in plan.candidates:
            bar.update(task, description=f"round {number}: {candidate.label}")
            result = results.candidates[candidate.name]
            if result.status == "measured":
                try:
                    result.rounds.append(measure(candidate, plan.settings))
                except ChildError as error:
                    # The reason is saved; stderr is not, since a traceback names paths.
                    result.status, result.reason = "failed", error.reason
                    complain(bar, candidate.label, error)
            bar.advance(task)
    for result in results.candidates.values():
        if result.status == "measured":
            result.median = median_of(result.rounds)
    bar.remove_task(task)


def measure_start(plan: Plan, bar: Progress) -> Startup | None:
    repeats = {"import_repeats": plan.import_repeats, "world_repeats": plan.world_repeats}
    task = bar.add_task("start-up", total=count_steps(**repeats))
    try:
        return measure_startup(**repeats, on_step=lambda: bar.advance(task))
    except ChildError as error:
        complain(bar, "start-up", error)
        return None


def complain(bar: Progress, label: str, error: ChildError) -> None:
    bar.console.print(f"{label}: {error.reason}", style="red", markup=False)
    if error.stderr:
        bar.console.print(error.stderr, style="dim", markup=False, highlight=False)


def save_all(
    results: Results, arguments: argparse.Namespace, notes: Console, *, by_default: bool
) -> None:
    """Write JSON and chart where asked, or to their homes after a full run."""
    json_path = arguments.json or (RESULTS_PATH if by_default else None)
    if json_path is not None:
        save(results, json_path)
        notes.print(f"saved {_shown(json_path)}")
    if arguments.chart is None and not by_default:
        return
    if importlib.util.find_spec("matplotlib") is None:
        notes.print("matplotlib is not installed: no chart")
        return
    if not any(result.median for result in results.candidates.values()):
        notes.print("nothing was measured: no chart")
        return
    # Imported late: matplotlib is slow to load, and may be missing.
    from benchmarks.chart import CHART_PATH, draw

    path = arguments.chart or CHART_PATH
    draw(results, path)
    notes.print(f"saved {_shown(path)}")


def _shown(path: Path) -> Path:
    path = path.resolve()
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


if __name__ == "__main__":
    sys.exit(main())
