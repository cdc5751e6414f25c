"""Run torch's own tests of ``torch.distributed`` on rankwire, and compare with what is expected.

    make test-torch-suites                                  all of them
    python tools/torch_suites.py test_all_reduce_sum test_broadcast
    python tools/torch_suites.py --every 8                  every eighth, for a quick look

``tests/torch_programs/expected.txt`` has a line for each test: its name, ``pass``, ``skip`` or
``fail``, and for the last the reason. It ends with an error if one does not do what is expected.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
import unittest
import warnings
from pathlib import Path

PROGRAMS = Path(__file__).parents[1] / "tests" / "torch_programs"
EXPECTED = PROGRAMS / "expected.txt"
RANKS = 4


def expectations() -> dict[str, tuple[str, str]]:
    """Return what is expected of each test, and why."""
    found = {}
    for line in EXPECTED.read_text().splitlines():
        if line and not line.startswith("#"):
            name, outcome, *reason = line.split(None, 2)
            found[name] = outcome, "".join(reason)
    return found


def load_suite() -> type[unittest.TestCase]:
    """Return torch's tests; they want to be told these things by the environment."""
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    os.environ["TEMP_DIR"] = tempfile.mkdtemp()
    sys.path.insert(0, str(PROGRAMS))
    from torch_suite import Suite

    logging.getLogger("torch.testing._internal.common_distributed").setLevel(logging.CRITICAL)
    return Suite


def run(test: unittest.TestCase) -> tuple[str, str]:
    """Run one test; return its outcome and the end of what there is to say about it."""
    result = unittest.TestResult()
    test.run(result)
    troubles = [text for _, text in (*result.errors, *result.failures)]
    if troubles:
        return "fail", troubles[0]
    return ("skip" if result.skipped else "pass"), ""


def main() -> None:
    """Run them, and say what was not as expected."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("names", nargs="*", help="tests; all if there are none")
    options.add_argument("--every", type=int, default=1, help="take only every so many-th")
    options.add_argument("--list", action="store_true", help="print what each test does")
    chosen = options.parse_args()
    warnings.simplefilter("ignore")
    suite = load_suite()
    expected = expectations() if EXPECTED.exists() else {}
    names = chosen.names or list(unittest.TestLoader().getTestCaseNames(suite))
    names = names[:: chosen.every]
    start, surprises = time.monotonic(), 0
    for number, name in enumerate(names, 1):
        outcome, text = run(suite(name))
        wanted, reason = expected.get(name, ("pass", ""))
        last = text.strip().splitlines()[-1:]
        if chosen.list:
            print(name, outcome, reason or "".join(last), flush=True)
        elif outcome != wanted:
            surprises += 1
            print(f"{name}: {outcome}, expected {wanted} {reason}\n{text[-3000:]}", flush=True)
        elif sys.stderr.isatty():
            print(f"\r{number} of {len(names)}", end="", file=sys.stderr, flush=True)
    print(f"{len(names)} tests in {time.monotonic() - start:.0f} s, {surprises} surprises")
    sys.exit(bool(surprises))


if __name__ == "__main__":
    main()
