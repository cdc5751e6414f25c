"""CI retries a failed test alone, says which tests were flaky, and lets no real failure pass."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "retry_failed.py"
PYTEST = Path(sys.executable).with_name("pytest")

FLAKY = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("text", ["a b", "c/d[e]"])
def test_fails_once(text):
    mark = Path(f"mark{len(text)}")
    if not mark.exists():
        mark.touch()
        raise AssertionError
"""
BROKEN = "def test_fails_always():\n    raise AssertionError\n"
GOOD = "def test_passes():\n    pass\n"


def retried(folder, *words, **files):
    """Run the tool on test files; return its exit code and what it printed."""
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, TOOL, *words, PYTEST, "-p", "no:xdist", "--quiet"],
        cwd=folder, capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_a_test_that_passes_alone_is_listed_as_flaky(tmp_path):
    code, text = retried(tmp_path, flaky=FLAKY, good=GOOD)
    assert code == 0, text
    assert "flaky: failed once, passed alone: test_flaky.py::test_fails_once[a b]" in text
    assert "flaky: failed once, passed alone: test_flaky.py::test_fails_once[c/d[e]]" in text
    assert "test_passes" not in text


def test_a_test_that_fails_twice_fails_the_run(tmp_path):
    code, text = retried(tmp_path, flaky=FLAKY, broken=BROKEN)
    assert code == 1
    assert "failed twice: test_broken.py::test_fails_always" in text
    assert "flaky: failed once" in text


def test_more_failures_than_allowed_are_not_retried(tmp_path):
    code, text = retried(tmp_path, "--most", "1", flaky=FLAKY)
    assert code == 1
    assert "2 tests failed: too many to retry (at most 1)" in text
    assert "alone" not in text


@pytest.mark.parametrize("text", ["import nothing_like_it\n", "this is no Python\n"])
def test_a_run_that_went_wrong_is_not_retried(tmp_path, text):
    code, text = retried(tmp_path, wrong=text)
    assert code == 2
    assert "alone" not in text


def test_a_good_run_prints_nothing_of_its_own(tmp_path):
    code, text = retried(tmp_path, good=GOOD)
    assert code == 0
    assert "alone" not in text
