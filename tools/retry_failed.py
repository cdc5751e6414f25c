"""Run pytest, then run each test that failed once more, alone.

::

    python tools/retry_failed.py [--most 3] [--record FILE] PYTEST ARGUMENTS...
    python tools/retry_failed.py --record FILE --show

A test that passes alone is listed as flaky, and the run goes on. A test that fails twice fails the
run, and so do a module that cannot be collected and more than ``--most`` failures. Runs with one
record count together, and ``--show`` prints the flaky tests of all of them with their logs. CI uses
this, so that one race does not keep a whole submission out; a flaky test is still a defect. ``make
test`` does not retry.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

_LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
_SOME_FAILED = 1  # pytest's exit code; all others but 0 mean that the run itself went wrong


def run(pytest: list[str], *, most: int, record: Path | None) -> int:
    """Run the tests and retry the failed ones.

    Args:
        pytest: The command with its arguments.
        most: How many failures may be retried, together with the flaky tests of the record.
        record: The file with the flaky tests of earlier runs, which this run adds to.

    Returns:
        An exit code: 0 if every test passed, at once or alone.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        code = subprocess.run([*pytest, "--cache-clear", f"--junitxml={report}"]).returncode
        if code != _SOME_FAILED:
            return code
        logs = _logs_of(report)
    failed = sorted(json.loads(_LAST_FAILED.read_text()))
    # With workers, a module that cannot be collected counts as a failure. Alone it may be collected
    # (two modules with one name are each an error to the other), but its tests did not run.
    uncollected = [test for test in failed if "::" not in test]
    for module in uncollected:
        print(f"not collected: {module}", flush=True)
    before = _read(record)
    if uncollected or len(failed) + len(before) > most:
        earlier = f", {len(before)} were flaky before" if before else ""
        if not uncollected:
            why = f"too many to retry (at most {most})"
            print(f"{len(failed)} tests failed{earlier}: {why}", flush=True)
        return code
    still = [test for test in failed if _fails_alone(pytest[0], test)]
    for test in failed:
        verdict = "failed twice" if test in still else "flaky: failed once, passed alone"
        print(f"{verdict}: {test}", flush=True)
    if record is not None:
        flaky = {test: logs.get(_address(test), "") for test in failed if test not in still}
        record.write_text(json.dumps(before | flaky))
    return _SOME_FAILED if still else 0


def show(record: Path) -> None:
    """Print the flaky tests of all runs with this record, each with the log of its failure."""
    flaky = _read(record)
    print(f"{len(flaky)} flaky tests: failed once, passed alone; each is a defect to be found")
    for test, log in flaky.items():
        print(f"\n--- {test}\n{log}")


def _read(record: Path | None) -> dict[str, str]:
    if record is None or not record.exists():
        return {}
    flaky: dict[str, str] = json.loads(record.read_text())
    return flaky


def _fails_alone(pytest: str, test: str) -> bool:
    print(f"once more, alone: {test}", flush=True)
    return subprocess.run([pytest, "--quiet", test]).returncode != 0


def _logs_of(report: Path) -> dict[tuple[str, str], str]:
    """Return the log of each failed test of a report, by class and name."""
    logs: dict[tuple[str, str], str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        for trouble in (*case.iter("failure"), *case.iter("error")):
            address = case.get("classname", ""), case.get("name", "")
            logs[address] = logs.get(address, "") + (trouble.text or "")
    return logs


def _address(test: str) -> tuple[str, str]:
    """Return the class and name that pytest's report has for a test."""
    place, bracket, parameters = test.partition("[")
    module, *names = place.split("::")
    classname = ".".join([module.removesuffix(".py").replace("/", "."), *names[:-1]])
    return classname, names[-1] + bracket + parameters


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="Run pytest and retry failed tests alone.")
    parser.add_argument("--most", type=int, default=3, help="failures to retry at most")
    parser.add_argument("--record", type=Path, help="file with the flaky tests of all runs")
    parser.add_argument("--show", action="store_true", help="print the record instead of running")
    parser.add_argument("pytest", nargs=argparse.REMAINDER, help="pytest and its arguments")
    words = parser.parse_args()
    if words.show:
        show(words.record)
        return 0
    return run(words.pytest, most=words.most, record=words.record)


if __name__ == "__main__":
    sys.exit(main())
