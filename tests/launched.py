"""Launchers that tests start as a user does, and watch from outside."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from children import Child

COMMAND = [sys.executable, "-m", "rankwire", "run"]

# A launcher that waits for a while for further failures: on a busy machine ranks end far apart.
PATIENT_COMMAND = [
    sys.executable,
    "-c",
    "from rankwire import cli; from rankwire.launch import attempt as a; a._SETTLE = 3; cli.main()",
    "run",
]

# Every script of these tests knows its rank, and tells who it is so that it can be looked for.
# Interpreters do not start at the same time: who does something to the others waits for them.
PREAMBLE = """
import os, signal, subprocess, sys, time
rank = int(os.environ["RANKWIRE_RANK"])
def ready():
    print("pid", os.getpid(), flush=True)
def meet(count):
    folder = os.path.dirname(os.path.abspath(__file__))
    open(f"{folder}/rank-{rank}-is-here", "w").close()
    while sum(name.endswith("-is-here") for name in os.listdir(folder)) < count:
        time.sleep(0.005)
"""


class Launched:
    """A launcher that runs."""

    def __init__(self, command: list[str]) -> None:
        self.process = Child(command)
        self.pids: list[int] = []

    def read_pids(self, count: int) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            words = line.split()
            if words[-2] == "pid":
                self.pids.append(int(words[-1]))
            if len(self.pids) == count:
                return
        raise AssertionError(f"the ranks did not start: {self.process.communicate()}")

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = 15.0) -> tuple[int, str, str]:
        stdout, stderr = self.process.communicate(timeout=timeout)
        return self.process.returncode, stdout, stderr

    def wait_until_all_gone(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while left := [pid for pid in self.pids if is_running(pid)]:
            assert time.monotonic() < end, f"still running: {left}"
            time.sleep(0.02)

    def close(self) -> None:
        self.process.close()
        for pid in filter(is_running, self.pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Whether a process exists and is not just waiting to be collected by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
