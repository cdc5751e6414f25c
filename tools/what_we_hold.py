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

Made by `make what-we-hold` or `make nightly` from a run of the tests: do not edit. Each line is a
fault that the tests produce, what was seen to hold under it, and the tests that show it. A promise
whose tests did not all pass cannot be printed.

Figures are of this run: {machine}. A test takes one value for each
operation that it times, in each of its trials; p50, p99 and the largest are over these values. With
fewer than 100 of them p99 is the largest.
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
    lines = [
        "| # | fault | what holds | tests, all passed | measured |",
        "|---|---|---|---|---|",
    ]
    for row in sorted(promises):
        for number, (promise, names) in enumerate(promises[row].items()):
            first = (str(row), FAULTS[row]) if number == 0 else ("", "")
            lines.append(_line(*first, promise, _tests(names), _figures(names, tests)))
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
    lines = ["## Not produced", "", "| # | fault | why not |", "|---|---|---|"]
    lines += [_line(str(row), FAULTS[row], reason) for row, reason in NOT_PRODUCED.items()]
    return "\n".join(lines) + "\n"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _tests(names: list[str]) -> str:
    """Name each test once, however many parameters it has."""
    functions = dict.fromkeys(name.partition("[")[0] for name in names)
    return "<br>".join(f"`{name.removeprefix('tests/')}`" for name in functions)


def _figures(names: list[str], tests: dict[str, Any]) -> str:
    """Return the figures of some tests, those of each parameter apart."""
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
