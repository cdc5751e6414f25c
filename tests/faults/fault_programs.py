"""Programs for tests of a process's end: what is written here runs in processes of its own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

TESTS = Path(__file__).parent.parent


def start(program: str, *arguments: str) -> subprocess.Popen:
    """Start a program that may use the helpers of the tests."""
    path = os.pathsep.join([str(TESTS), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def run(program: str, *arguments: str, timeout: float = 40.0) -> subprocess.CompletedProcess:
    """Run a program to its end."""
    process = start(program, *arguments)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout} s: {out}\n{err}") from None
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)
