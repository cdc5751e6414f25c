"""The comparison as a picture for the README: horizontal bars on a log scale, one panel a figure.

The background stays transparent and every colour is a middle one, so that it can be read on a white
page and on a dark one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from benchmarks.candidates import CANDIDATES
from benchmarks.report import format_rate, format_time
from benchmarks.results import CHART_PATH, Results

# Contrast with #ffffff and with #0d1117: text at least 4.3 : 1, bars at least 3 : 1.
TEXT = "#6e7b88"
PEER = "#8b959f"
OURS = "#e8590c"

# The salt makes the ids in the file the same each time.
SETTINGS: dict[Any, Any] = {"svg.hashsalt": "rankwire", "font.size": 9, "text.color": TEXT}

PANELS = (
    ("noop_p50", "No-op call, median (lower is better)", format_time),
    ("calls_per_second", "Calls per second, 64 in flight (higher is better)", format_rate),
    ("echo_1mib_p50", "Echo of a 1 MiB array (lower is better)", format_time),
    ("echo_64mib_p50", "Echo of a 64 MiB array (lower is better)", format_time),
)


def draw(results: Results, path: Path = CHART_PATH) -> None:
    """Write the chart of what was measured as SVG; the same results give the same bytes."""
    names = [name for name, result in results.candidates.items() if result.median is not None]
    ours = {candidate.name for candidate in CANDIDATES if candidate.is_ours}
    with matplotlib.rc_context(SETTINGS):
        # A `Figure` of its own: pyplot would look for a screen.
        figure = Figure(figsize=(10, 1.4 + 0.6 * len(names)), layout="constrained")
        for index, (key, title, formatted) in enumerate(PANELS):
            axes = figure.add_subplot(2, 2, index + 1)
            set_title(axes, title)
            draw_bars(
                axes,
                {results.candidates[name].label: _value(results, name, key) for name in names},
                [OURS if name in ours else PEER for name in names],
                formatted,
                labelled=index % 2 == 0,
            )
        figure.text(0.995, 0.0, "log scale", ha="right", va="bottom", fontsize=7, color=TEXT)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, transparent=True, metadata={"Date": None})


def draw_bars(
    axes: Axes,
    values: Mapping[str, float],
    colors: Sequence[str],
    formatted: Callable[[float], str],
    *,
    labelled: bool,
) -> None:
    """Draw one bar a value, from the top, with the value written beside it; ``nan`` draws none."""
    bars = axes.barh(list(values), list(values.values()), 0.7)
    for bar, color in zip(bars, colors, strict=True):
        bar.set_color(color)
    axes.bar_label(
        bars,
        ["" if math.isnan(value) else formatted(value) for value in values.values()],
        padding=4,
        color=TEXT,
    )
    _clean(axes, list(values.values()), labelled=labelled)


def set_title(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=TEXT, fontweight="bold")


def _value(results: Results, name: str, key: str) -> float:
    """Return the figure, or ``nan``, which draws no bar."""
    value = results.metric(name, key)
    return math.nan if value is None else value


def _clean(axes: Axes, values: list[float], *, labelled: bool) -> None:
    """Keep bars and labels; the values are written out, so the value axis can go."""
    axes.set_xscale("log")
    # A bar starts somewhere on a log scale: below the smallest value, and with room for the label.
    drawn = [value for value in values if not math.isnan(value)]
    if drawn:
        axes.set_xlim(min(drawn) / 3, max(drawn) * 6)
    axes.xaxis.set_major_locator(NullLocator())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0, colors=TEXT, labelleft=labelled)
    for spine in axes.spines.values():
        spine.set_visible(False)
