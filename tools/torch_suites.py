"""Run torch's own tests of ``torch.distributed`` on rankwire, and compare with what is expected.

    make test-torch-suites                                       all of them
    python tools/torch_suites.py --of rpc                        those of torch.distributed.rpc
    python tools/torch_suites.py test_all_reduce_sum test_broadcast
    python tools/torch_suites.py --of rpc-pickle --every 8       every eighth, for a quick look

A file in ``tests/torch_programs`` has a line for each: its name, ``pass``, ``skip``, ``fail`` or
``left-out``, and for the last two the reason. What is left out is run only if it is named. It ends
with an error if one does not do what is expected.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import tempfile
import time
import unittest
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = Path(__file__).parents[1] / "tests" / "torch_programs"
RANKS = 4
PASS = ("pass", "")


@dataclass
class Tests:
    """Some of torch's tests.

    Attributes:
        module: Has their classes, as ``SUITES``.
        expected: The file that says what is expected of them.
        environment: They want to be told these things by it.
    """

    module: str
    expected: str
    environment: dict[str, str] = field(default_factory=dict)


TESTS = {
    "groups": Tests("torch_suite", "expected.txt", {"BACKEND": "gloo", "WORLD_SIZE": str(RANKS)}),
    "rpc": Tests("torch_rpc_suite", "expected_rpc.txt", {"RPC": "safe"}),
    "rpc-pickle": Tests("torch_rpc_suite", "expected_rpc_pickle.txt", {"RPC": "pickle"}),
    "rpc-stock": Tests("torch_rpc_suite", "expected_rpc_stock.txt", {"RPC": "stock"}),
}


def expectations(path: Path) -> dict[str, tuple[str, str]]:
    """Return what is expected of each test, and why."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        if line and not line.startswith("#"):
            name, outcome, *reason = line.split(None, 2)
            found[name] = outcome, "".join(reason)
    return found


def load(tests: Tests) -> tuple[type[unittest.TestCase], ...]:
    """Return the classes of some tests."""
    os.environ |= {
        **tests.environment,
        "OMP_NUM_THREADS": "1",
        "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
        "TEMP_DIR": tempfile.mkdtemp(),
    }
    sys.path.insert(0, str(PROGRAMS))
    suites: tuple[type[unittest.TestCase], ...] = importlib.import_module(tests.module).SUITES
    logging.getLogger("torch.testing._internal.common_distributed").setLevel(logging.CRITICAL)
    return suites


def cases(suites: tuple[type[unittest.TestCase], ...]) -> Iterator[tuple[str, unittest.TestCase]]:
    """Yield each test with its name: with that of its class, if there are several."""
    for suite in suites:
        for name in unittest.TestLoader().getTestCaseNames(suite):
            yield (f"{suite.__name__}.{name}" if len(suites) > 1 else name), suite(name)


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
    options.add_argument("--of", choices=TESTS, default="groups", help="which of torch's tests")
    options.add_argument("--every", type=int, default=1, help="take only every so many-th")
    options.add_argument("--list", action="store_true", help="print what each test does")
    chosen = options.parse_args()
    warnings.simplefilter("ignore")
    expected = expectations(PROGRAMS / TESTS[chosen.of].expected)
    tests = [
        (name, test)
        for name, test in cases(load(TESTS[chosen.of]))
        if (name in chosen.names if chosen.names else expected.get(name, PASS)[0] != "left-out")
    ][:: chosen.every]
    start, surprises = time.monotonic(), 0
    for number, (name, test) in enumerate(tests, 1):
        outcome, text = run(test)
        wanted, reason = expected.get(name, PASS)
        if chosen.list:
            print(name, outcome, reason or "".join(text.strip().splitlines()[-1:]), flush=True)
        elif outcome != wanted:
            surprises += 1
            print(f"{name}: {outcome}, expected {wanted} {reason}\n{text[-3000:]}", flush=True)
        elif sys.stderr.isatty():
            print(f"\r{number} of {len(tests)}", end="", file=sys.stderr, flush=True)
    print(f"{len(tests)} tests in {time.monotonic() - start:.0f} s, {surprises} surprises")
    sys.exit(bool(surprises))


if __name__ == "__main__":
    main()
