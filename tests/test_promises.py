"""What `make test` leaves out is shown by a quicker test: each promise, check, and rule."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rankwire.testing import CHECKS

ROOT = Path(__file__).parent.parent
COLLECT = """
import json, pytest

class Look:
    def pytest_collection_modifyitems(self, items):
        self.found = [
            [
                item.nodeid,
                [mark.args for mark in item.iter_markers("fault")],
                item.get_closest_marker("slow") is not None,
            ]
            for item in items
        ]

look = Look()
pytest.main(["--collect-only", "-qq"], [look])
print(json.dumps(look.found))
"""


@pytest.fixture(scope="module")
def items() -> list:
    """Each test with the promises it shows, and whether it is slow."""
    done = subprocess.run(
        [sys.executable, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_every_promise_has_a_quick_test(items):
    promises = {tuple(promise) for _, shown, _ in items for promise in shown}
    quick = {tuple(promise) for _, shown, is_slow in items for promise in shown if not is_slow}
    assert len(quick) > 50
    assert promises - quick == set()


@pytest.mark.slow
def test_every_conformance_check_has_a_quick_test(items):
    quick = "\n".join(name for name, _, is_slow in items if not is_slow)
    assert [check for check in CHECKS if f"-{check}]" not in quick] == []


@pytest.mark.slow
def test_every_test_that_the_page_of_the_seeds_names_is_quick(items):
    quick = "\n".join(name for name, _, is_slow in items if not is_slow)
    named = re.findall(r"`(test_\w+\.py): (test_\w+)`", (ROOT / "docs/seeds.md").read_text())
    assert named
    assert [test for file, test in named if f"/{file}::{test}" not in quick] == []
