"""What the tests show about the fault catalogue, written down at the end of a run.

A test says which fault it produces and what it shows to hold under it::

    @pytest.mark.fault(1, "every operation that waits on a killed rank fails and names it")
    def test_...(measured):
        measured("killed rank named", seconds, limit=0.1)

With ``--what-we-hold=PATH`` the run writes all of it as JSON: row, promise, test, outcome, figures.
``tools/what_we_hold.py`` makes the page of it. A figure with a limit fails its test when its 99th
percentile is above the limit, which is strict only in such a run: others share the machine with
tests beside them, or with anybody. This module knows nothing of rankwire.
"""

import json
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from faults.sizes import NIGHTLY

ROWS = range(1, 61)
_LENIENT = {"s": 20}  # times the limit where nothing is written down; of other units:
_LENIENT_OTHERWISE = 5
_FAULTS = "faults"
_FIGURES = "figures"


class Figures:
    """What one test measured, by name; called with one value a trial. Safe from any thread."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str, float | None], list[float]] = {}

    def __call__(
        self, name: str, value: float, *, unit: str = "s", limit: float | None = None
    ) -> None:
        self._values.setdefault((name, unit, limit), []).append(float(value))

    def summaries(self) -> list[dict[str, Any]]:
        return [
            {"name": name, "unit": unit, "limit": limit, **summary(values)}
            for (name, unit, limit), values in self._values.items()
        ]


def summary(values: list[float]) -> dict[str, float]:
    """Return the percentiles of some trials: each is a value that was measured."""
    ordered = sorted(values)

    def percentile(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {
        "trials": len(ordered),
        "p50": percentile(0.50),
        "p99": percentile(0.99),
        "max": ordered[-1],
    }


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """Write down a figure: ``measured("killed rank named", 0.002, unit="s", limit=0.1)``."""
    figures = Figures()
    yield figures
    summaries = figures.summaries()
    request.node.user_properties.append((_FIGURES, summaries))
    is_strict = bool(request.config.getoption("--what-we-hold"))
    for figure in summaries:
        leniency = 1 if is_strict else _LENIENT.get(figure["unit"], _LENIENT_OTHERWISE)
        if figure["limit"] is not None and figure["p99"] > figure["limit"] * leniency:
            pytest.fail(f"above the limit: {figure}", pytrace=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--what-we-hold",
        metavar="PATH",
        help="write as JSON what the tests show about the fault catalogue",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "fault(row, promise): produces a fault of the catalogue and shows what holds"
    )
    config.addinivalue_line("markers", "nightly: takes long; left out of the run of every day")
    path = config.getoption("--what-we-hold")
    if path:
        config.pluginmanager.register(Recorder(Path(path)), "what-we-hold")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _note_faults(items)
    if not NIGHTLY:
        left_out = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _note_faults(items: list[pytest.Item]) -> None:
    for item in items:
        faults = []
        for mark in item.iter_markers("fault"):
            row, promise = mark.args
            if row not in ROWS:
                raise pytest.UsageError(f"{item.nodeid}: there is no row {row}")
            faults.append({"row": row, "promise": promise})
        if faults:
            item.user_properties.append((_FAULTS, faults))


class Recorder:
    """Collects the outcomes of tests with the marker and writes them down."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        if _FAULTS not in properties:
            return
        test = self._tests.setdefault(
            report.nodeid,
            {"faults": properties[_FAULTS], "outcome": "passed", "reason": "", "figures": []},
        )
        test["figures"] = properties.get(_FIGURES, [])
        if report.outcome == "passed":
            return
        if hasattr(report, "wasxfail"):
            test["outcome"], test["reason"] = "xfailed", report.wasxfail
        else:
            test["outcome"], test["reason"] = report.outcome, _reason(report)

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps({"machine": machine(), "tests": self._tests}, indent=1))


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "size": "nightly" if NIGHTLY else "daily",
    }


def _reason(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return report.longreprtext.strip().rpartition("\n")[2]
