"""Render docs/faults-and-guarantees.md from what a test run wrote with ``--what-we-hold=run.json``.

    python tools/what_we_hold.py run.json [more.json ...] docs/faults-and-guarantees.md

Several runs are parts of one, such as the fuzzing apart from the rest; a test that is in two of
them counts as in the last. A promise is printed only if every test that shows it passed in that
run. One that failed or was skipped stops the rendering, and so does a row that has neither a test
nor a reason.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fault_catalogue import FAULTS, NOT_PRODUCED

_INTRODUCTION = """\
# Faults and guarantees

Each row is a fault that the tests produce, what holds under it, and the test modules that show it.
`make what-we-hold` and `make nightly` make this page from a run of the tests and refuse if a test
failed: do not edit it. To find the test of a promise, search the test modules for its text.

The figures are from this run: {machine}.
Each test measures all operations of its trials. With fewer than 100 values, p99 is the largest.
"""


class NotHeldError(Exception):
    """The page would promise what the run did not show."""


def render(run: dict[str, Any]) -> str:
    """Return the page.

    Raises:
        NotHeldError: A test failed or was skipped, or a row is neither tested nor explained.
    """
    promises, missing = _promises(run["tests"])
    _check(run["tests"], promises, missing)
    parts = [_INTRODUCTION.format(machine=_machine(run["machine"])), _held(promises, run["tests"])]
    if missing:
        parts.append(_not_yet(missing))
    parts.append(_not_produced())
    return "\n".join(parts)


def _promises(
    tests: dict[str, Any],
) -> tuple[dict[int, dict[str, list[str]]], dict[int, dict[str, str]]]:
    """Return the tests of each promise by row; and the promises expected to fail, with reasons."""
    missing: dict[int, dict[str, str]] = {}
    for test in tests.values():
        if test["outcome"] == "xfailed":
            for fault in test["faults"]:
                missing.setdefault(fault["row"], {})[fault["promise"]] = test["reason"]
    held: dict[int, dict[str, list[str]]] = {}
    for name, test in tests.items():
        for fault in test["faults"]:
            if fault["promise"] not in missing.get(fault["row"], {}):
                held.setdefault(fault["row"], {}).setdefault(fault["promise"], []).append(name)
    return held, missing


def _check(tests: dict[str, Any], held: Iterable[int], missing: Iterable[int]) -> None:
    complaints = [
        f"{name}: {test['outcome']}: {test['reason']}"
        for name, test in tests.items()
        if test["outcome"] not in ("passed", "xfailed")
    ]
    shown = {*held, *missing}
    complaints += [f"row {row} has no test and no reason" for row in FAULTS if _is_bare(row, shown)]
    complaints += [f"row {row} has a test and a reason" for row in NOT_PRODUCED if row in shown]
    complaints += [f"row {row} is not in the catalogue" for row in shown if row not in FAULTS]
    if complaints:
        raise NotHeldError("\n".join(complaints))


def _is_bare(row: int, shown: set[int]) -> bool:
    return row not in shown and row not in NOT_PRODUCED


def _held(promises: dict[int, dict[str, list[str]]], tests: dict[str, Any]) -> str:
    lines = ["| # | fault | what holds | tests | measured |", "|---|---|---|---|---|"]
    for row in sorted(promises):
        names = list(dict.fromkeys(name for shown in promises[row].values() for name in shown))
        told = "<br>".join(promises[row])
        lines.append(_line(str(row), FAULTS[row], told, _modules(names), _figures(names, tests)))
    return "\n".join(lines) + "\n"


def _not_yet(missing: dict[int, dict[str, str]]) -> str:
    lines = ["## Not held yet", "", "| # | fault | wanted | what is missing |", "|---|---|---|---|"]
    for row in sorted(missing):
        lines += [
            _line(str(row), FAULTS[row], promise, reason)
            for promise, reason in missing[row].items()
        ]
    return "\n".join(lines) + "\n"


def _not_produced() -> str:
    lines = ["## Not in this run", "", "| # | fault | why not |", "|---|---|---|"]
    lines += [_line(str(row), FAULTS[row], reason) for row, reason in NOT_PRODUCED.items()]
    return "\n".join(lines) + "\n"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _modules(names: list[str]) -> str:
    modules = dict.fromkeys(name.partition("::")[0].removeprefix("tests/") for name in names)
    return "<br>".join(f"`{module}`" for module in modules)


def _figures(names: list[str], tests: dict[str, Any]) -> str:
    lines = []
    for name in names:
        parameters = name.partition("[")[2].rstrip("]")
        lines += [_figure(figure, parameters) for figure in tests[name]["figures"]]
    return "<br>".join(lines)


def _figure(figure: dict[str, Any], parameters: str) -> str:
    unit = figure["unit"]
    text = f"{figure['name']}{f' ({parameters})' if parameters else ''}: "
    if figure["trials"] == 1:
        text += _number(figure["max"], unit)
    else:
        text += (
            f"p50 {_number(figure['p50'], unit)}, p99 {_number(figure['p99'], unit)}, "
            f"max {_number(figure['max'], unit)} over {figure['trials']}"
        )
    if figure["limit"] is not None:
        text += f" (at most {_number(figure['limit'], unit)})"
    return text


def _number(value: float, unit: str) -> str:
    if unit == "s" and value < 1.0:
        return f"{value * 1000:.3g} ms"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,} {unit}"
    return f"{value:.3g} {unit}"


def _machine(facts: dict[str, Any]) -> str:
    size = f", {facts['size']} size" if "size" in facts else ""
    return f"{facts['system']}, {facts['cores']} cores, Python {facts['python']}{size}"


def main(arguments: list[str]) -> int:
    """Render, or say why not."""
    *sources, target = map(Path, arguments)
    run: dict[str, Any] = {"tests": {}}
    for source in sources:
        part = json.loads(source.read_text())
        run = part | {"tests": run["tests"] | part["tests"]}
    try:
        page = render(run)
    except NotHeldError as error:
        print(f"the page is not made, because:\n{error}", file=sys.stderr)
        return 1
    target.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
