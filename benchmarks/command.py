"""What the commands of the benchmarks have in common: options, consoles, a bar, saving."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.processes import ChildError
from benchmarks.results import ROOT, save

# Into a file or a log the tables go unfolded.
FILE_WIDTH = 120


class Named(Protocol):
    """What ``--only`` can choose."""

    @property
    def name(self) -> str:
        """What the command line calls it."""


T = TypeVar("T", bound=Named)


def add_options(
    parser: argparse.ArgumentParser, *, seconds: float, rounds: int, home: Path, chart: Path
) -> None:
    """Add the options of a comparison; the numbers and paths are the defaults that help shows."""
    parser.add_argument("--only", metavar="NAME,...", help="measure these candidates only")
    parser.add_argument(
        "--rounds",
        type=_positive(int),
        metavar="N",
        help=f"interleaved rounds (default: {rounds})",
    )
    parser.add_argument(
        "--seconds",
        type=_positive(float),
        metavar="S",
        help=f"time for each figure in a round (default: {seconds:g})",
    )
    parser.add_argument("--quick", action="store_true", help="smoke run: one short round")
    parser.add_argument(
        "--markdown", action="store_true", help="also print the README's block to stdout"
    )
    for option, what, path in (("--json", "results", home), ("--chart", "chart", chart)):
        parser.add_argument(
            option,
            type=Path,
            metavar="PATH",
            help=f"where to save the {what} (default: {_shown(path)}; "
            "with --quick or --only: nowhere)",
        )


def is_partial(arguments: argparse.Namespace) -> bool:
    """Whether a run is too short or too narrow to replace what is saved."""
    return bool(arguments.quick or arguments.only)


def select(
    parser: argparse.ArgumentParser, only: str | None, candidates: Sequence[T]
) -> tuple[T, ...]:
    """Return the candidates that ``--only`` names, in their own order; without it, all."""
    if not only:
        return tuple(candidates)
    names = [name.strip() for name in only.split(",")]
    known = [candidate.name for candidate in candidates]
    for name in names:
        if name not in known:
            parser.error(f"no candidate {name!r}; there are {', '.join(known)}")
    return tuple(candidate for candidate in candidates if candidate.name in names)


def output_console() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console


def progress_bar(notes: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=notes,
        # Drawing costs cycles that a measured process may want on a small machine.
        refresh_per_second=1,
        transient=True,
    )


def complain(bar: Progress, label: str, error: ChildError) -> None:
    bar.console.print(f"{label}: {error.reason}", style="red", markup=False)
    if error.stderr:
        bar.console.print(error.stderr, style="dim", markup=False, highlight=False)


def save_all(
    results: Any,
    notes: Console,
    *,
    json_path: Path | None,
    chart_path: Path | None,
    chart_module: str,
) -> None:
    """Write JSON and chart where there is a path; ``chart_module`` has the ``draw`` for it."""
    if json_path is not None:
        save(results, json_path)
        notes.print(f"saved {_shown(json_path)}")
    if chart_path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        notes.print("matplotlib is not installed: no chart")
        return
    if not any(result.median for result in results.candidates.values()):
        notes.print("nothing was measured: no chart")
        return
    # Imported late: matplotlib is slow to load, and may be missing.
    importlib.import_module(chart_module).draw(results, chart_path)
    notes.print(f"saved {_shown(chart_path)}")


def _shown(path: Path) -> Path:
    path = path.resolve()
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
        return value

    return parse
