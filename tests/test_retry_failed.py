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


def retried(folder, *words, plugins=("-p", "no:xdist"), **files):
    """Run the tool on test files; return its exit code and what it printed."""
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, TOOL, *words, PYTEST, *plugins, "--quiet"],
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


def test_modules_that_cannot_be_collected_together_are_not_retried_alone(tmp_path):
    """Workers report an error of collection as a failure, and each module alone has none."""
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test_same_name.py").write_text(GOOD)
    code, text = retried(tmp_path, plugins=("-n", "1"))
    assert code != 0
    assert "not collected: other/test_same_name.py" in text
    assert "flaky" not in text


def test_flaky_tests_of_all_stages_count_together(tmp_path):
    words = ("--most", "3", "--record", "flaky.json")
    first, text = retried(tmp_path, *words, flaky=FLAKY)
    assert first == 0, text
    for mark in tmp_path.glob("mark*"):
        mark.unlink()
    second, text = retried(tmp_path, *words)
    assert second == 1
    assert "2 tests failed, 2 were flaky before: too many to retry (at most 3)" in text


def test_the_record_shows_each_flaky_test_with_its_log(tmp_path):
    retried(tmp_path, "--record", "flaky.json", flaky=FLAKY)
    done = subprocess.run(
        [sys.executable, TOOL, "--record", "flaky.json", "--show"],
        cwd=tmp_path, capture_output=True, text=True, timeout=50, check=True,
    )  # fmt: skip
    assert "2 flaky tests" in done.stdout
    assert "test_flaky.py::test_fails_once[a b]" in done.stdout
    assert done.stdout.count("raise AssertionError") == 2


def test_a_good_run_prints_nothing_of_its_own(tmp_path):
    code, text = retried(tmp_path, good=GOOD)
    assert code == 0
    assert "alone" not in text
