"""Run pytest, then run each test that failed once more, alone.

::

    python tools/retry_failed.py [--most 3] PYTEST ARGUMENTS...

A test that passes alone is listed as flaky, and the run goes on. A test that fails twice fails the
run, and so do more than ``--most`` failures. CI uses this, so that one race does not keep a whole
submission out; a flaky test is still a defect. ``make test`` does not retry.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

_LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
_SOME_FAILED = 1  # pytest's exit code; all others but 0 mean that the run itself went wrong


def run(pytest: list[str], *, most: int) -> int:
    """Run the tests and retry the failed ones.

    Args:
        pytest: The command with its arguments.
        most: How many failures may be retried.

    Returns:
        An exit code: 0 if every test passed, at once or alone.
    """
    code = subprocess.run([*pytest, "--cache-clear"]).returncode
    if code != _SOME_FAILED:
        return code
    failed = sorted(json.loads(_LAST_FAILED.read_text()))
    if len(failed) > most:
        print(f"{len(failed)} tests failed: too many to retry (at most {most})", flush=True)
        return code
    still = [test for test in failed if _fails_alone(pytest[0], test)]
    for test in failed:
        verdict = "failed twice" if test in still else "flaky: failed once, passed alone"
        print(f"{verdict}: {test}", flush=True)
    return _SOME_FAILED if still else 0


def _fails_alone(pytest: str, test: str) -> bool:
    print(f"once more, alone: {test}", flush=True)
    return subprocess.run([pytest, "--quiet", test]).returncode != 0


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="Run pytest and retry failed tests alone.")
    parser.add_argument("--most", type=int, default=3, help="failures to retry at most")
    parser.add_argument("pytest", nargs=argparse.REMAINDER, help="pytest and its arguments")
    words = parser.parse_args()
    return run(words.pytest, most=words.most)


if __name__ == "__main__":
    sys.exit(main())
