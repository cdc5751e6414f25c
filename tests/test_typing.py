"""Programs of users are checked by mypy as they should be: what is right, and what is wrong."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TYPED = Path(__file__).parent / "typed"
SOURCE = Path(__file__).parents[1] / "src"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_mypy_finds_what_is_wrong_in_programs_and_nothing_else(tmp_path):
    pytest.importorskip("mypy", reason="comes with the extra 'check'")
    programs = sorted(TYPED.glob("*.py"))
    command = [sys.executable, "-m", "mypy", "--strict", "--hide-error-codes", "--no-color-output"]
    command += ["--cache-dir", str(tmp_path), *map(str, programs)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={"MYPYPATH": str(SOURCE)}, timeout=280
    )
    found = {}
    for line in done.stdout.splitlines():
        if match := re.match(r"(.+?):(\d+): error: (.*)", line):
            found[Path(match[1]).name, int(match[2])] = match[3]
    expected = {
        (path.name, number): line.partition("# error: ")[2]
        for path in programs
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if "# error: " in line
    }
    assert found.keys() == expected.keys(), done.stdout + done.stderr
    for place, text in expected.items():
        assert text in found[place], place
