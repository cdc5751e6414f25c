"""Collectives and bulk messages in one run: every candidate in turn, round after round.

In a round every number of ranks has its turn, and in it every candidate (A, B, C, A, B, C, ...), so
that a busy spell of the machine falls on all of them; the median over the rounds is what counts.
Nothing is judged by the exit code: a missed target is shown, not raised.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.progress import Progress

from benchmarks.collectives.candidates import CANDIDATES, Candidate
from benchmarks.collectives.figures import WORLD_SIZES, Figure, figures_of
from benchmarks.collectives.measure import Settings, measure
from benchmarks.collectives.messages import CASE_COUNT, measure_messages
from benchmarks.collectives.messages import WORLD_SIZES as COUNTED_WORLD_SIZES
from benchmarks.collectives.report import markdown, print_report
from benchmarks.collectives.results import (
    CHART_PATH,
    RESULTS_PATH,
    CandidateResult,
    MessageCount,
    Results,
    Run,
    describe,
    median_of,
)
from benchmarks.command import (
    add_options,
    complain,
    is_partial,
    output_console,
    progress_bar,
    save_all,
    select,
)
from benchmarks.processes import ChildError, exit_on_sigterm
from benchmarks.results import today

EPILOG = """\
candidates:
{candidates}

examples:
  python -m benchmarks.collectives.run                       all: about 4 minutes, saves all
  python -m benchmarks.collectives.run --quick               does it work? 40 s, saves nothing
  python -m benchmarks.collectives.run --only rankwire,gloo  while tuning; saves nothing
  python -m benchmarks.collectives.run --ranks 2             only these worlds; saves nothing
  python -m benchmarks.collectives.counting                  only the numbers of messages
  python -m benchmarks.update_pages                          put what is saved into the pages

A library that is not installed is left out and said to be; Open MPI needs the package mpi4py and
the program mpirun (Debian, Ubuntu: apt install openmpi-bin). Keep the machine idle meanwhile: on
two cores, anything else that runs is in the figures.
"""


@dataclass(frozen=True)
class Plan:
    """What a run does, from the command line."""

    candidates: tuple[Candidate, ...]
    settings: Settings = field(default_factory=Settings)
    rounds: int = 3
    world_sizes: tuple[int, ...] = WORLD_SIZES
    counted_world_sizes: tuple[int, ...] = COUNTED_WORLD_SIZES
    quick: bool = False

    @property
    def includes_messages(self) -> bool:
        """Messages are rankwire's own figure; without rankwire there is none."""
        wanted = any(candidate.is_ours for candidate in self.candidates)
        return (
            bool(wanted and self.counted_world_sizes)
            and importlib.util.find_spec("rankwire") is not None
        )

    def hurried(self) -> Plan:
        """The same with the fewest repeats that still go through every line."""
        return replace(
            self,
            settings=replace(self.settings, seconds=0.03, fewest_repeats=2),
            rounds=1,
            world_sizes=(*WORLD_SIZES[:2], WORLD_SIZES[-1]),
            counted_world_sizes=COUNTED_WORLD_SIZES[:4],
            quick=True,
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
    partial = is_partial(arguments) or arguments.ranks
    save_all(
        results,
        notes,
        json_path=arguments.json or (None if partial else RESULTS_PATH),
        chart_path=arguments.chart or (None if partial else CHART_PATH),
        chart_module="benchmarks.collectives.chart",
    )
    return 0


def build_parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {each.name:10}{each.label}: {each.carries}" for each in CANDIDATES)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.collectives.run",
        description="Measure collectives and bulk messages of rankwire and its peers side by side "
        "on this machine.",
        epilog=EPILOG.format(candidates=names),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(
        parser, seconds=Settings.seconds, rounds=Plan.rounds, home=RESULTS_PATH, chart=CHART_PATH
    )
    parser.add_argument(
        "--ranks",
        metavar="N,...",
        help=f"only worlds of so many ranks, of {', '.join(map(str, WORLD_SIZES))}; saves nothing "
        "and counts no messages",
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
    if arguments.ranks is not None:
        wanted = {text.strip() for text in arguments.ranks.split(",")}
        for text in wanted - set(map(str, WORLD_SIZES)):
            parser.error(
                f"no world of {text!r} ranks; there are {', '.join(map(str, WORLD_SIZES))}"
            )
        world_sizes = tuple(size for size in WORLD_SIZES if str(size) in wanted)
        plan = replace(plan, world_sizes=world_sizes, counted_world_sizes=())
    return plan


def execute(plan: Plan, notes: Console) -> Results:
    """Measure everything in the plan, with a progress bar on ``notes``."""
    results = Results(
        date=today(),
        machine=describe(),
        run=Run(
            rounds=plan.rounds,
            seconds=plan.settings.seconds,
            fewest_repeats=plan.settings.fewest_repeats,
            quick=plan.quick,
        ),
        candidates={candidate.name: expect(candidate) for candidate in plan.candidates},
    )
    with progress_bar(notes) as bar:
        measure_rounds(plan, results, bar)
        if plan.includes_messages:
            count_messages(plan, results, bar)
    return results


def expect(candidate: Candidate) -> CandidateResult:
    """Return a result to fill in, or one that says why there will be none."""
    missing = candidate.find_missing()
    return CandidateResult(
        label=candidate.label,
        carries=candidate.carries,
        status="measured" if missing is None else "not installed",
        reason=missing,
    )


def measure_rounds(plan: Plan, results: Results, bar: Progress) -> None:
    """Fill in every candidate's rounds and medians; a world that fails is not tried again."""
    per_round = sum(len(figures_of(world_size)) for world_size in plan.world_sizes)
    task = bar.add_task("", total=plan.rounds * len(plan.candidates) * per_round)
    failed: set[tuple[str, int]] = set()
    done = 0
    for number in range(1, plan.rounds + 1):
        for result in results.candidates.values():
            result.rounds.append({})
        for world_size in plan.world_sizes:
            for candidate in plan.candidates:
                label = f"{candidate.label}, {world_size} ranks"
                bar.update(task, description=f"round {number}: {label}")
                result = results.candidates[candidate.name]
                if result.status != "not installed" and (candidate.name, world_size) not in failed:
                    try:
                        measure_world(
                            candidate, world_size, plan, result, lambda: bar.advance(task)
                        )
                    except ChildError as error:
                        failed.add((candidate.name, world_size))
                        complain(bar, label, error)
                        # The reason is saved; stderr is not, since a traceback names paths.
                        reasons = (result.reason, f"with {world_size} ranks {error.reason}")
                        result.reason = "; ".join(filter(None, reasons))
                        result.status = "failed"
                # Also past what was left out.
                done += len(figures_of(world_size))
                bar.update(task, completed=done)
    for result in results.candidates.values():
        result.rounds = [each for each in result.rounds if each]
        result.median = median_of(result.rounds)
    bar.remove_task(task)


def measure_world(
    candidate: Candidate,
    world_size: int,
    plan: Plan,
    result: CandidateResult,
    on_figure: Callable[[], None],
) -> None:
    """Add the figures of one world to the last round."""

    def record(figure: Figure, seconds: float) -> None:
        result.rounds[-1][figure.key] = seconds
        on_figure()

    measure(candidate, world_size, plan.settings, record)


def count_messages(plan: Plan, results: Results, bar: Progress) -> None:
    task = bar.add_task("messages", total=CASE_COUNT * len(plan.counted_world_sizes))

    def record(count: MessageCount) -> None:
        results.message_counts.append(count)
        bar.advance(task)

    try:
        measure_messages(plan.counted_world_sizes, record)
    except ChildError as error:
        complain(bar, "messages", error)


if __name__ == "__main__":
    sys.exit(main())
