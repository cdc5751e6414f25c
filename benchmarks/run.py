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

from rich.console import Console
from rich.progress import Progress

from benchmarks.candidates import CANDIDATES, Candidate
from benchmarks.command import (
    add_options,
    complain,
    is_partial,
    output_console,
    progress_bar,
    save_all,
    select,
)
from benchmarks.measure import Settings, measure
from benchmarks.processes import ChildError, exit_on_sigterm
from benchmarks.report import markdown, print_report
from benchmarks.results import (
    CHART_PATH,
    RESULTS_PATH,
    CandidateResult,
    Results,
    Run,
    Startup,
    describe_machine,
    median_of,
    today,
)
from benchmarks.startup import count_steps, measure_startup

EPILOG = """\
candidates:
{candidates}

examples:
  python -m benchmarks.run                        the real thing: about 3 minutes, saves all
  python -m benchmarks.run --quick                does everything work? under 30 s, saves nothing
  python -m benchmarks.run --only rankwire,torch  while tuning; saves nothing
  python -m benchmarks.update_pages               put the saved figures into the pages

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
    notes = Console(stderr=True)
    try:
        results = execute(plan, notes)
    except KeyboardInterrupt:
        notes.print("stopped; nothing saved")
        return 130
    print_report(results, output_console())
    if arguments.markdown:
        print(markdown(results))
    save_all(
        results,
        notes,
        json_path=arguments.json or (None if is_partial(arguments) else RESULTS_PATH),
        chart_path=arguments.chart or (None if is_partial(arguments) else CHART_PATH),
        chart_module="benchmarks.chart",
    )
    return 0


def build_parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {each.name:14}{each.label}: {each.carries}" for each in CANDIDATES)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description="Measure rankwire and its peers side by side on this machine.",
        epilog=EPILOG.format(candidates=names),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(
        parser, seconds=Settings.seconds, rounds=Plan.rounds, home=RESULTS_PATH, chart=CHART_PATH
    )
    return parser


def build_plan(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Plan:
    plan = Plan(select(parser, arguments.only, CANDIDATES))
    if arguments.quick:
        plan = plan.hurried()
    if arguments.rounds is not None:
        plan = replace(plan, rounds=arguments.rounds)
    if arguments.seconds is not None:
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
    with progress_bar(notes) as bar:
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


if __name__ == "__main__":
    sys.exit(main())
