"""The comparison as a picture for the README, in the look of ``benchmarks.chart``.

Bars for four figures, and below them two lines a candidate: over bytes, and over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.chart import OURS as OUR_COLOR
from benchmarks.chart import PEER, SETTINGS, TEXT, draw_bars, set_title
from benchmarks.collectives.candidates import OURS
from benchmarks.collectives.figures import FIGURES, KIB, MIB, Figure
from benchmarks.collectives.results import CHART_PATH, Results
from benchmarks.report import format_time

BARS = (
    (Figure("all_reduce", 2, 4 * KIB), "all_reduce of 4 KiB, 2 ranks (lower is better)"),
    (Figure("all_reduce", 2, 64 * MIB), "all_reduce of 64 MiB, 2 ranks (lower is better)"),
    (Figure("barrier", 2), "Barrier, 2 ranks (lower is better)"),
    (Figure("ping_pong", 2, 64 * MIB), "64 MiB there and back (lower is better)"),
)
# Peers are told apart by the dashes, since colour says who is ours.
PEER_STYLES = ("--", ":", "-.")


def draw(results: Results, path: Path = CHART_PATH) -> None:
    """Write the chart of what was measured as SVG; the same results give the same bytes."""
    names = [name for name, result in results.candidates.items() if result.median]
    with matplotlib.rc_context(SETTINGS):
        # A `Figure` of its own: pyplot would look for a screen.
        # The layout leaves a strip at the bottom for the note.
        layout = ConstrainedLayoutEngine(rect=(0, 0.03, 1, 0.97))
        picture = Picture(figsize=(10, 5.0 + 0.5 * len(names)), layout=layout)
        heights = [len(names), len(names), 7]
        grid = picture.add_gridspec(3, 2, height_ratios=heights)
        for index, (figure, title) in enumerate(BARS):
            axes = picture.add_subplot(grid[index // 2, index % 2])
            set_title(axes, title)
            draw_bars(
                axes,
                {results.candidates[name].label: _time(results, name, figure) for name in names},
                [OUR_COLOR if name == OURS else PEER for name in names],
                format_time,
                labelled=index % 2 == 0,
            )
        by_bytes = picture.add_subplot(grid[2, 0])
        set_title(by_bytes, "all_reduce by size, 2 ranks")
        sizes = [each for each in FIGURES if (each.operation, each.world_size) == ("all_reduce", 2)]
        _draw_lines(by_bytes, results, names, sizes, lambda each: each.nbytes, _size)
        by_ranks = picture.add_subplot(grid[2, 1])
        set_title(by_ranks, "all_reduce of 4 KiB by number of ranks")
        worlds = [
            each for each in FIGURES if (each.operation, each.nbytes) == ("all_reduce", 4 * KIB)
        ]
        _draw_lines(by_ranks, results, names, worlds, lambda each: each.world_size, _ranks)
        picture.text(0.995, 0.0, "log scale", ha="right", va="bottom", fontsize=7, color=TEXT)
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.savefig(path, transparent=True, metadata={"Date": None})


def _draw_lines(
    axes: Axes,
    results: Results,
    names: Sequence[str],
    figures: Sequence[Figure],
    position: Callable[[Figure], float],
    tick: Callable[[Figure], str],
) -> None:
    styles = iter(PEER_STYLES)
    for name in names:
        points = [(position(figure), results.time(name, figure)) for figure in figures]
        measured = [(x, y) for x, y in points if y is not None]
        axes.plot(
            [x for x, _ in measured],
            [y for _, y in measured],
            "-" if name == OURS else next(styles),
            color=OUR_COLOR if name == OURS else PEER,
            marker="o",
            markersize=4,
            linewidth=2,
            label=results.candidates[name].label,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([position(figure) for figure in figures], [tick(each) for each in figures])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _round_time(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color=PEER, alpha=0.3, linewidth=0.5)
    axes.tick_params(length=0, colors=TEXT)
    axes.legend(frameon=False, labelcolor=TEXT)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _time(results: Results, name: str, figure: Figure) -> float:
    """Return the figure, or ``nan``, which draws no bar."""
    value = results.time(name, figure)
    return math.nan if value is None else value


def _size(figure: Figure) -> str:
    # Beside 64 MiB, this label has no room.
    return "" if figure.nbytes == 16 * MIB else figure.size


def _ranks(figure: Figure) -> str:
    return str(figure.world_size)


def _round_time(seconds: float) -> str:
    """Name a power of ten, without the digits that a measured time has."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= unit * 0.999:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds * 1e9:.0f} ns"
