"""Programs for tests of a process's end: what is written here runs in processes of its own."""

import os
import sys
import textwrap
from pathlib import Path

from children import Child, Ended

TESTS = Path(__file__).parent.parent


def start(program: str, *arguments: str) -> Child:
    """Start a program that may use the helpers of the tests."""
    path = os.pathsep.join([str(TESTS), *sys.path])
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    return Child(command, {**os.environ, "PYTHONPATH": path})


def run(program: str, *arguments: str, timeout: float = 40.0) -> Ended:
    """Run a program to its end."""
    return start(program, *arguments).result(timeout)
