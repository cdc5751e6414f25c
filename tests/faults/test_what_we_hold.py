"""The page: made from a run, and impossible to make with a promise that was not shown."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fault_catalogue import FAULTS, NOT_PRODUCED
from faults.plugin import ROWS, summary
from what_we_hold import NotHeldError, main, render

MACHINE = {"system": "Linux", "cores": 2, "python": "3.11"}


def a_test(row, outcome="passed", *, promise="it holds", reason="", figures=()):
    fault = {"row": row, "promise": promise}
    return {"faults": [fault], "outcome": outcome, "reason": reason, "figures": list(figures)}


def a_run(**changed):
    """A run in which every row that can be shown was shown, but for what is changed."""
    tests = {f"tests/test_{row}": a_test(row) for row in FAULTS if row not in NOT_PRODUCED}
    return {"machine": MACHINE, "tests": {**tests, **changed}}


def test_every_row_is_in_the_catalogue():
    assert set(FAULTS) == set(ROWS)
    assert set(NOT_PRODUCED) < set(FAULTS)


def test_a_page_has_every_promise_with_its_test_modules_and_figures():
    figure = {"name": "named", "unit": "s", "limit": 0.1, **summary([0.001, 0.002, 0.003])}
    page = render(a_run(**{"tests/a.py::test_b[unix]": a_test(1, figures=[figure])}))
    line = next(line for line in page.splitlines() if line.startswith("| 1 |"))
    assert FAULTS[1] in line
    assert "`a.py`" in line
    assert "named (unix): p50 2 ms, p99 3 ms, max 3 ms over 3 (at most 100 ms)" in line


@pytest.mark.parametrize("outcome", ["failed", "skipped", "error"])
def test_a_promise_whose_test_did_not_pass_stops_the_page(outcome):
    with pytest.raises(NotHeldError, match="because"):
        render(a_run(bad=a_test(7, outcome, reason="because")))


def test_a_promise_of_which_one_test_is_expected_to_fail_is_not_held():
    missing = a_test(7, "xfailed", reason="heartbeats")
    page = render(a_run(bad=missing))
    held, _, not_yet = page.partition("## Not held yet")
    assert "| 7 |" not in held
    assert "heartbeats" in not_yet


def test_a_row_without_a_test_or_a_reason_stops_the_page():
    run = a_run()
    del run["tests"]["tests/test_9"]
    with pytest.raises(NotHeldError, match="row 9 has no test"):
        render(run)


def test_a_reason_for_a_row_that_is_shown_stops_the_page():
    row = next(iter(NOT_PRODUCED))
    with pytest.raises(NotHeldError, match="a test and a reason"):
        render(a_run(more=a_test(row)))


def test_nothing_is_written_when_the_page_is_refused(tmp_path, capsys):
    source, target = tmp_path / "run.json", tmp_path / "page.md"
    source.write_text(json.dumps(a_run(bad=a_test(7, "failed", reason="it hung"))))
    assert main([str(source), str(target)]) == 1
    assert "it hung" in capsys.readouterr().err
    assert not target.exists()


def test_a_run_in_two_parts_is_one(tmp_path):
    parts = [tmp_path / "one.json", tmp_path / "two.json"]
    whole = a_run()
    names = list(whole["tests"])
    for part, some in zip(parts, (names[:1], names[1:]), strict=True):
        part.write_text(json.dumps(whole | {"tests": {n: whole["tests"][n] for n in some}}))
    target = tmp_path / "page.md"
    assert main([*map(str, parts), str(target)]) == 0
    assert target.read_text() == render(whole)


TESTS_OF_A_USER = """
import pytest

@pytest.mark.fault(1, "one")
@pytest.mark.fault(2, "two")
def test_passes(measured):
    for seconds in (1, 2, 3):
        measured("waited", seconds, limit=5)

@pytest.mark.fault(3, "three")
def test_fails():
    raise ValueError("no")

@pytest.mark.fault(4, "four")
def test_is_skipped():
    pytest.skip("no root")

@pytest.mark.fault(5, "five")
@pytest.mark.xfail(reason="not there", strict=True)
def test_is_missing():
    raise ValueError("no")

@pytest.mark.fault(6, "six")
def test_is_too_slow(measured):
    measured("waited", 7, limit=5)

def test_is_no_fault():
    pass
"""


def test_a_run_writes_down_what_it_showed(tmp_path):
    (tmp_path / "test_user.py").write_text(TESTS_OF_A_USER)
    written = tmp_path / "run.json"
    command = [sys.executable, "-m", "pytest", "-p", "faults.plugin", "-p", "no:cacheprovider"]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [*command, "--what-we-hold", str(written), "test_user.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        check=False,
    )
    tests = {
        name.partition("::")[2]: (test["outcome"], test["reason"])
        for name, test in json.loads(written.read_text())["tests"].items()
    }
    assert tests == {
        "test_passes": ("passed", ""),
        "test_fails": ("failed", "test_user.py:12: ValueError"),
        "test_is_skipped": ("skipped", "no root"),
        "test_is_missing": ("xfailed", "not there"),
        "test_is_too_slow": ("failed", tests["test_is_too_slow"][1]),
    }
    assert "above the limit" in tests["test_is_too_slow"][1]
    shown = json.loads(written.read_text())["tests"]["test_user.py::test_passes"]
    assert {fault["row"] for fault in shown["faults"]} == {1, 2}
    assert shown["figures"] == [
        {"name": "waited", "unit": "s", "limit": 5, "trials": 3, "p50": 2.0, "p99": 3.0, "max": 3.0}
    ]
