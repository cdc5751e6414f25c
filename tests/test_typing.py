"""Type checkers read programs of users: they accept what is right, and refuse what is wrong."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

TYPED = Path(__file__).parent / "typed"
SOURCE = Path(__file__).parents[1] / "src"
PROGRAMS = sorted(TYPED.glob("*.py"))
EXPECTED = {
    (path.name, number): line.partition("# error: ")[2]
    for path in PROGRAMS
    for number, line in enumerate(path.read_text().splitlines(), start=1)
    if "# error: " in line
}


def run(*command):
    return subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        capture_output=True,
        text=True,
        env={"MYPYPATH": str(SOURCE)},
        timeout=280,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_mypy_finds_what_is_wrong_in_programs_and_nothing_else(tmp_path):
    pytest.importorskip("mypy", reason="comes with the extra 'check'")
    options = ["--strict", "--hide-error-codes", "--no-color-output", "--cache-dir", tmp_path]
    done = run("mypy", *options, *PROGRAMS)
    found = {}
    for line in done.stdout.splitlines():
        if match := re.match(r"(.+?):(\d+): error: (.*)", line):
            found.setdefault((Path(match[1]).name, int(match[2])), []).append(match[3])
    assert found.keys() == EXPECTED.keys(), done.stdout + done.stderr
    for place, text in EXPECTED.items():
        assert text in "\n".join(found[place]), place


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pyright_finds_the_same(tmp_path):
    pytest.importorskip("basedpyright", reason="comes with the extra 'check'")
    project = tmp_path / "pyrightconfig.json"
    project.write_text(json.dumps({"include": [str(TYPED)], "typeCheckingMode": "strict"}))
    done = run("basedpyright", "--outputjson", "--pythonpath", sys.executable, "--project", project)
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)["generalDiagnostics"]
    found = {(Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in told}
    assert found == EXPECTED.keys(), done.stdout
