"""The process that outlives a killed launcher: it ends the ranks that would be left alone.

Run as a script with nothing but the standard library: ``python -I -S keeper.py GRACE``. It reads
from stdin the process ids of the ranks, one a line, as they start, and again with a minus sign once
they are gone and their numbers may be others'. The line ``done`` says that all have ended. The end
of the pipe without it says that the launcher is dead: then every rank's process group gets SIGTERM,
and after GRACE seconds SIGKILL.

A parent-death signal (``PR_SET_PDEATHSIG``) would not do: a rank may catch or ignore it, what the
rank started does not get it, and it needs code between fork and exec.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

__all__ = ["Keeper"]


class Keeper:
    """The launcher's end: tell it of each rank, and leave the ``with`` block when all are gone."""

    def __init__(self, grace: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(grace)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # what ends the launcher's group must not end it
        )

    def watch(self, pid: int) -> None:
        """From now on end ``pid`` and its process group if the launcher dies."""
        self._write(f"{pid}\n")

    def forget(self, pid: int) -> None:
        """``pid`` and its process group are gone."""
        self._write(f"-{pid}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._write("done\n")
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
        except BrokenPipeError:
            pass  # someone killed it; the job goes on without


def keep(grace: float) -> None:
    """Do the keeper's work."""
    groups: list[int] = []
    for line in sys.stdin:
        if line == "done\n":
            return
        number = int(line)
        if number > 0:
            groups.append(number)
        else:
            groups.remove(-number)
    end = time.monotonic() + grace
    left = [group for group in groups if _signal(group, signal.SIGTERM)]
    while left and time.monotonic() < end:
        time.sleep(0.05)
        left = [group for group in left if _signal(group, 0)]
    for group in left:
        _signal(group, signal.SIGKILL)


def _signal(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    keep(float(sys.argv[1]))
